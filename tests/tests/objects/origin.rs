//! A server of HTTP whose object and faults are the test's.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Status(u16),
    /// 503, and when to come again.
    Later(u64),
    /// The connection ends in the middle.
    Cut,
    /// As many bytes, of which one is another.
    Wrong,
    /// It takes that long.
    Slow(Duration),
}

/// What is served, and how.
pub struct State {
    pub object: Vec<u8>,
    pub etag: Option<String>,
    pub ranges: bool,
    /// Whether If-Match counts.
    pub conditions: bool,
    /// What happens to the next requests for the object, one after the other.
    pub faults: Vec<Fault>,
    /// To all of them.
    pub always: Option<Fault>,
    /// Who asks for this range is not answered: of what is read ahead any may come first.
    pub held: Option<(u64, u64)>,
    /// What lies beside it, by the ending of its name.
    pub beside: Vec<(String, Vec<u8>)>,
    /// Ranges of the object that were asked for.
    pub asked: Vec<(u64, u64)>,
    /// Headers that requests had.
    pub headers: Vec<String>,
    /// Nobody is answered any more.
    pub gone: bool,
}

/// The server; it goes with the process.
pub struct Origin {
    pub port: u16,
    pub state: Arc<Mutex<State>>,
}

impl Origin {
    pub fn new(object: Vec<u8>) -> Origin {
        let state = State {
            object,
            etag: Some("\"one\"".into()),
            ranges: true,
            conditions: true,
            faults: vec![],
            always: None,
            held: None,
            beside: vec![],
            asked: vec![],
            headers: vec![],
            gone: false,
        };
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.lock().expect("the state").gone {
                    break;
                }
                let state = shared.clone();
                thread::spawn(move || while serve(&client, &state).is_some() {});
            }
        });
        Origin { port, state }
    }

    pub fn uri(&self) -> String {
        format!("http://127.0.0.1:{}/a/disk.img?reconnect=20", self.port)
    }

    /// It is gone: who connects is refused, and who is connected hears nothing more.
    pub fn end(&self) {
        self.with(|state| state.gone = true);
        // So that whoever listens sees it.
        let address = ("127.0.0.1", self.port);
        while TcpStream::connect(address).is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().expect("the state"))
    }
}

/// One request; none when the connection is at its end.
fn serve(client: &TcpStream, state: &Mutex<State>) -> Option<()> {
    let mut lines = BufReader::new(client).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let headers: Vec<String> =
        lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let header = |name: &str| {
        headers.iter().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    };
    let mut state = state.lock().expect("the state");
    if state.gone {
        return None;
    }
    let is_object = path.ends_with("/disk.img");
    if is_object {
        state.headers.extend(headers.iter().cloned());
    }
    let range = header("range").filter(|_| state.ranges).and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse::<u64>().ok()?, to.parse::<u64>().ok()?))
    });
    let beside =
        state.beside.iter().find(|(ending, _)| path.ends_with(&format!("disk.img{ending}")));
    let object = match (is_object, beside) {
        (true, _) => state.object.clone(),
        (false, Some((_, bytes))) => bytes.clone(),
        (false, None) => return answer(client, 404, &[], b"there is none"),
    };
    let fault = match is_object {
        true if range.is_some() && range == state.held => {
            Some(Fault::Slow(Duration::from_secs(600)))
        }
        true if !state.faults.is_empty() => Some(state.faults.remove(0)),
        true => state.always,
        false => None,
    };
    if let Some(range) = range.filter(|_| is_object) {
        state.asked.push(range);
    }
    let other = header("if-match").is_some_and(|etag| Some(etag) != state.etag);
    let mut tags = vec![];
    if let Some(etag) = state.etag.as_ref().filter(|_| is_object) {
        tags.push(format!("ETag: {etag}"));
    }
    let conditions = state.conditions;
    drop(state);
    match fault {
        Some(Fault::Status(403)) => {
            let text = b"<Error><Code>ExpiredToken</Code></Error>";
            return answer(client, 403, &[], text);
        }
        Some(Fault::Status(status)) => return answer(client, status, &[], b"not now"),
        Some(Fault::Later(seconds)) => {
            return answer(client, 503, &[format!("Retry-After: {seconds}")], b"later");
        }
        Some(Fault::Slow(time)) => thread::sleep(time),
        _ => {}
    }
    if other && conditions && is_object {
        return answer(client, 412, &tags, b"another");
    }
    let Some((from, to)) = range else { return answer(client, 200, &tags, &object) };
    let to = to.min(object.len() as u64 - 1);
    let mut part = object[from as usize..=to as usize].to_vec();
    if fault == Some(Fault::Wrong) {
        part[0] ^= 1;
    }
    tags.push(format!("Content-Range: bytes {from}-{to}/{}", object.len()));
    if fault == Some(Fault::Cut) {
        let mut client = client;
        let head = head(206, &tags, part.len());
        client.write_all(head.as_bytes()).ok()?;
        client.write_all(&part[..part.len() / 2]).ok()?;
        let _ = client.shutdown(std::net::Shutdown::Both);
        return None;
    }
    answer(client, 206, &tags, &part)
}

fn head(status: u16, headers: &[String], len: usize) -> String {
    let more: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    format!("HTTP/1.1 {status} X\r\nContent-Length: {len}\r\n{more}\r\n")
}

fn answer(mut client: &TcpStream, status: u16, headers: &[String], body: &[u8]) -> Option<()> {
    client.write_all(head(status, headers, body.len()).as_bytes()).ok()?;
    client.write_all(body).ok()
}
