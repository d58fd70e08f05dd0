//! What the log was told of one disk, for tests. The log is the whole process's: disks have names of their own.

use std::io;
use std::sync::{Mutex, Once, PoisonError};

use serde_json::Value;

static SAID: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// Who has a request of a disk of this name refused panics as that is told: outside of all that the disk does.
pub(crate) const TRAPPED: &str = "trapped";

struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = std::str::from_utf8(bytes).expect("text");
        assert!(!(line.contains(TRAPPED) && line.contains("refused")), "as the test has it");
        SAID.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Begin to listen, before the disk has its name.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing_subscriber::fmt().json().with_writer(|| Log).init());
}

/// The fields of each line about the disk of this name.
pub(crate) fn of(disk: &str) -> Vec<Value> {
    let said = SAID.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let lines = String::from_utf8(said).expect("text");
    let parsed = lines.lines().map(|line| serde_json::from_str(line).expect(line));
    let ours = parsed.filter(|line: &Value| line["span"]["disk"] == disk);
    ours.map(|line| line["fields"].clone()).collect()
}
