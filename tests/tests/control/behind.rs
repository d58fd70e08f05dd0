//! A job whose target takes less than its guest writes, on another server that is slow.

use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::{Empty, node};

/// What the guest may write in a second, and what the target takes.
const GUEST: u64 = 16 << 20;
const TARGET: u64 = 4 << 20;

/// Writes at random places, as fast as it may, until its input ends.
const WRITES: &str = r#"
import nbd, random, select, sys
h = nbd.NBD()
h.connect_uri(sys.argv[1])
size, rng = h.get_size() // 65536, random.Random(7)
while not select.select([sys.stdin], [], [], 0)[0]:
    h.pwrite(bytes([rng.randrange(1, 256)]) * 65536, rng.randrange(size) * 65536)
h.flush()
"#;

fn guest(uri: &str) -> Child {
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", WRITES, uri]).stdin(Stdio::piped());
    python.spawn().expect("python3, with python3-libnbd")
}

impl Empty {
    fn throttle(&mut self, node: &str, limits: Value) {
        self.control.ok("__ringtap_throttle", json!({"node-name": node, "limits": limits}));
    }

    /// The next event of that name: what it says.
    fn told(&mut self, name: &str) -> Value {
        loop {
            let (event, data) = self.control.event();
            assert_ne!(event, "BLOCK_JOB_ERROR", "{data}");
            if event == name {
                return data;
            }
        }
    }
}

#[test]
fn who_copies_less_than_a_guest_writes_says_so_and_ends_once_the_target_is_faster() {
    let (mut here, mut there) = (Empty::new(), Empty::new());
    there.add("far", "raw", "16M");
    there.throttle("far", json!({"bps-total": TARGET}));
    let to = there.nbd();
    there.export("far", "far", "nbd", json!({}));
    let path = here.path("vm");
    let file = std::fs::File::create(&path).expect("an image");
    file.set_len(16 << 20).expect("its size");
    here.control.ok("blockdev-add", node("vm", "raw", &path));
    here.throttle("vm", json!({"bps-write": GUEST}));
    let uri = here.nbd();
    here.export("n", "vm", "nbd", json!({}));
    let mut guest = guest(&uri("vm"));
    let (status, said) = here.refused(&[
        "mirror",
        "vm",
        &to("far"),
        "-f",
        "raw",
        "--max-slowdown",
        "96",
        "--no-wait",
    ]);
    assert!(status == Some(1) && said.contains("takes 0 to 95 percent"), "{status:?} {said}");
    here.said(&["mirror", "vm", &to("far"), "-f", "raw", "--max-slowdown", "10", "--no-wait"]);
    let behind = here.told("__ringtap_JOB_BEHIND");
    let [rate, guest_rate] =
        ["rate", "guest-rate"].map(|key| behind[key].as_u64().expect("a rate"));
    assert_eq!(behind["device"], "mirror-vm");
    assert!(0 < rate && rate < guest_rate, "{behind}");
    // It goes on, and so does the guest; both rates can be looked at.
    let jobs = here.control.ok("query-jobs", json!({}));
    assert_eq!(
        (&jobs[0]["id"], &jobs[0]["status"]),
        (&json!("mirror-vm"), &json!("running")),
        "{jobs}"
    );
    assert!(guest.try_wait().expect("its state").is_none(), "the guest has ended");
    there.throttle("far", json!({"bps-total": 0}));
    assert_eq!(here.told("BLOCK_JOB_READY")["device"], "mirror-vm");
    here.control.ok("block-job-complete", json!({"device": "mirror-vm"}));
    let done = here.told("BLOCK_JOB_COMPLETED");
    assert_eq!((&done["device"], done.get("error")), (&json!("mirror-vm"), None), "{done}");
    drop(guest.stdin.take());
    assert!(guest.wait().expect("its end").success());
    // The guest went on in the target, and what it wrote last is there.
    let found = |uri: &str| {
        let script = "import nbd, sys\nh = nbd.NBD()\nh.connect_uri(sys.argv[1])\n\
                      sys.stdout.buffer.write(h.pread(h.get_size(), 0))";
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-c", script, uri]).output().expect("python3").stdout
    };
    let shown = found(&uri("vm"));
    assert_eq!(shown.len(), 16 << 20);
    here.control.ok("quit", json!({}));
    here.server.ends();
    assert!(shown == found(&to("far")), "the copy is another");
    there.server.stop();
}
