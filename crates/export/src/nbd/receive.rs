//! Receiving from a client, or finding that it is gone.

use ringtap_io::{Io, Op};

/// The connection is over: closed by the client, or broken.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Gone;

pub(super) async fn receive(io: &Io, op: Op) -> Result<usize, Gone> {
    loop {
        match io.run(op).await {
            n if n > 0 => return Ok(n as usize),
            n if n == -libc::EINTR => {}
            _ => return Err(Gone),
        }
    }
}
