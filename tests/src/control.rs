//! A client of the control socket, as plain as the protocol is.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Deserializer, Value, json};

use crate::patience;

/// One connection.
pub struct Control {
    stream: UnixStream,
    bytes: Vec<u8>,
    said: VecDeque<Value>,
    /// Events that came before a reply.
    events: VecDeque<Value>,
}

impl Control {
    /// Connect; the greeting is the first that is said.
    pub fn connect(path: &Path) -> Control {
        Control::of(UnixStream::connect(path).expect("the control socket"))
    }

    fn of(stream: UnixStream) -> Control {
        stream.set_read_timeout(Some(patience())).expect("a time limit");
        Control { stream, bytes: vec![], said: VecDeque::new(), events: VecDeque::new() }
    }

    /// Connect and negotiate.
    pub fn open(path: &Path) -> Control {
        Control::connect(path).negotiate()
    }

    /// Be connected to by a server, and negotiate.
    pub fn accept(listener: &UnixListener) -> Control {
        let end = Instant::now() + patience();
        listener.set_nonblocking(true).expect("a socket");
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    assert!(Instant::now() < end, "no server connects");
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("nobody can connect: {error}"),
            }
        };
        stream.set_nonblocking(false).expect("a socket");
        Control::of(stream).negotiate()
    }

    fn negotiate(mut self) -> Control {
        let control = &mut self;
        assert!(control.hear().expect("a greeting")["QMP"]["version"].is_object());
        assert_eq!(control.call("qmp_capabilities", json!({})), Ok(json!({})));
        self
    }

    /// Send bytes, whatever they are.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).expect("it takes what is sent");
    }

    /// No more will be sent.
    pub fn end(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Write).expect("the other half stays");
    }

    /// The stream itself.
    pub fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }

    /// What is said next; nothing where the server has closed.
    pub fn hear(&mut self) -> Option<Value> {
        while self.said.is_empty() {
            let mut piece = [0; 4096];
            let len = match self.stream.read(&mut piece) {
                Ok(len) => len,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => 0,
                Err(error) => panic!("nothing is said: {error}"),
            };
            if len == 0 {
                assert!(
                    self.bytes.is_empty(),
                    "cut off: {:?}",
                    String::from_utf8_lossy(&self.bytes)
                );
                return None;
            }
            self.bytes.extend(&piece[..len]);
            let mut values = Deserializer::from_slice(&self.bytes).into_iter::<Value>();
            let mut used = 0;
            while let Some(Ok(value)) = values.next() {
                self.said.push_back(value);
                used = values.byte_offset();
            }
            self.bytes.drain(..used);
            if self.bytes.iter().all(u8::is_ascii_whitespace) {
                self.bytes.clear();
            }
        }
        self.said.pop_front()
    }

    /// The next reply; events on the way are kept.
    pub fn reply(&mut self) -> Option<Value> {
        loop {
            let said = self.hear()?;
            if said.get("event").is_none() {
                return Some(said);
            }
            self.events.push_back(said);
        }
    }

    /// What a command returns, or its error's class and text.
    pub fn call(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        self.send(json!({"execute": command, "arguments": arguments, "id": command}).to_string());
        let mut reply = self.reply().expect("a reply");
        assert_eq!(reply["id"], command, "{reply}");
        match reply.get("error") {
            None => Ok(reply["return"].take()),
            Some(error) => Err(format!(
                "{}: {}",
                error["class"].as_str().expect("a class"),
                error["desc"].as_str().expect("a text")
            )),
        }
    }

    /// What a command returns that must succeed.
    pub fn ok(&mut self, command: &str, arguments: Value) -> Value {
        let end = self.call(command, arguments.clone());
        end.unwrap_or_else(|error| panic!("{command} {arguments}: {error}"))
    }

    /// The next event: its name and its data.
    pub fn event(&mut self) -> (String, Value) {
        loop {
            let said = self.events.pop_front().or_else(|| self.hear()).expect("an event");
            if let Some(name) = said["event"].as_str() {
                assert!(said["timestamp"]["seconds"].as_i64() > Some(0), "{said}");
                return (name.to_owned(), said["data"].clone());
            }
        }
    }
}
