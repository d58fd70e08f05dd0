//! Command lines as scripts write them for qemu-img, put in Ringtap's words before they are read: secrets that
//! `--object` defines, images that `--image-opts` and `json:` describe, and names with QEMU's prefixes.

mod node;
mod pairs;
mod secrets;

use std::ffi::{OsStr, OsString};

use clap::{Arg, ArgAction, Command};

use self::node::Node;
use self::secrets::Secrets;

/// The verbs that qemu-img has too.
pub(crate) const VERBS: [&str; 15] = [
    "amend", "bench", "bitmap", "check", "commit", "compare", "convert", "create", "dd", "info",
    "map", "measure", "rebase", "resize", "snapshot",
];

/// A word of the command line, and what it is.
#[derive(Debug)]
enum Word {
    /// An option with its value, as it is to be written.
    Option(String, OsString),
    /// A value that stands alone.
    Plain(OsString),
    /// Whatever else.
    Other(OsString),
}

/// The command line in Ringtap's words. What is none of QEMU's comes back as it is.
pub(crate) fn translate(words: Vec<OsString>, program: &Command) -> Result<Vec<OsString>, String> {
    let Some(verb) = place_of_verb(&words, program) else { return Ok(words) };
    let command = words[verb].to_str().filter(|name| VERBS.contains(name));
    let Some(command) = command.and_then(|name| program.find_subcommand(name)) else {
        return Ok(words);
    };
    let mut front = words;
    let rest = front.split_off(verb + 1);
    let line = Line::read(rest, command, program)?;
    front.extend(line.settle(command.get_name())?);
    Ok(front)
}

/// The first word that is no option of the program, and no value of one.
fn place_of_verb(words: &[OsString], program: &Command) -> Option<usize> {
    let mut at = 1;
    while let Some(text) = words.get(at)?.to_str() {
        let takes = match (text.strip_prefix("--"), text.strip_prefix('-')) {
            (Some(long), _) => takes_value(program, |arg| arg_is_long(arg, long)),
            (None, Some(short)) => {
                let mut letters = short.chars();
                let letter = letters.next().filter(|_| letters.next().is_none());
                takes_value(program, |arg| letter.is_some_and(|it| arg_is_short(arg, it)))
            }
            (None, None) => return Some(at),
        };
        at += 1 + usize::from(takes);
    }
    None
}

/// What stands behind a verb.
#[derive(Default)]
struct Line {
    words: Vec<Word>,
    secrets: Secrets,
    image_opts: bool,
    target_image_opts: bool,
}

impl Line {
    fn read(rest: Vec<OsString>, command: &Command, program: &Command) -> Result<Line, String> {
        let mut line = Line::default();
        let takes =
            |is: &dyn Fn(&Arg) -> bool| takes_value(command, is) || takes_value(program, is);
        let mut rest = rest.into_iter();
        while let Some(word) = rest.next() {
            let Some(text) = word.to_str() else {
                line.words.push(Word::Plain(word));
                continue;
            };
            if text == "--" {
                line.words.push(Word::Other(word));
                line.words.extend(rest.by_ref().map(Word::Plain));
            } else if let Some(long) = text.strip_prefix("--") {
                let (name, value) = match long.split_once('=') {
                    Some((name, value)) => (name, Some(OsString::from(value))),
                    None => (long, None),
                };
                match name {
                    "image-opts" => line.image_opts = true,
                    "target-image-opts" => line.target_image_opts = true,
                    "object" => {
                        let value = value.or_else(|| rest.next());
                        let value = value.ok_or(
                            "--object: a definition follows, such as secret,id=s,file=key",
                        )?;
                        line.secrets.define(&value.to_string_lossy())?;
                    }
                    _ => match (value, takes(&|arg| arg_is_long(arg, name))) {
                        (Some(value), _) => {
                            line.words.push(Word::Option(format!("--{name}"), value))
                        }
                        (None, true) => match rest.next() {
                            Some(value) => {
                                line.words.push(Word::Option(format!("--{name}"), value))
                            }
                            None => line.words.push(Word::Other(word)),
                        },
                        (None, false) => line.words.push(Word::Other(word)),
                    },
                }
            } else if let Some(letters) = text.strip_prefix('-').filter(|it| !it.is_empty()) {
                line.read_letters(letters, command, &mut rest);
            } else {
                line.words.push(Word::Plain(word));
            }
        }
        line.drop_overridden(command);
        Ok(line)
    }

