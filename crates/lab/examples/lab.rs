//! The lab's verbs without the rest of `ringtap`: `cargo run -p ringtap-lab --example lab -- compare --quick`.
//! `RINGTAP` names the binary that is measured.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "lab")]
enum Lab {
    Compare {
        known: Option<String>,
        #[command(flatten)]
        args: Box<ringtap_lab::CompareArgs>,
    },
    Report(ringtap_lab::ReportArgs),
    #[command(name = "lab-tool")]
    Tool(ringtap_lab::ToolArgs),
}

fn main() -> anyhow::Result<ExitCode> {
    match Lab::parse() {
        Lab::Compare { known, args } => {
            let ringtap = std::env::var_os("RINGTAP").map_or_else(|| "ringtap".into(), Into::into);
            ringtap_lab::compare(&ringtap_lab::CompareArgs { known, ..*args }, ringtap)
        }
        Lab::Report(args) => ringtap_lab::report(&args),
        Lab::Tool(args) => ringtap_lab::tool::run(&args).map(|()| ExitCode::SUCCESS),
    }
}
