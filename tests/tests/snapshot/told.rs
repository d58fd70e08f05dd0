//! What a front-end by vhost-user is told where its disk becomes larger.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ringtap_tests::{ok, patience};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;

use crate::bench::{Bench, MIB};

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGED: u32 = 2;
/// VHOST_USER_F_PROTOCOL_FEATURES and VIRTIO_F_VERSION_1.
const FEATURES: u64 = 1 << 30 | 1 << 32;
/// VHOST_USER_PROTOCOL_F_BACKEND_REQ and _CONFIG.
const PROTOCOL: u64 = 1 << 5 | 1 << 9;

fn header(request: u32, len: usize) -> Vec<u8> {
    [request, 1, len as u32].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// A front-end that has agreed on as little as it needs.
struct FrontEnd {
    socket: UnixStream,
    /// By which it is told of changes.
    told: UnixStream,
}

impl FrontEnd {
    fn new(path: &Path) -> FrontEnd {
        let socket = UnixStream::connect(path).expect("a server");
        let (told, theirs) = UnixStream::pair().expect("sockets");
        for one in [&socket, &told] {
            one.set_read_timeout(Some(patience())).expect("a time");
        }
        let mut own = FrontEnd { socket, told };
        own.send(SET_OWNER, &[]);
        own.send(GET_FEATURES, &[]);
        let offered = own.number();
        assert_eq!(offered & FEATURES, FEATURES, "{offered:x}");
        own.send(GET_PROTOCOL_FEATURES, &[]);
        let offered = own.number();
        assert_eq!(offered & PROTOCOL, PROTOCOL, "{offered:x}");
        own.send(SET_PROTOCOL_FEATURES, &PROTOCOL.to_ne_bytes());
        let (message, files) = (header(SET_BACKEND_REQ_FD, 0), [theirs.as_fd()]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut more = SendAncillaryBuffer::new(&mut space);
        assert!(more.push(SendAncillaryMessage::ScmRights(&files)));
        let parts = [IoSlice::new(&message)];
        let sent = sendmsg(&own.socket, &parts, &mut more, SendFlags::empty());
        assert_eq!(sent, Ok(message.len()));
        own.send(SET_FEATURES, &FEATURES.to_ne_bytes());
        own
    }

    fn send(&mut self, request: u32, payload: &[u8]) {
        let message = [header(request, payload.len()), payload.to_vec()].concat();
        self.socket.write_all(&message).expect("it is taken");
    }

    fn reply(&mut self, len: usize) -> Vec<u8> {
        let mut reply = vec![0; 12 + len];
        self.socket.read_exact(&mut reply).expect("a reply");
        reply.split_off(12)
    }

    fn number(&mut self) -> u64 {
        u64::from_ne_bytes(self.reply(8).try_into().expect("eight bytes"))
    }

    /// Bytes of the disk, as its configuration has them now.
    fn size(&mut self) -> u64 {
        // At 0, so many bytes, no flags: the capacity, in sectors.
        let wanted: Vec<u8> = [0u32, 8, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        self.send(GET_CONFIG, &[&wanted[..], &[0; 8]].concat());
        let sectors = self.reply(20).split_off(12);
        u64::from_le_bytes(sectors.try_into().expect("eight bytes")) * 512
    }

    /// Wait until it is told that the configuration has changed.
    fn hears(&mut self) {
        let mut message = [0; 12];
        self.told.read_exact(&mut message).expect("it is told");
        assert_eq!(message[..4], CONFIG_CHANGED.to_ne_bytes());
    }
}

#[test]
fn front_ends_are_told_of_the_new_size_whatever_the_format_and_find_it() {
    for format in ["raw", "luks", "data file"] {
        let bench = Bench::new();
        let (image, key) = (bench.text("a.img"), bench.text("key"));
        std::fs::write(&key, "a secret").expect("a key");
        let (object, secret) = (format!("secret,id=s,file={key}"), format!("file:{key}"));
        let data = format!("data_file={}", bench.text("data"));
        let (made, served): (&[&str], &[&str]) = match format {
            "raw" => (&["-f", "raw"], &["-f", "raw"]),
            "luks" => (
                &["-f", "luks", "--object", &object, "-o", "key-secret=s,iter-time=10"],
                &["-f", "luks", "--secret", &secret],
            ),
            _ => (&["-f", "qcow2", "-o", &data], &["-f", "qcow2"]),
        };
        ok("qemu-img", "qemu-utils", &[&["create", "-q"], made, &[&*image, "64M"]].concat());
        let server = bench.serve(&["a.img"], served);
        let mut control = bench.control();
        let mut first = FrontEnd::new(&bench.path("a"));
        assert_eq!(first.size(), 64 * MIB, "{format}");
        for more in [80 * MIB, 96 * MIB + 512] {
            control.ok("block_resize", json!({ "node-name": "a", "size": more }));
            first.hears();
            assert_eq!(first.size(), more, "{format}");
        }
        drop(first);
        // One that connects later finds it.
        assert_eq!(FrontEnd::new(&bench.path("a")).size(), 96 * MIB + 512, "{format}");
        server.stop();
    }
}
