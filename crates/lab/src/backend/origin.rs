//! An image behind HTTP, on a server that is far away: each request takes 20 ms, and all together get 100 MB/s.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Access, Backend, Context, Entry, File, Peers, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::sample::Stage;

/// What a request takes before its first byte.
const LATENCY: Duration = Duration::from_millis(20);
/// Bytes a second of all answers together.
const RATE: f64 = 100e6;
/// Bytes that are sent at once.
const PIECE: u64 = 64 << 10;
/// How often a connection that asks for nothing looks whether the server ends.
const LOOK: Duration = Duration::from_millis(200);
/// The object's path.
const OBJECT: &str = "/disk.img";

/// How a guest's disk comes from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// All of it is downloaded first.
    Download,
    /// What is read is fetched then.
    Lazy,
    /// The list of what an earlier start read is fetched before and meanwhile.
    BootList,
    /// All of it is fetched meanwhile.
    Fill,
}

/// A server that shows one file; it ends when this is dropped.
#[derive(Debug)]
pub struct Origin {
    port: u16,
    ends: Arc<AtomicBool>,
}

/// What its connections share.
struct Shared {
    file: fs::File,
    len: u64,
    etag: String,
    /// When the line is free again.
    line: Mutex<Instant>,
    ends: Arc<AtomicBool>,
}

impl Origin {
    /// Shows a file, which must not change meanwhile.
    pub fn start(path: &Path) -> Result<Origin> {
        let file = fs::File::open(path).map_err(Error::file("open", path))?;
        let facts = file.metadata().map_err(Error::file("look at", path))?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = listener.map_err(Error::file("find a port for", path))?;
        let port = listener.local_addr().map_err(Error::file("find a port for", path))?.port();
        let ends = Arc::new(AtomicBool::new(false));
        let etag = format!("\"{:x}-{:x}-{:x}\"", facts.ino(), facts.mtime(), facts.mtime_nsec());
        let line = Mutex::new(Instant::now());
        let shared = Arc::new(Shared { file, len: facts.len(), etag, line, ends: ends.clone() });
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ends.load(SeqCst) {
                    return;
                }
                let shared = shared.clone();
                // Whoever goes away in the middle has what he wanted.
                thread::spawn(move || _ = shared.converse(&client));
            }
        });
        Ok(Origin { port, ends })
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}{OBJECT}", self.port)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.ends.store(true, SeqCst);
        // Who waits for the next client sees it.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

impl Shared {
    fn converse(&self, client: &TcpStream) -> io::Result<()> {
        client.set_nodelay(true)?;
        client.set_read_timeout(Some(LOOK))?;
        let mut reader = BufReader::new(client);
        while let Some(head) = self.head(&mut reader)? {
            self.answer(client, &head)?;
        }
        Ok(())
    }

