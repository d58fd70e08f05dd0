//! A client of xenstored, by /dev/xen/xenbus.
//!
//! Source: Xen, docs/misc/xenstore.txt and public/io/xs_wire.h. A relative path is below
//! /local/domain/N of the domain this runs in.

#[cfg(test)]
pub(crate) mod fake;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

const DEVICE: &str = "/dev/xen/xenbus";
const PAYLOAD_MAX: usize = 4096;
const HEADER: usize = 16;

const DIRECTORY: u32 = 1;
const READ: u32 = 2;
const WATCH: u32 = 4;
const TRANSACTION_START: u32 = 6;
const TRANSACTION_END: u32 = 7;
const WRITE: u32 = 11;
const WATCH_EVENT: u32 = 15;
const ERROR: u32 = 16;

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The connection is of no use.
    #[error("cannot {tried} {path} in xenstore: {source}")]
    Io {
        /// What was tried.
        tried: &'static str,
        /// On which node.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// xenstored refused.
    #[error("cannot {tried} {path} in xenstore: {code}")]
    Refused {
        /// What was tried.
        tried: &'static str,
        /// On which node.
        path: String,
        /// The name of an errno.
        code: String,
    },
}

impl StoreError {
    pub(crate) fn open(source: io::Error) -> StoreError {
        StoreError::Io { tried: "open", path: DEVICE.into(), source }
    }

    pub(crate) fn wait(source: io::Error) -> StoreError {
        StoreError::Io { tried: "wait for", path: "changes".into(), source }
    }

    fn is(&self, name: &str) -> bool {
        matches!(self, StoreError::Refused { code, .. } if code == name)
    }
}

/// A connection. Its watches are its own.
pub(crate) struct Store {
    file: File,
    events: VecDeque<String>,
    /// The transaction that requests belong to; 0 for none.
    transaction: u32,
}

struct Message {
    kind: u32,
    payload: Vec<u8>,
}

/// Read one message. Lengths are bounded by the protocol.
fn receive(from: &mut impl Read) -> io::Result<Message> {
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| header[at + i]));
    let len = word(12) as usize;
    if len > PAYLOAD_MAX {
        return Err(io::Error::other(format!("xenstored sends {len} bytes at once")));
    }
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    Ok(Message { kind: word(0), payload })
}

fn message(kind: u32, transaction: u32, payload: &[u8]) -> Vec<u8> {
    let words = [kind, 0, transaction, payload.len() as u32];
    let mut out: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    out.extend(payload);
    out
}

/// The strings of a payload, each with its zero byte.
fn strings(payload: &[u8]) -> Vec<String> {
    let text = payload.strip_suffix(&[0]).unwrap_or(payload);
    if text.is_empty() {
        return vec![];
    }
    text.split(|byte| *byte == 0).map(|one| String::from_utf8_lossy(one).into_owned()).collect()
}

impl Store {
    pub(crate) fn open() -> io::Result<Store> {
        let file = File::options().read(true).write(true).open(DEVICE)?;
        Ok(Store::of(file))
    }

    /// The connection that is this file.
    pub(crate) fn of(file: File) -> Store {
        Store { file, events: VecDeque::new(), transaction: 0 }
    }

    fn request(
        &mut self,
        tried: &'static str,
        path: &str,
        kind: u32,
        payload: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        let failed = |source| StoreError::Io { tried, path: path.to_owned(), source };
        if payload.len() > PAYLOAD_MAX {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        self.file.write_all(&message(kind, self.transaction, payload)).map_err(failed)?;
        loop {
            let Message { kind, payload } = receive(&mut self.file).map_err(failed)?;
            match kind {
                WATCH_EVENT => self.events.extend(strings(&payload).into_iter().next()),
                ERROR => {
                    let code = strings(&payload).into_iter().next().unwrap_or_default();
                    return Err(StoreError::Refused { tried, path: path.to_owned(), code });
                }
                _ => return Ok(payload),
            }
        }
    }

    /// A node's value; none where there is no such node.
    pub(crate) fn read(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        match self.request("read", path, READ, format!("{path}\0").as_bytes()) {
            Ok(value) => Ok(Some(String::from_utf8_lossy(&value).into_owned())),
            Err(error) if error.is("ENOENT") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A node's value as a number; none where there is no such node, or it is not one.
    pub(crate) fn number(&mut self, path: &str) -> Result<Option<u32>, StoreError> {
        Ok(self.read(path)?.and_then(|value| value.trim().parse().ok()))
    }

    pub(crate) fn write(&mut self, path: &str, value: &str) -> Result<(), StoreError> {
        self.request("write", path, WRITE, format!("{path}\0{value}").as_bytes()).map(drop)
    }

    /// The names below a node; none where there is no such node.
    pub(crate) fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.request("list", path, DIRECTORY, format!("{path}\0").as_bytes()) {
            Ok(names) => Ok(strings(&names)),
            Err(error) if error.is("ENOENT") => Ok(vec![]),
            Err(error) => Err(error),
        }
    }

    /// Have events for a node and all below it. The first comes at once.
    pub(crate) fn watch(&mut self, path: &str) -> Result<(), StoreError> {
        self.request("watch", path, WATCH, format!("{path}\0w\0").as_bytes()).map(drop)
    }

    /// Carry out `work` as one, again and again until nobody came between.
    pub(crate) fn transaction<T>(
        &mut self,
        path: &str,
        work: impl Fn(&mut Store) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        loop {
            let id = self.request("change", path, TRANSACTION_START, b"\0")?;
            let id = strings(&id).first().and_then(|id| id.parse().ok());
            self.transaction = id.unwrap_or_default();
            let done = work(self);
            let word: &[u8] = if done.is_ok() { b"T\0" } else { b"F\0" };
            let ended = self.request("change", path, TRANSACTION_END, word);
            self.transaction = 0;
            match ended {
                Err(error) if done.is_ok() && error.is("EAGAIN") => {}
                Err(error) if done.is_ok() => return Err(error),
                _ => return done,
            }
        }
    }

    /// The path of the next event that has come.
    pub(crate) fn event(&mut self) -> Result<Option<String>, StoreError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        match poll(&mut fds, Some(&now)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
            Ok(_) => {}
            Err(error) => return Err(StoreError::wait(error.into())),
        }
        let message = receive(&mut self.file).map_err(StoreError::wait)?;
        Ok(strings(&message.payload).into_iter().next().filter(|_| message.kind == WATCH_EVENT))
    }

    /// Whether an event has been read already, so that nothing needs to be waited for.
    pub(crate) fn has_event(&self) -> bool {
        !self.events.is_empty()
    }
}

impl AsFd for Store {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_layout_of_the_header() {
        let bytes = message(READ, 7, b"a/b\0");
        assert_eq!(bytes[..16], [2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 4, 0, 0, 0]);
        let back = receive(&mut &bytes[..]).expect("a message");
        assert_eq!((back.kind, &back.payload[..]), (READ, &b"a/b\0"[..]));
    }

    #[test]
    fn what_is_too_long_or_cut_short_is_an_error() {
        let mut bytes = message(READ, 0, b"abc");
        assert!(receive(&mut &bytes[..18]).is_err());
        bytes[12..16].copy_from_slice(&5000u32.to_ne_bytes());
        assert!(receive(&mut &bytes[..]).is_err());
    }

    #[test]
    fn payloads_are_strings_with_zero_bytes() {
        assert_eq!(strings(b"1\x002\0"), ["1", "2"]);
        assert_eq!(strings(b"ENOENT\0"), ["ENOENT"]);
        assert!(strings(b"").is_empty() && strings(b"\0").is_empty());
    }
}
