//! `--metrics`: what the disks do, for Prometheus, over HTTP.
//!
//! A thread takes who asks, and another answers each, in the few words of HTTP that a scrape takes: the server of a framework
//! (axum with tokio and hyper) would bring some thirty crates and a second kind of event loop into the process that has
//! every disk of the host, for one page that is asked for every few seconds.

#[doc(hidden)]
pub mod testing;
mod text;

use std::collections::VecDeque;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringtap_export::Stop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use crate::newcomers::Newcomers;
use crate::running::Event;
use crate::socket::{self, SocketFile};
use crate::threads::{contained, spawn};
use crate::{Address, Error};

/// The longest request that is read.
const MOST: usize = 8 << 10;
/// How long a client may take with all of its request and of the page, and the thread that attends to the disks.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most clients at a time: one more, and the oldest is let go.
const CLIENTS: usize = 8;
/// What tells a scraper how to read it.
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

/// A client, whichever way it came.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Listener::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Listener::Unix(listener) => Stream::Unix(listener.accept()?.0),
        })
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

/// A client that is waited for until a time, and no longer than the service goes on: however little it sends or takes at once.
struct Client<'a> {
    stream: Stream,
    stop: &'a Stop,
    until: Instant,
}

impl Client<'_> {
    fn new(stream: Stream, stop: &Stop) -> io::Result<Client<'_>> {
        rustix::io::ioctl_fionbio(&stream, true)?;
        Ok(Client { stream, stop, until: Instant::now() + PATIENCE })
    }

    fn wait(&self, what: PollFlags) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(self.stop, PollFlags::IN), PollFd::new(&self.stream, what)];
        match poll(&mut fds, Some(&left)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) if self.stop.is_raised() => Err(io::ErrorKind::Interrupted.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            self.wait(PollFlags::IN)?;
            match rustix::io::read(&self.stream, &mut *bytes) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.wait(PollFlags::OUT)?;
            match rustix::net::send(&self.stream, bytes, SendFlags::NOSIGNAL) {
                Ok(len) => bytes = &bytes[len..],
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The page, until this drops.
pub(crate) struct Metrics {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    /// Its sockets, for the process that comes after this one.
    pub(crate) sockets: Vec<(Address, OwnedFd)>,
    _file: Option<SocketFile>,
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            // One that panicked has told of it.
            let _ = thread.join();
        }
    }
}

impl Metrics {
    /// Answer there; what there is to tell is found by the thread that attends to the inbox.
    pub(crate) fn start(
        address: &Address,
        mode: u32,
        inbox: Sender<Event>,
        newcomers: &Newcomers,
    ) -> Result<Metrics, Error> {
        let failed = |source| Error::Process { tried: "set up the metrics", source };
        let (listeners, file) = match address {
            Address::Unix(path) => {
                let (listener, file) = socket::unix(path, mode)?;
                (vec![Listener::Unix(listener)], Some(file))
            }
            Address::Tcp { host, port } => {
                let all = socket::tcp(host, *port)?;
                (all.into_iter().map(Listener::Tcp).collect(), None)
            }
            Address::Systemd(_) => {
                return Err(Error::Usage("--metrics takes HOST:PORT or unix:PATH".into()));
            }
        };
        for listener in &listeners {
            match listener {
                Listener::Tcp(listener) => listener.set_nonblocking(true).map_err(failed)?,
                Listener::Unix(listener) => listener.set_nonblocking(true).map_err(failed)?,
            }
        }
        let copies = listeners.iter().map(|listener| {
            let place = match listener {
                Listener::Unix(listener) => Address::Unix(socket::unix_path(listener)),
                Listener::Tcp(listener) => {
                    let bound = listener.local_addr()?;
                    Address::Tcp { host: bound.ip().to_string(), port: bound.port() }
                }
            };
            Ok((place, listener.as_fd().try_clone_to_owned()?))
        });
        let sockets = copies.collect::<io::Result<_>>().map_err(failed)?;
        let stop = Stop::new().map_err(failed)?;
        let (theirs, newcomers) = (stop.clone(), newcomers.clone());
        let thread = spawn("metrics", move || serve(&listeners, &theirs, &inbox, &newcomers))?;
        Ok(Metrics { stop, thread: Some(thread), sockets, _file: file })
    }
}

