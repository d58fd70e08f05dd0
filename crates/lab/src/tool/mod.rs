//! Programs of the lab's own that must run where the disk is, inside a guest too: `ringtap-lab tool`, a hidden verb.

pub mod filecopy;
pub mod tree;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};

/// What `ringtap-lab tool` is told.
#[derive(Clone, Debug, Args)]
pub struct ToolArgs {
    #[command(subcommand)]
    tool: Tool,
}

#[derive(Clone, Debug, Subcommand)]
enum Tool {
    /// Copy a file through buffers of 256, 1024 and 4096 bytes, as UnixBench does
    Filecopy {
        /// Where the two files are made.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// Seconds of each copy.
        #[arg(long, value_name = "S")]
        seconds: f64,
        /// Make each pass over the file durable before the next.
        #[arg(long)]
        durable: bool,
    },
    /// Make a tree of files
    Tree {
        /// Where; made if it is not there.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// How many files.
        #[arg(long, value_name = "N")]
        files: u64,
        /// Bytes of all of them together.
        #[arg(long, value_name = "BYTES")]
        bytes: u64,
        /// Decides sizes and contents.
        #[arg(long, value_name = "N")]
        seed: u64,
    },
}

/// Runs a tool; prints one JSON object.
pub fn run(args: &ToolArgs) -> anyhow::Result<()> {
    let text = match &args.tool {
        Tool::Filecopy { dir, seconds, durable } => {
            anyhow::ensure!((0.01..=3600.0).contains(seconds), "--seconds: give 0.01 to 3600");
            let time = Duration::from_secs_f64(*seconds);
            serde_json::to_string(&filecopy::run(dir, time, *durable)?)?
        }
        Tool::Tree { dir, files, bytes, seed } => {
            anyhow::ensure!(*files > 0, "--files: give at least 1");
            serde_json::to_string(&tree::make(dir, *files, *bytes, *seed)?)?
        }
    };
    writeln!(std::io::stdout(), "{text}").context("cannot print")
}
