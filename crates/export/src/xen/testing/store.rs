//! What bytes of an xenstored lead to, for fuzz targets.

use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::xen::connect::Connection;
use crate::xen::xenstore::Store;

/// Ask all that is ever asked of a store that answers with these bytes, and then nothing; how many questions
/// had an answer. Give no more bytes than a socket holds.
pub fn ask_store(answers: &[u8]) -> io::Result<usize> {
    let (ours, mut theirs) = UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    theirs.write_all(answers)?;
    theirs.shutdown(Shutdown::Write)?;
    let mut store = Store::of(File::from(OwnedFd::from(ours)));
    let mut answered = 0;
    // The first of them a frontend has written.
    answered += usize::from(Connection::read(&mut store, "device/vbd/1", 1, 4).is_ok());
    answered += usize::from(store.watch("backend").is_ok());
    answered += usize::from(store.list("backend/vbd").is_ok());
    let changed = store.transaction("backend/vbd/1", |store| {
        let state = store.number("state")?;
        store.write("state", &state.unwrap_or(1).to_string())
    });
    answered += usize::from(changed.is_ok());
    while let Ok(Some(_event)) = store.event() {
        answered += 1;
    }
    Ok(answered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_goes_away_has_answered_what_it_did() {
        let message = |kind: u32, text: &[u8]| {
            let words = [kind, 0, 0, text.len() as u32];
            [&words.map(u32::to_ne_bytes).concat()[..], text].concat()
        };
        let all = [message(16, b"EINVAL\0"), message(4, b"OK\0"), message(1, b"a\0b\0")].concat();
        assert_eq!(ask_store(&all).expect("a socket"), 2);
        assert_eq!(ask_store(&[]).expect("a socket"), 0);
    }
}
