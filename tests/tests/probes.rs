//! The static probes: which there are, what scripts in contrib/bpftrace make of them, and what they show of a load.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ringtap_tests::{Server, ok, plain, ringtap};

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

/// What a script says of a load, where the kernel lets it.
fn traced(script: &str, load: impl FnOnce()) -> Option<String> {
    let text = scripts().into_iter().find(|(path, _)| path.ends_with(script)).expect("it").1;
    let text = text.replace("/usr/bin/ringtap", plain(&ringtap()));
    let mut child = Command::new("bpftrace")
        // Whatever it has when it is told to end.
        .args(["-e", &format!("{text}\nBEGIN {{ printf(\"attached\\n\"); }}"), "0"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = BufReader::new(child.stdout.take().expect("its output"));
    let mut said = String::new();
    while !said.contains("attached\n") {
        if stdout.read_line(&mut said).unwrap_or(0) == 0 {
            let _ = child.wait();
            return None;
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

#[test]
fn a_trace_counts_the_requests_that_were_made() {
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let text = |name: &str| plain(&dir.path().join(name)).to_owned();
    ok("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &text("disk"), "64M"]);
    let nbd = format!("unix:{}", text("nbd"));
    let server = Server::start([&text("disk"), "-f", "qcow2", "--name", "traced", "--nbd", &nbd]);
    let uri = format!("nbd+unix:///traced?socket={}", text("nbd"));
    let said = traced("latency.bt", || {
        let write =
            ["-f", "raw", "-c", "write 0 64k", "-c", "write 1M 64k", "-c", "read 0 4k", &uri];
        ok("qemu-io", "qemu-utils", &write);
    });
    let Some(said) = said else {
        println!("skipped: bpftrace cannot trace here");
        return;
    };
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
