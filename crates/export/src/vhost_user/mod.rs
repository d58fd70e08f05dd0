//! vhost-user-blk: a listening socket, one front-end at a time, a thread for each of its queues.
//!
//! Source: QEMU, docs/interop/vhost-user.rst; virtio 1.2, section 5.2.

mod backend;
mod config;
mod inflight;
mod memory;
mod queue;
mod request;
mod thread;
mod virtqueue;

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringtap_vbd::Vbd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use vhost::vhost_user::BackendReqHandler;

pub use virtqueue::RingError;

use self::backend::Backend;
use crate::Stop;

/// A front-end that sends part of a message and then nothing is given up after this.
const PATIENCE: Duration = Duration::from_secs(10);
/// VHOST_USER_SET_SLAVE_REQ_FD and VHOST_USER_SLAVE_CONFIG_CHANGE_MSG by number.
const SET_BACKEND_REQUEST_SOCKET: u32 = 21;
const CONFIG_CHANGED: u32 = 2;

/// How a disk is shown to its front-end.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most queues a front-end may use.
    pub queues: u16,
    /// What the guest reads as the disk's serial number; 20 bytes of it count.
    pub serial: String,
}

impl Default for Options {
    fn default() -> Self {
        Options { queues: 16, serial: "ringtap".to_owned() }
    }
}

/// Why a server ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The listening socket is of no use any more.
    #[error("cannot wait for front-ends on the vhost-user socket: {0}")]
    Listen(#[source] io::Error),
}

/// Serves one device to one front-end after the other.
pub struct Server {
    listener: UnixListener,
    vbd: Arc<Vbd>,
    options: Options,
    /// Where to tell the front-end that the configuration changed.
    requests: Mutex<Option<UnixStream>>,
}

impl Server {
    /// A server on a bound socket.
    pub fn new(listener: UnixListener, vbd: Arc<Vbd>, options: Options) -> Server {
        Server { listener, vbd, options, requests: Mutex::new(None) }
    }

    /// Serve until `stop` is raised; then drain, flush and leave.
    pub fn serve(&self, stop: &Stop) -> Result<(), Error> {
        self.listener.set_nonblocking(true).map_err(Error::Listen)?;
        while wait(&self.listener, stop).map_err(Error::Listen)? {
            match self.listener.accept() {
                Ok((stream, _)) => self.serve_front_end(stream, stop),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::ECONNABORTED | libc::EINTR) => {}
                    // Out of descriptors or memory: others may give some back.
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => {
                        tracing::warn!("cannot accept a front-end yet: {error}");
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    _ => return Err(Error::Listen(error)),
                },
            }
        }
        Ok(())
    }

    /// Tell the front-end that the disk's size changed.
    pub fn resized(&self) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = &mut *requests {
            // Request, flags (version 1), size of the payload: none.
            let mut message = [0; 12];
            message[0..4].copy_from_slice(&CONFIG_CHANGED.to_ne_bytes());
            message[4..8].copy_from_slice(&1u32.to_ne_bytes());
            if let Err(error) = stream.write_all(&message) {
                tracing::warn!("cannot tell the front-end of the new size: {error}");
                *requests = None;
            }
        }
    }

    fn serve_front_end(&self, stream: UnixStream, stop: &Stop) {
        tracing::info!("front-end connected");
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let Ok(socket) = stream.try_clone() else { return };
        self.vbd.set_write_cache(true);
        let backend = Arc::new(Mutex::new(Backend::new(self.vbd.clone(), self.options.clone())));
        let mut handler = BackendReqHandler::from_stream(stream, backend.clone());
        loop {
            match wait(&socket, stop) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    tracing::warn!("the front-end is lost: {error}");
                    break;
                }
            }
            self.keep_request_socket(&socket);
            match handler.handle_request() {
                Ok(()) => {}
                Err(vhost::vhost_user::Error::Disconnected) => {
                    tracing::info!("front-end left");
                    break;
                }
                Err(error) => {
                    tracing::warn!("the front-end is let go: {error}");
                    break;
                }
            }
        }
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner) = None;
        backend.lock().unwrap_or_else(PoisonError::into_inner).stop_all();
    }

    /// The vhost crate keeps the socket for our own requests to itself and cannot send the one we
    /// need on it; so look at the message before the crate takes it, and keep a duplicate.
    fn keep_request_socket(&self, socket: &UnixStream) {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let peeked = recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut header)],
            &mut ancillary,
            RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        );
        let request = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
        let whole = matches!(&peeked, Ok(message) if message.bytes == header.len());
        let mut files: Vec<OwnedFd> = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        if whole && request == SET_BACKEND_REQUEST_SOCKET {
            if let Some(file) = files.pop() {
                let stream = UnixStream::from(file);
                let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
                *self.requests.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
            }
        }
    }
}

/// Wait until something can be read (true) or the stop is raised (false).
fn wait(file: impl AsFd, stop: &Stop) -> io::Result<bool> {
    loop {
        let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(&file, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) if !fds[0].revents().is_empty() => return Ok(false),
            Ok(_) if !fds[1].revents().is_empty() => return Ok(true),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
