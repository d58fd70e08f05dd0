//! Folders of runs of every schema open, and those of a later one are refused in a sentence.

use std::path::{Path, PathBuf};

use ringtap_lab::report::{self, page, table};
use ringtap_lab::run::folder::{SCHEMA, State};

use super::{record, samples, write};

/// The folders that hold a run, in `parent`.
fn runs(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.join("run.json").exists()).collect()
}

#[test]
fn every_committed_run_opens() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kept = runs(&here.join("tests/runs"));
    for schema in 0..SCHEMA {
        let name = format!("schema-{schema}");
        assert!(
            kept.iter().any(|run| run.ends_with(&name)),
            "no run of {name} is kept in tests/runs"
        );
    }
    let published = runs(&here.join("../../docs/results"));
    assert!(!published.is_empty());
    for run in kept.iter().chain(&published) {
        let analysis = report::load(run).unwrap_or_else(|e| panic!("{}: {e}", run.display()));
        assert!(analysis.rows.iter().any(|row| row.ratio.is_some()), "{}", run.display());
        assert!(page::render(&analysis).contains(&analysis.run.began), "{}", run.display());
        assert!(table::render(&analysis, false, Some(160)).contains("virtio-raw"));
    }
}

#[test]
fn a_run_of_a_later_schema_is_refused_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let run = write(dir.path(), "run", &record(3, State::Complete), &samples(3));
    let file = run.join("run.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["schema"], SCHEMA);
    json["schema"] = (SCHEMA + 1).into();
    json["lab"] = "9.9".into();
    // What a later lab may have done to it.
    json["plan"] = "another shape".into();
    std::fs::write(&file, json.to_string()).unwrap();
    let error = report::load(&run).unwrap_err().to_string();
    let said = format!("has schema {}, made by version 9.9", SCHEMA + 1);
    assert!(error.contains(&said) && error.contains("a later one"), "{error}");
}

#[test]
fn the_report_of_one_run_goes_where_it_is_told_to_and_the_run_stays_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let run = write(dir.path(), "run", &record(3, State::Complete), &samples(3));
    let list = |path: &Path| {
        let mut names: Vec<_> =
            std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let (before, out) = (list(&run), dir.path().join("elsewhere"));
    let mut report = std::process::Command::new(env!("CARGO_BIN_EXE_ringtap-lab"));
    report.arg("report").arg(&run).arg("--out").arg(&out);
    let ended = report.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert!(out.join("report.html").exists());
    assert_eq!(list(&run), before);
}
