//! `ringtap snapshot`: the snapshots inside an image.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Args};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use ringtap_image::Format;
use ringtap_image::qcow2::Snapshot;
use ringtap_image_tools::snapshot::{Change, Of, change, list};
use serde_json::{Value, json};

use super::bar::Talk;
use super::source::{DataFiles, Force};
use super::watch;
use crate::manual::section::{EXIT, Section};
use crate::names;
use crate::output::{Output, human};

/// What `ringtap snapshot` is told.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").args(["list", "create", "apply", "delete"])))]
pub(crate) struct SnapshotArgs {
    /// List the snapshots (as without any of these)
    #[arg(short, long)]
    list: bool,

    /// Take a snapshot of this name
    #[arg(short, long, value_name = "NAME")]
    create: Option<String>,

    /// Let the disk be as it was at this snapshot; what it holds now is lost
    #[arg(short, long, value_name = "NAME|ID")]
    apply: Option<String>,

    /// Delete a snapshot
    #[arg(short, long, value_name = "NAME|ID")]
    delete: Option<String>,

    /// An image that nobody uses; one of Ceph (rbd:POOL/IMAGE), whose snapshots the cluster keeps, may be in use
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Format of the image [default: as recorded]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// How to print the list
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    /// Say nothing but warnings and errors
    #[arg(short, long)]
    quiet: bool,

    /// List them though another program may be writing to the image
    #[arg(short = 'U', long)]
    force_share: bool,

    #[command(flatten)]
    force: Force,

    #[command(flatten)]
    data: DataFiles,
}

pub(crate) fn run(args: &SnapshotArgs) -> anyhow::Result<ExitCode> {
    let of = Of { path: &args.file, format: args.format };
    let (create, apply, delete) = (args.create.clone(), args.apply.clone(), args.delete.clone());
    let wanted = create.map(Change::Create).or(apply.map(Change::Apply));
    if let Some(wanted) = wanted.or(delete.map(Change::Delete)) {
        let talk = Talk { quiet: args.quiet, ..Talk::default() };
        watch::show(talk, || change(&of, wanted, args.force.force_format, &args.data.data_file))?;
        return Ok(ExitCode::SUCCESS);
    }
    let list = list(&of, args.force_share)?;
    match args.output {
        _ if args.quiet => {}
        Output::Json => say!("{:#}", Value::from_iter(list.iter().map(facts))),
        Output::Text if list.is_empty() => {}
        Output::Text => say!("{}", table(&list)),
    }
    Ok(ExitCode::SUCCESS)
}

/// A snapshot with the fields of QEMU's SnapshotInfo.
pub(crate) fn facts(snapshot: &Snapshot) -> Value {
    const SECOND: u64 = 1_000_000_000;
    let mut facts = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_size,
        "date-sec": snapshot.taken.0,
        "date-nsec": snapshot.taken.1,
        "vm-clock-sec": snapshot.guest_clock / SECOND,
        "vm-clock-nsec": snapshot.guest_clock % SECOND,
    });
    if let Some(count) = instructions(snapshot) {
        facts["icount"] = count.into();
    }
    facts
}

/// The list for people, in the columns of qemu-img.
pub(crate) fn table(list: &[Snapshot]) -> String {
    let line = |fields: [&str; 6]| {
        let [id, name, state, taken, clock, count] = fields;
        format!("{id:<7} {name:<16} {state:>8} {taken:>19} {clock:>15} {count:>10}")
    };
    let mut lines = vec![
        "Snapshot list:".to_owned(),
        line(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]),
    ];
    lines.extend(list.iter().map(|it| {
        let (state, count) = (human(it.vm_state_size), instructions(it).map(|it| it.to_string()));
        let (taken, clock) = (date(it.taken.0, &TimeZone::system()), clock(it.guest_clock));
        line([&it.id, &it.name, &state, &taken, &clock, &count.unwrap_or_default()])
    }));
    lines.join("\n")
}

/// How many instructions the guest had carried out, where that was counted.
fn instructions(snapshot: &Snapshot) -> Option<u64> {
    let count = snapshot.extra.first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
    count.filter(|count| *count != u64::MAX)
}

/// Hours, minutes, seconds and milliseconds of nanoseconds.
fn clock(nanoseconds: u64) -> String {
    let millis = nanoseconds / 1_000_000;
    let (hours, minutes) = (millis / 3_600_000, millis / 60_000 % 60);
    format!("{hours:04}:{minutes:02}:{:02}.{:03}", millis / 1000 % 60, millis % 1000)
}

/// Date and time of seconds since 1970, as clocks there show them.
fn date(seconds: u32, zone: &TimeZone) -> String {
    let time = Timestamp::from_second(seconds.into()).unwrap_or_default();
    time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
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
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_have_hours_and_milliseconds() {
        assert_eq!(clock(0), "0000:00:00.000");
        assert_eq!(clock(3_723_004_999_999), "0001:02:03.004");
        assert_eq!(clock(u64::MAX), "5124095:34:33.709");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_795_306_263, "2026-11-22 00:11:03"),
            (u32::MAX, "2106-02-07 06:28:15"),
        ] {
            assert_eq!(date(seconds, &TimeZone::UTC), text);
        }
    }
}
