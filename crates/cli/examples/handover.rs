//! For how long disks stand still while a server is followed by another: one disk, and 100 with 8 under load.
//!
//!     cargo build --release && cargo run --release -p ringtap --example handover -- target/release/ringtap
//!
//! Prints what the new process says (from the word to stop until it serves) and the slowest request of the loads.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let ringtap = std::env::args().nth(1).ok_or("name the program: target/release/ringtap")?;
    let ringtap = std::fs::canonicalize(ringtap)?;
    for (disks, loaded, bar) in [(1, 1, 20.0), (100, 8, 100.0)] {
        for format in ["raw", "qcow2"] {
            let (mut pauses, slowest) = measure(&ringtap, disks, loaded, format)?;
            pauses.sort_by(f64::total_cmp);
            let (least, median) = (pauses[0], pauses[pauses.len() / 2]);
            let most = pauses[pauses.len() - 1];
            println!(
                "{disks:>3} {format:>5} disks, {loaded} loaded: pause {least:.1} / {median:.1} / {most:.1} ms (least, median, \
                 most of {ROUNDS}; bar {bar} ms), slowest request {slowest:.1} ms"
            );
        }
    }
    Ok(())
}

/// The pauses of some upgrades, and the slowest request of all loads, in milliseconds.
fn measure(
    ringtap: &Path,
    disks: usize,
    loaded: usize,
    format: &str,
) -> Result<(Vec<f64>, f64), Box<dyn Error>> {
    let dir = tempfile::tempdir_in("/var/tmp")?;
    let command = || {
        let mut command = Command::new(ringtap);
        command.current_dir(dir.path()).env("RINGTAP_STATE_DIR", dir.path().join("state"));
        command
    };
    std::fs::create_dir(dir.path().join("state"))?;
    let mut serve = command();
    serve.args(["serve", "--control", "unix:c", "--pid-file", "pid"]);
    for number in 0..disks {
        let name = format!("{number}.img");
        command().args(["create", "-q", "-f", format, &name, "64M"]).status()?;
        serve.args([&name, "-f", format, "--vhost-user", &format!("{number}.sock")]);
    }
    let log = std::fs::File::create(dir.path().join("log"))?;
    let mut server = serve.stdout(Stdio::piped()).stderr(log).spawn()?;
    let mut ready = String::new();
    BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut ready)?;
    let seconds = (ROUNDS + 3).to_string();
    let load = |number: usize| {
        let socket = format!("{number}.sock");
        let line =
            ["load", "--socket", &socket, "--rw", "randrw", "--depth", "16", "--seconds", &seconds];
        let more = ["--fsync-every", "64", "--verify", "--output", "json"];
        let mut lab = Command::new(ringtap.with_file_name("ringtap-lab"));
        lab.current_dir(dir.path()).args(line).args(more).stdout(Stdio::piped()).spawn()
    };
    let loads: Vec<Child> = (0..loaded).map(load).collect::<Result<_, _>>()?;
    sleep(Duration::from_secs(1));
    for _ in 0..ROUNDS {
        let status = command().args(["upgrade", "unix:c"]).stdout(Stdio::null()).status()?;
        if !status.success() {
            return Err(format!("no upgrade; see {}/log", dir.keep().display()).into());
        }
        sleep(Duration::from_secs(1));
    }
    let mut slowest: f64 = 0.0;
    for load in loads {
        let output = load.wait_with_output()?;
        let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        if !output.status.success() {
            return Err(format!("a load failed: {said}").into());
        }
        slowest = slowest.max(said["lat_ns"]["max"].as_f64().unwrap_or(0.0) / 1e6);
    }
    let pid = std::fs::read_to_string(dir.path().join("pid"))?;
    Command::new("kill").arg(pid.trim()).status()?;
    let _ = server.wait();
    let log = std::fs::read_to_string(dir.path().join("log"))?;
    let told = log.lines().filter_map(|line| line.split("stood still for ").nth(1));
    let millis = |text: &str| {
        let (number, unit) = text.split_at(text.find(|c: char| c.is_alphabetic() || c == 'µ')?);
        let scale = match unit {
            "s" => 1e3,
            "ms" => 1.0,
            _ => 1e-3,
        };
        Some(number.parse::<f64>().ok()? * scale)
    };
    // The last may still be on its way out.
    sleep(Duration::from_millis(500));
    Ok((told.filter_map(millis).collect(), slowest))
}
