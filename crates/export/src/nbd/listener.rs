//! A socket that listens.

use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// A UNIX stream socket.
    Unix(UnixListener),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}
