//! The NBD wire under arbitrary bytes, with a corpus of what real clients say.
//!
//! The files of the corpus are the client's side of whole connections (nbdinfo, nbdcopy, nbdsh,
//! qemu-img, qemu-io, fio), so each target sees the part of them that it knows how to take.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bolero::{TypeGenerator, check};
use ringtap_export::Stop;
use ringtap_export::nbd::wire::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, IHAVEOPT, MAX_PAYLOAD, OPTION_REPLY_MAGIC,
    REQUEST_MAGIC, can, cmd_flag, errno, opt, rep,
};
use ringtap_export::nbd::{
    Choice, Command as Request, Contexts, Credentials, Facts, Handshake, Header, Listener,
    NamedExport, Rules, Security, Server, Step, Tls,
};
use ringtap_image::{CacheMode, Null};

fn exports() -> Vec<Facts> {
    let export = |name: &str| Facts {
        name: name.into(),
        description: "an export".into(),
        size: 1 << 30,
        flags: can::FLUSH,
        preferred_block: 4096,
        contexts: vec!["base:allocation".into(), format!("qemu:dirty-bitmap:{name}")],
        lies_in: vec!["a0".into()],
        available: true,
    };
    vec![export("disk"), export("other")]
}

/// Lead a handshake through, given so many bytes at a time. Gives what the server says, how it
/// ended, and the bytes it took. What would be encrypted is not.
fn shake(input: &[u8], at_a_time: usize, security: Security) -> (Vec<u8>, Option<Step>, usize) {
    let mut handshake = Handshake::new(exports(), None).with_security(security);
    let mut output = vec![];
    let mut secret = false;
    let (mut from, mut to) = (0, 0);
    loop {
        let (used, step) = handshake.advance(&input[from..to], &mut output);
        assert!(used <= to - from);
        from += used;
        match step {
            Step::Again => assert!(used > 0, "it would go round for ever"),
            Step::StartTls => {
                let offered = [Security::Offered, Security::Required].contains(&security);
                assert!(used > 0 && offered && !std::mem::replace(&mut secret, true));
            }
            Step::More if to == input.len() => return (output, None, from),
            Step::More => {
                // What is looked at as a whole is bounded, whatever the client says.
                assert!(to - from <= (64 << 10) + 16 + at_a_time);
                to = input.len().min(to + at_a_time);
            }
            end => return (output, Some(end), from),
        }
    }
}

fn check_handshake(input: &[u8]) {
    for security in [Security::Plain, Security::Offered, Security::Required] {
        check_handshake_with(input, security);
    }
}

