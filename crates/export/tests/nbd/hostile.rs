//! Clients that break the protocol, or the connection; others go on.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ringtap_export::nbd::Limits;
use ringtap_export::nbd::wire::{cmd, errno, opt, rep};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::harness::{How, Served, pattern, run, sparse};
use crate::raw::{Raw, Reply, request};

fn served() -> Served {
    sparse(64 << 20, How::default())
}

/// Another client is served as if nothing were.
fn others_go_on(socket: &Path) {
    let mut other = Raw::transmit(socket);
    other.send(&request(cmd::WRITE, 0, 1, 0, 5));
    other.send(b"still");
    assert_eq!(other.reply(), Reply::Simple { error: 0, cookie: 1 });
    other.send(&request(cmd::READ, 0, 2, 0, 5));
    assert_eq!(other.reply(), Reply::Simple { error: 0, cookie: 2 });
    assert_eq!(other.take(5), b"still");
}

#[test]
fn a_broken_handshake_is_closed() {
    let served = served();
    let flags = 3u32.to_be_bytes();
    let mut wrong_magic = flags.to_vec();
    wrong_magic.extend([0x55; 64]);
    let mut absurd = flags.to_vec();
    absurd.extend(b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff");
    let mut unknown_name = flags.to_vec();
    unknown_name.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\x04none");
    let mut long_name = flags.to_vec();
    long_name.extend(b"IHAVEOPT\0\0\0\x01\0\x02\0\0");
    for bytes in [&[0xff; 4][..], &[0, 0, 0, 4], &wrong_magic, &absurd, &unknown_name, &long_name] {
        let mut raw = Raw::connect(&served.socket);
        raw.send(bytes);
        assert!(raw.is_closed(), "{bytes:?}");
    }
    others_go_on(&served.socket);
}

#[test]
fn wrong_options_get_an_error_and_the_handshake_goes_on() {
    let served = served();
    let mut raw = Raw::connect(&served.socket);
    raw.send(&3u32.to_be_bytes());
    assert_eq!(raw.ask(opt::STARTTLS, b"")[0].0, rep::ERR_UNSUP);
    assert_eq!(raw.ask(12, b"")[0].0, rep::ERR_UNSUP);
    assert_eq!(raw.ask(0xdead_beef, &[7; 5000])[0].0, rep::ERR_UNSUP);
    assert_eq!(raw.ask(opt::GO, b"\0\0\0\xff")[0].0, rep::ERR_INVALID);
    assert_eq!(raw.ask(opt::LIST, b"data")[0].0, rep::ERR_INVALID);
    assert_eq!(raw.ask(opt::INFO, &[0; 100_000])[0].0, rep::ERR_TOO_BIG);
    assert_eq!(raw.ask(opt::LIST, b"").len(), 3);
    assert_eq!(raw.ask(opt::ABORT, b"").len(), 1);
    assert!(raw.is_closed());
}

#[test]
fn options_sent_without_waiting_are_answered_in_turn_and_a_flood_is_closed() {
    let served = served();
    let mut raw = Raw::connect(&served.socket);
    let mut bytes = 3u32.to_be_bytes().to_vec();
    for _ in 0..50 {
        bytes.extend(b"IHAVEOPT\0\0\0\x03\0\0\0\0");
    }
    raw.send(&bytes);
    for _ in 0..50 {
        let kinds: Vec<_> = (0..3).map(|_| raw.answer(opt::LIST).0).collect();
        assert_eq!(kinds, [rep::SERVER, rep::SERVER, rep::ACK]);
    }
    let began = Instant::now();
    // It never listens, and must not be listened to for ever.
    raw.0.set_write_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let mut flood = raw.0.try_clone().expect("a descriptor");
    let listener = std::thread::spawn(move || raw.is_closed());
    let end = loop {
        if let Err(error) = flood.write_all(b"IHAVEOPT\0\0\0\x03\0\0\0\0") {
            break error;
        }
        assert!(began.elapsed() < Duration::from_secs(20));
    };
    assert!([ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&end.kind()), "{end}");
    assert!(listener.join().expect("the listener"));
    others_go_on(&served.socket);
}

#[test]
fn bytes_that_are_no_request_close_the_connection_after_its_last_replies() {
    let served = served();
    let mut raw = Raw::transmit(&served.socket);
    let mut bytes = request(cmd::WRITE, 0, 7, 4096, 4);
    bytes.extend(b"data");
    bytes.extend(request(cmd::READ, 0, 8, 0, 1));
    bytes.extend([0x77; 28]);
    raw.send(&bytes);
    let mut cookies = vec![];
    for _ in 0..2 {
        let Reply::Simple { error: 0, cookie } = raw.reply() else { panic!("no reply") };
        if cookie == 8 {
            raw.take(1);
        }
        cookies.push(cookie);
    }
    cookies.sort_unstable();
    assert_eq!(cookies, [7, 8]);
    assert!(raw.is_closed());
    others_go_on(&served.socket);
}

#[test]
fn unknown_commands_and_oversized_lengths_are_errors_only() {
    let served = served();
    let mut raw = Raw::transmit(&served.socket);
    for kind in [8u16, 9, 100, 0xffff] {
        raw.send(&request(kind, 0, 5, 0, 512));
        assert_eq!(raw.reply(), Reply::Simple { error: errno::EINVAL, cookie: 5 });
    }
    raw.send(&request(cmd::READ, 0, 6, 0, u32::MAX));
    assert_eq!(raw.reply(), Reply::Simple { error: errno::EINVAL, cookie: 6 });
    raw.send(&request(cmd::WRITE_ZEROES, 0, 7, u64::MAX - 5, u32::MAX));
    assert_eq!(raw.reply(), Reply::Simple { error: errno::ENOSPC, cookie: 7 });
    raw.send(&request(cmd::TRIM, 0, 8, 0, u32::MAX));
    assert_eq!(raw.reply(), Reply::Simple { error: errno::EINVAL, cookie: 8 });
    // A write of more than 32 MiB is skipped to its end.
    raw.send(&request(cmd::WRITE, 0, 9, 0, (40 << 20) + 3));
    raw.send(&vec![1; (40 << 20) + 3]);
    assert_eq!(raw.reply(), Reply::Simple { error: errno::EINVAL, cookie: 9 });
    raw.send(&request(cmd::FLUSH, 0, 10, 0, 0));
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 10 });
}

