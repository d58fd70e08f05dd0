//! What a client of the page is told, without a server.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;

use ringtap_export::Stop;

use super::{Client, Stream, answer};

/// What a client gets that says this and no more, where nobody attends to the disks.
///
/// # Errors
/// Where it cannot be said at once, or the client is not answered.
pub fn answer_to(request: &[u8]) -> io::Result<Vec<u8>> {
    let (mut ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    ours.write_all(request)?;
    ours.shutdown(Shutdown::Write)?;
    let (stop, inbox) = (Stop::new()?, channel().0);
    answer(&Client::new(Stream::Unix(theirs), &stop)?, &inbox)?;
    let (mut all, mut piece) = (vec![], [0; 1024]);
    // What it has said and nobody has read ends this with an error.
    while let Ok(len @ 1..) = ours.read(&mut piece) {
        all.extend(&piece[..len]);
    }
    Ok(all)
}