fn check_handshake_with(input: &[u8], security: Security) {
    let whole = shake(input, usize::MAX >> 1, security);
    let piece = 1 + input.len() / 4096;
    let again = shake(input, piece, security);
    assert_eq!(whole, again, "it depends on how the bytes arrive");
    let (output, end, used) = whole;
    if security == Security::Required {
        nothing_is_told_before_tls(&output);
    }
    if let Some(Step::Transmission(Choice { export, structured, extended, contexts })) = end {
        assert!(export < 2);
        assert!(structured || contexts.is_empty() && !extended);
        assert!(contexts.numbers().all(|number| number < 2));
        return;
    }
    // 16 bytes of an option bring no more than the list of both exports.
    assert!(output.len() <= (used / 16 + 1) * 200);
    let mut rest = &output[..];
    while !rest.is_empty() {
        assert_eq!(rest[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        let len = u32::from_be_bytes(rest[16..20].try_into().expect("four")) as usize;
        rest = &rest[20 + len..];
    }
}

/// Up to the acknowledgement of STARTTLS every answer is an error, or lets the client go.
fn nothing_is_told_before_tls(mut output: &[u8]) {
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four"));
    while let Some(head) = output.get(..20) {
        let (option, kind) = (number(&head[8..12]), number(&head[12..16]));
        if (option, kind) == (opt::STARTTLS, rep::ACK) {
            return;
        }
        assert!(kind >> 31 == 1 || (option, kind) == (opt::ABORT, rep::ACK));
        output = &output[20 + number(&head[16..20]) as usize..];
    }
    assert!(output.is_empty(), "requests without TLS");
}

#[test]
fn handshake_of_bytes() {
    check!().for_each(check_handshake);
}

/// An option that is nearly right.
#[derive(Debug, TypeGenerator)]
enum Say {
    Plain(#[generator(0..16)] u32),
    Info {
        go: bool,
        name: Name,
        wishes: Vec<u16>,
    },
    Context {
        set: bool,
        name: Name,
        queries: Vec<Name>,
    },
    /// A length that is not that of the data.
    Wrong {
        #[generator(0..16)]
        option: u32,
        len: u16,
        data: Vec<u8>,
    },
    /// An option longer than any that is looked at.
    Long {
        #[generator(0..16)]
        option: u32,
        #[generator(0..300_000)]
        len: u32,
    },
}

#[derive(Debug, TypeGenerator)]
enum Name {
    Empty,
    Disk,
    Base,
    Allocation,
    Dirty,
    Qemu,
    Other(Vec<u8>),
    /// A name of another length than it says.
    Lie(#[generator(0..5000)] u16, Vec<u8>),
}

impl Name {
    fn write(&self, data: &mut Vec<u8>) {
        let bytes = match self {
            Name::Lie(len, bytes) => {
                data.extend(u32::from(*len).to_be_bytes());
                data.extend(bytes);
                return;
            }
            Name::Empty => &[][..],
            Name::Disk => b"disk",
            Name::Base => b"base:",
            Name::Allocation => b"base:allocation",
            Name::Dirty => b"qemu:dirty-bitmap:disk",
            Name::Qemu => b"qemu:",
            Name::Other(bytes) => bytes,
        };
        data.extend((bytes.len() as u32).to_be_bytes());
        data.extend(bytes);
    }
}

impl Say {
    fn write(&self, bytes: &mut Vec<u8>) {
        let mut data = vec![];
        let (option, len) = match self {
            Say::Plain(option) => (*option, None),
            Say::Info { go, name, wishes } => {
                name.write(&mut data);
                data.extend((wishes.len() as u16).to_be_bytes());
                wishes.iter().for_each(|wish| data.extend(wish.to_be_bytes()));
                (if *go { 7 } else { 6 }, None)
            }
            Say::Context { set, name, queries } => {
                name.write(&mut data);
                data.extend((queries.len() as u32).to_be_bytes());
                queries.iter().for_each(|query| query.write(&mut data));
                (if *set { 10 } else { 9 }, None)
            }
            Say::Long { option, len } => {
                data.resize(*len as usize, 0);
                (*option, None)
            }
            Say::Wrong { option, len, data: wrong } => {
                data.extend(wrong);
                (*option, Some(u32::from(*len)))
            }
        };
        bytes.extend(IHAVEOPT.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend(len.unwrap_or(data.len() as u32).to_be_bytes());
        bytes.extend(data);
    }
}

#[test]
fn handshake_of_options() {
    check!().with_type::<(u8, Vec<Say>)>().for_each(|(first, all)| {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        // Structured replies, extended headers, STARTTLS, or whatever comes.
        if let Some(option) = [8, 11, 5].get(usize::from(first % 4)) {
            Say::Plain(*option).write(&mut bytes);
        }
        all.iter().for_each(|say| say.write(&mut bytes));
        check_handshake(&bytes);
    });
}

fn check_request(header: &Header, rules: &Rules) {
    let within = |header: &Header| {
        header.offset.checked_add(header.len).is_some_and(|end| end <= rules.size)
    };
    let most = u64::from(MAX_PAYLOAD);
    match header.check(rules) {
        Err(error) => {
            let known =
                [errno::EPERM, errno::EINVAL, errno::ENOSPC, errno::EOVERFLOW].contains(&error);
            assert!(known, "error {error}");
            assert!(rules.read_only || error != errno::EPERM);
        }
        Ok(Request::Disconnect | Request::Flush) => {}
        Ok(Request::NarrowBlockStatus { .. }) => {
            assert!(header.extended && (12..=264).contains(&header.payload()));
            // Whatever the payload says.
            let payload: Vec<u8> = (0..header.payload())
                .map(|at| (header.cookie >> (at % 8 * 8)) as u8 & [0xff, 3][usize::from(at > 7)])
                .collect();
            if let Ok((narrow, of)) = header.narrow(&payload, rules) {
                assert!(within(&narrow) && narrow.len > 0 && narrow.payload() == 0);
                let known = |of: usize| rules.contexts.numbers().any(|one| one == of);
                assert!(!of.is_empty() && of.numbers().all(known));
            }
        }
        Ok(command) => {
            assert!(within(header), "{command:?} is past the end");
            match command {
                Request::Read { whole } => {
                    assert!(header.len <= most && (rules.structured || !whole));
                }
                Request::Write => {
                    assert!(header.len <= most && header.payload() == header.len);
                }
                Request::BlockStatus { of, .. } => {
                    assert!(of == rules.contexts && !of.is_empty() && header.len > 0);
                }
                _ => {}
            }
            let writes =
                matches!(command, Request::Write | Request::Trim | Request::WriteZeroes { .. });
            assert!(!(writes && rules.read_only));
        }
    }
}

/// The contexts that a client has which asked for those of allocation, or for none.
fn contexts(some: bool) -> Contexts {
    asked_for(if some { vec![Name::Allocation, Name::Dirty] } else { vec![] })
}

fn asked_for(queries: Vec<Name>) -> Contexts {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    Say::Plain(8).write(&mut bytes);
    Say::Context { set: true, name: Name::Disk, queries }.write(&mut bytes);
    Say::Info { go: true, name: Name::Disk, wishes: vec![] }.write(&mut bytes);
    match shake(&bytes, usize::MAX >> 1, Security::Plain).1 {
        Some(Step::Transmission(choice)) => choice.contexts,
        end => panic!("{end:?}"),
    }
}

#[test]
fn requests_of_bytes() {
    let (some, none) = (contexts(true), contexts(false));
    check!().for_each(|input: &[u8]| {
        // Requests follow the handshake, where there is one.
        let (_, end, used) = shake(input, usize::MAX >> 1, Security::Plain);
        let choice = match end {
            Some(Step::Transmission(choice)) => Some(choice),
            _ => None,
        };
        let headers = choice.map_or(&[false, true][..], |choice| match choice.extended {
            false => &[false],
            true => &[true],
        });
        for (extended, read_only) in headers.iter().flat_map(|one| [(*one, false), (*one, true)]) {
            let mut rest = if choice.is_some() { &input[used..] } else { input };
            let rules = Rules {
                size: 1 << 30,
                read_only,
                structured: choice.is_none_or(|choice| choice.structured),
                contexts: choice.map_or(some, |choice| choice.contexts),
            };
            assert!(!some.is_empty() && none.is_empty());
            while let Some(parsed) = Header::parse(rest, extended) {
                let Ok(header) = parsed else { break };
                check_request(&header, &rules);
                let skip = (Header::len_of(extended) as u64).saturating_add(header.payload());
                rest = usize::try_from(skip).ok().and_then(|skip| rest.get(skip..)).unwrap_or(&[]);
            }
        }
    });
}

#[derive(Debug, TypeGenerator)]
struct Ask {
    flags: u16,
    #[generator(0..10)]
    kind: u16,
    cookie: u64,
    /// Near the start or the end of the disk, or anywhere.
    near: (u8, u32),
    anywhere: u64,
    #[generator(0..24)]
    len_bits: u8,
    len: u64,
}

impl Ask {
    fn header(&self, size: u64, extended: bool) -> Header {
        let offset = match self.near {
            (0..=99, more) => u64::from(more % 100_000),
            (100..=199, less) => size.saturating_sub(u64::from(less % 100_000)),
            _ => self.anywhere,
        };
        // Lengths of every magnitude, and absurd ones.
        let len = if self.near.0 == 255 { self.len } else { self.len & ((1 << self.len_bits) - 1) };
        let len = if extended { len } else { u64::from(len as u32) };
        // Any flags at times, the known ones mostly, or every request would be refused for them.
        let mask = [0, 1, 0x3f, 0xffff][usize::from(self.near.0 % 4)];
        let (flags, kind, cookie) = (self.flags & mask, self.kind, self.cookie);
        // A write says that something follows it, mostly.
        let follows = extended && kind == 1 && self.near.0 % 8 > 0;
        let flags = flags | if follows { cmd_flag::PAYLOAD_LEN } else { 0 };
        Header { flags, kind, cookie, offset, len, extended }
    }
}

#[test]
fn requests_by_their_fields() {
    let (some, none) = (contexts(true), contexts(false));
    check!().with_type::<(Ask, bool, bool, bool, u64)>().for_each(
        |(ask, read_only, structured, status, size)| {
            let contexts = if *status { some } else { none };
            let (size, read_only) = (*size, *read_only);
            let rules = Rules { size, read_only, structured: *structured, contexts };
            check_request(&ask.header(size, false), &rules);
            check_request(&ask.header(size, true), &Rules { structured: true, ..rules });
        },
    );
}

/// A server on a null disk of 1 GiB, for as long as the test runs.
struct Live {
    socket: PathBuf,
    stop: Stop,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Live {
    fn new() -> Live {
        Live::with(Tls::Off)
    }

    fn with(tls: Tls) -> Live {
        let dir = tempfile::TempDir::new().expect("a folder");
        let socket = dir.path().join("nbd");
        let listener = Listener::Unix(UnixListener::bind(&socket).expect("a socket"));
        let vbd = ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(
            Box::new(Null::new(1 << 30, false)),
            CacheMode::None,
        ));
        let export = |name: &str| NamedExport {
            name: name.into(),
            description: "an export".into(),
            vbd: vbd.clone(),
        };
        let server =
            Server::new(vec![listener], vec![export("disk"), export("other")]).with_tls(vec![tls]);
        let stop = Stop::new().expect("an eventfd");
        let theirs = stop.clone();
        let thread = std::thread::spawn(move || server.serve(&theirs).expect("the server"));
        Live { socket, stop, thread: Some(thread), _dir: dir }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            let end = thread.join();
            if !std::thread::panicking() {
                end.expect("the server's thread");
            }
        }
    }
}

/// Say all of `bytes`, take everything that is answered, until the server closes.
fn talk(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let mut speaking = stream.try_clone().expect("a descriptor");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The server may close in the middle of it.
            let _ = speaking.write_all(bytes);
            let _ = speaking.shutdown(Shutdown::Write);
        });
        let mut heard = vec![];
        match stream.read_to_end(&mut heard) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        heard
    })
}