    /// Of options that have one value what is said last counts, even where the rest makes no sense.
    fn drop_overridden(&mut self, command: &Command) {
        let mut later: Vec<String> = vec![];
        let once = |name: &str| {
            let long = name.strip_prefix("--");
            let short = name.strip_prefix('-').and_then(|rest| rest.chars().next());
            let is = |arg: &&Arg| match long {
                Some(long) => arg_is_long(arg, long),
                None => short.is_some_and(|letter| arg_is_short(arg, letter)),
            };
            let arg = command.get_arguments().find(is);
            arg.filter(|arg| matches!(arg.get_action(), ArgAction::Set))
                .map(|arg| arg.get_id().to_string())
        };
        let mut kept: Vec<Word> = vec![];
        for word in std::mem::take(&mut self.words).into_iter().rev() {
            if let Word::Option(name, _) = &word {
                match once(name) {
                    Some(id) if later.contains(&id) => continue,
                    Some(id) => later.push(id),
                    None => {}
                }
            }
            kept.push(word);
        }
        kept.reverse();
        self.words = kept;
    }

    /// Options of one letter, the last of which may have a value.
    fn read_letters(
        &mut self,
        letters: &str,
        command: &Command,
        rest: &mut impl Iterator<Item = OsString>,
    ) {
        for (place, letter) in letters.char_indices() {
            let takes = takes_value(command, |arg| arg_is_short(arg, letter));
            if !takes {
                continue;
            }
            let flags = &letters[..place];
            if !flags.is_empty() {
                self.words.push(Word::Other(format!("-{flags}").into()));
            }
            let value = &letters[place + letter.len_utf8()..];
            let value = value.strip_prefix('=').unwrap_or(value);
            let value = if value.is_empty() { rest.next() } else { Some(value.into()) };
            self.words.push(match value {
                Some(value) => Word::Option(format!("-{letter}"), value),
                None => Word::Other(format!("-{letter}").into()),
            });
            return;
        }
        self.words.push(Word::Other(format!("-{letters}").into()));
    }

    /// The words, in Ringtap's.
    fn settle(mut self, verb: &str) -> Result<Vec<OsString>, String> {
        let mut more: Vec<OsString> = vec![];
        let makes = matches!(verb, "create" | "convert" | "dd" | "measure");
        for word in &mut self.words {
            let Word::Option(name, value) = word else { continue };
            let Some(text) = value.to_str().filter(|_| name == "-o" || name == "--options") else {
                continue;
            };
            let (kept, secret) = self.secrets.in_options(text, makes)?;
            if let Some(secret) = secret {
                more.extend(["--target-secret".into(), secret.into()]);
            }
            *value = kept.into();
        }
        // An -o of which nothing is left.
        self.words.retain(
            |word| !matches!(word, Word::Option(name, value) if name == "-o" && value.is_empty()),
        );
        let operand = |text: &str| text.strip_prefix("if=").is_some() && verb == "dd";
        let plain: Vec<usize> =
            (0..self.words.len()).filter(|at| matches!(&self.words[*at], Word::Plain(_))).collect();
        // A new image is named by its path, and what follows an image is a size or a name.
        let images = match verb {
            "create" => 0,
            "convert" => plain.len().saturating_sub(1),
            "compare" => 2,
            "dd" => plain.len(),
            _ => 1,
        };
        let (mut formats, mut opened) = (vec![], vec![]);
        for (nth, at) in plain.iter().enumerate() {
            let Word::Plain(word) = &self.words[*at] else { continue };
            let Some(text) = word.to_str() else { continue };
            let target = verb == "convert" && nth + 1 == plain.len();
            let (before, text) = if operand(text) { text.split_at(3) } else { ("", text) };
            let described = match target {
                true => self.target_image_opts,
                false => self.image_opts && nth < images && (verb != "dd" || before == "if="),
            };
            let Some(node) = Node::of(text, described)? else { continue };
            for id in &node.secrets {
                let option = match (verb, nth) {
                    _ if target => "--target-secret",
                    ("compare", 1) => "--second-secret",
                    _ => "--secret",
                };
                if option != "--secret" && node.secrets.len() > 1 {
                    return Err(format!(
                        "{text}: one secret opens it and what lies below it here, not {}",
                        node.secrets.join(" and ")
                    ));
                }
                if !opened.contains(&(option, id.clone())) {
                    more.extend([option.into(), self.secrets.source(id)?.into()]);
                    opened.push((option, id.clone()));
                }
            }
            if node.read_only && (target || self.changes(verb)) {
                return Err(format!(
                    "{text}: {verb} would change it, and read-only=on says that nobody does"
                ));
            }
            if let Some(context) = &node.context {
                if verb != "map" {
                    return Err(format!(
                        "x-dirty-bitmap={context}: only map shows what a metadata context says"
                    ));
                }
                more.push(format!("--context={context}").into());
            }
            if node.share && !more.iter().any(|word| word == "-U") {
                more.push("-U".into());
            }
            if let Some(format) = node.format {
                formats.push((nth, target, format));
            }
            self.words[*at] = Word::Plain(format!("{before}{}", node.path).into());
        }
        let sources = formats.iter().filter(|(_, target, _)| !target).count();
        if verb == "convert" && sources > 0 && sources < images {
            return Err(
                "sources of which some are described, and others not: convert them one by one"
                    .into(),
            );
        }
        self.add_formats(verb, formats, &mut more)?;
        let mut words: Vec<OsString> = vec![];
        for word in self.words {
            match word {
                Word::Option(name, value) if name.starts_with("--") => {
                    let mut joined: OsString = name.into();
                    joined.push("=");
                    joined.push(value);
                    words.push(joined);
                }
                Word::Option(name, value) => words.extend([name.into(), value]),
                Word::Plain(word) | Word::Other(word) => words.push(word),
            }
        }
        // Before a `--` of the command line.
        more.extend(words);
        Ok(more)
    }

