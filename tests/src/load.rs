//! A guest that writes and reads all the time, and finds what it wrote.

use std::process::Output;
use std::thread::{self, JoinHandle};

use serde_json::{Value, json};

use crate::{lab, program, ringtap};

/// What a verb of `ringtap` prints, however it ends.
pub fn ringtap_of(args: &[&str]) -> Output {
    program(ringtap().to_str().expect("a plain path"), "ringtap", args)
}

/// What a verb of `ringtap-lab` prints, however it ends.
pub fn lab_of(args: &[&str]) -> Output {
    program(lab().to_str().expect("a plain path"), "ringtap-lab", args)
}

/// Load the disk of a vhost-user socket for so many seconds.
pub fn load(socket: String, seconds: &'static str) -> JoinHandle<Value> {
    thread::spawn(move || {
        let head = ["load", "--socket", &socket, "--rw", "randrw", "--depth", "8"];
        let tail = ["--seconds", seconds, "--verify", "--output", "json"];
        let output = lab_of(&[&head[..], &tail].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    })
}

/// It met no error, and found all that it wrote.
pub fn is_well(load: JoinHandle<Value>) {
    has_written(load, 100);
}

/// The same, however little that was: a disk of the host may stand still for longer than a load lasts.
pub fn is_served(load: JoinHandle<Value>) {
    has_written(load, 0);
}

fn has_written(load: JoinHandle<Value>, more_than: u64) {
    let told = load.join().expect("the load");
    assert_eq!((&told["verify"]["mismatches"], &told["errors"]), (&json!(0), &json!(0)), "{told}");
    let blocks = told["verify"]["blocks"].as_u64();
    assert!(blocks.is_some_and(|blocks| blocks > more_than), "{told}");
}