fn still_serves(socket: &Path) {
    let mut bytes = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk".to_vec();
    bytes.extend(b"\x25\x60\x95\x13\0\0\0\x03cookie!!");
    bytes.extend([0; 12]);
    let heard = talk(socket, &bytes);
    assert_eq!(heard[28..], *b"\x67\x44\x66\x98\0\0\0\0cookie!!");
}

#[test]
fn a_server_of_bytes() {
    let live = Live::new();
    let socket = live.socket.as_path();
    check!().with_iterations(300).for_each(|input: &[u8]| {
        talk(socket, input);
    });
    still_serves(&live.socket);
}

/// Certificates, by the script that makes those of the other tests.
fn credentials(folder: &Path) -> Credentials {
    let script = include_str!("../../crates/export/tests/nbd/certificates.py");
    let made = Command::new("/usr/bin/python3").args(["-c", script]).arg(folder).status();
    assert!(made.expect("python3").success(), "python3-cryptography is not installed");
    Credentials::load(&folder.join("server"), true).expect("credentials")
}

#[test]
fn a_server_of_tls() {
    let dir = tempfile::TempDir::new().expect("a folder");
    let live = Live::with(Tls::On(credentials(dir.path())));
    let socket = live.socket.as_path();
    check!().with_iterations(300).with_type::<Vec<(u8, Vec<u8>)>>().for_each(|records| {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        Say::Plain(opt::STARTTLS).write(&mut bytes);
        for (kind, data) in records {
            // Records of every kind, mostly whole, and bytes that are none.
            if kind % 8 < 7 {
                bytes.extend([20 + kind % 5, 3, 3]);
                bytes.extend((data.len() as u16).to_be_bytes());
            }
            bytes.extend(data);
        }
        let heard = talk(socket, &bytes);
        assert!(heard.len() >= 38, "STARTTLS was not answered");
    });
    still_serves(&live.socket);
}