    /// Whether the image is changed.
    fn changes(&self, verb: &str) -> bool {
        let says = |names: &[&str]| {
            self.words.iter().any(|word| match word {
                Word::Option(name, _) => names.contains(&name.as_str()),
                _ => false,
            })
        };
        let writes = |flag: &OsStr| {
            let letters = flag.to_str().unwrap_or_default();
            letters == "--write" || (!letters.starts_with("--") && letters.contains('w'))
        };
        match verb {
            "amend" | "bitmap" | "commit" | "rebase" | "resize" => true,
            "bench" => {
                self.words.iter().any(|word| matches!(word, Word::Other(flag) if writes(flag)))
            }
            "check" => says(&["-r", "--repair"]),
            "snapshot" => says(&["-a", "--apply", "-c", "--create", "-d", "--delete"]),
            _ => false,
        }
    }

    /// Say of which formats the images are, where that is not said already.
    fn add_formats(
        &self,
        verb: &str,
        formats: Vec<(usize, bool, String)>,
        more: &mut Vec<OsString>,
    ) -> Result<(), String> {
        let mut said: Vec<(&str, String)> = vec![];
        for (nth, target, format) in formats {
            let option = match (verb, nth) {
                ("compare", 1) => "-F",
                _ if target => "-O",
                _ => "-f",
            };
            match said.iter().find(|(other, _)| *other == option) {
                Some((_, other)) if *other != format => {
                    return Err(format!(
                        "sources of two formats, {other} and {format}: convert them one by one"
                    ));
                }
                Some(_) => {}
                None => said.push((option, format)),
            }
        }
        for (option, format) in said {
            let long = match option {
                "-F" => "--second-format",
                "-O" => "--output-format",
                _ => "--format",
            };
            let given = self.words.iter().find_map(|word| match word {
                Word::Option(name, value) if name == option || name == long => Some(value),
                _ => None,
            });
            match given {
                None => more.extend([option.into(), format.into()]),
                Some(given) if *given == *format => {}
                Some(given) => {
                    let given = given.to_string_lossy();
                    return Err(format!(
                        "{option} {given} of an image that is described as {format}"
                    ));
                }
            }
        }
        Ok(())
    }
}

fn arg_is_short(arg: &Arg, letter: char) -> bool {
    arg.get_short_and_visible_aliases().is_some_and(|all| all.contains(&letter))
}

fn arg_is_long(arg: &Arg, name: &str) -> bool {
    arg.get_long_and_visible_aliases().is_some_and(|all| all.contains(&name))
        || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
}

fn takes_value(command: &Command, is: impl Fn(&Arg) -> bool) -> bool {
    let found = command.get_arguments().find(|arg| is(arg));
    found.is_some_and(|arg| {
        arg.get_action().takes_values() && !arg.is_positional() && !optional(arg)
    })
}

/// Whether a value is written behind `=` or not at all.
fn optional(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|count| count.min_values() == 0)
}

#[cfg(test)]
mod tests;
