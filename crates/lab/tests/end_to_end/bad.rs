//! What goes wrong is said in a sentence with its remedy; what was started is stopped, what was made is removed, and the
//! samples so far are kept and marked.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use ringtap_lab::process;

use super::*;

/// A tmpfs; unmounted when it is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf, mib: u32) -> Small {
        fs::create_dir(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]).arg(&at);
        assert!(mount.status().unwrap().success(), "root is needed for a file system of its own");
        Small(at)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Runs the lab on a small file system that is filled after the first samples; its end and its report.
fn filled(out: impl Fn(&Path, &Bench) -> PathBuf) {
    let bench = Bench::new();
    let small = Small::mount(bench.dir.path().join("run-small"), 400);
    let words = "--stages host --rounds 200 --seconds 0.05 --backends native --workloads filecopy";
    let mut plan = bench.plan(words);
    plan.dir = small.0.clone();
    let (env, out) = (Env::new("/nonexistent/ringtap".into(), lab()), out(&small.0, &bench));
    let over = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            let until = Instant::now() + Duration::from_secs(60);
            let text = || fs::read_to_string(out.join("samples.jsonl")).unwrap_or_default();
            while text().lines().count() < 3 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            let mut filler = fs::File::create(small.0.join("filler")).unwrap();
            // What the lab frees in passing is taken as well.
            while !over.load(Ordering::SeqCst) {
                while std::io::Write::write_all(&mut filler, &[7; 65536]).is_ok() {}
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let ended = run::run(&plan, &env, &out, &Stop::default());
        over.store(true, Ordering::SeqCst);
        ended
    });
    let left: Vec<_> = fs::read_dir(&small.0).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| name == "filler" || name == "out"), "{left:?}");
    fs::remove_file(small.0.join("filler")).unwrap();
    let said = match &ended {
        Ok(ended) => {
            assert_eq!(ended.state, State::Failed);
            assert!(ended.samples >= 3, "{ended:?}");
            let analysis = report::load(&out).unwrap();
            assert_eq!(analysis.run.troubles.len(), 1, "{:?}", analysis.run.troubles);
            let table = report::table::render(&analysis, false, Some(160));
            assert!(table.contains("PARTIAL: ended early by an error"), "{table}");
            assert!(table.contains("is full"), "{table}");
            analysis.run.troubles[0].clone()
        }
        // Where even the record could not be written.
        Err(error) => error.to_string(),
    };
    assert!(said.contains("full") || said.contains("No space left"), "{said}");
    assert!(said.contains("ree some space there") && said.contains("--dir"), "{said}");
    assert!(samples(&out).iter().filter(|sample| sample.error.is_none()).count() >= 3);
    report::write_html(&out, &report::load(&out).unwrap()).unwrap();
    drop(small);
    bench.assert_clean();
}

#[test]
fn a_disk_that_fills_during_a_run_ends_it() {
    filled(|_, bench| bench.out());
}

#[test]
fn so_does_one_that_holds_the_run_too() {
    filled(|small, _| small.join("out"));
}