#[test]
fn a_server_of_requests() {
    let live = Live::new();
    let socket = live.socket.as_path();
    let (allocation, none) = (asked_for(vec![Name::Allocation]), contexts(false));
    let target = check!().with_iterations(300);
    target.with_type::<(u8, Vec<Ask>, Vec<u8>)>().for_each(|(form, asks, junk)| {
        let (structured, extended) = (form % 3 > 0, form % 3 == 2);
        let mut bytes = 3u32.to_be_bytes().to_vec();
        if structured {
            Say::Plain(if extended { 11 } else { 8 }).write(&mut bytes);
            let queries = vec![Name::Allocation];
            Say::Context { set: true, name: Name::Disk, queries }.write(&mut bytes);
        }
        Say::Info { go: true, name: Name::Disk, wishes: vec![] }.write(&mut bytes);
        // The null disk has no bitmaps.
        let contexts = if structured { allocation } else { none };
        let rules = Rules { size: 1 << 30, read_only: false, structured, contexts };
        let mut answers = 0;
        for ask in asks {
            let header = ask.header(rules.size, extended);
            let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
            bytes.extend(magic.to_be_bytes());
            bytes.extend(header.flags.to_be_bytes());
            bytes.extend(header.kind.to_be_bytes());
            bytes.extend(header.cookie.to_be_bytes());
            bytes.extend(header.offset.to_be_bytes());
            match extended {
                true => bytes.extend(header.len.to_be_bytes()),
                false => bytes.extend((header.len as u32).to_be_bytes()),
            }
            if header.check(&rules) == Ok(Request::Disconnect) {
                break;
            }
            if header.payload() > u64::from(MAX_PAYLOAD) {
                // Too long to send here: the client leaves in the middle.
                break;
            }
            bytes.resize(bytes.len() + header.payload() as usize, 0x5a);
            answers += 1;
        }
        bytes.extend(junk);
        let heard = talk(socket, &bytes);
        if structured {
            assert_eq!(finished(&heard), answers);
        }
    });
    still_serves(&live.socket);
}

/// Answers that are complete in what a server said with structured replies.
fn finished(heard: &[u8]) -> usize {
    // The greeting, then the handshake: its last word is the acknowledgement of GO.
    let mut rest = &heard[18..];
    while rest.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
        let len = u32::from_be_bytes(rest[16..20].try_into().expect("four")) as usize;
        rest = &rest[20 + len..];
    }
    let mut count = 0;
    while !rest.is_empty() {
        if rest.starts_with(b"\x67\x44\x66\x98") {
            count += 1;
            rest = &rest[16..];
            continue;
        }
        if rest.starts_with(&EXTENDED_REPLY_MAGIC.to_be_bytes()) {
            count += usize::from(rest[5] & 1);
            let len = u64::from_be_bytes(rest[24..32].try_into().expect("eight"));
            rest = &rest[32 + len as usize..];
            continue;
        }
        assert!(rest.starts_with(b"\x66\x8e\x33\xef"));
        count += usize::from(rest[5] & 1);
        let len = u32::from_be_bytes(rest[16..20].try_into().expect("four")) as usize;
        rest = &rest[20 + len..];
    }
    count
}
