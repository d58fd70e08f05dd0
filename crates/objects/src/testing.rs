//! A server of HTTP for tests, with one object.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::Uri;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) object: Vec<u8>,
    pub(crate) etag: Option<&'static str>,
    pub(crate) index: Option<Vec<u8>>,
    /// It answers 503, and that one may come again at once.
    pub(crate) away: bool,
    /// No answer comes for that long.
    pub(crate) slow: Duration,
    /// The first bytes of ranges of the object that were asked for, but for opening it.
    pub(crate) asked: Vec<u64>,
}

pub(crate) struct Served {
    port: u16,
    state: Arc<Mutex<State>>,
}

impl Served {
    pub(crate) fn new(state: State) -> Served {
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = shared.clone();
                thread::spawn(move || answer(&client, &state));
            }
        });
        Served { port, state }
    }

    pub(crate) fn uri(&self, query: &str) -> Uri {
        Uri::parse(&format!("http://127.0.0.1:{}/disk.img{query}", self.port)).expect("a name")
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the state")
    }
}

/// One request.
fn answer(mut client: &TcpStream, state: &Mutex<State>) -> Option<()> {
    let lines: Vec<String> = BufReader::new(client)
        .lines()
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .collect();
    let path = lines.first()?.split(' ').nth(1)?.to_owned();
    let range = lines.iter().find_map(|line| {
        let range = line.to_ascii_lowercase();
        let (from, to) = range.strip_prefix("range: bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()?))
    });
    let mut state = state.lock().expect("the state");
    let mut head = String::new();
    let mut body = vec![];
    let status = match (path.as_str(), range) {
        ("/disk.img", Some((from, to))) => {
            if to > 0 {
                state.asked.push(from as u64);
            }
            if let Some(etag) = state.etag {
                head = format!("ETag: {etag}\r\n");
            }
            let to = to.min(state.object.len() - 1);
            match state.away {
                true => {
                    head += "Retry-After: 0\r\n";
                    503
                }
                false => {
                    head += &format!("Content-Range: bytes {from}-{to}/{}\r\n", state.object.len());
                    body = state.object[from..=to].to_vec();
                    206
                }
            }
        }
        ("/disk.img.rtidx", _) if state.index.is_some() => {
            body = state.index.clone()?;
            200
        }
        _ => 404,
    };
    let slow = state.slow;
    drop(state);
    thread::sleep(slow);
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status} X\r\nContent-Length: {len}\r\nConnection: close\r\n{head}\r\n");
    client.write_all(&[head.as_bytes(), &body].concat()).ok()
}
