//! `ringtap top`, for programs, for a pipe and for a terminal.

use std::process::{Command, Stdio};

use ringtap_tests::{program, ringtap};
use serde_json::{Value, json};

use crate::{Empty, qemu_io};

impl Empty {
    fn top(&self, args: &[&str]) -> String {
        let control = format!("unix:{}", self.text("control"));
        let args = ["top", "--once", "--interval", "1", "--control", &control]
            .into_iter()
            .chain(args.iter().copied());
        let output = program(ringtap().to_str().expect("a path"), "ringtap", args);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

#[test]
fn what_disks_do_is_shown() {
    let mut empty = Empty::new();
    empty.add("a", "qcow2", "8M");
    let over = json!({"node-name": "a", "snapshot-file": empty.path("over"), "format": "qcow2"});
    empty.control.ok("blockdev-snapshot-sync", over);
    empty.control.ok("blockdev-add", json!({"driver": "null-co", "node-name": "idle"}));
    let uri = empty.nbd();
    empty.export("e", "a", "nbd", json!({"name": "e"}));
    empty
        .control
        .ok("__ringtap_throttle", json!({"node-name": "a", "limits": {"iops-total": 200}}));
    // Which goes on for seconds.
    let writes =
        ["bench", "-w", "-c", "4000", "-d", "8", "-s", "4k", "-f", "raw", "-t", "none", &uri("e")];
    let mut bench = Command::new("qemu-img");
    let bench = bench.args(writes).stdout(Stdio::null()).spawn();
    let mut bench = bench.expect("qemu-img");
    // For a moment between two of its requests nothing is held, or under way.
    let found = (0..20).find_map(|_| {
        let all: Value = serde_json::from_str(&empty.top(&["--output", "json"])).expect("JSON");
        let busy = all["disks"][0].clone();
        let above = |key: &str, least: f64| busy[key].as_f64() > Some(least);
        (above("writes_per_second", 100.0) && above("held", 0.0)).then_some((all, busy))
    });
    let (all, busy) = found.expect("writes are seen");
    assert_eq!((&busy["node"], &busy["chain"]), (&json!("a"), &json!(2)), "{all}");
    let number = |key: &str| busy[key].as_f64().unwrap_or_default();
    // As many as the limit lets through, and a bit for the moments of the looks.
    assert!(number("writes_per_second") < 240.0, "{busy}");
    let of_4k = number("written_bytes_per_second") / number("writes_per_second");
    assert!((of_4k - 4096.0).abs() < 0.01, "{busy}");
    assert!(number("p50_ns") > 1e6 && number("p999_ns") >= number("p50_ns"), "{busy}");
    assert!(
        number("in_flight") > 0.0 && number("held") > 0.0 && number("oldest_us") > 0.0,
        "{busy}"
    );
    assert_eq!(
        (&all["disks"][1]["node"], &all["disks"][1]["p50_ns"]),
        (&json!("idle"), &Value::Null)
    );

    let mut looks = (0..20).map(|_| empty.top(&[]));
    let plain = looks.find(|look| look.lines().nth(1).is_some_and(|it| it.ends_with("limited")));
    let plain = plain.unwrap_or_else(|| panic!("never limited: {}", empty.top(&[])));
    let lines: Vec<&str> = plain.lines().collect();
    assert!(lines[0].trim_start().starts_with("disk") && lines[0].contains("p99.9 us"), "{plain}");
    assert!(lines[1].trim_start().starts_with('a'), "{plain}");
    assert!(!plain.contains('\x1b'), "{plain:?}");
    // Numbers end where their headings do. Several of its requests are held at a time.
    let end = lines[0].find("throttled s/s").expect("a heading") + "throttled s/s".len();
    let held = lines[1][..end].rsplit(' ').next().expect("a column");
    assert!(held.parse::<f64>().expect("a number") > 0.5, "{plain}");
    // On a terminal it takes the place of the last.
    let command = format!(
        "{} top --once --interval 0.1 --control unix:{}",
        ringtap().display(),
        empty.text("control")
    );
    let shown = program("script", "bsdutils", ["-qec", &command, "/dev/null"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.starts_with("\x1b[H\x1b[J") && shown.contains("idle"), "{shown:?}");
    empty.control.ok("__ringtap_throttle", json!({"node-name": "a", "limits": {"iops-total": 0}}));
    assert!(bench.wait().expect("its end").success());
    assert!(qemu_io(&uri("e"), &["read 0 4k"]).is_ok());
}
