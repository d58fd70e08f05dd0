//! `ringtap dd`: a part of an image copied into a new one, with the operands of dd(1).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::{CacheMode, Format, parse_size};
use ringtap_image_tools::convert::{Convert, Target};

use super::bar::Talk;
use super::source::{Sources, backing};
use super::target::NewImage;
use super::{convert, watch};
use crate::manual::section::{EXIT_WRITING, Section};
use crate::names;

/// Bytes of a block unless `bs=` tells.
const BLOCK: u64 = 512;

/// What `ringtap dd` is told.
#[derive(Debug, Args)]
#[command(mut_arg("allow_backing", backing))]
pub(crate) struct DdArgs {
    /// if=FILE to read, of=FILE to make, bs=SIZE of a block (512), skip=N blocks at the beginning of what
    /// is read, count=N blocks to copy from there on
    #[arg(value_name = "OPERAND", required_unless_present = "options")]
    operands: Vec<String>,

    /// Format of what is read [default: as recorded, else by its signature]
    #[arg(
        short,
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    format: Option<Format>,

    /// Format of what is made [default: raw]
    #[arg(
        short = 'O',
        long,
        value_parser = names::format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    output_format: Option<Format>,

    #[command(flatten)]
    new: NewImage,

    #[command(flatten)]
    talk: Talk,

    #[command(flatten)]
    sources: Sources,
}

/// The operands, understood.
#[derive(Debug, Default, PartialEq, Eq)]
struct Operands {
    from: PathBuf,
    to: PathBuf,
    /// In bytes.
    skip: u64,
    /// In bytes; to the end where it is none.
    count: Option<u64>,
}

impl Operands {
    fn parse(operands: &[String]) -> Result<Operands, String> {
        let (mut found, mut block) = (Operands::default(), BLOCK);
        let (mut skip, mut count) = (0, None);
        for operand in operands {
            let wrong = |want: &str| format!("{operand}: write {want}");
            let (key, value) = operand.split_once('=').unwrap_or((operand, ""));
            let number = || parse_size(value).ok_or_else(|| wrong("a number, such as 8 or 1k"));
            match key {
                "if" => found.from = names::image_path(value.into())?,
                "of" => found.to = names::image_path(value.into())?,
                "bs" => block = number()?,
                "skip" => skip = number()?,
                "count" => count = Some(number()?),
                _ => return Err(wrong("if=FILE of=FILE bs=SIZE skip=N count=N")),
            }
        }
        if found.from.as_os_str().is_empty() || found.to.as_os_str().is_empty() {
            return Err("name what to read and what to make: if=FILE of=FILE".into());
        }
        if block == 0 {
            return Err("bs=0: a block has at least one byte".into());
        }
        let bytes = |blocks: u64| {
            let bytes = blocks.checked_mul(block);
            bytes.ok_or_else(|| format!("{blocks} blocks of {block} bytes are too many"))
        };
        found.skip = bytes(skip)?;
        found.count = count.map(bytes).transpose()?;
        Ok(found)
    }
}

pub(crate) fn run(args: &DdArgs) -> anyhow::Result<ExitCode> {
    let output_format = args.output_format.unwrap_or(Format::Raw);
    if let Some(text) = args.new.help_wanted(output_format) {
        crate::say::out(&text);
        return Ok(ExitCode::SUCCESS);
    }
    let operands = Operands::parse(&args.operands).map_err(Fault::Usage)?;
    let (reading, cache) = (args.sources.reading(), CacheMode::Writeback);
    let size = reading.open(&operands.from, args.format, cache, &watch::notes())?.size();
    let begin = operands.skip.min(size);
    if operands.skip > size {
        // As dd(1) has it: told, and nothing is copied.
        let (skip, from) = (operands.skip, operands.from.display());
        tell!("ringtap: {skip} bytes are to be skipped, and {from} has {size}: nothing is copied");
    }
    let end = operands.count.map_or(size, |count| begin.saturating_add(count).min(size));
    let recipe = args.new.recipe(&operands.to, Some(output_format), None)?;
    let into = Target::New(recipe.read(args.new.secret())?);
    convert::start(
        args.talk,
        &Convert {
            format: args.format,
            part: Some(begin..end),
            since: None,
            reading,
            ..Convert::new(operands.from, operands.to, into)
        },
    )
}

/// What its help and its manual page say beyond the options.
pub(crate) const SECTIONS: &[Section] = &[
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
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_those_of_dd() {
        let parse = |line: &str| {
            Operands::parse(&line.split(' ').map(str::to_owned).collect::<Vec<String>>())
        };
        let wanted = Operands { from: "a".into(), to: "b=c".into(), skip: 3072, count: Some(2048) };
        assert_eq!(parse("if=a of=b=c bs=1k skip=3 count=2"), Ok(wanted));
        let wanted = Operands { from: "a".into(), to: "b".into(), skip: 512, count: None };
        assert_eq!(parse("skip=1 of=b if=a"), Ok(wanted));
        for (line, said) in [
            ("if=a", "of=FILE"),
            ("if=a of=b bs=0", "at least one byte"),
            ("if=a of=b seek=1", "seek=1: write"),
            ("if=a of=b count=x", "count=x: write"),
            ("if=a of=b bs=1T count=99999999", "too many"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(said), "{error}");
        }
    }
}
