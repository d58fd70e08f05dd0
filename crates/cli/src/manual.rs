//! What help and manual pages say beyond the options: examples, signals, exit status. The pages
//! themselves are made from the command line's own description.

pub(crate) mod section;
mod serving;

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use self::section::{EXIT, EXIT_OF_ALL, Section};
#[cfg(feature = "object")]
use crate::verbs::publish;
use crate::verbs::{
    amend, bench, bitmap, check, commit, compare, convert, create, dd, detach, info, map, measure,
    rebase, resize, snapshot,
};

fn sections(command: &str) -> &'static [Section] {
    match command {
        "ringtap" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap serve vm.raw -f raw --vhost-user /run/vm.sock",
                        "serve an image to a virtual machine",
                    ),
                    ("ringtap compare", "measure the ways of serving a disk on this machine"),
                ],
            ),
            EXIT_OF_ALL,
        ],
        "create" => create::SECTIONS,
        "info" => info::SECTIONS,
        "map" => map::SECTIONS,
        "measure" => measure::SECTIONS,
        "convert" => convert::SECTIONS,
        "dd" => dd::SECTIONS,
        #[cfg(feature = "object")]
        "publish" => publish::SECTIONS,
        "check" => check::SECTIONS,
        "resize" => resize::SECTIONS,
        "amend" => amend::SECTIONS,
        "snapshot" => snapshot::SECTIONS,
        "bench" => bench::SECTIONS,
        "bitmap" => bitmap::SECTIONS,
        "commit" => commit::SECTIONS,
        "rebase" => rebase::SECTIONS,
        "detach" => detach::SECTIONS,
        "compare" => compare::SECTIONS,
        "report" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap report ringtap-runs/2026-11-21T21-30-00",
                        "the tables and the page of a run",
                    ),
                    (
                        "ringtap-lab report --help",
                        "runs merged, or held against another, for CI too",
                    ),
                ],
            ),
            (
                "Exit status",
                &[
                    ("2", "the lab is not installed, or the command line makes no sense"),
                    ("others", "those of ringtap-lab report; its help has them"),
                ],
            ),
        ],
        "list" => &[
            (
                "Examples",
                &[
                    ("ringtap list", "devices, sizes, servers and disks"),
                    (
                        "ringtap list --reap=3",
                        "delete /dev/ublkb3, whose server will not come back",
                    ),
                ],
            ),
            EXIT,
        ],
        "completions" => &[(
            "Examples",
            &[(
                "ringtap completions bash > /etc/bash_completion.d/ringtap",
                "for every user's bash",
            )],
        )],
        "man" => &[(
            "Examples",
            &[("ringtap man /usr/local/share/man/man1", "ringtap.1, ringtap-serve.1 and so on")],
        )],
        _ => serving::sections(command),
    }
}

/// The same command, with the sections above at the end of its long help.
pub(crate) fn with_sections(command: Command) -> Command {
    let text = help_text(sections(command.get_name()));
    if text.is_empty() { command } else { command.after_long_help(text) }
}

fn help_text(sections: &[Section]) -> String {
    let mut text = String::new();
    for (title, rows) in sections {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&format!("{title}:\n"));
        for (what, meaning) in *rows {
            text.push_str(&if what.len() < 4 {
                format!("  {what:<4}{meaning}\n")
            } else {
                format!("  {what}\n      {meaning}\n")
            });
        }
    }
    text
}

/// Write every page to a folder, or the first to stdout.
pub(crate) fn run(mut command: Command, dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    command.build();
    let Some(dir) = dir else {
        page(&command, "ringtap", &mut io::stdout().lock())?;
        return Ok(ExitCode::SUCCESS);
    };
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let write = |command: &Command, name: &str| -> anyhow::Result<()> {
        let path = dir.join(format!("{name}.1"));
        let mut text = vec![];
        page(command, name, &mut text)?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write(&command, "ringtap")?;
    below(&command, "ringtap", &write)?;
    Ok(ExitCode::SUCCESS)
}

/// Write the pages of a command's own commands, and of theirs: `ringtap-disk-add` is one.
fn below(
    command: &Command,
    name: &str,
    write: &impl Fn(&Command, &str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let shown = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    for sub in command.get_subcommands().filter(shown) {
        let name = format!("{name}-{}", sub.get_name());
        write(sub, &name)?;
        below(sub, &name, write)?;
    }
    Ok(())
}

fn page(command: &Command, name: &str, out: &mut impl Write) -> io::Result<()> {
    // By its whole name: `ringtap disk commit` is another than `ringtap commit`.
    let sections = sections(name.strip_prefix("ringtap-").unwrap_or(name));
    // The lab writes the end of its commands' help itself.
    let rest = command.get_after_help().filter(|_| sections.is_empty()).map(ToString::to_string);
    let man =
        Man::new(command.clone()).title(name.to_uppercase()).source("ringtap").manual("Ringtap");
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    if command.get_opts().next().is_some() {
        man.render_options_section(out)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(out)?;
    }
    let mut roff = Roff::new();
    if let Some(text) = rest {
        roff.control("SH", ["EXAMPLES AND EXIT STATUS"]);
        roff.control("nf", []);
        roff.text(text.lines().map(|line| roman(format!("{line}\n"))).collect::<Vec<_>>());
        roff.control("fi", []);
    }
    for (title, rows) in sections {
        roff.control("SH", [title.to_uppercase().as_str()]);
        for (what, meaning) in *rows {
            roff.control("TP", []);
            roff.text([clap_mangen::roff::bold(*what)]);
            roff.text([roman(*meaning)]);
        }
    }
    if let Some((above, _)) = name.rsplit_once('-').filter(|(above, _)| *above != "ringtap") {
        roff.control("SH", ["SEE ALSO"]);
        roff.text([roman(format!("{above}(1), with examples and exit status"))]);
    }
    roff.to_writer(out)
}
