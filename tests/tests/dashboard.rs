//! The dashboard of contrib/grafana, and the page that it is fed with, as Prometheus has them.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{Control, Server, ok, patience, plain};
use serde_json::{Value, json};

/// A program of Debian's package, installed, or unpacked by `scripts/setup.sh test`.
fn of_prometheus(name: &str) -> Option<PathBuf> {
    let installed = std::env::var_os("PATH").into_iter();
    let installed = installed.flat_map(|all| std::env::split_paths(&all).collect::<Vec<_>>());
    let test = std::env::current_exe().expect("the test's own path");
    let unpacked = test.ancestors().nth(3).map(|target| target.join("prometheus/usr/bin"));
    installed.chain(unpacked).map(|dir| dir.join(name)).find(|path| path.is_file())
}

fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}

/// What a GET of plain HTTP brings.
fn get(port: u16, target: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(patience())).ok()?;
    write!(stream, "GET {target} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    head.contains(" 200 ").then(|| body.to_owned())
}

fn escaped(query: &str) -> String {
    percent_encoding::utf8_percent_encode(query, percent_encoding::NON_ALPHANUMERIC).to_string()
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server with an overlay and a LUKS disk, which were used, and its page.
fn served(dir: &Path, metrics: u16) -> (Server, String) {
    let text = |name: &str| plain(&dir.join(name)).to_owned();
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &text("base"), "64M"]);
    let write = ["-f", "qcow2", "-c", "write 48M 64k", &text("base")];
    ok("qemu-io", "qemu-utils", &write);
    let below = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &text("base"), &text("top")];
    ok("qemu-img", "qemu-utils", &below);
    std::fs::write(text("key"), "secret").expect("a key");
    let secret = format!("secret,id=k,file={}", text("key"));
    let fast = "key-secret=k,iter-time=10";
    let luks = ["create", "-q", "-f", "luks", "--object", &secret, "-o", fast, &text("luks"), "8M"];
    ok("qemu-img", "qemu-utils", &luks);
    let nbd = format!("unix:{}", text("nbd"));
    let args = [
        "--metrics",
        &format!("127.0.0.1:{metrics}"),
        "--control",
        &format!("unix:{}", text("control")),
        &text("top"),
        "-f",
        "qcow2",
        "--name",
        "top",
        "--nbd",
        &nbd,
        "--iops",
        "20000",
        &text("luks"),
        "-f",
        "luks",
        "--secret",
        &format!("file:{}", text("key")),
        "--name",
        "luks",
        "--nbd",
        &nbd,
    ];
    let server = Server::start(args);
    (server, text("nbd"))
}

/// A little of everything that a client can ask for.
fn load(nbd: &str) {
    for (disk, at, below) in [("top", 0, 48), ("luks", 4 << 20, 1)] {
        let uri = format!("nbd+unix:///{disk}?socket={nbd}");
        let commands = [
            format!("write {at} 256k"),
            format!("read {at} 256k"),
            "flush".into(),
            format!("write -z {at} 64k"),
            format!("discard {at} 64k"),
            "read 1024 512".into(),
            format!("read {below}M 4k"),
        ];
        let mut args: Vec<String> =
            ["-f", "raw", "-d", "unmap", "-t", "none"].map(String::from).into();
        args.extend(commands.into_iter().flat_map(|command| ["-c".into(), command]));
        args.push(uri);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        ok("qemu-io", "qemu-utils", &args);
    }
}

