//! Clients that agree, and clients that do not.

use super::*;

fn facts(name: &str, size: u64) -> Facts {
    Facts {
        name: name.into(),
        description: "about it".into(),
        size,
        flags: can::FLUSH,
        preferred_block: 4096,
        contexts: context::names([name].into_iter()),
        lies_in: vec![format!("of-{name}")],
        available: true,
    }
}

fn handshake() -> Handshake {
    Handshake::new(vec![facts("a", 1 << 20), facts("b", 2 << 20)], None)
}

fn message(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn go(name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((kinds.len() as u16).to_be_bytes());
    kinds.iter().for_each(|kind| data.extend(kind.to_be_bytes()));
    data
}

fn context(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(query.as_bytes());
    }
    data
}

/// Replies as (option, kind, data).
fn replies(mut bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut all = vec![];
    while !bytes.is_empty() {
        let mut fields = Fields(bytes);
        assert_eq!(fields.u64().expect("magic"), OPTION_REPLY_MAGIC);
        let (option, kind) = (fields.u32().expect("option"), fields.u32().expect("kind"));
        let len = fields.u32().expect("length") as usize;
        all.push((option, kind, fields.0[..len].to_vec()));
        bytes = &fields.0[len..];
    }
    all
}

fn ask(shake: &mut Handshake, option: u32, data: &[u8]) -> (Vec<(u32, u32, Vec<u8>)>, Step) {
    let (bytes, mut output) = (message(option, data), vec![]);
    let (used, step) = shake.advance(&bytes, &mut output);
    assert_eq!(used, bytes.len());
    (replies(&output), step)
}

fn begun(flags: u32) -> Handshake {
    let mut shake = handshake();
    assert_eq!(shake.advance(&flags.to_be_bytes(), &mut vec![]), (4, Step::Again));
    shake
}

