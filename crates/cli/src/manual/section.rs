//! What help and manual pages say beyond the options, in titled lists, and those that many commands share.

/// A titled list of what is written and what it means.
pub(crate) type Section = (&'static str, &'static [(&'static str, &'static str)]);

pub(crate) const EXIT: Section =
    ("Exit status", &[("0", "all was done"), ("1", FAILED), ("2", USAGE), ("101", PANIC)]);

const FAILED: &str = "it failed; the reason is on stderr";
const USAGE: &str = "the command line makes no sense; stderr says what to write";
const PANIC: &str = "an error of ringtap itself (a panic); a line on stderr says where";

/// Of all commands together.
pub(super) const EXIT_OF_ALL: Section = (
    "Exit status",
    &[
        ("0", "all was done"),
        ("1", FAILED),
        ("2", USAGE),
        ("101", PANIC),
        (
            "others",
            "those of check, compare, convert, report, serve and the like; their help has them",
        ),
    ],
);

/// Of those that serve.
pub(super) const EXIT_SERVING: Section = (
    "Exit status",
    &[
        (
            "0",
            "SIGTERM, SIGINT or SIGQUIT ended it, or another process took over, and all was done",
        ),
        ("1", "it failed, or a disk of serve or daemon was not served; the reason is on stderr"),
        ("2", USAGE),
        ("101", PANIC),
        ("130", "ended at once, by the second SIGTERM or SIGINT"),
    ],
);

/// Of the verbs that write for long.
pub(crate) const EXIT_WRITING: Section = (
    "Exit status",
    &[
        ("0", "all was done"),
        ("1", FAILED),
        ("2", USAGE),
        (
            "130, 143",
            "stopped by SIGINT or SIGTERM, which is what it ends by; stderr says what is left. The \
             second signal ends it at once",
        ),
        ("101", PANIC),
    ],
);

pub(super) const SIGNALS: Section = (
    "Signals",
    &[
        (
            "SIGTERM, SIGINT",
            "take no more requests, end those in flight, flush, remove the sockets, exit 0; \
             the second time exit at once with 130",
        ),
        ("SIGQUIT", "the same, but block devices of this host (ublk) wait for the next server"),
        (
            "SIGHUP",
            "look again how large the images are and tell the guests; serve disks that were left \
             out and can be had now, and files of disks that have come; read certificates again; \
             have requests that wait for space tried again",
        ),
        ("SIGUSR2", "have the program that is installed now take over, as `ringtap upgrade` does"),
        ("SIGUSR1", "print the state and statistics of every disk as one line of JSON on stderr"),
    ],
);
