//! The host's end of the byte stream to the agent in a guest (`init.sh` tells the protocol).

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Bytes of script per line.
const CHUNK: usize = 600;

/// Lines sent and not yet read by the agent, at most. A terminal that has 4 KiB unread stops its
/// line, and User-Mode Linux 6.1 does not start it again.
const WINDOW: u32 = 3;

/// How long an agent may take to read a line, however busy its guest is.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often one who waits looks whether that shall end.
const TICK: Duration = Duration::from_millis(50);

/// What one command has shown so far.
#[derive(Default)]
pub(crate) struct Progress {
    begun: Option<Instant>,
    ended: Option<(Instant, i32)>,
    complete: bool,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// A command's end, with times taken on the host.
pub(crate) struct Finished {
    pub(crate) status: i32,
    pub(crate) elapsed: Duration,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

#[derive(Default)]
struct State {
    /// The line by which somebody tells of the guest's end.
    farewell: Option<String>,
    greeted: bool,
    closed: bool,
    unread: u32,
    commands: HashMap<u64, Progress>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Why a wait ended without what was waited for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The time is over.
    TimedOut,
    /// The guest has closed its end.
    Closed,
    /// Nobody wants to wait any more.
    Interrupted,
}

/// The stream to one guest.
pub(crate) struct Channel {
    shared: Arc<Shared>,
    writer: Mutex<UnixStream>,
    next: Mutex<u64>,
    interrupt: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel {
    /// All waiting ends once `interrupt` is true. Where the stream may outlive the guest, `farewell` is the
    /// line that says so.
    pub(crate) fn new(
        stream: UnixStream,
        interrupt: Arc<AtomicBool>,
        farewell: Option<String>,
    ) -> std::io::Result<Self> {
        let state = Mutex::new(State { farewell, ..State::default() });
        let shared = Arc::new(Shared { state, changed: Condvar::default() });
        let reader = {
            let shared = shared.clone();
            let stream = stream.try_clone()?;
            thread::spawn(move || read_lines(stream, &shared))
        };
        let (writer, next) = (Mutex::new(stream), Mutex::new(1));
        Ok(Self { shared, writer, next, interrupt, reader: Some(reader) })
    }

    /// The flag that it was given.
    pub(crate) fn interrupt(&self) -> &Arc<AtomicBool> {
        &self.interrupt
    }

    /// Waits for the agent's greeting.
    pub(crate) fn wait_hello(&self, end: Instant) -> Result<(), Gone> {
        self.wait(end, |state| state.greeted.then_some(()))
    }

    /// Sends a script and has it run; returns its number.
    pub(crate) fn start(&self, script: &str, place: &str) -> Result<u64, Gone> {
        let id = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let id = *next;
            *next += 1;
            id
        };
        self.shared.lock().commands.insert(id, Progress::default());
        for chunk in script.as_bytes().chunks(CHUNK) {
            self.send(&format!("add {id} {}\n", STANDARD.encode(chunk)))?;
        }
        self.send(&format!("run {id} {place}\n"))?;
        Ok(id)
    }

    /// Kills a command and all it started.
    pub(crate) fn kill(&self, id: u64) -> Result<(), Gone> {
        self.send(&format!("kill {id}\n"))
    }

    /// Asks the guest to switch itself off.
    pub(crate) fn off(&self) -> Result<(), Gone> {
        self.send("off\n")
    }

    fn send(&self, line: &str) -> Result<(), Gone> {
        self.wait(Instant::now() + PATIENCE, |state| {
            if state.unread >= WINDOW {
                return None;
            }
            state.unread += 1;
            Some(())
        })?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_all(line.as_bytes()).map_err(|_| Gone::Closed)
    }

    /// Whether a command has ended.
    pub(crate) fn is_done(&self, id: u64) -> bool {
        self.shared.lock().commands.get(&id).is_some_and(|p| p.ended.is_some())
    }

    /// Waits for a command's end and its output, and forgets it.
    pub(crate) fn wait_done(&self, id: u64, end: Instant) -> Result<Finished, Gone> {
        self.wait(end, |state| {
            if !state.commands.get(&id)?.complete {
                return None;
            }
            let progress = state.commands.remove(&id)?;
            let (ended, status) = progress.ended?;
            let elapsed = ended.duration_since(progress.begun.unwrap_or(ended));
            let Progress { stdout, stderr, .. } = progress;
            Some(Finished { status, elapsed, stdout, stderr })
        })
    }