#[test]
fn go_tells_what_was_asked_and_agrees() {
    let mut shake = begun(3);
    assert_eq!(ask(&mut shake, opt::STRUCTURED_REPLY, &[]).1, Step::Again);
    let (told, _) = ask(&mut shake, opt::SET_META_CONTEXT, &context("b", &["base:allocation"]));
    assert_eq!(told[0].1, rep::META_CONTEXT);
    assert_eq!(told[1].1, rep::ACK);
    let (told, step) = ask(&mut shake, opt::GO, &go("b", &[1, 2, 3, 77]));
    let kinds: Vec<_> = told.iter().map(|told| told.1).collect();
    assert_eq!(kinds, [rep::INFO, rep::INFO, rep::INFO, rep::INFO, rep::ACK]);
    let flags = can::HAS_FLAGS | can::FLUSH | can::DF;
    let mut export = vec![0, 0];
    export.extend((2u64 << 20).to_be_bytes());
    export.extend(flags.to_be_bytes());
    assert_eq!(told[0].2, export);
    assert_eq!(told[1].2, b"\0\x01b");
    assert_eq!(told[2].2, b"\0\x02about it");
    assert_eq!(told[3].2, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
    let mut contexts = Contexts::default();
    contexts.add(0);
    let choice = Choice { export: 1, structured: true, extended: false, contexts };
    assert_eq!(step, Step::Transmission(choice));
}

#[test]
fn contexts_belong_to_one_export_and_need_structured_replies() {
    let mut shake = begun(3);
    let wish = context("b", &["base:allocation"]);
    assert_eq!(ask(&mut shake, opt::SET_META_CONTEXT, &wish).0[0].1, rep::ERR_INVALID);
    ask(&mut shake, opt::STRUCTURED_REPLY, &[]);
    ask(&mut shake, opt::SET_META_CONTEXT, &wish);
    let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
    assert_eq!(
        step,
        Step::Transmission(Choice {
            export: 0,
            structured: true,
            extended: false,
            contexts: Contexts::default()
        })
    );
    let count = |shake: &mut Handshake, option, queries: &[&str]| {
        ask(shake, option, &context("", queries)).0.len() - 1
    };
    assert_eq!(count(&mut shake, opt::LIST_META_CONTEXT, &[]), 2);
    assert_eq!(count(&mut shake, opt::LIST_META_CONTEXT, &["base:"]), 1);
    assert_eq!(count(&mut shake, opt::LIST_META_CONTEXT, &["base:x", "q:y"]), 0);
    assert_eq!(count(&mut shake, opt::SET_META_CONTEXT, &["base:allocation"]), 1);
    for none in [&[][..], &["base:"], &[""], &["other:allocation"]] {
        assert_eq!(count(&mut shake, opt::SET_META_CONTEXT, none), 0);
        assert!(shake.selected.is_some_and(|(_, contexts)| contexts.is_empty()));
    }
    let both = ["qemu:dirty-bitmap:a", "base:allocation", "qemu:dirty-bitmap:b"];
    assert_eq!(count(&mut shake, opt::SET_META_CONTEXT, &both), 2);
    let (told, _) = ask(&mut shake, opt::SET_META_CONTEXT, &context("a", &both));
    assert_eq!(told[0].2, b"\0\0\0\x01base:allocation");
    assert_eq!(told[1].2, b"\0\0\0\x02qemu:dirty-bitmap:a");
    let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
    let Step::Transmission(choice) = step else { panic!("{step:?}") };
    assert_eq!(choice.contexts.numbers().collect::<Vec<_>>(), [0, 1]);
}

/// Whoever wants to know asks by name; others see no such context, and nobody can choose it.
#[test]
fn what_an_export_lies_in_is_told_who_asks_for_it() {
    let mut shake = begun(3);
    ask(&mut shake, opt::STRUCTURED_REPLY, &[]);
    let wish = context("b", &["x-ringtap:lies-in:"]);
    let (told, _) = ask(&mut shake, opt::LIST_META_CONTEXT, &wish);
    assert_eq!(told.len(), 2);
    assert_eq!(told[0].2, b"\0\0\0\0x-ringtap:lies-in:of-b");
    assert_eq!(ask(&mut shake, opt::SET_META_CONTEXT, &wish).0.len(), 1);
    let (all, _) = ask(&mut shake, opt::LIST_META_CONTEXT, &context("b", &[]));
    assert!(!all.iter().any(|(_, _, data)| data.ends_with(b"of-b")));
}

#[test]
fn the_old_option_pads_and_cannot_fail_politely() {
    for (flags, len) in [(1, 134), (3, 10), (0, 134), (2, 10)] {
        let mut output = vec![];
        let (_, step) = begun(flags).advance(&message(opt::EXPORT_NAME, b""), &mut output);
        assert!(matches!(step, Step::Transmission(Choice { export: 0, .. })));
        assert_eq!(output.len(), len);
    }
    let (_, step) = begun(3).advance(&message(opt::EXPORT_NAME, b"c"), &mut vec![]);
    assert!(matches!(step, Step::Close(_)));
}

#[test]
fn what_is_unknown_or_wrong() {
    let mut shake = begun(1);
    for option in [0, opt::STARTTLS, 12, u32::MAX] {
        assert_eq!(ask(&mut shake, option, &[]).0[0].1, rep::ERR_UNSUP);
    }
    assert_eq!(ask(&mut shake, opt::LIST, b"x").0[0].1, rep::ERR_INVALID);
    assert_eq!(ask(&mut shake, opt::GO, b"x").0[0].1, rep::ERR_INVALID);
    assert_eq!(ask(&mut shake, opt::GO, &go("c", &[])).0[0].1, rep::ERR_UNKNOWN);
    assert_eq!(ask(&mut shake, opt::LIST, b"").0.len(), 3);
    let (told, step) = ask(&mut shake, opt::ABORT, b"whatever");
    assert_eq!(told[0].1, rep::ACK);
    assert!(matches!(step, Step::Close(_)));
    let mut output = vec![];
    assert!(matches!(handshake().advance(&[0, 0, 0, 4], &mut output).1, Step::Close(_)));
    assert!(matches!(begun(0).advance(&message(opt::LIST, b""), &mut output).1, Step::Close(_)));
    assert!(matches!(begun(1).advance(&[9; 16], &mut output).1, Step::Close(_)));
}

#[test]
fn long_options_are_skipped_and_absurd_ones_end_it() {
    let mut shake = begun(1);
    let bytes = message(opt::GO, &vec![0; MAX_OPTION + 1]);
    let mut output = vec![];
    let (used, step) = shake.advance(&bytes, &mut output);
    assert_eq!((used, step), (16, Step::Again));
    assert_eq!(replies(&output)[0].1, rep::ERR_TOO_BIG);
    assert_eq!(shake.advance(&bytes[16..100], &mut output), (84, Step::More));
    assert_eq!(shake.advance(&bytes[100..], &mut output).1, Step::Again);
    assert_eq!(ask(&mut shake, opt::LIST, b"").0.len(), 3);
    let mut absurd = message(opt::GO, &[]);
    absurd[12] = 0xff;
    assert!(matches!(shake.advance(&absurd, &mut output).1, Step::Close(_)));
}

#[test]
fn extended_headers_come_before_structured_replies() {
    let mut shake = begun(3);
    assert_eq!(ask(&mut shake, opt::EXTENDED_HEADERS, b"x").0[0].1, rep::ERR_INVALID);
    assert_eq!(ask(&mut shake, opt::STRUCTURED_REPLY, &[]).0[0].1, rep::ACK);
    assert_eq!(ask(&mut shake, opt::EXTENDED_HEADERS, &[]).0[0].1, rep::ACK);
    assert_eq!(ask(&mut shake, opt::EXTENDED_HEADERS, &[]).0[0].1, rep::ERR_INVALID);
    let again = ask(&mut shake, opt::STRUCTURED_REPLY, &[]).0;
    assert_eq!(again[0].1, rep::ERR_EXT_HEADER_REQD);
    let flags = |shake: &mut Handshake| {
        let (told, _) = ask(shake, opt::INFO, &go("a", &[]));
        u16::from_be_bytes(*told[0].2.last_chunk().expect("flags"))
    };
    let common = can::HAS_FLAGS | can::FLUSH | can::DF;
    assert_eq!(flags(&mut shake), common);
    ask(&mut shake, opt::SET_META_CONTEXT, &context("b", &["base:allocation"]));
    assert_eq!(flags(&mut shake), common, "another export's contexts");
    ask(&mut shake, opt::SET_META_CONTEXT, &context("a", &["base:allocation"]));
    assert_eq!(flags(&mut shake), common | can::BLOCK_STATUS_PAYLOAD);
    let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
    let Step::Transmission(choice) = step else { panic!("{step:?}") };
    assert!(choice.extended && choice.structured);
    let mut shake = begun(3);
    ask(&mut shake, opt::EXTENDED_HEADERS, &[]);
    let (_, step) = shake.advance(&message(opt::EXPORT_NAME, b"a"), &mut vec![]);
    assert!(matches!(step, Step::Close(_)));
    // Without them, nothing of theirs.
    let mut shake = begun(3);
    ask(&mut shake, opt::STRUCTURED_REPLY, &[]);
    ask(&mut shake, opt::SET_META_CONTEXT, &context("a", &["base:allocation"]));
    assert_eq!(flags(&mut shake), common);
}

#[test]
fn nothing_but_tls_where_it_is_required() {
    let begun = |security| {
        let mut shake = handshake().with_security(security);
        shake.advance(&[0, 0, 0, 3], &mut vec![]);
        shake
    };
    let mut shake = begun(Security::Required);
    for (option, data) in [
        (opt::LIST, vec![]),
        (opt::STRUCTURED_REPLY, vec![]),
        (opt::INFO, go("a", &[])),
        (opt::GO, go("a", &[])),
        (opt::GO, go("none", &[])),
        (opt::SET_META_CONTEXT, context("a", &["base:allocation"])),
        (77, vec![1]),
    ] {
        let (told, step) = ask(&mut shake, option, &data);
        assert_eq!((told.len(), told[0].1, step), (1, rep::ERR_TLS_REQD, Step::Again));
    }
    assert_eq!(ask(&mut shake, opt::STARTTLS, b"x").0[0].1, rep::ERR_INVALID);
    let (told, step) = ask(&mut shake, opt::STARTTLS, &[]);
    assert_eq!((told[0].1, step), (rep::ACK, Step::StartTls));
    assert_eq!(ask(&mut shake, opt::STARTTLS, &[]).0[0].1, rep::ERR_INVALID);
    assert!(matches!(ask(&mut shake, opt::GO, &go("a", &[])).1, Step::Transmission(_)));
    let (_, step) =
        begun(Security::Required).advance(&message(opt::EXPORT_NAME, b"a"), &mut vec![]);
    assert!(matches!(step, Step::Close(_)));
    let mut shake = begun(Security::Required);
    assert!(matches!(ask(&mut shake, opt::ABORT, &[]).1, Step::Close(_)));
}

#[test]
fn what_was_agreed_on_in_the_clear_is_forgotten() {
    let mut shake = handshake().with_security(Security::Offered);
    shake.advance(&[0, 0, 0, 3], &mut vec![]);
    ask(&mut shake, opt::EXTENDED_HEADERS, &[]);
    ask(&mut shake, opt::SET_META_CONTEXT, &context("a", &["base:allocation"]));
    assert_eq!(ask(&mut shake, opt::STARTTLS, &[]).1, Step::StartTls);
    let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
    let Step::Transmission(choice) = step else { panic!("{step:?}") };
    assert!(!choice.structured && !choice.extended && choice.contexts.is_empty());
}

#[test]
fn refusals_let_a_client_leave_politely() {
    for (refusal, error) in [
        (Refusal::Busy, rep::ERR_POLICY),
        (Refusal::PeerBusy, rep::ERR_POLICY),
        (Refusal::ShuttingDown, rep::ERR_SHUTDOWN),
    ] {
        let mut shake = Handshake::new(vec![facts("a", 1)], Some(refusal));
        shake.advance(&[0, 0, 0, 3], &mut vec![]);
        assert_eq!(ask(&mut shake, opt::GO, &go("a", &[])).0[0].1, error);
        assert_eq!(ask(&mut shake, opt::ABORT, &[]).0[0].1, rep::ACK);
    }
}
