//! Rings of a process that may have little: they are refused with an error, or do without.

use std::os::fd::OwnedFd;
use std::process::Command;

use ringtap_io::{OpenFile, Ring, Tasks};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const CHILD: &str = "RINGTAP_TEST_DESCRIPTORS";

/// Run the test of that name alone, in a process that may have so many descriptors.
fn with_descriptors(name: &str, count: u64) {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, count.to_string())
        .output()
        .expect("this program again");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{count}: {said}");
}

/// Whether this is that process; then its limit holds from now on.
fn is_child() -> bool {
    let Some(count) = std::env::var(CHILD).ok().and_then(|text| text.parse().ok()) else {
        return false;
    };
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum }).expect("a limit");
    true
}

/// A ring's own table of files is longer than such a process may have files.
#[test]
fn a_ring_without_a_table_of_files_works() {
    if !is_child() {
        return with_descriptors("a_ring_without_a_table_of_files_works", 40);
    }
    let file = tempfile::tempfile().expect("a file");
    file.set_len(8192).expect("its length");
    let file = OpenFile::new(OwnedFd::from(file));
    let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
    let io = tasks.io().clone();
    let handle = file.handle();
    let done = tasks.block_on(async move {
        let mut buffer = io.buffer(4096).expect("memory");
        buffer.bytes_mut().fill(7);
        io.write(handle, 4096, buffer.mem(), true).await.expect("written");
        buffer.bytes_mut().fill(1);
        assert_eq!(io.read(handle, 4096, buffer.mem()).await, Ok(4096));
        buffer.bytes().iter().all(|byte| *byte == 7)
    });
    assert!(done.expect("the ring"));
}

#[test]
fn a_ring_that_cannot_be_had_is_an_error_and_can_be_had_later() {
    if !is_child() {
        return with_descriptors("a_ring_that_cannot_be_had_is_an_error_and_can_be_had_later", 30);
    }
    let mut rings = vec![];
    let error = loop {
        match Ring::new() {
            Ok(ring) => rings.push(ring),
            Err(error) => break error,
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
    assert!(rings.len() > 10, "{}", rings.len());
    rings.truncate(5);
    Ring::new().expect("there is room again");
}
