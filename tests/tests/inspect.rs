//! SIGUSR1: the state of every disk as one line of JSON, over each transport that runs here.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ringtap_tests::{lab, patience, program, ringtap};
use serde_json::Value;

/// A server whose stderr is read line by line.
struct Server {
    child: Child,
    said: mpsc::Receiver<String>,
}

fn lines(from: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (said, heard) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = said.send(line);
        }
    });
    heard
}

impl Server {
    fn start(args: &[String]) -> Server {
        let mut command = Command::new(ringtap());
        command.arg("serve").args(args).stdin(Stdio::null());
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ringtap starts");
        let said = lines(child.stderr.take().expect("its errors"));
        let ready = lines(child.stdout.take().expect("its output"));
        assert_eq!(ready.recv_timeout(patience()).as_deref(), Ok("ready"));
        Server { child, said }
    }

    /// What it says of its disks now.
    fn state(&self) -> Value {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::USR1).expect("it is there");
        loop {
            let line = self.said.recv_timeout(patience()).expect("its state");
            if let Ok(state) = serde_json::from_str::<Value>(&line) {
                return state;
            }
        }
    }

    /// The first state of which something is so.
    fn until(&self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + patience();
        loop {
            let state = self.state();
            if is(&state) {
                return state;
            }
            assert!(Instant::now() < end, "no {what}: {state:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    /// In order, so that what is mounted goes.
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ringtap_does(folder: &Path, words: &[&str]) {
    let mut command = Command::new(ringtap());
    assert!(command.current_dir(folder).args(words).status().expect("ringtap runs").success());
}

fn queue<'a>(disk: &'a Value, transport: &str) -> Option<&'a Value> {
    let queues = disk["queues"].as_array()?;
    queues.iter().find(|queue| queue["transport"] == transport)
}

#[test]
fn the_state_tells_layers_connections_and_what_is_in_flight() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    ringtap_does(folder, &["create", "-q", "-f", "raw", "base.raw", "64M"]);
    let overlay = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"];
    ringtap_does(folder, &overlay);
    fs::write(folder.join("mounted"), b"").expect("a place to mount on");
    let at = |name: &str| folder.join(name).display().to_string();
    let words = ["-f", "qcow2", "--cache", "writeback", "--fuse"].map(str::to_owned);
    let sockets = ["--nbd".into(), format!("unix:{}", at("nbd")), "--vhost-user".into(), at("vu")];
    let args: Vec<String> =
        [at("top.qcow2")].into_iter().chain(words).chain([at("mounted")]).chain(sockets).collect();
    let server = Server::start(&args);
    let disk = |state: &Value| state["stats"][0].clone();

    // FUSE has its queues from the start.
    let state = disk(&server.state());
    let fuse = queue(&state, "fuse").unwrap_or_else(|| panic!("{state:#}"));
    assert_eq!(fuse["peer"], at("mounted"));
    assert_eq!(state["layers"]["format"], "qcow2");
    assert_eq!(state["layers"]["path"], at("top.qcow2"));
    assert_eq!(state["layers"]["dirty"], false);
    assert_eq!(state["layers"]["below"]["format"], "raw");
    assert_eq!(state["layers"]["below"]["path"], at("base.raw"));
    assert!(state["layers"]["restart_log"]["room"].as_u64() > Some(0), "{state:#}");

    // What was written and not flushed is seen to be dirty.
    let file = fs::OpenOptions::new().write(true).open(at("mounted")).expect("the disk");
    file.write_all_at(&[7; 65536], 1 << 20).expect("written");
    let state =
        disk(&server.until("dirty table", |state| state["stats"][0]["layers"]["dirty"] == true));
    assert!(state["layers"]["cache"]["dirty"].as_u64() > Some(0), "{state:#}");
    file.sync_all().expect("flushed");
    let clean = |state: &Value| state["stats"][0]["layers"]["cache"]["dirty"] == 0;
    server.until("clean table", clean);

    // A client of NBD that is idle.
    let uri = format!("nbd+unix:///?socket={}", at("nbd"));
    let mut client = Command::new("qemu-io");
    let client = client.args(["-f", "raw", &uri]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut client = client.spawn().expect("qemu-io runs");
    let mut orders = client.stdin.take().expect("its orders");
    orders.write_all(b"read 0 4k\n").expect("told");
    let state = disk(&server.until("client of NBD", |state| {
        queue(&state["stats"][0], "nbd").is_some_and(|queue| queue["ended"].as_u64() > Some(0))
    }));
    let user = format!("user {}", rustix::process::getuid().as_raw());
    let connections = state["connections"].as_array().expect("connections");
    assert!(connections.iter().any(|one| one["transport"] == "nbd" && one["peer"] == user));
    drop(orders);
    client.wait().expect("it ends");
    server.until("end of the client", |state| queue(&state["stats"][0], "nbd").is_none());

    // A front-end with much in flight.
    let socket = at("vu");
    let load = std::thread::spawn(move || {
        let words = ["load", "--socket", &socket, "--rw", "randwrite", "--seconds", "8"];
        program(&lab().display().to_string(), "ringtap-lab", words)
    });
    let state = disk(&server.until("request in flight", |state| {
        let queue = queue(&state["stats"][0], "vhost-user");
        queue.is_some_and(|queue| queue["in_flight"].as_array().is_some_and(|all| all.len() > 3))
    }));
    let of_guest = queue(&state, "vhost-user").expect("its queue");
    let oldest = &of_guest["in_flight"][0];
    assert!(["read", "write"].iter().any(|kind| oldest["kind"] == *kind), "{state:#}");
    assert!(oldest["length"].as_u64() > Some(0) && oldest["age_us"].is_u64(), "{state:#}");
    assert!(["spins", "sleeps"].iter().any(|how| of_guest["poll"]["state"] == *how));
    assert!(of_guest["peer"].as_str().expect("a peer").starts_with("process "), "{state:#}");
    let end = load.join().expect("the load");
    assert!(end.status.success(), "{}", String::from_utf8_lossy(&end.stderr));
}
