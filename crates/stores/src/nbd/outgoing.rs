//! Requests on their way into the socket, of which it may have taken a part.

use std::collections::VecDeque;

use ringtap_io::{Mem, Part};

use super::handshake::Replies;
use super::requests::Command;
use super::wire::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, cmd, cmd_flag};

/// Head and payload of one request.
struct Piece {
    cookie: u64,
    head: [u8; 32],
    /// What of the head and of the payload has not been sent.
    head_left: std::ops::Range<usize>,
    payload: Payload,
}

enum Payload {
    None,
    /// The memory of an operation in flight.
    Of(Mem),
    /// A copy of what is left, for the memory is used no more.
    Copied(Vec<u8>),
}

/// What has been begun, in order.
#[derive(Default)]
pub(super) struct Outgoing {
    pieces: VecDeque<Piece>,
    /// Bytes of payload.
    bytes: usize,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether so much is on its way that no more is taken for now.
    pub(super) fn is_full(&self) -> bool {
        self.pieces.len() >= 60 || self.bytes >= 4 << 20
    }

    pub(super) fn push(&mut self, replies: Replies, cookie: u64, command: Command, mem: Mem) {
        let mut head = [0; 32];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            head[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        let writes = command.kind == cmd::WRITE;
        if replies == Replies::Extended {
            let payload = if writes { cmd_flag::PAYLOAD_LEN } else { 0 };
            put(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
            put(&(command.flags | payload).to_be_bytes());
        } else {
            put(&REQUEST_MAGIC.to_be_bytes());
            put(&command.flags.to_be_bytes());
        }
        put(&command.kind.to_be_bytes());
        put(&cookie.to_be_bytes());
        put(&command.offset.to_be_bytes());
        match replies {
            Replies::Extended => put(&command.len.to_be_bytes()),
            _ => put(&(command.len as u32).to_be_bytes()),
        }
        let payload = if writes { Payload::Of(mem) } else { Payload::None };
        self.bytes += if writes { mem.len() } else { 0 };
        self.pieces.push_back(Piece { cookie, head, head_left: 0..at, payload });
    }

    /// What is left to be sent.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        self.pieces.iter().flat_map(|piece| {
            let head = &piece.head[piece.head_left.clone()];
            let head = (!head.is_empty()).then_some(Part::Bytes(head));
            let payload = match &piece.payload {
                Payload::None => None,
                Payload::Of(mem) => Some(Part::Mem(*mem)),
                Payload::Copied(bytes) => Some(Part::Bytes(bytes)),
            };
            head.into_iter().chain(payload)
        })
    }

    /// So many bytes have been sent.
    pub(super) fn sent(&mut self, mut bytes: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            let head = bytes.min(piece.head_left.len());
            piece.head_left.start += head;
            bytes -= head;
            let left = match &mut piece.payload {
                Payload::None => 0,
                Payload::Of(mem) => {
                    let part = bytes.min(mem.len());
                    *mem = mem.window(part, usize::MAX);
                    (bytes, self.bytes) = (bytes - part, self.bytes - part);
                    mem.len()
                }
                Payload::Copied(copy) => {
                    let part = bytes.min(copy.len());
                    copy.drain(..part);
                    (bytes, self.bytes) = (bytes - part, self.bytes - part);
                    copy.len()
                }
            };
            if !piece.head_left.is_empty() || left > 0 {
                return;
            }
            self.pieces.pop_front();
        }
    }

    /// The memory of a request is used no more.
    pub(super) fn copy_rest(&mut self, cookie: u64) {
        let piece = self.pieces.iter_mut().find(|piece| piece.cookie == cookie);
        let Some(Piece { payload, .. }) = piece else { return };
        if let Payload::Of(mem) = payload {
            let mut copy = vec![0; mem.len()];
            mem.copy_to(&mut copy);
            *payload = Payload::Copied(copy);
        }
    }

    /// The connection is gone.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
    }
}
