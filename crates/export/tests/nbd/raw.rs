//! A client made of bytes, that does as it likes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringtap_export::nbd::wire::{
    IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, opt, rep,
};

pub struct Raw<S = UnixStream>(pub S);

/// A reply of the transmission phase: simple, or one chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    Simple { error: u32, cookie: u64 },
    Chunk { flags: u16, kind: u16, cookie: u64, payload: Vec<u8> },
}

impl Raw {
    /// Connect, and take the server's greeting.
    pub fn connect(socket: &Path) -> Raw {
        let stream = UnixStream::connect(socket).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let mut raw = Raw(stream);
        let greeting = raw.take(18);
        assert_eq!(greeting[..8], NBDMAGIC.to_be_bytes());
        assert_eq!(greeting[8..16], IHAVEOPT.to_be_bytes());
        assert_eq!(greeting[16..], [0, 3]);
        raw
    }

    /// Whether a client is let in, rather than closed or told that there are too many.
    pub fn is_welcome(socket: &Path) -> bool {
        Raw::is_let_in(UnixStream::connect(socket).expect("a connection"))
    }

    /// Take the greeting on any stream; none where the server closes first.
    pub fn greet(stream: UnixStream) -> Option<Raw> {
        let mut raw = Raw(stream);
        raw.0.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        raw.0.read_exact(&mut [0; 18]).is_ok().then_some(raw)
    }

    /// Go on from the greeting to the requests, with simple replies.
    pub fn choose(&mut self) {
        self.send(&3u32.to_be_bytes());
        self.option(opt::EXPORT_NAME, b"");
        self.take(10);
    }

    /// As [`Raw::is_welcome`], on any stream.
    pub fn is_let_in(stream: UnixStream) -> bool {
        let Some(mut raw) = Raw::greet(stream) else { return false };
        if raw.0.write_all(&3u32.to_be_bytes()).is_err() {
            return false;
        }
        raw.ask(opt::GO, b"\0\0\0\0\0\0").last().expect("an answer").0 == rep::ACK
    }

    /// Connect and go on to the requests, with simple replies.
    pub fn transmit(socket: &Path) -> Raw {
        let mut raw = Raw::connect(socket);
        raw.choose();
        raw
    }

    /// As [`Raw::transmit`]; none where the server closes first.
    pub fn try_to_transmit(socket: &Path) -> Option<Raw> {
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        stream.read_exact(&mut [0; 18]).ok()?;
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").ok()?;
        stream.read_exact(&mut [0; 10]).ok()?;
        Some(Raw(stream))
    }
}

impl<S: Read + Write> Raw<S> {
    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("sent");
    }

    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).expect("received");
        bytes
    }

    /// Whether the server has closed the connection, after whatever it still sent.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = vec![0; 1 << 20];
        loop {
            match self.0.read(&mut rest) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes);
    }

    /// One reply to an option: its kind and data.
    pub fn answer(&mut self, option: u32) -> (u32, Vec<u8>) {
        let head = self.take(20);
        assert_eq!(head[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(head[8..12], option.to_be_bytes());
        let len = number(&head[16..]) as usize;
        (number(&head[12..16]) as u32, self.take(len))
    }

    /// All replies to an option, to the last.
    pub fn ask(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.option(option, data);
        let mut all = vec![];
        loop {
            let answer = self.answer(option);
            let last = answer.0 == rep::ACK || answer.0 >> 31 == 1;
            all.push(answer);
            if last {
                return all;
            }
        }
    }

    pub fn reply(&mut self) -> Reply {
        let magic = number(&self.take(4)) as u32;
        if magic == SIMPLE_REPLY_MAGIC {
            let rest = self.take(12);
            return Reply::Simple { error: number(&rest[..4]) as u32, cookie: number(&rest[4..]) };
        }
        assert_eq!(magic, STRUCTURED_REPLY_MAGIC);
        let rest = self.take(16);
        let len = number(&rest[12..]) as usize;
        Reply::Chunk {
            flags: number(&rest[..2]) as u16,
            kind: number(&rest[2..4]) as u16,
            cookie: number(&rest[4..12]),
            payload: self.take(len),
        }
    }
}

pub fn request(kind: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}