    /// The lines of the next request; none at the end.
    fn head(&self, reader: &mut BufReader<&TcpStream>) -> io::Result<Option<Vec<String>>> {
        let (mut lines, mut line) = (Vec::new(), String::new());
        loop {
            match reader.read_line(&mut line) {
                Ok(0) => return Ok(None),
                Ok(_) if line.trim_end().is_empty() => return Ok(Some(lines)),
                Ok(_) => lines.push(std::mem::take(&mut line).trim_end().to_owned()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.ends.load(SeqCst) {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn answer(&self, mut client: &TcpStream, head: &[String]) -> io::Result<()> {
        thread::sleep(LATENCY);
        let mut words = head.first().map(String::as_str).unwrap_or_default().split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let header = |name: &str| {
            head.iter().skip(1).find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim())
            })
        };
        let empty = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        if path != OBJECT {
            return client.write_all(empty("404 Not Found").as_bytes());
        }
        if header("if-match").is_some_and(|etag| etag != self.etag) {
            return client.write_all(empty("412 Precondition Failed").as_bytes());
        }
        let range = header("range").and_then(|range| self.range(range));
        let (status, (from, to)) = match range {
            Some(range) => ("206 Partial Content", range),
            None => ("200 OK", (0, self.len)),
        };
        let mut text = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: {}\r\nAccept-Ranges: bytes\r\n",
            to - from,
            self.etag
        );
        if range.is_some() {
            let last = to.saturating_sub(1);
            text.push_str(&format!("Content-Range: bytes {from}-{last}/{}\r\n", self.len));
        }
        client.write_all((text + "\r\n").as_bytes())?;
        if method == "HEAD" { Ok(()) } else { self.send(client, from, to) }
    }

    /// From where to where, of `bytes=FROM-[LAST]` within the object.
    fn range(&self, text: &str) -> Option<(u64, u64)> {
        let (from, last) = text.strip_prefix("bytes=")?.split_once('-')?;
        let from: u64 = from.parse().ok()?;
        let last = if last.is_empty() { self.len - 1 } else { last.parse().ok()? };
        (from <= last && from < self.len).then(|| (from, self.len.min(last.saturating_add(1))))
    }

    fn send(&self, mut client: &TcpStream, from: u64, to: u64) -> io::Result<()> {
        let mut bytes = vec![0; PIECE as usize];
        for at in (from..to).step_by(PIECE as usize) {
            let piece = &mut bytes[..PIECE.min(to - at) as usize];
            self.file.read_exact_at(piece, at)?;
            let free = {
                let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
                let time = Duration::from_secs_f64(piece.len() as f64 / RATE);
                *line = (*line).max(Instant::now()) + time;
                *line
            };
            thread::sleep(free.saturating_duration_since(Instant::now()));
            client.write_all(piece)?;
        }
        Ok(())
    }
}

/// A start from there.
#[derive(Debug)]
pub struct Http(pub Start);

impl Backend for Http {
    fn reach(&self) -> Reach {
        Reach::Origin
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let curl = || (self.0 == Start::Download).then(|| env.program("curl", "curl")).flatten();
        env.ringtap_serve().or_else(curl)
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let origin = Origin::start(context.disk)?;
        let (url, start, sockets) = (origin.url(), self.0, context.sockets.to_owned());
        let served = Served::reached(Access::Origin { url, start, sockets });
        Ok(Served { behind: vec![Box::new(origin)], ..served })
    }
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Remote,
            110,
            "http-download",
            "the image downloaded whole, then served",
            &Http(Start::Download),
        ),
        Entry::usual(
            Stage::Remote,
            120,
            "http-lazy",
            "ringtap serve http:, what is read is fetched then",
            &Http(Start::Lazy),
        ),
        Entry::usual(
            Stage::Remote,
            130,
            "http-boot-list",
            "the same, with the list of an earlier start",
            &Http(Start::BootList),
        ),
        Entry::usual(
            Stage::Remote,
            140,
            "http-fill",
            "the same, all of it fetched meanwhile",
            &Http(Start::Fill),
        ),
    ],
    labels: &[
        ("http-download", "download, then local"),
        ("http-lazy", "Ringtap, on demand"),
        ("http-boot-list", "Ringtap, boot list"),
        ("http-fill", "Ringtap, all fetched meanwhile"),
    ],
    peers: &[
        Peers {
            place: 330,
            stage: Stage::Remote,
            arm: "http-boot-list",
            against: &["http-download", "http-lazy"],
        },
        Peers { place: 340, stage: Stage::Remote, arm: "http-lazy", against: &["http-download"] },
        Peers { place: 350, stage: Stage::Remote, arm: "http-fill", against: &["http-download"] },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_come_late_and_at_the_rate_of_the_line() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let bytes: Vec<u8> = (0..4u32 << 20).map(|at| (at >> 10) as u8).collect();
        std::fs::write(file.path(), &bytes).expect("written");
        let origin = Origin::start(file.path()).expect("a server");
        let ask = |head: &str| {
            let begun = Instant::now();
            let mut client =
                TcpStream::connect((Ipv4Addr::LOCALHOST, origin.port)).expect("it listens");
            client.write_all(head.as_bytes()).expect("asked");
            client.shutdown(std::net::Shutdown::Write).expect("asked");
            let mut answer = Vec::new();
            io::Read::read_to_end(&mut client, &mut answer).expect("answered");
            let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
            let head = String::from_utf8_lossy(&answer[..end]).into_owned();
            (head, answer[end..].to_vec(), begun.elapsed())
        };
        let (head, body, took) = ask("GET /disk.img HTTP/1.1\r\nRange: bytes=1024-5119\r\n\r\n");
        assert!(
            head.starts_with("HTTP/1.1 206") && head.contains("bytes 1024-5119/4194304"),
            "{head}"
        );
        assert!(body == bytes[1024..5120] && took >= LATENCY, "{took:?}");
        let (head, body, took) = ask("GET /disk.img HTTP/1.1\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200") && body == bytes);
        assert!(took >= LATENCY + Duration::from_millis(40), "{took:?}");
        let etag = head.lines().find_map(|line| line.strip_prefix("ETag: ")).expect("an ETag");
        let with = |etag: &str| format!("HEAD /disk.img HTTP/1.1\r\nIf-Match: {etag}\r\n\r\n");
        assert!(ask(&with(etag)).0.starts_with("HTTP/1.1 200"));
        assert!(ask(&with("\"another\"")).0.starts_with("HTTP/1.1 412"));
        assert!(ask("GET /disk.img.rtidx HTTP/1.1\r\n\r\n").0.starts_with("HTTP/1.1 404"));
    }
}