    fn wait<T>(
        &self,
        end: Instant,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Gone> {
        let mut state = self.shared.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if state.closed {
                return Err(Gone::Closed);
            }
            if self.interrupt.load(Ordering::SeqCst) {
                return Err(Gone::Interrupted);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Gone::TimedOut);
            }
            let waited = self.shared.changed.wait_timeout(state, left.min(TICK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writer.shutdown(Shutdown::Both);
        drop(writer);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn read_lines(stream: UnixStream, shared: &Shared) {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        match stream.read_line(&mut line) {
            Ok(n) if n > 0 => take_line(line.trim_end(), &mut shared.lock()),
            _ => break,
        }
        shared.changed.notify_all();
    }
    shared.lock().closed = true;
    shared.changed.notify_all();
}

/// Lines that are none of the protocol's are passed over: what a guest prints is not trusted.
fn take_line(line: &str, state: &mut State) {
    state.closed |= state.farewell.as_deref() == Some(line);
    let mut words = line.split(' ');
    let verb = words.next().unwrap_or("");
    match verb {
        "hello" => state.greeted = true,
        "got" => state.unread = state.unread.saturating_sub(1),
        _ => {}
    }
    let Some(id) = words.next().and_then(|id| id.parse::<u64>().ok()) else { return };
    let Some(command) = state.commands.get_mut(&id) else { return };
    let rest = words.next().unwrap_or("");
    match verb {
        "begin" => command.begun = Some(Instant::now()),
        "end" => command.ended = Some((Instant::now(), rest.parse().unwrap_or(-1))),
        "out" => command.stdout.extend(STANDARD.decode(rest).unwrap_or_default()),
        "err" => command.stderr.extend(STANDARD.decode(rest).unwrap_or_default()),
        "fin" => command.complete = command.ended.is_some(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_long_script_arrives_whole_and_its_output_comes_back() {
        let (host, guest) = UnixStream::pair().unwrap();
        let channel = Channel::new(host, Arc::default(), None).unwrap();
        let script: String = (0..500).map(|n| format!("echo line {n} 'ü'\n")).collect();
        let agent = thread::spawn(move || {
            let mut got = Vec::new();
            let mut unread = BufReader::new(guest.try_clone().unwrap());
            loop {
                let mut line = String::new();
                unread.read_line(&mut line).unwrap();
                assert!(line.len() < 1024 && unread.buffer().len() < 3072);
                (&guest).write_all(b"got\n").unwrap();
                let words: Vec<&str> = line.split_whitespace().collect();
                match words[..] {
                    ["add", "1", chunk] => got.extend(STANDARD.decode(chunk).unwrap()),
                    ["run", "1", "root"] => return (guest, got),
                    _ => panic!("{line}"),
                }
            }
        });
        let id = channel.start(&script, "root").unwrap_or_else(|_| panic!("not sent"));
        let (guest, got) = agent.join().unwrap();
        assert_eq!(got, script.as_bytes());
        let answer = format!("hello\nnoise\nbegin {id}\nend {id} 3\nout {id} YWI=\nfin {id}\n");
        (&guest).write_all(answer.as_bytes()).unwrap();
        channel.wait_hello(soon()).unwrap();
        let done = channel.wait_done(id, soon()).unwrap_or_else(|_| panic!("not done"));
        assert_eq!((done.status, &done.stdout[..]), (3, &b"ab"[..]));
    }

    #[test]
    fn a_guest_that_dies_ends_the_wait_at_once() {
        let (host, guest) = UnixStream::pair().unwrap();
        let channel = Channel::new(host, Arc::default(), None).unwrap();
        let id = channel.start("true", "root").unwrap_or_else(|_| panic!("not sent"));
        drop(guest);
        let started = Instant::now();
        let gone = channel.wait_done(id, soon()).err();
        assert_eq!(gone, Some(Gone::Closed));
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn the_end_of_another_guest_is_not_its_own() {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let channel = Channel::new(host, Arc::default(), Some("bye 12".into())).unwrap();
        guest.write_all(b"out\n\nbye 11\nbye\nhello\n").unwrap();
        assert_eq!(channel.wait_hello(soon()), Ok(()));
        let id = channel.start("true", "root").unwrap_or_else(|_| panic!("not sent"));
        assert_eq!(channel.wait_done(id, Instant::now()).err(), Some(Gone::TimedOut));
        guest.write_all(b"\nbye 12\n").unwrap();
        assert_eq!(channel.wait_done(id, soon()).err(), Some(Gone::Closed));
    }

    #[test]
    fn who_waits_for_a_guest_that_says_nothing_can_be_interrupted() {
        let (host, _guest) = UnixStream::pair().unwrap();
        let interrupt = Arc::new(AtomicBool::new(false));
        let channel = Channel::new(host, interrupt.clone(), None).unwrap();
        let started = Instant::now();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| channel.wait_hello(soon()));
            thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            interrupt.store(true, Ordering::SeqCst);
            assert_eq!(waiting.join().unwrap(), Err(Gone::Interrupted));
        });
        // What needs no waiting is sent all the same; a long script waits for the agent to read.
        assert!(channel.start("true", "root").is_ok());
        assert_eq!(channel.start(&"true;".repeat(CHUNK), "root"), Err(Gone::Interrupted));
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
