//! The control socket's wire under arbitrary bytes, with a corpus of what QEMU's clients say.

use bolero::{TypeGenerator, check};
use ringtap_daemon::control::testing::{job_of, understand};
use ringtap_daemon::control::wire::{MAX_MESSAGE, line};
use serde_json::Value;

/// However a stream is cut, the same is made of it, and no more than a message is kept. What goes out is a line of ASCII
/// that reads as what it was.
fn takes(stream: &[u8], at_a_time: usize) -> Vec<Value> {
    let (whole, _) = understand(stream, stream.len());
    let (cut, held) = understand(stream, at_a_time);
    assert_eq!(whole, cut);
    assert!(held <= MAX_MESSAGE.min(2 * stream.len()));
    for value in &whole {
        let sent = line(value);
        let text = sent.strip_suffix(b"\r\n").expect("its end");
        assert!(text.iter().all(|byte| (b' '..=b'~').contains(byte)));
        assert_eq!(serde_json::from_slice::<Value>(text).expect("JSON"), *value);
    }
    whole
}

#[test]
fn control_of_bytes() {
    check!().for_each(|input: &[u8]| {
        let [at_a_time, stream @ ..] = input else { return };
        takes(stream, usize::from(*at_a_time));
    });
}

/// A piece of what a client says.
#[derive(Debug, TypeGenerator)]
enum Piece {
    Open,
    Close,
    List,
    EndOfList,
    Colon,
    Comma,
    Space,
    Number(i64),
    True,
    Null,
    Word(u8),
    Byte(u8),
}

/// Words that mean something somewhere.
const WORDS: &[&str] = &[
    "execute",
    "arguments",
    "id",
    "exec-oob",
    "enable",
    "oob",
    "qmp_capabilities",
    "blockdev-add",
    "driver",
    "raw",
    "qcow2",
    "node-name",
    "file",
    "filename",
    "host_device",
    "read-only",
    "cache",
    "direct",
    "no-flush",
    "discard",
    "unmap",
    "block-export-add",
    "type",
    "nbd",
    "vhost-user-blk",
    "fuse",
    "writable",
    "addr",
    "unix",
    "path",
    "data",
    "num-queues",
    "size",
    "block_resize",
    "device",
    "block-export-del",
    "mode",
    "hard",
    "nbd-server-start",
    "inet",
    "host",
    "port",
    "transaction",
    "actions",
    "query-block-exports",
];

impl Piece {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Piece::Open => out.push(b'{'),
            Piece::Close => out.push(b'}'),
            Piece::List => out.push(b'['),
            Piece::EndOfList => out.push(b']'),
            Piece::Colon => out.push(b':'),
            Piece::Comma => out.push(b','),
            Piece::Space => out.push(b' '),
            Piece::Number(number) => out.extend(number.to_string().bytes()),
            Piece::True => out.extend(b"true"),
            Piece::Null => out.extend(b"null"),
            Piece::Word(word) => {
                let quote = if word & 128 == 0 { b'"' } else { b'\'' };
                out.push(quote);
                out.extend(WORDS[usize::from(word & 127) % WORDS.len()].bytes());
                out.push(quote);
            }
            Piece::Byte(byte) => out.push(*byte),
        }
    }
}

#[test]
fn control_of_words() {
    check!().with_type::<Vec<Piece>>().for_each(|pieces| {
        let mut stream = vec![];
        pieces.iter().for_each(|piece| piece.put(&mut stream));
        takes(&stream, 3);
    });
}

/// The input: a file of the ledger of jobs, as it is, and with pieces of a real one around it.
#[test]
fn ledger_of_jobs() {
    let head = br#"{"files":[["/srv/vm.qcow2","id"]],"id":"j","command":"block-commit","arguments":{"device":"vm","#;
    let tail = br#"},"target":null}"#;
    let (command, whole) = job_of(&[&head[..head.len() - 1], tail].concat()).expect("a line");
    assert_eq!((&*command, whole), ("block-commit", true));
    check!().for_each(|input: &[u8]| {
        for line in [input, &[head, input, tail].concat()] {
            if let Some((command, _)) = job_of(line) {
                assert!(command.starts_with("block"), "{command} begins no job");
            }
        }
    });
}

#[test]
fn what_clients_say_is_understood() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/__fuzz__/control_of_bytes/corpus");
    let mut understood = 0;
    for file in std::fs::read_dir(folder).expect("the corpus") {
        let bytes = std::fs::read(file.expect("an entry").path()).expect("a file");
        let said = takes(&bytes[1..], usize::from(bytes[0]));
        understood += said.iter().filter(|one| one.get("return").is_some()).count();
    }
    assert!(understood > 10, "{understood}");
}