#[test]
fn requests_cut_into_single_bytes_are_put_together() {
    let served = served();
    let mut raw = Raw::connect(&served.socket);
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk");
    let mut rest = request(cmd::WRITE, 0, 1, 3, 9);
    rest.extend(b"piecemeal");
    rest.extend(request(cmd::READ, 0, 2, 0, 16));
    for byte in bytes {
        raw.send(&[byte]);
    }
    raw.take(10);
    for byte in &rest[..37] {
        raw.send(&[*byte]);
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 1 });
    for byte in &rest[37..] {
        raw.send(&[*byte]);
    }
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 2 });
    assert_eq!(raw.take(16), b"\0\0\0piecemeal\0\0\0\0");
}

#[test]
fn a_half_closed_connection_still_gets_its_replies() {
    let served = served();
    let mut raw = Raw::transmit(&served.socket);
    let mut bytes = vec![];
    for cookie in 0..100 {
        bytes.extend(request(cmd::WRITE, 0, cookie, cookie * 4096, 8));
        bytes.extend(cookie.to_be_bytes());
    }
    raw.send(&bytes);
    raw.0.shutdown(Shutdown::Write).expect("half closed");
    let mut cookies: Vec<_> = (0..100)
        .map(|_| match raw.reply() {
            Reply::Simple { error: 0, cookie } => cookie,
            other => panic!("{other:?}"),
        })
        .collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..100).collect::<Vec<_>>());
    assert!(raw.is_closed());
}

#[test]
fn leaving_politely_ends_what_was_asked_before() {
    let served = served();
    let mut raw = Raw::transmit(&served.socket);
    let mut bytes = request(cmd::WRITE, 0, 1, 1 << 20, 1 << 20);
    bytes.extend(vec![0x33; 1 << 20]);
    bytes.extend(request(cmd::DISC, 0, 2, 0, 0));
    raw.send(&bytes);
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 1 });
    assert!(raw.is_closed());
    assert!(served.content()[1 << 20..2 << 20].iter().all(|byte| *byte == 0x33));
}

