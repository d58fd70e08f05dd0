//! Servers that fail, for a while or for good, and objects that change.

use std::thread;
use std::time::Duration;

use crate::bench::{Bench, MIB, pattern};
use crate::origin::{Fault, Origin};

#[test]
fn what_fails_for_a_while_is_not_missed() {
    let object = pattern(8 * MIB);
    let many = [
        vec![Fault::Status(500); 9],
        vec![Fault::Later(1), Fault::Status(429), Fault::Status(403), Fault::Status(408)],
        vec![Fault::Cut; 9],
        vec![Fault::Slow(Duration::from_millis(300)); 20],
    ];
    for faults in many {
        let bench = Bench::new();
        let origin = Origin::new(object.clone());
        let server = bench.serve_raw(&origin);
        origin.with(|state| state.faults = faults.clone());
        assert!(bench.whole() == object, "{faults:?}");
        let said = server.stop();
        let silent = matches!(faults[0], Fault::Slow(_));
        assert_eq!(said.contains("tried again for 20 s"), !silent, "{faults:?}: {said}");
    }
}

#[test]
fn a_guest_waits_as_long_as_was_said_and_no_longer() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(8 * MIB));
    let uri = origin.uri().replace("reconnect=20", "reconnect=1");
    let server = bench.serve(&uri, &["-f", "raw", "--read-only"]);
    origin.with(|state| state.always = Some(Fault::Status(503)));
    assert!(bench.io(&["read 0 4k"]).contains("error"));
    origin.with(|state| state.always = None);
    bench.io_well(&["read -P 1 0 4k"]);
    let said = server.stop();
    assert!(said.contains("reads fail until the server answers again"), "{said}");
    assert!(said.contains("the server answers again"), "{said}");
}

#[test]
fn an_object_that_was_replaced_is_an_error_and_no_mixture() {
    // Whether the server looks at If-Match or not.
    for conditions in [true, false] {
        let bench = Bench::new();
        let origin = Origin::new(pattern(8 * MIB));
        let server = bench.serve_raw(&origin);
        bench.io_well(&["read -P 1 0 4k"]);
        origin.with(|state| {
            state.object = vec![0xee; 8 * MIB];
            state.etag = Some("\"two\"".into());
            state.conditions = conditions;
        });
        let said = bench.io(&["read -P 1 0 4k", "read 6M 4k"]);
        assert!(said.contains("read failed") && !said.contains("Pattern"), "{said}");
        let said = server.stop();
        assert!(said.contains("was replaced while it was open"), "{said}");
    }
}

#[test]
fn no_read_waits_behind_another_chunk() {
    let bench = Bench::new();
    let origin = Origin::new(pattern(16 * MIB));
    let server = bench.serve_raw(&origin);
    // The first answer never comes; what is read elsewhere does.
    let first = (0, 256 * 1024 - 1);
    origin.with(|state| state.held = Some(first));
    let uri = format!("nbd+unix:///d?socket={}", bench.text("nbd"));
    let mut stuck = std::process::Command::new("qemu-io")
        .args(["-f", "raw", "-r", "-c", "read 0 4k", &uri])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("qemu-io");
    while !origin.with(|state| state.asked.contains(&first)) {
        thread::sleep(Duration::from_millis(5));
    }
    bench.io_well(&["read 8M 4k", "read 12M 1M"]);
    assert!(stuck.try_wait().expect("its status").is_none(), "the first should wait");
    let _ = stuck.kill();
    let _ = stuck.wait();
    server.kill();
}