/// Whether a judge is content with the page that it is given, and what it says of it.
fn judged(command: &mut Command, page: &str) -> (bool, String) {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().expect("the judge");
    let mut stdin = child.stdin.take().expect("its input");
    stdin.write_all(page.as_bytes()).expect("the page");
    drop(stdin);
    let output = child.wait_with_output().expect("its end");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn the_page_passes_before_judges_of_openmetrics() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let port = port();
    let (server, nbd) = served(dir.path(), port);
    load(&nbd);
    let page = get(port, "/metrics").expect("the page");
    let script = "import sys\n\
        from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
        for f in parse(sys.stdin.read()):\n    \
            for s in f.samples: print(f.type, s.name, s.labels.get('disk'), s.labels.get('le'), s.value)";
    let (passed, told) = judged(Command::new("/usr/bin/python3").args(["-c", script]), &page);
    assert!(passed, "{told}\n{page}");
    let value = |start: &str| -> f64 {
        let line = told.lines().find(|line| line.starts_with(start));
        let line = line.unwrap_or_else(|| panic!("{start}: {told}"));
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    };
    let disk = |kind: &str, name: &str, disk: &str| {
        value(&format!("{kind} ringtap_disk_{name} {disk} None "))
    };
    // What was asked for above, by the disk's own way to its bytes.
    for name in ["top", "luks"] {
        assert_eq!(disk("counter", "reads_completed_total", name), 3.0);
        assert_eq!(disk("counter", "read_bytes_total", name), f64::from((260 << 10) + 512));
        assert_eq!(disk("counter", "written_bytes_total", name), f64::from(256 << 10));
        assert_eq!(disk("counter", "zeroed_bytes_total", name), f64::from(64 << 10));
        for time in ["read_time", "write_time", "io_time", "io_time_weighted"] {
            assert!(disk("counter", &format!("{time}_seconds_total"), name) > 0.0, "{time}");
        }
        // What is done within a turn takes no time.
        for time in ["discard_time", "write_zeroes_time", "flush_requests_time"] {
            assert!(disk("counter", &format!("{time}_seconds_total"), name) >= 0.0, "{time}");
        }
        let busy = disk("counter", "io_time_seconds_total", name);
        let weighted = disk("counter", "io_time_weighted_seconds_total", name);
        assert!(busy <= weighted * 16.0 / 15.0, "{busy} of {weighted}");
    }
    assert_eq!(disk("counter", "ciphered_bytes_total", "top"), 0.0);
    assert!(disk("counter", "direct_bytes_total", "top") >= f64::from(2 * (256 << 10)));
    let ciphered = disk("counter", "ciphered_bytes_total", "luks");
    assert!(ciphered >= f64::from(2 * (256 << 10) + 512), "{ciphered}");
    assert_eq!(disk("counter", "direct_bytes_total", "luks"), 0.0);
    assert!(disk("counter", "map_misses_total", "top") > 0.0);
    assert_eq!(disk("gauge", "chain_depth", "top"), 2.0);
    assert!(disk("gauge", "table_cache_bytes", "top") > 0.0);
    match of_prometheus("promtool") {
        Some(promtool) => {
            let (_, said) = judged(Command::new(promtool).args(["check", "metrics"]), &page);
            // It reads the older format, in which the help of a counter names it with its suffix.
            let meant = |line: &&str| !line.ends_with("_total no help text");
            let said: Vec<&str> = said.lines().filter(meant).collect();
            assert!(said.is_empty(), "{said:#?}");
        }
        None => println!("skipped: no promtool"),
    }
    server.stop();
}

#[test]
fn each_query_of_the_dashboard_returns_data() {
    let Some(prometheus) = of_prometheus("prometheus") else {
        println!("skipped: no prometheus");
        return;
    };
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let [metrics, own] = [port(), port()];
    let (server, nbd) = served(dir.path(), metrics);
    let config = dir.path().join("prometheus.yml");
    let scrape = json!({
        "global": { "scrape_interval": "500ms" },
        "scrape_configs": [{
            "job_name": "ringtap",
            "static_configs": [{ "targets": [format!("127.0.0.1:{metrics}")] }],
        }],
    });
    std::fs::write(&config, scrape.to_string()).expect("its configuration");
    let _prometheus = Ended(
        Command::new(prometheus)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{own}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("prometheus starts"),
    );
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/grafana/ringtap.json");
    let dashboard = std::fs::read_to_string(file).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut left: Vec<String> = targets
        .map(|target| target["expr"].as_str().expect("a query"))
        .map(|query| query.replace("$disk", ".*").replace("$__rate_interval", "20s"))
        .collect();
    let asked = left.len();
    assert!(asked > 30 && left.iter().all(|query| !query.contains('$')), "{left:?}");
    let end = Instant::now() + patience();
    // Data is a number: what is divided by nothing is none.
    let has_data = |query: &String| -> bool {
        let Some(reply) = get(own, &format!("/api/v1/query?query={}", escaped(query))) else {
            return false;
        };
        let reply: Value = serde_json::from_str(&reply).expect("JSON");
        let found = reply["data"]["result"].as_array().expect("results");
        let number = |one: &Value| {
            one["value"][1]
                .as_str()
                .and_then(|value| value.parse::<f64>().ok())
                .is_some_and(f64::is_finite)
        };
        found.iter().any(number)
    };
    while !left.is_empty() && Instant::now() < end {
        load(&nbd);
        left.retain(|query| !has_data(query));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(left.is_empty(), "no data of {asked}: {left:#?}");
    println!("{asked} queries, each with data");
    server.stop();
}

#[test]
fn the_tree_of_what_is_served_is_told_to_clients_of_the_control_socket() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (server, nbd) = served(dir.path(), port());
    load(&nbd);
    let mut client = Control::open(&dir.path().join("control"));
    let tree = client.ok("__ringtap_inspect", json!({}));
    let top = &tree["disks"]["top"];
    assert_eq!(top["layers"]["below"]["format"], "qcow2", "{tree:#}");
    assert_eq!(top["exports"]["top-nbd0"]["type"], "nbd");
    assert_eq!(top["limited"]["iops-total"], 20000);
    assert_eq!(tree["disks"]["luks"]["read"]["ended"], 3);
    let part = client.ok("__ringtap_inspect", json!({"path": "disks/top/layers/below/format"}));
    assert_eq!(part, "qcow2");
    let refused = client.call("__ringtap_inspect", json!({"path": "disks/none"}));
    let refused = refused.expect_err("nothing is there");
    assert!(refused.contains("There is nothing at 'disks/none'"), "{refused}");
    server.stop();
}
