//! A run's folder when something is cut off, or is full.

use std::path::Path;
use std::process::Command;

use super::*;

/// What a letter is cut to was no text, and with it nothing of the run.
#[test]
fn a_last_line_that_is_cut_within_a_letter_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let run = write(dir.path(), "run", &record(6, State::Running), &samples(6));
    let file = run.join("samples.jsonl");
    let mut bytes = std::fs::read(&file).unwrap();
    let whole = bytes.iter().filter(|byte| **byte == b'\n').count();
    bytes.extend(b"{\"note\":\"12 \xc2");
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(report::load(&run).unwrap().samples.len(), whole);
}

/// A file of one name was written by both, and renamed by the first under the second.
#[test]
fn what_another_report_writes_is_let_be() {
    let dir = tempfile::tempdir().unwrap();
    let run = write(dir.path(), "run", &record(6, State::Complete), &samples(6));
    let other = run.join("report.new");
    std::fs::write(&other, "half of another's").unwrap();
    let analysis = report::load(&run).unwrap();
    report::write_html(&run, &analysis).unwrap();
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "half of another's");
    let new = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".new");
    let left = std::fs::read_dir(&run).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(left.filter(new).collect::<Vec<_>>(), ["report.new"], "none of its own");
}

/// A file system of a MiB; unmounted when it is dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let words = ["-t", "tmpfs", "-o", "size=1M", "none"];
        let mounted = Command::new("mount").args(words).arg(dir.path()).output();
        mounted.is_ok_and(|ended| ended.status.success()).then_some(Small(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_run_whose_folder_is_full_says_that_it_failed() {
    let Some(small) = Small::mount() else {
        println!("skipped: mounting needs root");
        return;
    };
    let run = small.0.path().join("run");
    let names = |dir: &Path| {
        let all = std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.file_name());
        let mut all: Vec<String> = all.map(|name| name.to_string_lossy().into()).collect();
        all.sort();
        all
    };
    let mut folder = Folder::create(&run).unwrap();
    folder.write_record(&record(6, State::Running)).unwrap();
    let sample = &samples(1)[0];
    // What is held back has no name: a lab that is killed leaves none of it.
    assert_eq!(names(&run), ["run.json", "samples.jsonl", "servers"]);
    while folder.append(sample).is_ok() {}
    folder.write_record(&record(6, State::Failed)).unwrap();
    drop(folder);
    assert_eq!(names(&run), ["run.json", "samples.jsonl", "servers"]);
    let analysis = report::load(&run).unwrap();
    assert!(analysis.run.state == State::Failed && !analysis.samples.is_empty());
}