#[test]
fn a_client_that_vanishes_in_the_middle_of_a_write_writes_nothing() {
    let served = served();
    let source = served.dir.path().join("source");
    std::fs::write(&source, pattern(8 << 20, 5)).expect("written");
    let copying = {
        let (source, uri) = (source.clone(), served.uri());
        std::thread::spawn(move || {
            for _ in 0..5 {
                run("nbdcopy", &["--connections=2", source.to_str().expect("UTF-8"), &uri]);
            }
        })
    };
    for i in 0..40 {
        let mut raw = Raw::transmit(&served.socket);
        // Some requests that will end while nobody listens, then the half of one.
        let mut bytes = vec![];
        for cookie in 0..20 {
            bytes.extend(request(cmd::READ, 0, cookie, 0, 1 << 20));
        }
        bytes.extend(request(cmd::WRITE, 0, 99, 32 << 20, 1 << 20));
        bytes.extend(vec![0xee; i * 13_000]);
        raw.0.set_nonblocking(true).expect("non-blocking");
        let _ = raw.0.write(&bytes);
        drop(raw);
    }
    copying.join().expect("the other client went on");
    let content = served.content();
    assert!(content[32 << 20..33 << 20].iter().all(|byte| *byte == 0));
    assert_eq!(content[..8 << 20], std::fs::read(&source).expect("read"));
}

#[test]
fn silent_clients_are_closed_in_time() {
    let limits = Limits { handshake: Duration::from_millis(300), ..Limits::default() };
    let served = sparse(1 << 20, How { limits, ..How::default() });
    let began = Instant::now();
    let mut silent = Raw::connect(&served.socket);
    let mut slow = Raw::connect(&served.socket);
    slow.send(b"\0\0\0\x03IHAVE");
    assert!(silent.is_closed() && slow.is_closed());
    assert!(began.elapsed() >= Duration::from_millis(250));
    assert!(began.elapsed() < Duration::from_secs(10));
    // Past its handshake a client may rest as long as it likes. (Where the machine is so busy that
    // the handshake itself takes too long, it is closed with good reason, and tries again.)
    let mut served_well = (0..100).find_map(|_| Raw::try_to_transmit(&served.socket));
    let served_well = served_well.as_mut().expect("a handshake in time");
    std::thread::sleep(Duration::from_millis(1500));
    served_well.send(&request(cmd::FLUSH, 0, 10, 0, 0));
    assert_eq!(served_well.reply(), Reply::Simple { error: 0, cookie: 10 });
}

#[test]
fn too_many_connections_are_told_so_and_places_become_free_again() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let served = sparse(1 << 20, How { limits, ..How::default() });
    let first = Raw::transmit(&served.socket);
    let _second = Raw::transmit(&served.socket);
    let mut third = Raw::connect(&served.socket);
    third.send(&3u32.to_be_bytes());
    let (kind, words) = third.ask(opt::GO, b"\0\0\0\0\0\0").remove(0);
    assert_eq!(kind, rep::ERR_POLICY);
    assert!(String::from_utf8(words).expect("UTF-8").contains("too many"));
    // Far too many are not even told.
    let many: Vec<_> = (0..40)
        .map(|_| std::os::unix::net::UnixStream::connect(&served.socket).expect("connected"))
        .collect();
    let closed = many.iter().filter(|stream| {
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        let mut byte = [0; 1];
        matches!(std::io::Read::read(&mut &**stream, &mut byte), Ok(0))
    });
    assert!(closed.count() >= 20);
    drop((first, third, many));
    // The places of those who left become free one by one: until then a newcomer is told that there
    // are too many, or is closed.
    let began = Instant::now();
    while !Raw::is_welcome(&served.socket) {
        assert!(began.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_flood_of_connections_does_not_hold_up_the_stop() {
    // What is left of each connection would end the flood soon, were there few descriptors.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("up to there");
    let mut served = served();
    let socket = served.socket.clone();
    let (over, late) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|all| {
        for _ in 0..4 {
            all.spawn(|| {
                while !over.load(SeqCst) {
                    let _ = UnixStream::connect(&socket);
                }
            });
        }
        all.spawn(|| {
            let end = Instant::now() + Duration::from_secs(20);
            while !over.load(SeqCst) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(50));
            }
            late.store(!over.swap(true, SeqCst), SeqCst);
        });
        std::thread::sleep(Duration::from_millis(300));
        served.stop();
        over.store(true, SeqCst);
    });
    assert!(!late.load(SeqCst), "the server stopped only when the flood did");
}
