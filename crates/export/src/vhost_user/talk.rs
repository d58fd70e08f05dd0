//! A conversation made of arbitrary messages, for fuzz targets.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use ringtap_image::{CacheMode, Null};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::BackendReqHandler;

use super::Options;
use super::backend::Backend;
use super::relay::{self, Relay};
use crate::Stop;

/// Bytes of the memory whose descriptor messages come with.
pub const MEMORY: u64 = 1 << 20;
/// What a front-end says first: SET_OWNER, GET_FEATURES, SET_FEATURES, SET_PROTOCOL_FEATURES, in the form that
/// [`converse`] takes.
pub const BEGIN: [u8; 32] = [
    3, 0, 0, 0, // SET_OWNER
    1, 0, 0, 0, // GET_FEATURES
    2, 0, 0, 8, 0, 0, 0, 0x40, 1, 0, 0, 0, // VERSION_1 and PROTOCOL_FEATURES
    16, 0, 0, 8, 10, 0x92, 0, 0, 0, 0, 0,
    0, // LOG_SHMFD, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS
];

const NEED_REPLY: u32 = 1 << 3;

/// Messages of four bytes each (request, flags, descriptors, length of the payload), each with its payload behind
/// them. Bit 0 of the flags wants a reply. The descriptors are named by bits: memory, an eventfd, a pipe's end,
/// `/dev/zero`. Gives how many messages were taken.
///
/// # Panics
/// Where a reply that is wanted does not come, or there are no descriptors for the test itself.
pub fn converse(mut input: &[u8]) -> usize {
    let (mut front_end, ours) = UnixStream::pair().expect("a socket pair");
    front_end.set_nonblocking(true).expect("its flags");
    let (mut relay, socket) = Relay::new(ours).expect("a relay");
    let vbd = Vbd::new(Box::new(Null::new(1 << 20, false)), CacheMode::None);
    let backend = Arc::new(Mutex::new(Backend::new(vbd.into(), Options::default())));
    let mut handler = BackendReqHandler::from_stream(socket, backend.clone());
    let (mut taken, mut negotiated) = (0, false);
    let stop = Stop::new().expect("a stop");
    while let [request, flags, files, len, rest @ ..] = input {
        let (payload, next) = rest.split_at(rest.len().min(usize::from(*len)));
        input = next;
        if u32::from(*request) == relay::SET_PROTOCOL_FEATURES && payload.len() >= 8 {
            negotiated = payload[0] & 8 != 0;
        }
        let wants = flags & 1 != 0;
        let word = if wants { 1 | NEED_REPLY } else { 1 };
        let head = [u32::from(*request), word, payload.len() as u32].map(u32::to_ne_bytes).concat();
        relay::send(&front_end, &[&head[..], payload].concat(), &descriptors(*files))
            .expect("sent");
        if relay.forward_message(&mut None, [&stop, &stop]).is_err() {
            break;
        }
        let handled = handler.handle_request();
        relay.forward_reply(handled.is_ok(), [&stop, &stop]).expect("its reply");
        let mut reply = [0; 8192];
        let replied = front_end.read(&mut reply).is_ok_and(|len| len > 0);
        // Those that are answered with a value fail without one.
        let acked = handled.is_ok() || !relay::OTHER_REPLY.contains(&u32::from(*request));
        assert!(replied || !(wants && negotiated && acked), "no reply to {request}");
        if handled.is_err() {
            break;
        }
        taken += 1;
    }
    backend.lock().expect("nobody panicked").stop_all();
    taken
}

fn descriptors(bits: u8) -> Vec<OwnedFd> {
    let memory = || {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, MEMORY).expect("its size");
        file
    };
    let event = || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    let pipe = || rustix::pipe::pipe().expect("a pipe").0;
    let zeros = || OwnedFd::from(File::open("/dev/zero").expect("it is everywhere"));
    let kinds: [&dyn Fn() -> OwnedFd; 4] = [&memory, &event, &pipe, &zeros];
    let named = kinds.iter().enumerate().filter(|(bit, _)| bits & (1 << bit) != 0);
    named.map(|(_, make)| make()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(request: u8, flags: u8, files: u8, payload: &[u8]) -> Vec<u8> {
        [&[request, flags, files, payload.len() as u8][..], payload].concat()
    }

    /// What starts a queue and ends it again, as the corpus has it.
    #[test]
    fn a_whole_conversation() {
        let words = |words: &[u64]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        let half = |index: u32, number: u32| [index, number].map(u32::to_le_bytes).concat();
        let at = 0x7000_0000_0000;
        let all = [
            BEGIN.to_vec(),
            message(15, 0, 0, &[]),
            message(36, 0, 0, &[]),
            message(37, 1, 1, &words(&[0, 0, MEMORY, at, 0])),
            message(31, 0, 0, &[words(&[0, 0]), vec![1, 0, 128, 0, 0, 0, 0, 0]].concat()),
            message(8, 1, 0, &half(0, 64)),
            message(10, 1, 0, &half(0, 0)),
            message(9, 1, 0, &words(&[0, at, at + 0x2000, at + 0x1000, 0])),
            message(13, 1, 2, &words(&[0])),
            message(12, 1, 2, &words(&[0])),
            message(18, 1, 0, &half(0, 1)),
            message(6, 0, 1, &words(&[4096, 0])),
            message(7, 1, 2, &words(&[0])),
            message(2, 1, 0, &words(&[0x1_4400_0000])),
            message(9, 1, 0, &words(&[1 << 32, at, at + 0x2000, at + 0x1000, 0x2000])),
            message(24, 0, 0, &[half(0, 60), vec![0; 64]].concat()),
            message(5, 1, 1, &[&half(1, 0)[..], &words(&[0, MEMORY, at, 0])].concat()),
            message(38, 1, 0, &words(&[0, 0, MEMORY, at, 0])),
            message(37, 1, 1, &words(&[0, 0, MEMORY, at, 0])),
            message(11, 0, 0, &half(0, 0)),
        ];
        assert_eq!(converse(&all.concat()), all.len() + 3);
        if let Some(path) = std::env::var_os("RINGTAP_TEST_CORPUS") {
            std::fs::write(path, all.concat()).expect("written");
        }
        let kick = [BEGIN.to_vec(), message(12, 1, 8, &words(&[0]))].concat();
        assert_eq!(converse(&kick), 4, "/dev/zero is no kick");
    }
}
