//! What the load loop asks of a device.

use crate::Error;
use crate::buffers::Buffers;

/// One kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Read,
    Write,
    Flush,
}

/// A request that came back: 0 or a negative errno.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    pub slot: usize,
    pub result: i32,
}

/// One queue of a device with a buffer for each slot of its depth.
pub trait Engine {
    /// Lists a request; the device sees it at the next [`Engine::turn`].
    ///
    /// The slot must be free. Its buffer belongs to the device until the request is done.
    fn list(&mut self, slot: usize, op: Op, offset: u64);

    /// Hands all listed requests over at once, then waits until at least one is done.
    fn turn(&mut self, done: &mut Vec<Done>) -> Result<(), Error>;

    /// The slots' buffers.
    fn buffers(&mut self) -> &mut Buffers;
}
