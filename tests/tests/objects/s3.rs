//! A store that speaks S3: moto, which pip brings.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{ok, patience, ringtap};

use crate::bench::{Bench, MIB, pattern};

/// The server; killed when dropped.
struct Moto {
    child: Child,
    endpoint: String,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where it is; none where pip cannot bring it.
fn moto() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("moto");
    if !folder.join("moto").is_dir() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "-q", "--no-input", "--target"]).arg(&folder);
        let made = pip.args(["moto[s3]==5.2.*", "flask", "flask-cors"]).output().ok()?;
        if !made.status.success() {
            println!("{}", String::from_utf8_lossy(&made.stderr));
            let _ = fs::remove_dir_all(&folder);
            return None;
        }
    }
    Some(folder)
}

impl Moto {
    fn start(bench: &Bench) -> Option<Moto> {
        let folder = moto()?;
        let log = fs::File::create(bench.path("moto.log")).expect("a log");
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port");
        let port = port.port().to_string();
        let child = Command::new("python3")
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port])
            .env("PYTHONPATH", folder)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("python3");
        let moto = Moto { child, endpoint: format!("http://127.0.0.1:{port}") };
        let until = Instant::now() + patience();
        while std::net::TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
            assert!(Instant::now() < until, "moto does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        let url = format!("{}/images", moto.endpoint);
        ok("curl", "curl", &["-sS", "--fail", "-X", "PUT", &url]);
        Some(moto)
    }

    fn run(&self, bench: &Bench, args: &[&str]) -> Output {
        self.command(bench, args).output().expect("ringtap")
    }

    fn command(&self, bench: &Bench, args: &[&str]) -> Command {
        let credentials = bench.path("credentials");
        let text = "[images]\naws_access_key_id = id\naws_secret_access_key = secret\n";
        fs::write(&credentials, text).expect("written");
        let mut command = Command::new(ringtap());
        command.args(args).env("AWS_SHARED_CREDENTIALS_FILE", credentials);
        command.env("AWS_PROFILE", "images").env("AWS_ENDPOINT_URL", &self.endpoint);
        command.env_remove("AWS_ACCESS_KEY_ID").env("STATE_DIRECTORY", bench.path("state"));
        command
    }

    fn said(&self, bench: &Bench, args: &[&str]) -> String {
        let output = self.run(bench, args);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {err}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn refusal(&self, bench: &Bench, args: &[&str]) -> String {
        let output = self.run(bench, args);
        assert!(!output.status.success(), "{args:?} should have been refused");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

#[test]
fn an_image_is_published_to_s3_and_read_from_there() {
    let bench = Bench::new();
    let Some(moto) = Moto::start(&bench) else {
        println!("skipped: pip cannot install moto here");
        return;
    };
    // Several parts, of which the last is short.
    let path = bench.text("a.img");
    fs::write(&path, pattern(17 * MIB + 512)).expect("written");
    let printed = moto.said(&bench, &["publish", &path, "s3://images/x/"]);
    let name = printed.lines().next().expect("a name").to_owned();
    assert!(name.starts_with("s3://images/x/a.img?digest=sha256:"), "{name}");
    // As another client has it.
    let copy = bench.text("copy");
    let url = format!("{}/images/x/a.img", moto.endpoint);
    ok("curl", "curl", &["-sS", "--fail", "-o", &copy, &url]);
    assert!(fs::read(&copy).expect("the copy") == fs::read(&path).expect("the image"));

    let plain = "s3://images/x/a.img";
    moto.said(&bench, &["info", "-f", "raw", plain]);
    let top = bench.text("top.qcow2");
    moto.said(&bench, &["create", "-q", "-f", "qcow2", "-b", &name, "-F", "raw", &top]);
    let flat = bench.text("flat.raw");
    let cache = bench.text("cache");
    moto.said(&bench, &["convert", "-q", "--cache-dir", &cache, "-O", "raw", &top, &flat]);
    assert!(fs::read(&flat).expect("flat") == fs::read(&path).expect("the image"));

    // The same again goes on; another is refused, and replaces only where that is said.
    moto.said(&bench, &["publish", &path, plain]);
    fs::write(&path, pattern(3 * MIB)).expect("written");
    let why = moto.refusal(&bench, &["publish", &path, plain]);
    assert!(why.contains("another image is published there") && why.contains("--replace"), "{why}");
    let printed = moto.said(&bench, &["publish", "--replace", &path, plain]);
    let replaced = printed.lines().next().expect("a name").to_owned();
    moto.said(&bench, &["compare", "-f", "raw", "-F", "raw", &replaced, &path]);
    // Who has the former name has those bytes or none.
    let why = moto.refusal(&bench, &["info", "-f", "raw", &name]);
    assert!(why.contains("is not the one that digest="), "{why}");
    let missing = moto.refusal(&bench, &["info", "-f", "raw", "s3://images/none"]);
    assert!(missing.contains("no such object"), "{missing}");
}

/// Lines of a folder's files.
fn lines(folder: &Path) -> Vec<String> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = found.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn a_publication_that_was_killed_sends_only_what_has_not_arrived() {
    let bench = Bench::new();
    let Some(moto) = Moto::start(&bench) else {
        println!("skipped: pip cannot install moto here");
        return;
    };
    const PARTS: usize = 10;
    let path = bench.text("a.img");
    fs::write(&path, pattern((PARTS - 1) * 16 * MIB + 512)).expect("written");
    let target = "s3://images/a.img";
    let mut first = moto.command(&bench, &["publish", &path, target]);
    let mut first = first.stdout(Stdio::null()).spawn().expect("ringtap");
    // Three lines stand before those of the parts.
    let (uploads, until) = (bench.path("state/uploads"), Instant::now() + patience());
    while lines(&uploads).len() < 4 {
        assert!(Instant::now() < until, "no part arrives");
        std::thread::sleep(Duration::from_millis(1));
    }
    first.kill().expect("killed");
    first.wait().expect("its end");
    let arrived = lines(&uploads).len() - 3;
    assert!((1..PARTS).contains(&arrived), "{arrived}");
    // What the killed one had on its way comes to moto's log yet.
    let sent = |log: &str| log.matches("partNumber=").count();
    let log = || fs::read_to_string(bench.path("moto.log")).expect("the log");
    std::thread::sleep(Duration::from_secs(1));
    let before = sent(&log());
    let printed = moto.said(&bench, &["publish", &path, target]);
    let name = printed.lines().next().expect("a name").to_owned();
    let after = log();
    assert_eq!(sent(&after) - before, PARTS - arrived, "{after}");
    assert_eq!(after.matches("?uploads").count(), 1, "{after}");
    assert!(name.starts_with("s3://images/a.img?digest=sha256:"), "{name}");
    let (copy, url) = (bench.text("copy"), format!("{}/images/a.img", moto.endpoint));
    ok("curl", "curl", &["-sS", "--fail", "-o", &copy, &url]);
    assert!(fs::read(&copy).expect("the copy") == fs::read(&path).expect("the image"));
    assert_eq!(lines(&uploads), [""; 0]);
    // The same once more sends nothing.
    moto.said(&bench, &["publish", &path, target]);
    assert_eq!(sent(&log()), sent(&after));
}

/// Unlike who is killed: what was there before is there, and nothing else takes room in the store.
#[test]
fn a_publication_that_is_stopped_leaves_what_was_there() {
    use std::os::unix::process::ExitStatusExt;
    let bench = Bench::new();
    let Some(moto) = Moto::start(&bench) else {
        println!("skipped: pip cannot install moto here");
        return;
    };
    let (small, path) = (bench.text("small/a.img"), bench.text("a.img"));
    fs::create_dir(bench.path("small")).expect("made");
    fs::write(&small, pattern(MIB)).expect("written");
    fs::write(&path, pattern(9 * 16 * MIB + 512)).expect("written");
    let target = "s3://images/a.img";
    let get = |what: &str| {
        let url = format!("{}/images{what}", moto.endpoint);
        // A refusal has a number of its own each time.
        let got = ok("curl", "curl", &["-sS", &url]);
        got.split("<RequestId>").next().unwrap_or_default().to_owned()
    };
    let uploads = bench.path("state/uploads");
    for (more, before, signal) in
        [(&[][..], None, libc::SIGINT), (&["--replace"][..], Some(&small), libc::SIGTERM)]
    {
        if let Some(before) = before {
            moto.said(&bench, &["publish", before, target]);
        }
        let (index, listed) = (get("/a.img.rtidx"), get(""));
        let mut command = moto.command(&bench, &[&["publish", &path, target], more].concat());
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("ringtap");
        let until = Instant::now() + patience();
        // Three lines stand before those of the parts.
        while lines(&uploads).len() < 4 {
            assert!(Instant::now() < until, "no part arrives");
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = rustix::process::Pid::from_child(&child);
        let name = if signal == libc::SIGINT {
            rustix::process::Signal::INT
        } else {
            rustix::process::Signal::TERM
        };
        rustix::process::kill_process(pid, name).expect("it is there");
        let end = child.wait_with_output().expect("its end");
        let why = String::from_utf8_lossy(&end.stderr).into_owned();
        assert_eq!(end.status.signal(), Some(signal), "{why}");
        assert!(why.contains("what was there before is there as it was"), "{why}");
        assert!(!get("?uploads").contains("<UploadId>"), "the upload is given up");
        let strip = |listed: String| {
            listed
                .split("<Contents>")
                .skip(1)
                .map(|it| it.split("<LastModified>").next().unwrap_or_default().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(strip(get("")), strip(listed));
        assert_eq!(get("/a.img.rtidx"), index, "of the image that is there");
        assert_eq!(lines(&uploads), [""; 0]);
    }
    moto.said(&bench, &["compare", "-f", "raw", "-F", "raw", target, &small]);
}
