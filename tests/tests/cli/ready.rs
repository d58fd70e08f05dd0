//! What the service manager hears once all that can be is served.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use ringtap_tests::ringtap;

/// systemd takes no message of more than 4096 bytes, and each line for a word of its own.
#[test]
fn ready_is_heard_however_much_is_left_out() {
    let dir = tempfile::tempdir().expect("a folder");
    let disks = dir.path().join("disks.d");
    std::fs::create_dir(&disks).expect("a folder");
    for number in 0..70 {
        let image = format!("{}/{number:0>60}", dir.path().display());
        let text = format!("image = \"{image}\\nSTATUS=x\"\nformat = \"raw\"\n");
        std::fs::write(disks.join(format!("d{number:02}.toml")), text).expect("written");
    }
    std::fs::write(disks.join("zz.toml"), "nonsense = 1\n").expect("written");
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let mut server = std::process::Command::new(ringtap())
        .args(["daemon", "--sandbox", "off", "--disks"])
        .arg(&disks)
        .args(["--control", &format!("unix:{}/control", dir.path().display())])
        .env("NOTIFY_SOCKET", &path)
        .spawn()
        .expect("it runs");
    let mut hear = || {
        let mut bytes = vec![0; 64 << 10];
        let len = socket.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let told = std::iter::repeat_with(&mut hear).find(|told| told.contains("READY=1"));
    let _ = server.kill();
    let _ = server.wait();
    let told = told.expect("it is heard");
    let status = told.strip_prefix("READY=1\n").expect("before all else");
    assert!(status.starts_with("STATUS=serving 0 of 71 disks, not "), "{status}");
    assert!(status.len() < 1100 && status.trim_end().lines().count() == 1, "{status}");
}
