//! `--metrics`, read as the specification of OpenMetrics has it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, patience};
use serde_json::json;

use crate::qemu_io;

fn ask(socket: &Path, request: &str) -> (String, String) {
    let mut stream = UnixStream::connect(socket).expect("the socket");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("a reply");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

/// Samples by their names with labels; everything that the format forbids is a failure.
fn parse(page: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut families: BTreeMap<String, String> = BTreeMap::new();
    let mut now = String::new();
    let lines = page.strip_suffix("# EOF\n").expect("it ends with # EOF").lines();
    for line in lines {
        if let Some(of) = line.strip_prefix("# TYPE ") {
            let (name, kind) = of.split_once(' ').expect("a type");
            assert!(families.insert(name.into(), kind.into()).is_none(), "{name} comes twice");
            now = name.to_owned();
        } else if let Some(of) = line.strip_prefix("# HELP ") {
            assert_eq!(of.split(' ').next(), Some(now.as_str()), "{line}");
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            let bare = name.split('{').next().unwrap_or_default();
            let suffixes: &[&str] = match families[&now].as_str() {
                "counter" => &["_total"],
                "gauge" => &[""],
                "histogram" => &["_bucket", "_count", "_sum"],
                other => panic!("{other} is no type"),
            };
            let suffix = bare.strip_prefix(now.as_str()).expect("of its family");
            assert!(suffixes.contains(&suffix), "{line}");
            let labels = name.split_once('{').map(|(_, labels)| labels.trim_end_matches('}'));
            for label in labels.into_iter().flat_map(|labels| labels.split(',')) {
                let key = label.split('=').next().unwrap_or_default();
                assert!(["disk", "transport", "le"].contains(&key), "{line}");
            }
            let value: f64 = value.parse().expect("a number");
            assert!(samples.insert(name.to_owned(), value).is_none(), "{name} comes twice");
        }
    }
    samples
}

#[test]
fn what_disks_have_done_is_told_in_openmetrics() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| dir.path().join(name).display().to_string();
    let [nbd, control, metrics] =
        ["nbd", "control", "metrics"].map(|name| format!("unix:{}", text(name)));
    std::fs::write(text("a"), vec![1; 1 << 20]).expect("an image");
    let disk = [
        &text("a"),
        "-f",
        "raw",
        "--node-name",
        "a",
        "--nbd",
        &nbd,
        "--name",
        "a",
        "--iops",
        "5000",
    ];
    let common = ["--control", &control, "--metrics", &metrics];
    let server = Server::start([&common[..], &disk[..]].concat());
    let uri = format!("nbd+unix:///a?socket={}", text("nbd"));
    qemu_io(&uri, &["read 0 4k", "read 8k 4k", "write 0 64k", "flush"]).expect("carried out");
    let socket = dir.path().join("metrics");
    let (head, page) = ask(&socket, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    let samples = parse(&page);
    let of = |name: &str| {
        let found = samples.get(&format!("ringtap_disk_{name}"));
        *found.unwrap_or_else(|| panic!("{name} is not told:\n{page}"))
    };
    let mut client = Control::open(&dir.path().join("control"));
    let stats = client.ok("query-blockstats", json!({}));
    let stats = &stats[0]["stats"];
    for (name, key) in [
        ("reads_completed_total", "rd_operations"),
        ("read_bytes_total", "rd_bytes"),
        ("writes_completed_total", "wr_operations"),
        ("written_bytes_total", "wr_bytes"),
        ("flush_requests_total", "flush_operations"),
    ] {
        let told = of(&format!("{name}{{disk=\"a\"}}"));
        assert!(told > 0.0 && Some(told) == stats[key].as_f64(), "{name} {told} {stats}");
    }
    // Buckets grow up to the count.
    for kind in ["read", "write", "flush"] {
        let name = |suffix: &str| format!("{kind}_duration_seconds_{suffix}");
        let buckets = samples.iter().filter_map(|(key, count)| {
            let le =
                key.strip_prefix(&format!("ringtap_disk_{}{{disk=\"a\",le=\"", name("bucket")))?;
            Some((le.trim_end_matches("\"}").parse::<f64>().expect("a bound"), *count))
        });
        let mut buckets: Vec<(f64, f64)> = buckets.collect();
        buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
        assert!(buckets.len() > 10 && buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        let last = buckets.last().expect("one");
        assert_eq!(*last, (f64::INFINITY, of(&name("count{disk=\"a\"}"))));
        assert!(of(&name("sum{disk=\"a\"}")) > 0.0);
    }
    assert_eq!(of("chain_depth{disk=\"a\"}"), 1.0);
    assert_eq!(of("size_bytes{disk=\"a\"}"), f64::from(1 << 20));
    assert!(samples.contains_key("ringtap_disk_throttled_seconds_total{disk=\"a\"}"));

    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "405"),
    ] {
        let (head, _) = ask(&socket, request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {head}");
    }
    let (head, body) = ask(&socket, "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.contains("200 OK") && body.is_empty(), "{head}");
    let (head, _) = ask(&socket, &"x".repeat(9000));
    assert!(head.contains("400"), "{head}");
    // Those that say nothing hold up nobody: who asks is answered while they are waited for.
    let silent = |count: usize| -> Vec<UnixStream> {
        (0..count).map(|_| UnixStream::connect(&socket).expect("the socket")).collect()
    };
    let is_there = |mut stream: &UnixStream| {
        stream.set_nonblocking(true).expect("its flags");
        stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    let began = Instant::now();
    loop {
        let silent = silent(3);
        let (head, _) = ask(&socket, "GET /metrics?x=y HTTP/1.0\r\n\r\n");
        assert!(head.contains("200 OK"), "{head}");
        if silent.iter().all(is_there) {
            break;
        }
        assert!(began.elapsed() < patience(), "they are waited for first");
    }
    // Of many the oldest goes.
    let many = silent(20);
    let (head, _) = ask(&socket, "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(head.contains("200 OK") && !is_there(&many[0]), "{head}");
    // Nor does one that says a little at a time, or the server's end wait for it.
    let dribbles = || {
        let mut stream = UnixStream::connect(&socket).expect("the socket");
        thread::spawn(move || {
            let sent = |_: &i32| {
                thread::sleep(Duration::from_millis(20));
                stream.write_all(b"x").is_ok()
            };
            (0..3000).take_while(sent).count()
        })
    };
    let dribbled = dribbles();
    let (head, _) = ask(&socket, "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(head.contains("200 OK"), "{head}");
    let sent = dribbled.join().expect("it ends");
    assert!(sent < 3000, "it was attended to for a minute");
    let dribbled = dribbles();
    server.stop();
    let sent = dribbled.join().expect("it ends");
    assert!(sent < 3000, "the server's end waited for a minute");
    assert!(!socket.exists());
}