fn serve(listeners: &[Listener], stop: &Stop, inbox: &Sender<Event>, newcomers: &Newcomers) {
    let mut clients = Clients::default();
    loop {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        match newcomers.wait() {
            true => fds.push(PollFd::new(newcomers, PollFlags::IN)),
            false => fds.extend(listeners.iter().map(|one| PollFd::new(one, PollFlags::IN))),
        }
        if poll(&mut fds, None).is_err_and(|error| error != rustix::io::Errno::INTR) {
            return;
        }
        let ready: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        if stop.is_raised() {
            return;
        }
        for (listener, _) in listeners.iter().zip(ready).filter(|(_, ready)| *ready) {
            let Some(accepted) = newcomers.take(|_| listener.accept()) else { break };
            let failed = match accepted.map(|stream| clients.attend(stream, inbox)) {
                Ok(Ok(())) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::warn!("cannot take who asks for metrics: {failed}");
            std::thread::sleep(PATIENCE / 20);
        }
    }
}

/// Those that are being answered, each by a thread, until this drops: one that says nothing keeps nobody else waiting.
#[derive(Default)]
struct Clients(VecDeque<(Stop, JoinHandle<()>)>);

impl Clients {
    fn attend(&mut self, stream: Stream, inbox: &Sender<Event>) -> Result<(), Error> {
        self.0.retain(|(_, thread)| !thread.is_finished());
        if self.0.len() >= CLIENTS {
            self.0.pop_front().into_iter().for_each(let_go);
        }
        let failed = |source| Error::Process { tried: "answer who asks for metrics", source };
        let stop = Stop::new().map_err(failed)?;
        let (theirs, inbox) = (stop.clone(), inbox.clone());
        let thread = spawn("metrics client", move || {
            // It may have gone, or be no client at all.
            let _ = contained(|| {
                Client::new(stream, &theirs).and_then(|client| answer(&client, &inbox))
            });
        })?;
        self.0.push_back((stop, thread));
        Ok(())
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.0.iter().for_each(|(stop, _)| stop.raise());
        self.0.drain(..).for_each(let_go);
    }
}

fn let_go((stop, thread): (Stop, JoinHandle<()>)) {
    stop.raise();
    // One that panicked has told of it.
    let _ = thread.join();
}

/// Answer one request, and be done with its client.
fn answer(client: &Client<'_>, inbox: &Sender<Event>) -> io::Result<()> {
    let mut request = vec![];
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let len = client.read(&mut piece)?;
        request.extend(&piece[..len]);
        if len == 0 || request.len() > MOST {
            return reply(client, "400 Bad Request", "text/plain", "no request\n", true);
        }
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line).into_owned();
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let wants_body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return reply(client, "405 Method Not Allowed", "text/plain", "GET it\n", true),
    };
    if target.split('?').next() != Some("/metrics") {
        return reply(client, "404 Not Found", "text/plain", "see /metrics\n", wants_body);
    }
    let (said, page) = channel();
    let ask = Event::Do(Box::new(move |running| {
        let _ = said.send(contained(|| text::page(running)));
    }));
    // Nobody attends where the process ends.
    let sent = inbox.send(ask).is_ok();
    match page.recv_timeout(PATIENCE) {
        Ok(Some(page)) if sent => reply(client, "200 OK", TYPE, &page, wants_body),
        _ => reply(client, "503 Service Unavailable", "text/plain", "try again\n", wants_body),
    }
}

fn reply(
    client: &Client<'_>,
    status: &str,
    kind: &str,
    body: &str,
    wants_body: bool,
) -> io::Result<()> {
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n"
    );
    client.write_all(head.as_bytes())?;
    client.write_all(if wants_body { body.as_bytes() } else { b"" })
}
