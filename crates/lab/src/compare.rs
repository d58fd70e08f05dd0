//! The verbs: `ringtap compare` and `ringtap report`.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::backend;
use crate::cli::{CompareArgs, Output, ReportArgs};
use crate::env::Env;
use crate::error::Error;
use crate::plan::Plan;
use crate::remote::address::Host;
use crate::remote::{self, Ended, Wish};
use crate::report::{self, Analysis};
use crate::run::{self, folder::State};
use crate::sample::Stage;
use crate::selftest;
use crate::stats::rates;
use crate::stop::Stop;
use crate::workload;

/// Nothing could be measured, or the lab itself failed.
pub const FAILED: u8 = 1;
/// The plan makes no sense; nothing was started.
pub const USAGE: u8 = 2;
/// A part was done: interrupted, or some samples failed. The report says what is missing.
pub const PARTIAL: u8 = 3;
/// `report --fail-if-worse`: something is.
pub const WORSE: u8 = 4;

/// Runs `ringtap-lab compare`. `ringtap` is the binary whose `serve` is measured, `lab` this one.
///
/// Prints the result to stdout, progress and paths to stderr. The exit code is 0, [`FAILED`], [`USAGE`] or [`PARTIAL`].
/// Errors are those of the lab itself, such as a run folder that cannot be written.
pub fn compare(args: &CompareArgs, ringtap: PathBuf, lab: PathBuf) -> anyhow::Result<ExitCode> {
    // Folders and devices are those of the other machine, and so is the plan.
    if let Some(host) = &args.on {
        return elsewhere(args, host, &ringtap, &lab);
    }
    let plan = match &args.rest_of {
        Some(run) => run::rest::plan(args, run),
        None => Plan::from_args(args),
    };
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => return Ok(refuse(&error)),
    };
    if (args.self_test || args.list) && !matches!(args.output, Output::Table | Output::Json) {
        eprintln!("ringtap compare: --self-test and --list print a table or JSON");
        return Ok(ExitCode::from(USAGE));
    }
    let env = Env::new(ringtap, lab);
    if args.self_test {
        return self_test(&plan, &env, args);
    }
    if args.list {
        list(&plan, args, &env)?;
        return Ok(ExitCode::SUCCESS);
    }
    let stop = Stop::on_signals().context("cannot watch for Ctrl-C")?;
    let out = args.out.clone().unwrap_or_else(usual_folder);
    let ended = match run::run(&plan, &env, &out, &stop) {
        Ok(ended) => ended,
        Err(error @ Error::Plan(_)) => return Ok(refuse(&error)),
        Err(error) => return Err(error.into()),
    };
    told(&out, args)?;
    if ended.state == State::Complete && ended.samples + ended.failures == 0 {
        eprintln!(
            "ringtap compare: nothing of the plan can run here; the table says why, and what would help"
        );
        return Ok(ExitCode::from(FAILED));
    }
    Ok(match ended.state {
        State::Complete if ended.failures == 0 => ExitCode::SUCCESS,
        State::Complete | State::Interrupted if ended.samples > 0 => ExitCode::from(PARTIAL),
        State::Interrupted => ExitCode::from(PARTIAL),
        _ => ExitCode::from(FAILED),
    })
}

/// The four lines, or all of it.
fn told(out: &Path, args: &CompareArgs) -> anyhow::Result<()> {
    match args.verbose || args.output != Output::Table {
        true => show(out, args.output),
        false => answer(out),
    }
}

/// The same on another machine: its run comes back, and is reported here.
fn elsewhere(
    args: &CompareArgs,
    host: &Host,
    ringtap: &Path,
    lab: &Path,
) -> anyhow::Result<ExitCode> {
    let stop = Stop::on_signals().context("cannot watch for Ctrl-C")?;
    let has_run = !args.list && !args.self_test;
    let out = args.out.clone().unwrap_or_else(usual_folder);
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let wish = Wish { host, ringtap, lab, args: &words, out: has_run.then_some(out.as_path()) };
    if let Err(error) = remote::check(wish) {
        return Ok(refuse(&error));
    }
    match remote::run(wish, &stop) {
        Ok(Ended { code, came_back }) => {
            if came_back {
                told(&out, args)?;
            }
            Ok(ExitCode::from(code))
        }
        Err(error @ Error::Plan(_)) => {
            eprintln!("ringtap compare: {error}");
            Ok(ExitCode::from(FAILED))
        }
        Err(Error::Interrupted) => Ok(ExitCode::from(PARTIAL)),
        Err(error) => Err(error.into()),
    }
}

