//! A server whose system calls are tampered with, or looked at.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;

use ringtap_tests::{Control, Server};
use serde_json::{Value, json};

/// What all this is about: how files are called, what is written down with them, and what is made stable.
const CALLS: &str = "trace=fsync,fdatasync,pwritev2,setxattr,removexattr,unlink,rename";

/// A server whose system calls on a file are tampered with.
pub struct Tampered(Child);

impl Tampered {
    /// Begin; `what` is of strace's `--inject`.
    pub fn begin(server: &Server, file: &str, what: &str) -> Tampered {
        let pid = server.pid().to_string();
        let inject = format!("inject={what}");
        let args = ["-f", "-e", CALLS, "-e", &inject, "-P", file, "-p", &pid];
        Tampered::strace(&[&args[..], &["-o", "/dev/null"]].concat())
    }

    /// Write down its system calls in a file, with the paths of descriptors.
    pub fn look(server: &Server, to: &str) -> Tampered {
        let pid = server.pid().to_string();
        Tampered::strace(&["-f", "-y", "-e", CALLS, "-p", &pid, "-o", to])
    }

    fn strace(args: &[&str]) -> Tampered {
        let mut child = Command::new("strace")
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("strace is missing: apt-get install strace");
        let mut said = BufReader::new(child.stderr.take().expect("its words")).lines();
        let attached = said.find(|line| line.as_ref().is_ok_and(|line| line.contains("attached")));
        assert!(attached.is_some(), "strace does not attach");
        thread::spawn(move || said.for_each(drop));
        Tampered(child)
    }

    /// As before, from now on.
    pub fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is there");
        self.0.wait().expect("it ends");
    }
}

impl Drop for Tampered {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is written down with an image of where its disk goes on; nothing where nothing is.
pub fn successor(image: &str) -> String {
    let mut text = [0; 4096];
    let len = rustix::fs::getxattr(image, "trusted.ringtap.successor", &mut text);
    String::from_utf8_lossy(&text[..len.unwrap_or(0)]).into_owned()
}

/// Say it to a server that does not outlive it.
pub fn is_killed_by(control: &mut Control, command: &str, arguments: Value) {
    control.send(json!({ "execute": command, "arguments": arguments }).to_string());
    while control.hear().is_some() {}
}

/// The system calls of a verb, which goes well, with the paths of descriptors. `state`: what it knows of images is there.
pub fn calls(to: &str, state: Option<&str>, args: &[&str]) -> Vec<String> {
    let mut command = Command::new("strace");
    command.args(["-f", "-y", "-e", CALLS, "-o", to]).arg(ringtap_tests::ringtap()).args(args);
    state.iter().for_each(|state| _ = command.env("STATE_DIRECTORY", state));
    let output = command.output().expect("strace is missing: apt-get install strace");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    lines(to)
}

/// Those that were written down.
pub fn lines(of: &str) -> Vec<String> {
    let text = fs::read_to_string(of).expect("what strace has written");
    text.lines().filter(|line| !line.contains(" = -1")).map(str::to_owned).collect()
}
