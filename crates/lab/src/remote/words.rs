//! The command line of a lab that runs elsewhere: what stays here is left out, files that are named go along, those that a plan
//! names too.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::workload::JOB_FILE;

/// Options that are for here; where there is a run, it is printed here, too.
const HERE: [&str; 2] = ["--on", "--out"];
const OUTPUT: &str = "--output";
/// Options that name a file to be read.
const FILES: [&str; 4] = ["--fio-job", "--job", "--catalogue", "--plan"];
const JOBS: [&str; 2] = ["--fio-job", "--job"];
const PLAN: &str = "--plan";
/// The key of a plan that names job files.
const PLAN_JOBS: &str = "fio_jobs";

/// What is run there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Words {
    /// The arguments, as the lab there takes them.
    pub(super) args: Vec<String>,
    /// Files here, and their names there.
    pub(super) files: Vec<(PathBuf, String)>,
    /// Plans, changed so that they name those, and their names there.
    pub(super) plans: Vec<(String, String)>,
    /// Which of the files are jobs, for a load is named by its file.
    jobs: Vec<usize>,
}

impl Words {
    /// A file that goes along; gives its name there.
    fn add(&mut self, file: PathBuf, is_job: bool) -> String {
        let name = self.name(&file);
        if is_job {
            self.jobs.push(self.files.len());
        }
        self.files.push((file, name.clone()));
        name
    }

    /// Reports name a load by its file, so that its name stays in sight.
    fn name(&self, file: &Path) -> String {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or("file");
        let name: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
            .collect();
        format!("{}-{name}", self.files.len() + self.plans.len())
    }

    /// A plan with the job files that it names. One that cannot be read is refused there, with its line.
    fn add_plan(&mut self, file: PathBuf) -> Result<String> {
        let text = std::fs::read_to_string(&file).map_err(Error::file("open", &file))?;
        let Some(mut plan) = text.parse::<toml::Table>().ok().filter(|p| p.contains_key(PLAN_JOBS))
        else {
            return Ok(self.add(file, false));
        };
        for job in plan.get_mut(PLAN_JOBS).and_then(toml::Value::as_array_mut).into_iter().flatten()
        {
            if let toml::Value::String(path) = job {
                *path = self.add(PathBuf::from(&*path), true);
            }
        }
        let name = self.name(&file);
        self.plans.push((plan.to_string(), name.clone()));
        Ok(name)
    }

    /// What loads are called in a run of the folder `there`, and what they are called in one of this machine: two runs of the
    /// same job are to be compared, wherever each ran.
    pub(super) fn renamed(&self, there: &str) -> Result<Vec<(String, String)>> {
        let of = |&at: &usize| {
            let (file, name) = &self.files[at];
            let here = std::path::absolute(file).map_err(Error::file("find", file))?;
            let here = format!("{JOB_FILE}{}", here.display());
            Ok((format!("{JOB_FILE}{there}/{name}"), here))
        };
        self.jobs.iter().map(of).collect()
    }
}

/// A text in which names, as JSON has them within quotes, are changed.
pub(super) fn changed(text: &str, names: &[(String, String)]) -> String {
    let quoted = |name: &str| serde_json::Value::from(name).to_string();
    names.iter().fold(text.to_owned(), |text, (from, to)| text.replace(&quoted(from), &quoted(to)))
}

/// The words of `ringtap compare ...` for the other machine.
pub(super) fn forwarded(args: &[OsString], has_run: bool) -> Result<Words> {
    let mut words = Words::default();
    let mut rest = args.iter();
    while let Some(word) = rest.next() {
        let word = text(word)?;
        let (option, joined) = match word.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option, Some(value.to_owned())),
            _ => (word, None),
        };
        let is_file = FILES.contains(&option);
        let is_here = HERE.contains(&option) || has_run && option == OUTPUT;
        if !is_file && !is_here {
            words.args.push(word.to_owned());
            continue;
        }
        let value = match joined {
            Some(value) => value,
            None => match rest.next() {
                Some(value) => text(value)?.to_owned(),
                None => return Err(Error::Plan(format!("{option} has no value"))),
            },
        };
        if is_file {
            let file = PathBuf::from(value);
            let name = match option == PLAN {
                true => words.add_plan(file)?,
                false => words.add(file, JOBS.contains(&option)),
            };
            words.args.extend([option.to_owned(), name]);
        }
    }
    Ok(words)
}

fn text(word: &OsStr) -> Result<&str> {
    word.to_str().ok_or_else(|| Error::Plan(format!("{word:?} is no UTF-8")))
}

/// A word as a shell takes it.
pub(super) fn quoted(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| "''".into(), |quoted| quoted.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Words {
        forwarded(&line.iter().map(OsString::from).collect::<Vec<_>>(), true).unwrap()
    }

    #[test]
    fn what_is_for_here_stays_and_files_go_along() {
        let line = [
            "compare",
            "--on",
            "ssh://a",
            "--out=x",
            "--output",
            "json",
            "--stages",
            "host",
            "--job",
            "/jobs/my load.fio",
            "--catalogue=ways.toml",
            "--qemu",
            "file=/dev/x,format=raw",
        ];
        let words = words(&line);
        let args = [
            "compare",
            "--stages",
            "host",
            "--job",
            "0-my_load.fio",
            "--catalogue",
            "1-ways.toml",
            "--qemu",
            "file=/dev/x,format=raw",
        ];
        assert_eq!(words.args, args);
        let list: Vec<_> = ["compare", "--list", "--output", "json"].map(OsString::from).into();
        assert_eq!(
            forwarded(&list, false).unwrap().args,
            ["compare", "--list", "--output", "json"]
        );
        let files = [("/jobs/my load.fio", "0-my_load.fio"), ("ways.toml", "1-ways.toml")];
        assert_eq!(words.files, files.map(|(from, to)| (PathBuf::from(from), to.to_owned())));
    }

    #[test]
    fn a_plan_takes_its_jobs_along_and_loads_keep_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let plan = dir.path().join("nightly.toml");
        let text = "rounds = 3\nfio_jobs = [\"/jobs/my load.fio\", \"b.fio\"]\n";
        std::fs::write(&plan, text).unwrap();
        let words = words(&["compare", "--plan", plan.to_str().unwrap(), "--job=/a/\"x\".fio"]);
        assert_eq!(words.args, ["compare", "--plan", "2-nightly.toml", "--job", "3-_x_.fio"]);
        let names: Vec<&str> = words.files.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["0-my_load.fio", "1-b.fio", "3-_x_.fio"]);
        let there: crate::plan::PlanFile = toml::from_str(&words.plans[0].0).unwrap();
        assert_eq!(there.rounds, Some(3));
        assert_eq!(there.fio_jobs.unwrap(), [PathBuf::from(names[0]), PathBuf::from(names[1])]);

        let record = r#"{"workloads":["dd","job:/there/3-_x_.fio"],"dir":"/there"}"#;
        let here = changed(record, &words.renamed("/there").unwrap());
        assert_eq!(here, r#"{"workloads":["dd","job:/a/\"x\".fio"],"dir":"/there"}"#);
        // One without jobs goes as it is, so that errors name its lines.
        std::fs::write(&plan, "rounds = 3\n").unwrap();
        let plain = forwarded(&["--plan".into(), plan.clone().into()], true).unwrap();
        assert!(plain.plans.is_empty() && plain.files == [(plan, "0-nightly.toml".to_owned())]);
    }

    #[test]
    fn a_word_stays_one_word_in_a_shell() {
        for word in ["a b", "$(reboot)", "it's", "", "file=/x,format=raw", "a\nb"] {
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", quoted(word))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