/// Runs `ringtap report`: makes the report of a run again, merges runs, or compares two, and prints the result.
pub fn report(args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let runs: Vec<&Path> = args.runs.iter().map(PathBuf::as_path).collect();
    if let Some(before) = &args.before {
        let [after] = runs[..] else {
            eprintln!("ringtap report: --before OLD takes one RUN beside it");
            return Ok(ExitCode::from(USAGE));
        };
        return changes(before, after, args);
    }
    if let Some(run) =
        runs.first().filter(|_| runs.len() == 1 && (args.out.is_none() || !args.with.is_empty()))
    {
        if args.with.is_empty() {
            show(run, args.output)?;
            return Ok(ExitCode::SUCCESS);
        }
        return with_others(run, args);
    }
    if !args.with.is_empty() {
        eprintln!("ringtap report: --with takes one RUN; merge them first, with --out");
        return Ok(ExitCode::from(USAGE));
    }
    let (record, samples) = match report::across::merge(&runs) {
        Ok(merged) => merged,
        Err(error @ Error::Plan(_)) => {
            eprintln!("ringtap report: {error}");
            return Ok(ExitCode::from(USAGE));
        }
        Err(error) => return Err(error.into()),
    };
    let out = args.out.clone().unwrap_or_else(|| {
        let date = usual_folder();
        let date = date.file_name().unwrap_or_default().to_string_lossy();
        Path::new("ringtap-runs").join(format!("merged-{date}"))
    });
    let mut folder = run::folder::Folder::create(&out)?;
    folder.write_record(&record)?;
    samples.iter().try_for_each(|sample| folder.append(sample))?;
    show(&out, args.output)?;
    Ok(ExitCode::SUCCESS)
}

/// Rows of others beside a run: printed, and in the run's folder as `beside.md`.
fn with_others(run: &Path, args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let beside = match report::beside::beside(&report::load(run)?, &args.with) {
        Ok(beside) => beside,
        Err(error @ (Error::Output { .. } | Error::File { .. })) => {
            eprintln!("ringtap report: {error}");
            return Ok(ExitCode::from(USAGE));
        }
        Err(error) => return Err(error.into()),
    };
    let text = report::beside::markdown(&beside);
    match args.output {
        Output::Table => print(text.trim_start())?,
        Output::Json => print(&(serde_json::to_string_pretty(&beside)? + "\n"))?,
        Output::Junit | Output::Openmetrics => {
            eprintln!("ringtap report: --with prints a table or JSON");
            return Ok(ExitCode::from(USAGE));
        }
    }
    let folder = args.out.as_deref().unwrap_or(run);
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    run::folder::replace(&folder.join("beside.md"), text.trim_start())?;
    eprintln!("report: {}", folder.join("beside.md").display());
    Ok(ExitCode::SUCCESS)
}

fn changes(old: &Path, new: &Path, args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let (before, after) = (report::load(old)?, report::load(new)?);
    if report::across::is_same(&before.run, &after.run) {
        eprintln!("ringtap report: {} and {} are the same run", old.display(), new.display());
        return Ok(ExitCode::from(USAGE));
    }
    let comparison = report::change::compare(&before, &after);
    let gate = args.fail_if_worse.map(|limit| report::gate::judge(&comparison, limit));
    match args.output {
        Output::Table => print(&report::change::markdown(&before, &after, &comparison))?,
        Output::Json => {
            let mut json = serde_json::to_value(&comparison)?;
            json["gate"] = serde_json::to_value(&gate)?;
            print(&(serde_json::to_string_pretty(&json)? + "\n"))?;
        }
        Output::Junit => print(&report::junit::changes(&comparison, args.fail_if_worse)?)?,
        Output::Openmetrics => {
            eprintln!(
                "ringtap report: OpenMetrics shows one run: leave out --before, and let Prometheus compare"
            );
            return Ok(ExitCode::from(USAGE));
        }
    }
    if comparison.changes.is_empty() {
        eprintln!(
            "ringtap report: {} and {} have no number in common: no backend and workload of one stage ran in both",
            old.display(),
            new.display()
        );
        return Ok(ExitCode::from(FAILED));
    }
    let folder = args.out.as_deref().unwrap_or(new);
    let page = report::write_changes(folder, &before, &after, &comparison)?;
    eprintln!("report: {}", page.canonicalize().unwrap_or(page).display());
    let Some(gate) = gate else { return Ok(ExitCode::SUCCESS) };
    eprint!("{}", gate.text());
    Ok(match (gate.worse.is_empty(), gate.is_whole()) {
        (false, _) => ExitCode::from(WORSE),
        (true, false) => ExitCode::from(PARTIAL),
        (true, true) => ExitCode::SUCCESS,
    })
}

