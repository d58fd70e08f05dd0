//! What a server passes to the next one, of a server that may be another's by now: it is read or refused, what is read
//! is passed on as it came, and no more is taken up than the disks have room for.

use bolero::check;
use ringtap_daemon::testing::handover::{connections_again, hear, jobs_go_on, passed, state_again};

/// The disk that jobs go on with.
const SIZE: u64 = 1 << 30;

/// As it is, and behind a first line that is right.
fn both(input: &[u8], each: impl Fn(&[u8])) {
    each(input);
    let (version, body) = input.split_first().map_or((0, input), |(first, rest)| (*first, rest));
    each(&passed(u32::from(version % 11), body));
}

#[test]
fn state_of_a_server() {
    check!().for_each(|input: &[u8]| {
        both(input, |bytes| {
            if let Ok(again) = state_again(bytes) {
                assert_eq!(state_again(&again), Ok(again));
            }
        });
    });
}

#[test]
fn connections_of_a_server() {
    check!().for_each(|input: &[u8]| {
        both(input, |bytes| {
            if let Ok(again) = connections_again(bytes) {
                assert_eq!(connections_again(&again), Ok(again));
            }
        });
    });
}

#[test]
fn jobs_of_a_server() {
    check!().for_each(|input: &[u8]| {
        both(input, |bytes| {
            let Ok(again) = jobs_go_on(bytes, SIZE) else { return };
            // A page takes as much as there is of it, and not more than the disk has.
            assert!(again.len() <= 10 * bytes.len().max(1) + (64 << 20));
            assert_eq!(jobs_go_on(&again, SIZE), Ok(again));
        });
    });
}

#[test]
fn messages_of_a_handover() {
    check!().with_max_len(80 << 10).for_each(|input: &[u8]| {
        let (texts, why) = hear(input).expect("a channel");
        let heard: usize = texts.iter().map(String::len).sum();
        // What is no text is replaced by three bytes.
        assert!(heard <= 3 * input.len());
        assert!(16 * texts.len() <= input.len());
        assert!(why.is_none_or(|why| !why.is_empty()));
    });
}
