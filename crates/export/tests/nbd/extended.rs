//! Extended headers: by hand, and with a client that has them.

use std::fs;
use std::path::Path;

use ringtap_export::nbd::wire::{EXTENDED_REQUEST_MAGIC, chunk, cmd, cmd_flag, errno, opt, rep};
use ringtap_image::{CacheMode, Null};

use crate::harness::{How, assert_same, image, pattern, sparse};
use crate::newer::Newer;
use crate::raw::{Raw, request};

const TIB: u64 = 1 << 40;

fn extended(kind: u16, flags: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = EXTENDED_REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend([cookie, offset, len].map(u64::to_be_bytes).concat());
    bytes
}

/// A chunk of an answer: its type, cookie, offset, payload; the last one of a request.
fn answer(raw: &mut Raw) -> (u16, u64, u64, Vec<u8>) {
    let head = raw.take(32);
    assert_eq!(head[..4], 0x6e8a_278cu32.to_be_bytes());
    assert_eq!(head[4..6], chunk::DONE.to_be_bytes());
    let number = |range: std::ops::Range<usize>| {
        head[range].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let payload = raw.take(number(24..32) as usize);
    (number(6..8) as u16, number(8..16), number(16..24), payload)
}

fn error(raw: &mut Raw) -> u32 {
    let (kind, _, _, payload) = answer(raw);
    assert_eq!(kind, chunk::ERROR);
    u32::from_be_bytes(*payload.first_chunk().expect("an error"))
}

fn begun(socket: &Path) -> Raw {
    let mut raw = Raw::connect(socket);
    raw.send(&3u32.to_be_bytes());
    assert_eq!(raw.ask(opt::EXTENDED_HEADERS, b"")[0].0, rep::ACK);
    let context = b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation";
    assert_eq!(raw.ask(opt::SET_META_CONTEXT, context).len(), 2);
    let told = raw.ask(opt::GO, b"\0\0\0\x04disk\0\0");
    assert_eq!(told.last().expect("an answer").0, rep::ACK);
    raw
}

#[test]
fn every_answer_has_an_extended_header() {
    let served = sparse(1 << 20, How::default());
    let mut raw = begun(&served.socket);
    raw.send(&extended(cmd::WRITE, cmd_flag::PAYLOAD_LEN, 1, 4096, 5));
    raw.send(b"bytes");
    assert_eq!(answer(&mut raw), (chunk::NONE, 1, 4096, vec![]));
    raw.send(&extended(cmd::READ, 0, 2, 4094, 8));
    let data = [&4094u64.to_be_bytes()[..], b"\0\0bytes\0"].concat();
    assert_eq!(answer(&mut raw), (chunk::OFFSET_DATA, 2, 4094, data));
    for (cookie, kind) in [(3, cmd::FLUSH), (4, cmd::TRIM), (5, cmd::CACHE), (6, cmd::READ)] {
        raw.send(&extended(kind, 0, cookie, 0, 0));
        assert_eq!(answer(&mut raw), (chunk::NONE, cookie, 0, vec![]));
    }
    raw.send(&extended(cmd::BLOCK_STATUS, cmd_flag::REQ_ONE, 7, 0, 1 << 20));
    let (kind, cookie, _, payload) = answer(&mut raw);
    assert_eq!((kind, cookie, payload.len()), (chunk::BLOCK_STATUS_EXT, 7, 24));
    assert_eq!(payload[..8], *b"\0\0\0\x01\0\0\0\x01");
    raw.send(&extended(cmd::READ, 0, 8, 1 << 20, 1));
    assert_eq!(error(&mut raw), errno::EINVAL);
    raw.send(&extended(cmd::DISC, 0, 9, 0, 0));
    assert!(raw.is_closed());
}

#[test]
fn payloads_are_taken_as_their_flag_says() {
    let served = sparse(1 << 20, How::default());
    let mut raw = begun(&served.socket);
    let payload = cmd_flag::PAYLOAD_LEN;
    // QEMU's client writes without the flag.
    raw.send(&extended(cmd::WRITE, 0, 1, 0, 512));
    raw.send(&[0; 512]);
    assert_eq!(answer(&mut raw), (chunk::NONE, 1, 0, vec![]));
    for kind in [cmd::READ, cmd::TRIM, cmd::CACHE, cmd::FLUSH, cmd::WRITE_ZEROES, 77] {
        raw.send(&extended(kind, payload, 2, 0, 70_000));
        raw.send(&vec![0x25; 70_000]);
        assert_eq!(error(&mut raw), errno::EINVAL, "{kind}");
    }
    let narrow = |len: u64, ids: &[u32]| {
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
        [&len.to_be_bytes()[..], &ids].concat()
    };
    for bad in [
        narrow(512, &[]),
        narrow(512, &[2]),
        narrow(512, &[1, 1]),
        narrow(512, &[0]),
        narrow(0, &[1]),
        narrow(1 << 40, &[1]),
        narrow(512, &[1; 3000]),
        vec![0; 13],
        vec![1],
    ] {
        raw.send(&extended(cmd::BLOCK_STATUS, payload, 3, 0, bad.len() as u64));
        raw.send(&bad);
        assert_eq!(error(&mut raw), errno::EINVAL, "{bad:?}");
    }
    raw.send(&extended(cmd::BLOCK_STATUS, payload, 4, 65536, 12));
    raw.send(&narrow(4096, &[1]));
    let (kind, cookie, offset, told) = answer(&mut raw);
    assert_eq!((kind, cookie, offset), (chunk::BLOCK_STATUS_EXT, 4, 65536));
    assert_eq!(told[8..], [4096u64, 3].map(u64::to_be_bytes).concat());
    // Neither an absurd payload nor a compact header is waited for.
    for bytes in [
        extended(cmd::WRITE, payload, 5, 0, (32 << 20) + 1),
        extended(cmd::WRITE, 0, 5, 0, 1 << 40),
        extended(cmd::READ, payload, 5, 0, u64::MAX),
        [request(cmd::READ, 0, 5, 0, 512), vec![0; 4]].concat(),
    ] {
        let mut raw = begun(&served.socket);
        raw.send(&bytes);
        assert!(raw.is_closed());
    }
    raw.send(&extended(cmd::FLUSH, 0, 6, 0, 0));
    assert_eq!(answer(&mut raw), (chunk::NONE, 6, 0, vec![]));
}

#[test]
fn lengths_of_64_bits_are_carried_out_in_pieces() {
    let how = How { cache: CacheMode::None, ..How::default() };
    let served = image(Box::new(Null::new(3 * TIB, false)), how);
    let mut raw = begun(&served.socket);
    for (cookie, kind) in [(1, cmd::WRITE_ZEROES), (2, cmd::TRIM)] {
        raw.send(&extended(kind, cmd_flag::FUA, cookie, 512, 3 * TIB - 512));
        assert_eq!(answer(&mut raw), (chunk::NONE, cookie, 512, vec![]));
    }
    raw.send(&extended(cmd::BLOCK_STATUS, 0, 3, 1, 3 * TIB - 1));
    let (_, _, _, told) = answer(&mut raw);
    assert_eq!(told[8..16], (3 * TIB - 1).to_be_bytes());
    let stats = served.vbd.stats();
    assert_eq!((stats.write_zeroes.ended, stats.discard.ended), (3072, 3072));
    for (kind, error_of) in [
        (cmd::WRITE_ZEROES, errno::ENOSPC),
        (cmd::TRIM, errno::EINVAL),
        (cmd::BLOCK_STATUS, errno::EINVAL),
        (cmd::READ, errno::EOVERFLOW),
    ] {
        raw.send(&extended(kind, 0, 4, 1, u64::MAX));
        assert_eq!(error(&mut raw), error_of, "{kind}");
    }
}

#[test]
fn libnbd_has_them_too() {
    let newer = Newer::get();
    let version = newer.run("nbdinfo", &["--version"]);
    let version = version.split_whitespace().nth(1).expect("a version");
    let minor = version.split('.').nth(1).and_then(|text| text.parse::<u32>().ok());
    assert!(minor.expect("a number") >= 18, "{version}");
    let served = sparse(5 << 40, How::default());
    let socket = served.socket.to_str().expect("UTF-8");
    newer.python(include_str!("extended.py"), &[socket]);
    let told = newer.run("nbdinfo", &[&served.uri()]);
    assert!(told.contains("extended packets"), "{told}");
    let map = newer.run("nbdinfo", &["--map", &served.uri()]);
    let words: Vec<_> = map.split_whitespace().take(3).collect();
    assert_eq!(words, ["0", "5497558138880", "3"], "{map}");
    let content = pattern(9 << 20, 12);
    let served = sparse(content.len() as u64, How::default());
    let (source, back) = (served.dir.path().join("source"), served.dir.path().join("back"));
    fs::write(&source, &content).expect("written");
    let path = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    newer.run("nbdcopy", &[&path(&source), &served.uri()]);
    assert_same(&served.content(), &content);
    newer.run("nbdcopy", &["--request-size=1048576", &served.uri(), &path(&back)]);
    assert_same(&fs::read(&back).expect("read"), &content);
}

#[test]
fn qemu_has_them_too() {
    let newer = Newer::get();
    let served = sparse(5 << 40, How::default());
    let uri = served.uri();
    let script = [
        ["-c", "write -P 7 3T 1M"],
        ["-c", "write -z -u -n 1T 1500G"],
        ["-c", "discard 0 2047M"],
        ["-c", "read -P 7 3T 1M"],
        ["-c", "read -P 0 1T 1M"],
    ];
    let said = newer.run("qemu-io", &[&["-fraw"], &script.concat()[..], &[&uri]].concat());
    assert!(said.matches("ops; ").count() == 5 && !said.contains("failed"), "{said}");
    let stats = served.vbd.stats();
    assert_eq!(stats.write_zeroes.ended, 1500, "one request, in pieces of 1 GiB");
    let map = newer.run("qemu-img", &["map", "--output=json", "-fraw", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).expect("JSON");
    let lengths: Vec<_> = map.as_array().expect("a list").iter().map(|e| &e["length"]).collect();
    assert_eq!(lengths, [3 * TIB, 1 << 20, 2 * TIB - (1 << 20)]);
    let content = pattern(9 << 20, 13);
    let served = sparse(content.len() as u64, How::default());
    let source = served.dir.path().join("source");
    fs::write(&source, &content).expect("written");
    let source = source.to_str().expect("UTF-8");
    newer.run("qemu-img", &["convert", "-n", "-W", "-fraw", "-Oraw", source, &served.uri()]);
    assert_same(&served.content(), &content);
    newer.run("qemu-img", &["compare", "-fraw", "-Fraw", source, &served.uri()]);
}
