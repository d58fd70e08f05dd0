//! The command line of a lab that runs elsewhere: what stays here is left out, files that are named go along.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::error::{Error, Result};

/// Options that are for here; where there is a run, it is printed here, too.
const HERE: [&str; 2] = ["--on", "--out"];
const OUTPUT: &str = "--output";
/// Options that name a file to be read.
const FILES: [&str; 4] = ["--fio-job", "--job", "--catalogue", "--plan"];

/// What is run there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Words {
    /// The arguments, as the lab there takes them.
    pub(super) args: Vec<String>,
    /// Files here, and their names there.
    pub(super) files: Vec<(PathBuf, String)>,
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
            // Reports name a load by its file.
            let name = file.file_name().and_then(OsStr::to_str).unwrap_or("file");
            let name: String = name
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
                .collect();
            let name = format!("{}-{name}", words.files.len());
            words.args.extend([option.to_owned(), name.clone()]);
            words.files.push((file, name));
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