/// A script in a folder of its own that stands before a program of that name.
fn stands_before(bench: &Bench, name: &str, script: &str) -> String {
    let folder = bench.dir.path().join("run-before");
    fs::create_dir(&folder).unwrap();
    let file = folder.join(name);
    fs::write(&file, script).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

fn real(program: &str) -> String {
    process::find(program).unwrap_or_else(|| panic!("{program} is needed")).display().to_string()
}

/// Runs the lab as a user does; exit code, stdout, stderr.
fn compare(bench: &Bench, words: &str, set: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(lab());
    command.args(["compare", "--verbose", "--seed", "5", "--size", "32M", "--ramp", "0"]);
    command
        .args(["--seconds", "0.1"])
        .arg("--dir")
        .arg(bench.dir.path())
        .arg("--out")
        .arg(bench.out());
    command.args(words.split_whitespace()).envs(set.iter().copied());
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Where each start of a guest leaves a line.
fn boots(bench: &Bench) -> PathBuf {
    bench.dir.path().join("run-boots")
}

/// Has a monitor of guests hang before it speaks; the PATH with it.
fn hangs(bench: &Bench, program: &str) -> String {
    let script = format!(
        "#!/bin/sh\ncase $1 in --version) exec {} --version;; esac\necho >>'{}'\nexec sleep 600\n",
        real(program),
        boots(bench).display()
    );
    stands_before(bench, program, &script)
}

/// Three rounds of a guest that does not boot: one try, one sentence, every cell marked.
fn does_not_boot(bench: &Bench, stage: &str, backend: &str, set: &[(&str, &str)]) -> String {
    let began = Instant::now();
    let words = format!(
        "--stages {stage} --backends {backend} --workloads randread-4k-qd1 --rounds 3 --boot-limit 2"
    );
    let (code, table, said) = compare(bench, &words, set);
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    assert_eq!(code, Some(1), "{table}{said}");
    bench.assert_clean();
    assert_eq!(fs::read_to_string(boots(bench)).unwrap().lines().count(), 1, "tried once");
    assert_eq!(said.matches("did not boot").count(), 3, "once whole, once for each arm: {said}");
    assert!(said.contains("--boot-limit"), "{said}");
    let samples = samples(&bench.out());
    assert_eq!(samples.len(), 7, "the flushes, then three rounds of the reference and its twin");
    assert!(samples.iter().all(|s| s.error.as_ref().is_some_and(|e| e.contains("did not boot"))));
    let analysis = report::load(&bench.out()).unwrap();
    assert_eq!(analysis.run.troubles.len(), 1, "{:?}", analysis.run.troubles);
    assert!(table.contains("Failed:"), "{table}");
    said
}

#[test]
fn a_guest_that_hangs_before_it_speaks_is_given_up() {
    let bench = Bench::new();
    let path = hangs(&bench, "linux.uml");
    let cache = bench.dir.path().join("run-cache").display().to_string();
    let said =
        does_not_boot(&bench, "guest", "ubd", &[("PATH", &path), ("XDG_CACHE_HOME", &cache)]);
    assert!(said.contains("did not come within 2 s"), "{said}");
}

#[test]
fn a_kernel_that_is_none_is_given_up() {
    let bench = Bench::new();
    let appliance = bench.env.pc().unwrap_or_else(|m| panic!("{}: {}", m.reason, m.remedy));
    // What is remembered of KVM is found out by the real one.
    ringtap_guest::Qemu::kvm_works(&appliance);
    let garbage = bench.dir.path().join("run-garbage");
    fs::write(&garbage, "no kernel at all\n".repeat(4096)).unwrap();
    let script = format!(
        "#!/bin/bash\nargs=()\nwhile [ $# -gt 0 ]; do\ncase $1 in\n-kernel) args+=(-kernel '{}'); shift;;\n\
         *) args+=(\"$1\");;\nesac\nshift\ndone\ncase ${{args[*]}} in *-kernel*) echo >>'{}';; esac\nexec {} \"${{args[@]}}\"\n",
        garbage.display(),
        boots(&bench).display(),
        real("qemu-system-x86_64")
    );
    let path = stands_before(&bench, "qemu-system-x86_64", &script);
    does_not_boot(&bench, "vm", "virtio-raw", &[("PATH", &path)]);
}

/// Runs the stage `xen` with a QEMU that hangs before it speaks; its samples, and how often it was started.
fn on_a_xen_that_hangs(words: &str) -> (Vec<Sample>, usize) {
    let bench = Bench::new();
    let (first, _) = bench.env.xen().unwrap_or_else(|m| panic!("{}: {}", m.reason, m.remedy));
    // What is remembered of KVM is found out by the real one.
    ringtap_guest::Qemu::kvm_works(&first);
    let path = hangs(&bench, "qemu-system-x86_64");
    let began = Instant::now();
    let words = format!("--stages xen --backends phy-lvm --boot-limit 2 {words}");
    let (code, table, said) = compare(&bench, &words, &[("PATH", &path)]);
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    assert_eq!(code, Some(1), "{table}{said}");
    assert!(said.contains("did not come within 2 s"), "{said}");
    bench.assert_clean();
    (samples(&bench.out()), fs::read_to_string(boots(&bench)).unwrap().lines().count())
}

#[test]
fn a_xen_that_hangs_is_given_up() {
    let (samples, boots) = on_a_xen_that_hangs("--workloads dd-latency-direct --rounds 1");
    assert_eq!((samples.len(), boots), (3, 2), "the flushes, the reference and its twin");
    let hung = |s: &Sample| s.error.as_ref().is_some_and(|e| e.contains("within 2 s"));
    assert!(samples.iter().all(hung), "{samples:?}");
}

/// Neither the twin nor another round has anything to boot for.
#[test]
fn a_durability_that_cannot_be_checked_says_why() {
    let (samples, boots) = on_a_xen_that_hangs("--workloads durability --rounds 2");
    let [sample] = &samples[..] else { panic!("{samples:?}") };
    assert_eq!((sample.arm.as_str(), sample.workload.as_str()), ("phy-lvm", "durability"));
    assert!(sample.error.as_ref().is_some_and(|e| e.contains("within 2 s")), "{sample:?}");
    assert_eq!(boots, 1);
}

#[test]
fn ctrl_c_is_heard_while_a_guest_boots() {
    for (stage, backend) in [
        ("guest", "ubd"),
        ("two-guests", "ubd"),
        ("vm", "virtio-raw"),
        ("two-vms", "virtio-raw"),
        ("xen", "phy-lvm"),
    ] {
        stopped_while_booting(stage, backend);
    }
}

fn stopped_while_booting(stage: &str, backend: &str) {
    let bench = Bench::new();
    // Where a guest's links and logs are; their paths must be plain.
    let files = tempfile::Builder::new().prefix("lab-test-").tempdir_in("/tmp").unwrap();
    let mut command = Command::new(lab());
    command.env("TMPDIR", files.path());
    if stage.ends_with("guest") || stage.ends_with("guests") {
        command.env("PATH", hangs(&bench, "linux.uml"));
        command.env("XDG_CACHE_HOME", bench.dir.path().join("run-cache"));
    } else {
        let appliance = match stage {
            "xen" => bench.env.xen().map(|(first, _)| first),
            _ => bench.env.pc(),
        };
        let appliance = appliance.unwrap_or_else(|m| panic!("{}: {}", m.reason, m.remedy));
        // What is remembered of KVM is found out by the real one.
        ringtap_guest::Qemu::kvm_works(&appliance);
        command.env("PATH", hangs(&bench, "qemu-system-x86_64"));
    }
    command.args(["compare", "--stages", stage, "--backends", backend, "--size", "32M"]);
    let workload = if stage.starts_with("two") { "two-read" } else { "randread-4k-qd1" };
    command.args(["--workloads", workload, "--rounds", "2"]);
    command.arg("--dir").arg(bench.dir.path()).arg("--out").arg(bench.out());
    let mut lab = process::Group::spawn(&mut command).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !boots(&bench).exists() {
        assert!(lab.ended().is_none() && Instant::now() < until, "{stage}: nothing was booted");
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_raw(i32::try_from(lab.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    // Unheard it takes a minute until the boot is given up, or more.
    let ended = lab.wait(Duration::from_secs(20));
    assert_eq!(ended.and_then(|status| status.code()), Some(3), "{stage}: {ended:?}");
    bench.assert_clean();
    assert_eq!(fs::read_dir(files.path()).unwrap().count(), 0, "{stage}: files stay");
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let cwd = fs::read_link(process.path().join("cwd")).unwrap_or_default();
        assert!(!cwd.starts_with(files.path()), "{stage}: {process:?} still runs");
    }
    assert!(samples(&bench.out()).is_empty(), "{stage}: what was interrupted is no failure");
}

#[test]
fn without_kvm_the_guest_is_translated_and_the_reason_said() {
    let bench = Bench::new();
    bench.env.pc().unwrap_or_else(|m| panic!("{}: {}", m.reason, m.remedy));
    // In a mount namespace of its own the device may be opened by nobody.
    let script = "[ ! -e /dev/kvm ] || { mount --bind /dev/kvm /dev/kvm && mount -o remount,bind,nodev /dev/kvm; } || exit 99\n\
                  exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--", "sh", "-c", script]).arg(lab()).arg("compare");
    command.args([
        "--stages",
        "vm",
        "--backends",
        "virtio-raw",
        "--workloads",
        "dd-latency-direct",
    ]);
    command.args([
        "--size",
        "32M",
        "--rounds",
        "1",
        "--seconds",
        "0.1",
        "--ramp",
        "0",
        "--seed",
        "5",
    ]);
    command.arg("--dir").arg(bench.dir.path()).arg("--out").arg(bench.out());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{}{said}", String::from_utf8_lossy(&output.stdout));
    bench.assert_clean();
    let (why, remedy) = match Path::new("/dev/kvm").exists() {
        true => ("/dev/kvm may not be opened by this user", "a user of the group kvm"),
        false => ("there is no /dev/kvm", "modprobe kvm_intel or kvm_amd"),
    };
    let sentence =
        format!("the guest's processor is translated (TCG), for {why}. What would help: ");
    assert!(said.contains(&format!("vm: {sentence}")) && said.contains(remedy), "{said}");
    // It ran all the same, and the report says how.
    let samples = samples(&bench.out());
    assert!(samples.len() == 3 && samples.iter().all(|sample| sample.error.is_none()));
    let analysis = report::load(&bench.out()).unwrap();
    for text in [report::markdown::render(&analysis), report::page::render(&analysis)] {
        let text = text.replace("&#39;", "'");
        assert!(
            text.contains("; under TCG: only ratios are claimed") && text.contains(&sentence),
            "{text}"
        );
    }
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_starts() {
    let bench = Bench::new();
    let plan = bench.dir.path().join("run-plan.toml");
    fs::write(&plan, "rounds = 6\nbackends = [\"native\", \"qemunbd\"]\n").unwrap();
    for (words, why) in [
        ("--backends qemunbd".to_owned(), "did you mean qemu-nbd"),
        ("--workloads randread-4k-qd2".into(), "randread-4k-qd1"),
        ("--size 40T --stages host --backends native".into(), "MiB free"),
        ("--boot-limit 0".into(), "give 1 to 3600"),
        (format!("--plan {}", plan.display().to_string().replace(' ', "\u{a0}")), "line 2"),
    ] {
        let mut command = Command::new(lab());
        command.arg("compare").arg("--dir").arg(bench.dir.path()).arg("--out").arg(bench.out());
        command.args(words.split(' ').map(|word| word.replace('\u{a0}', " ")));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words}: {said}");
        assert!(said.contains(why), "{words}: {said}");
        assert!(!bench.out().exists(), "{words}: a folder was made for nothing");
    }
    bench.assert_clean();
}

#[test]
fn a_tool_that_is_missing_is_a_reason_with_its_package() {
    let bench = Bench::new();
    let empty = bench.dir.path().join("run-empty").display().to_string();
    fs::create_dir(&empty).unwrap();
    let (code, table, _) = compare(&bench, "--list --stages host", &[("PATH", &empty)]);
    assert_eq!(code, Some(0));
    for package in ["apt-get install fio", "apt-get install qemu-utils"] {
        assert!(table.contains(package), "{package}: {table}");
    }
    // Where nothing at all can run, that is no success.
    let words = "--stages host --backends qemu-nbd --workloads randread-4k-qd1";
    let (code, table, said) = compare(&bench, words, &[("PATH", &empty)]);
    assert_eq!(code, Some(1), "{table}{said}");
    assert!(table.contains("qemu-nbd is not installed"), "{table}");
    assert!(said.contains("nothing of the plan can run here"), "{said}");
    bench.assert_clean();
}

#[test]
fn without_root_what_needs_it_is_a_reason() {
    let place = tempfile::Builder::new().prefix("lab-test-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // Where cargo builds may be closed to others.
    let copy = place.path().join("lab");
    fs::copy(lab(), &copy).unwrap();
    let mut command = Command::new("setpriv");
    if rustix::process::geteuid().is_root() {
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
    } else {
        command.arg("--");
    }
    command.arg(&copy).args([
        "compare",
        "--verbose",
        "--stages",
        "host",
        "--backends",
        "native,loop",
    ]);
    command.args(["--size", "32M", "--ramp", "0", "--seconds", "0.1", "--rounds", "1"]);
    command.args(["--workloads", "randread-4k-qd1", "--out", "run", "--dir", "."]);
    let output = command.current_dir(place.path()).output().unwrap();
    let (table, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{table}{said}");
    assert!(table.contains("host loop: making a loop device needs root"), "{table}{said}");
    assert!(table.contains("run ringtap compare as root or with sudo"), "{table}");
    let (_, samples) = run::folder::read(&place.path().join("run")).unwrap();
    assert_eq!(samples.len(), 2, "native and its twin");
}

#[test]
fn a_server_that_refuses_is_a_failed_row_that_quotes_it() {
    let bench = Bench::new();
    if process::find("qemu-nbd").is_none() {
        panic!("qemu-nbd is needed: apt-get install qemu-utils");
    }
    // A "ringtap" whose serve has a help and then refuses every disk.
    let script = bench.dir.path().join("run-ringtap");
    std::fs::write(
        &script,
        "#!/bin/sh\ncase \"$2\" in --help) exit 0;; esac\necho 'no such cheese' >&2\nexit 7\n",
    )
    .unwrap();
    let mut mode = std::fs::metadata(&script).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let env = Env::new(script.clone(), script.clone());
    let plan = bench.plan("--stages host --rounds 1 --seconds 0.1 --backends native,ringtap-nbd --workloads randread-4k-qd1");
    let ended = run::run(&plan, &env, &bench.out(), &Stop::default()).unwrap();
    assert_eq!((ended.state, ended.samples, ended.failures), (State::Complete, 3, 2));
    let analysis = report::load(&bench.out()).unwrap();
    let failure = &analysis.failures[0];
    assert_eq!((failure.stage, failure.arm.as_str()), (Stage::Host, "ringtap-nbd"));
    assert!(
        failure.error.contains("no such cheese") && failure.error.contains("7"),
        "{}",
        failure.error
    );
    std::fs::remove_file(script).unwrap();
    bench.assert_clean();
}