fn self_test(plan: &Plan, env: &Env, args: &CompareArgs) -> anyhow::Result<ExitCode> {
    let stop = Stop::on_signals().context("cannot watch for Ctrl-C")?;
    let outcome = match selftest::run(plan, env, rates::RUNS, &stop) {
        Ok(outcome) => outcome,
        Err(Error::Interrupted) => return Ok(ExitCode::from(PARTIAL)),
        Err(error) => return Err(error.into()),
    };
    match args.output {
        Output::Json => print(&(serde_json::to_string_pretty(&outcome)? + "\n"))?,
        _ => print(&selftest::text(&outcome))?,
    }
    Ok(if outcome.all_found() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn refuse(error: &Error) -> ExitCode {
    eprintln!("ringtap compare: {error}");
    ExitCode::from(USAGE)
}

/// The answer in four lines; all else is on the page.
fn answer(run: &Path) -> anyhow::Result<()> {
    let analysis = report::load(run)?;
    let page = report::write_html(run, &analysis)?;
    let page = page.canonicalize().unwrap_or(page);
    print(&report::lines::render(&analysis, &page, columns()))
}

/// Columns of the terminal, where stdout is one.
fn columns() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(size.ws_col).filter(|columns| *columns > 0)
}

fn show(run: &Path, output: Output) -> anyhow::Result<()> {
    let analysis = report::load(run)?;
    let page = report::write_html(run, &analysis)?;
    match output {
        Output::Table => print(&table(&analysis))?,
        Output::Json => print(&(serde_json::to_string_pretty(&analysis)? + "\n"))?,
        Output::Junit => print(&report::junit::run(&analysis)?)?,
        Output::Openmetrics => print(&report::openmetrics::render(&analysis)?)?,
    }
    eprintln!("report: {}", page.canonicalize().unwrap_or(page).display());
    Ok(())
}

/// Prints to stdout; a reader that left (`| head`) is no error.
fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot print"),
    }
}

fn table(analysis: &Analysis) -> String {
    let stdout = std::io::stdout();
    let terminal = stdout.is_terminal();
    let colour = terminal && std::env::var_os("NO_COLOR").is_none();
    report::table::render(analysis, colour, if terminal { None } else { Some(160) })
}

fn usual_folder() -> PathBuf {
    let now = jiff::Zoned::now().strftime("%Y-%m-%dT%H-%M-%S").to_string();
    Path::new("ringtap-runs").join(now)
}

fn list(plan: &Plan, args: &CompareArgs, env: &Env) -> anyhow::Result<()> {
    // Named backends or all of them, the unusual ones too.
    let mut whole = plan.clone();
    if args.backends.is_none() {
        whole.backends = backend::all()
            .filter(|entry| plan.stages.contains(&entry.stage))
            .map(|entry| (entry.stage, entry.name.to_owned()))
            .collect();
    }
    let (arms, skipped) = run::matrix(&whole, env);
    if args.output == Output::Json {
        let value = serde_json::json!({
            "stages": whole.stages,
            "backends": whole.backends.iter().map(|(stage, name)| serde_json::json!({
                "stage": stage,
                "name": name,
                "title": backend::find(*stage, name).map(|entry| entry.title),
                "usual": backend::find(*stage, name).is_some_and(|entry| entry.usual),
                "workloads": arms.iter().filter(|(of, _)| of == stage).flat_map(|(_, arms)| arms)
                    .find(|arm| arm.name == *name).map(|arm| arm.workloads.iter().map(|w| w.name()).collect::<Vec<_>>()),
            })).collect::<Vec<_>>(),
            "workloads": workload::all().map(|w| serde_json::json!({"name": w.name(), "title": w.title(), "quick": w.listed().quick})).collect::<Vec<_>>(),
            "cannot_run": skipped,
        });
        return print(&(serde_json::to_string_pretty(&value)? + "\n"));
    }
    let mut text = String::new();
    for stage in &whole.stages {
        text += &format!("stage {stage}\n");
        for entry in whole.entries(*stage) {
            let mark = if entry.usual { " " } else { "+" };
            let gone = skipped.iter().any(|skip| {
                skip.stage == *stage && skip.backend == entry.name && skip.workload.is_none()
            });
            let gone = if gone { " — cannot run here" } else { "" };
            text += &format!("  {mark} {:<18} {}{gone}\n", entry.name, entry.title);
        }
    }
    text += "workloads\n";
    for workload in &whole.workloads() {
        text += &format!(
            "    {:<18} {}{}\n",
            workload.name(),
            workload.title(),
            if workload.listed().quick { " (quick)" } else { "" }
        );
    }
    for (group, members) in workload::groups() {
        text += &format!("    {group:<18} = {}\n", members.join(", "));
    }
    text += "+ only when named with --backends\n";
    let others: Vec<&str> =
        Stage::ALL.iter().filter(|s| !whole.stages.contains(s)).map(|s| s.name()).collect();
    if !others.is_empty() {
        text +=
            &format!("other stages, with backends of their own: --stages {}\n", others.join(","));
    }
    if !skipped.is_empty() {
        text += "cannot run here\n";
    }
    for (what, missing) in report::words::skipped(&skipped) {
        text += &format!("  {what}: {}. What would help: {}.\n", missing.reason, missing.remedy);
    }
    print(&text)
}
