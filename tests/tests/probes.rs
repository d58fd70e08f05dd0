//! The static probes: which there are, what scripts in contrib/bpftrace make of them, and what they show of a load.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use ringtap_tests::{Server, ok, plain, ringtap, ringtap_of};

/// Probes with so many arguments.
const PROBES: [(&str, usize); 7] = [
    ("request_start", 3),
    ("request_done", 5),
    ("throttled", 3),
    ("map_miss", 1),
    ("flush_start", 0),
    ("flush_done", 2),
    ("job_state", 4),
];

/// Those of the binary: how many arguments each place of a probe has.
fn notes() -> BTreeMap<String, Vec<usize>> {
    let said = ok("readelf", "binutils", &["-nW", plain(&ringtap())]);
    let mut found: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut lines = said.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if !line.ends_with("Provider: ringtap") {
            continue;
        }
        let name = lines.next().and_then(|line| line.strip_prefix("Name: ")).expect("a name");
        let arguments = lines.by_ref().find_map(|line| line.strip_prefix("Arguments:"));
        let count = arguments.expect("arguments").split_whitespace().count();
        found.entry(name.to_owned()).or_default().push(count);
    }
    found
}

#[test]
fn the_binary_has_the_probes_that_are_told_of() {
    let found = notes();
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    let mut told: Vec<&str> = PROBES.iter().map(|(name, _)| *name).collect();
    told.sort_unstable();
    assert_eq!(names, told);
    for (name, count) in PROBES {
        assert!(found[name].iter().all(|of| *of == count), "{name}: {:?}", found[name]);
    }
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/control.md");
    let docs = fs::read_to_string(docs).expect("the page");
    for (name, _) in PROBES {
        assert!(docs.contains(&format!("`{name}`")), "docs/control.md does not know {name}");
    }
}

fn scripts() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/bpftrace");
    let entries = fs::read_dir(folder).expect("the scripts").flatten();
    let path = entries.map(|entry| entry.path());
    path.map(|path| (path.clone(), fs::read_to_string(&path).expect("a script"))).collect()
}

#[test]
fn scripts_ask_for_probes_and_arguments_that_there_are() {
    let known: BTreeMap<&str, usize> = PROBES.into();
    let scripts = scripts();
    assert!(scripts.len() >= 3);
    for (path, text) in scripts {
        let mut asked = None;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("usdt:/usr/bin/ringtap:ringtap:") {
                asked = Some(*known.get(name).unwrap_or_else(|| panic!("{path:?}: {name}")));
            } else if line.starts_with("}") {
                asked = None;
            }
            for word in line.split(|c: char| !c.is_alphanumeric()) {
                let number =
                    word.strip_prefix("arg").and_then(|number| number.parse::<usize>().ok());
                let within = number.is_none_or(|number| asked.is_some_and(|count| number < count));
                assert!(within, "{path:?}: {line}");
            }
        }
    }
}

/// What a script says of a load, where the kernel lets anything be traced.
fn traced(script: &str, load: impl FnOnce()) -> Option<String> {
    let can = Command::new("bpftrace").args(["-e", "BEGIN { exit(); }"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("skipped: bpftrace cannot trace here");
        return None;
    }
    let text = scripts().into_iter().find(|(path, _)| path.ends_with(script)).expect("it").1;
    let text = text.replace("/usr/bin/ringtap", plain(&ringtap()));
    let says = "BEGIN\n{\n\tprintf(\"attached\\n\");";
    // There is one BEGIN at most.
    let text = match text.contains("BEGIN\n{") {
        true => text.replace("BEGIN\n{", says),
        false => format!("{text}\n{says}\n}}"),
    };
    let mut child = Command::new("bpftrace")
        // Whatever it has when it is told to end.
        .args(["-e", &text, "0"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it begins");
    let mut stderr = child.stderr.take().expect("its errors");
    let errors = thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let mut stdout = BufReader::new(child.stdout.take().expect("its output"));
    let mut said = String::new();
    while !said.contains("attached\n") {
        if stdout.read_line(&mut said).unwrap_or(0) == 0 {
            let _ = child.wait();
            panic!("{script} does not load: {}", errors.join().unwrap_or_default());
        }
    }
    load();
    let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is there");
    for line in stdout.lines().map_while(Result::ok) {
        said += &line;
        said.push('\n');
    }
    let _ = child.wait();
    Some(said)
}

/// A server of an empty image, and how clients name it.
fn served(dir: &Path, name: &str, more: &[&str]) -> (Server, String) {
    let text = |name: &str| plain(&dir.join(name)).to_owned();
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &text("disk"), "64M"]);
    let (nbd, control) = (format!("unix:{}", text("nbd")), control(dir));
    let disk = [&text("disk"), "-f", "qcow2", "--name", name, "--nbd", &nbd, "--control", &control];
    (Server::start(disk.iter().chain(more)), format!("nbd+unix:///{name}?socket={}", text("nbd")))
}

fn control(dir: &Path) -> String {
    format!("unix:{}", plain(&dir.join("control")))
}

fn load(uri: &str) {
    let write = ["-f", "raw", "-c", "write 0 64k", "-c", "write 1M 64k", "-c", "read 0 4k", uri];
    ok("qemu-io", "qemu-utils", &write);
}

#[test]
fn a_trace_counts_the_requests_that_were_made() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (server, uri) = served(dir.path(), "traced", &[]);
    let Some(said) = traced("latency.bt", || load(&uri)) else { return };
    let count = |kind: u32| {
        let line = said.lines().find(|line| {
            line.starts_with("@requests[traced") && line.contains(&format!(", {kind}, well]"))
        });
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u32>().ok())
    };
    assert_eq!((count(0), count(1)), (Some(1), Some(2)), "{said}");
    assert!(said.contains("@us[traced"), "{said}");
    server.stop();
}

#[test]
fn a_trace_tells_what_slow_requests_waited_for() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    // The first of four comes at once, the others after what they have to wait.
    let (server, uri) = served(dir.path(), "slow", &["--iops", "4"]);
    let Some(said) = traced("slow.bt", || load(&uri)) else { return };
    let waited = said.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let of = words.get(1).is_some_and(|comm| comm.starts_with("slow"));
        of && words.last().and_then(|held| held.parse::<u32>().ok()).is_some_and(|held| held > 10)
    });
    assert!(waited, "{said}");
    server.stop();
}

#[test]
fn a_trace_tells_what_a_job_does() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (server, uri) = served(dir.path(), "copied", &[]);
    let copy = plain(&dir.path().join("copy")).to_owned();
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &copy, "64M"]);
    let Some(said) = traced("jobs.bt", || {
        load(&uri);
        let words = ["disk", "mirror", "copied", &copy, "-f", "qcow2", "--control"];
        let output = ringtap_of(&[&words[..], &[&control(dir.path())]].concat());
        assert!(output.status.success(), "{output:?}");
    }) else {
        return;
    };
    for phase in ["copies", "is ready", "is done"] {
        let of_job = |line: &str| {
            let (job, of) = (line.contains(" job "), line.contains(&format!(" {phase}, ")));
            job && of && line.ends_with(" MiB")
        };
        assert!(said.lines().any(of_job), "{phase}: {said}");
    }
    assert!(said.contains("@flush_us["), "{said}");
    server.stop();
}
