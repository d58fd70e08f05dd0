//! What help and manual pages say beyond the options: examples, signals, exit status. The pages
//! themselves are made from the command line's own description.

mod serving;

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::args;

/// A titled list of what is written and what it means.
type Section = (&'static str, &'static [(&'static str, &'static str)]);

const EXIT: Section = (
    "Exit status",
    &[
        ("0", "all was done"),
        ("1", "it failed; the reason is on stderr"),
        ("2", "the command line makes no sense; stderr says what to write"),
        ("3", "a part was done (an interrupted comparison, a row that could not be measured)"),
        ("101", PANIC),
    ],
);

const PANIC: &str = "an error of ringtap itself (a panic); a line on stderr says where";

/// Of the verbs that write for long.
const EXIT_WRITING: Section = (
    "Exit status",
    &[
        ("0", "all was done"),
        ("1", "it failed; the reason is on stderr"),
        ("2", "the command line makes no sense; stderr says what to write"),
        (
            "130, 143",
            "stopped by SIGINT or SIGTERM, which is what it ends by; stderr says what is left. The \
             second signal ends it at once",
        ),
        ("101", PANIC),
    ],
);

const SIGNALS: Section = (
    "Signals",
    &[
        (
            "SIGTERM, SIGINT",
            "take no more requests, end those in flight, flush, remove the sockets, exit 0; \
             the second time exit at once with 130",
        ),
        ("SIGHUP", "look again how large the images are and tell the guests"),
        ("SIGUSR2", "have the program that is installed now take over, as `ringtap upgrade` does"),
        ("SIGUSR1", "print the state and statistics of every disk as one line of JSON on stderr"),
    ],
);

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
            EXIT,
        ],
        "create" => &[
            (
                "Examples",
                &[
                    ("ringtap create vm.raw 10G", "a raw image, all of it a hole"),
                    ("ringtap create -f qcow2 vm.qcow2 10G", "a qcow2 image"),
                    (
                        "ringtap create -b vm.qcow2 -F qcow2 today.qcow2",
                        "an overlay: vm.qcow2 stays as it is, and today.qcow2 holds what changes",
                    ),
                    ("ringtap create -f qcow2 -o help", "what -o takes for qcow2"),
                ],
            ),
            EXIT,
        ],
        "info" => &[
            (
                "Examples",
                &[
                    ("ringtap info vm.raw", "sizes, alignment, and who uses it"),
                    ("ringtap info vm.qcow2 --backing-chain", "that image and all below it"),
                    ("ringtap info vm.raw --output json", "the same for programs"),
                ],
            ),
            EXIT,
        ],
        "map" => &[
            (
                "Examples",
                &[
                    ("ringtap map vm.qcow2", "what lies where, in which file"),
                    ("ringtap map vm.qcow2 --output json", "all of it, holes too, for programs"),
                ],
            ),
            EXIT,
        ],
        "measure" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap measure -O qcow2 vm.raw",
                        "what `convert -O qcow2 vm.raw` would need",
                    ),
                    (
                        "ringtap measure -O qcow2 --size 1T --output json",
                        "an empty disk, and the same once it is full",
                    ),
                ],
            ),
            EXIT,
        ],
        "convert" => &[
            (
                "Examples",
                &[
                    ("ringtap convert vm.raw -O qcow2 vm.qcow2", "raw to qcow2"),
                    (
                        "ringtap convert vm.raw -c -O qcow2 -o compression_type=zstd vm.qcow2",
                        "compressed, on all cores",
                    ),
                    (
                        "ringtap convert -f qcow2 vm.qcow2 -O raw -n -t none /dev/vg/vm",
                        "qcow2 onto a logical volume that is there already",
                    ),
                    (
                        "ringtap convert today.qcow2 -B vm.qcow2 -F qcow2 thin.qcow2",
                        "a thin overlay with what today.qcow2 has and vm.qcow2 has not",
                    ),
                ],
            ),
            EXIT_WRITING,
        ],
        "dd" => &[
            (
                "Examples",
                &[
                    ("ringtap dd if=vm.qcow2 of=boot.raw bs=1M count=1", "the first MiB of a disk"),
                    (
                        "ringtap dd -f raw -O qcow2 if=disk.raw of=part.qcow2 bs=1M skip=1 count=512",
                        "a partition as an image of its own",
                    ),
                ],
            ),
            EXIT_WRITING,
        ],
        "publish" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap publish base.raw s3://images/base.raw",
                        "upload it; the name that is printed opens these bytes or none",
                    ),
                    (
                        "ringtap publish base.qcow2 /srv/www --boot-list base.list",
                        "beside what a web server shows, with what a guest reads as it starts",
                    ),
                ],
            ),
            EXIT_WRITING,
        ],
        "check" => &[
            (
                "Examples",
                &[
                    ("ringtap check vm.qcow2", "look"),
                    (
                        "ringtap check -f qcow2 --repair leaks vm.qcow2",
                        "free what is marked used and is not; harmless",
                    ),
                    ("ringtap check -f qcow2 --repair all vm.qcow2", "repair all that can be"),
                ],
            ),
            (
                "Exit status",
                &[
                    ("0", "the image is sound (after the repair, if one was asked for)"),
                    ("1", "it could not be looked at, or the command line makes no sense"),
                    ("2", "it is corrupt"),
                    ("3", "clusters are leaked, and nothing else is wrong"),
                    ("63", "images of this format have nothing to check"),
                ],
            ),
        ],
        "resize" => &[
            (
                "Examples",
                &[
                    ("ringtap resize vm.qcow2 20G", "20 GiB, if that is more than it has"),
                    ("ringtap resize -f raw vm.raw +5G", "5 GiB more"),
                    (
                        "ringtap resize --shrink vm.qcow2 8G",
                        "smaller: first let the guest shrink its file systems and partitions",
                    ),
                ],
            ),
            EXIT,
        ],
        "amend" => &[
            (
                "Examples",
                &[
                    ("ringtap amend -o compat=1.1 old.qcow2", "version 2 becomes 3"),
                    ("ringtap amend -o lazy_refcounts=off vm.qcow2", "exact refcounts again"),
                    (
                        "ringtap amend --record-format qcow2 copy.qcow2",
                        "what cp has lost: the record of what it is",
                    ),
                    (
                        "ringtap amend --secret file:old -o state=active,new-secret=file:new vm.luks",
                        "another secret opens it, too; encrypt.state= and so on inside qcow2",
                    ),
                    (
                        "ringtap amend -o state=inactive,old-secret=file:old vm.luks",
                        "the old one does no more",
                    ),
                ],
            ),
            EXIT,
        ],
        "snapshot" => &[
            (
                "Examples",
                &[
                    ("ringtap snapshot -c before-upgrade vm.qcow2", "take one"),
                    ("ringtap snapshot vm.qcow2", "list them"),
                    ("ringtap snapshot -a before-upgrade vm.qcow2", "go back to it"),
                    ("ringtap snapshot -d before-upgrade vm.qcow2", "delete it"),
                ],
            ),
            EXIT,
        ],
        "bitmap" => &[
            (
                "Examples",
                &[
                    ("ringtap bitmap --add vm.qcow2 backup", "note what is written from now on"),
                    (
                        "ringtap bitmap --merge monday --merge tuesday vm.qcow2 week",
                        "what was written on either day",
                    ),
                    ("ringtap bitmap --remove vm.qcow2 backup", "remove it"),
                ],
            ),
            EXIT,
        ],
        "commit" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap commit today.qcow2",
                        "into its backing file; today.qcow2 is empty afterwards",
                    ),
                    (
                        "ringtap commit -b base.raw today.qcow2",
                        "into an image further down; those between are then worthless",
                    ),
                ],
            ),
            EXIT_WRITING,
        ],
        "rebase" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap rebase -b new.qcow2 -F qcow2 today.qcow2",
                        "another image below, the content stays: what differs is copied in",
                    ),
                    ("ringtap rebase -b \'\' today.qcow2", "nothing below: all is copied in"),
                    (
                        "ringtap rebase -u -b moved/base.raw -F raw today.qcow2",
                        "the image below was moved: only the name changes",
                    ),
                ],
            ),
            EXIT_WRITING,
        ],
        "compare" => &[
            (
                "Examples of comparing two images",
                &[
                    ("ringtap compare vm.raw vm.qcow2", "whether a guest reads the same from both"),
                    ("ringtap compare -s a.qcow2 b.qcow2", "sizes and allocation must agree too"),
                ],
            ),
            (
                "Examples of measuring",
                &[
                    ("ringtap compare", "which way should I serve a guest's disk on this machine?"),
                    ("ringtap-lab compare --help", "all that can be measured, and how"),
                ],
            ),
            (
                "Exit status of comparing two images",
                &[
                    ("0", "a guest reads the same from both"),
                    ("1", "they differ"),
                    ("2", "one could not be opened, or the command line makes no sense"),
                    ("3", "what is allocated could not be found out"),
                    ("4", "reading failed"),
                ],
            ),
        ],
        "report" => &[(
            "Examples",
            &[
                (
                    "ringtap report ringtap-runs/2026-11-21T21-30-00",
                    "the tables and the page of a run",
                ),
                ("ringtap-lab report --help", "runs merged, or held against another, for CI too"),
            ],
        )],
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

/// The same command line, with the sections above at the end of the long help of each command.
pub(crate) fn with_sections(command: Command) -> Command {
    let own = help_text(sections(command.get_name()));
    command.after_long_help(own).mut_subcommands(|sub| {
        let text = help_text(sections(sub.get_name()));
        if text.is_empty() { sub } else { sub.after_long_help(text) }
    })
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
pub(crate) fn run(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut command = args::command();
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
    for sub in command.get_subcommands() {
        if !sub.is_hide_set() && sub.get_name() != "help" {
            write(sub, &format!("ringtap-{}", sub.get_name()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn page(command: &Command, name: &str, out: &mut impl Write) -> io::Result<()> {
    let sections = sections(command.get_name());
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
    roff.to_writer(out)
}
