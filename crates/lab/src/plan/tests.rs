use std::collections::BTreeSet;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: CompareArgs,
}

fn plan(words: &str) -> Result<Plan> {
    // The binary takes a plan's name before the flags.
    let mut words = words.split_whitespace().peekable();
    let known = words.next_if(|word| !word.starts_with('-')).map(str::to_owned);
    let args = Cli::parse_from(std::iter::once("compare").chain(words)).args;
    Plan::from_args(&CompareArgs { known, ..args })
}

#[test]
fn quick_and_normal() {
    let quick = plan("--quick --dir /tmp --stages host,guest").unwrap();
    assert_eq!((quick.rounds, quick.size, quick.margin), (12, 128 << 20, QUICK_MARGIN));
    let normal = plan("--dir /tmp --stages host,guest").unwrap();
    assert_eq!((normal.rounds, normal.size, normal.margin), (12, 1 << 30, FULL_MARGIN));
    assert!(!normal.questions.is_empty() && question::check(&normal.questions).is_ok());
    assert!(normal.workloads.len() > quick.workloads.len());
    let has_lvm = |plan: &Plan| plan.backends.iter().any(|(_, name)| name == "lvm-thin");
    assert!(has_lvm(&normal) && !has_lvm(&quick));
    assert_eq!(normal.stages, Stage::USUAL);
    assert_eq!(plan("--dir /tmp --list").unwrap().stages, Stage::USUAL);
    assert_eq!(normal.entries(Stage::Host)[0].name, "native");
    assert_eq!(normal.entries(Stage::Guest)[0].name, "ubd");
}

#[test]
fn who_names_nothing_is_asked_the_usual_question() {
    let usual = plan("--dir /tmp --seed 7").unwrap();
    assert_eq!(plan("quick --dir /tmp --seed 7").unwrap(), usual);
    assert_eq!(plan("--quick --dir /tmp --seed 7").unwrap(), usual);
    assert_eq!((usual.stages.as_slice(), usual.rounds), ([Stage::Vm].as_slice(), 12));
    assert_eq!(usual.margin, QUICK_MARGIN);
    let [question] = &usual.questions[..] else { panic!("{:?}", usual.questions) };
    assert_eq!((question.name.as_str(), question.primary.len()), (quick::QUESTION, 9));
    // What most have comes first: all is set beside it, and it runs twice.
    assert_eq!(usual.entries(Stage::Vm)[0].name, "virtio-default");
    let (slow, base) = backend::known_slow(Stage::Vm).unwrap();
    for one in &question.primary {
        let runs = |arm: &str| {
            let there = usual.backends.iter().any(|(_, name)| name == arm);
            there && usual.runs(one.stage, &one.workload, arm)
        };
        // The controls of each load that is asked about: the twin's original, the slow arm and what it is otherwise.
        for arm in [&one.arm, &one.against, "virtio-default", slow, base] {
            assert!(runs(arm), "{arm} in {}", one.workload);
        }
        assert_ne!(one.arm, "qsd-vhost", "it passes on no flush");
    }
    // Flags change it.
    assert_eq!(plan("--dir /tmp --rounds 14 --seed 7").unwrap().rounds, 14);
}

#[test]
fn every_plan_checks_who_flushes() {
    for words in ["", "published", "--quick --stages guest", "--stages two --workloads two-read"] {
        let plan = plan(&format!("{words} --dir /tmp")).unwrap();
        assert!(plan.workloads.iter().any(|name| name == "durability"), "{words}");
    }
}

#[test]
fn names_keep_the_catalogue_order_and_groups_unfold() {
    let plan =
        plan("--dir /tmp --backends qemu-nbd,native --workloads dd,randread-4k-qd1 --stages host")
            .unwrap();
    let names: Vec<&str> = plan.backends.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ["native", "qemu-nbd"]);
    assert_eq!(
        plan.workloads,
        [
            "randread-4k-qd1",
            "dd-throughput",
            "dd-throughput-dsync",
            "dd-latency-direct",
            "dd-latency-dsync",
            // Nobody named it: every plan checks it.
            "durability"
        ]
    );
}

#[test]
fn a_near_name_is_offered() {
    let text = |words| plan(words).unwrap_err().to_string();
    assert!(text("--backends qemunbd").contains("did you mean qemu-nbd"));
    let on_vm = text("--stages vm --backends ringtap-f");
    assert!(on_vm.contains("ringtap-vhost") && !on_vm.contains("fuse"), "{on_vm}");
    assert!(text("--workloads randread-4k-qd3").contains("randread-4k-qd32"));
    assert!(text("--stages hos").contains("did you mean host"));
    assert!(text("--backends zzz").contains("there are: "));
    assert!(
        text("disk.qcow2").contains(
            "quick, published, nbd, vhost-user, remote; two images are compared by naming"
        )
    );
}

#[test]
fn nonsense_is_refused_before_anything_starts() {
    for words in [
        "--rounds 0",
        "--size 5",
        "--size 1000001K",
        "--size much",
        "--seconds 0",
        "--dir /nowhere/at/all",
        "--stages guest --backends native",
        "--stages host,guest --backends native",
        "--backends native,virtio-raw",
        "--workloads job:/etc/passwd,fio",
        "--size 65T",
        "--stages two --workloads fio",
        "publishd",
        "published --plan /nowhere",
        "--fio-job /nowhere.fio",
    ] {
        assert!(plan(words).is_err(), "{words}");
    }
}

#[test]
fn no_backend_and_no_stage_is_left_out_silently() {
    let text = |words| plan(words).unwrap_err().to_string();
    let error = text("--dir /tmp --backends native,ahci");
    assert!(error.contains("\"ahci\" runs on stage vm, and the plan has host, guest"), "{error}");
    assert!(error.contains("add vm to --stages"), "{error}");
    let error = text("--dir /tmp --stages host,guest --backends native");
    assert!(
        error.contains("stage \"guest\" has none of these") && error.contains("ubd"),
        "{error}"
    );
    // Stages that nobody named are those that the backends need, and a flag narrows a known plan.
    let of = |words: &str| plan(words).unwrap().stages;
    assert_eq!(of("--dir /tmp --backends native"), [Stage::Host]);
    assert_eq!(
        of("published --dir /tmp --backends ringtap-vhost"),
        [Stage::Vm, Stage::Two, Stage::TwoVms]
    );
    assert_eq!(of("published --dir /tmp --stages vm"), [Stage::Vm]);
}

#[test]
fn the_published_plan_is_one_word() {
    let plan = plan("published --dir /tmp --rounds 7").unwrap();
    assert_eq!(plan.stages, [Stage::Vm, Stage::Two, Stage::TwoVms, Stage::Xen]);
    assert_eq!((plan.rounds, plan.size), (7, 96 << 20));
    assert!(plan.workloads.iter().any(|name| name == "snapshot-life"));
    assert!(
        plan.runs(Stage::Vm, "archive", "loop")
            && !plan.runs(Stage::Vm, "archive", "virtio-overlay")
    );
    assert!(plan.runs(Stage::Vm, "snapshot-life", "virtio-overlay"));
    let names: Vec<&str> = plan.entries(Stage::TwoVms).iter().map(|e| e.name).collect();
    for name in ["virtio-raw", "ringtap-vhost", "qsd-vhost", "loop", "lvm", "slow"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    // What was published is asked pair for pair.
    let asked = |stage, arm: &str, against: &str, workload: &str| {
        let mut all = plan.questions.iter().flat_map(|question| &question.primary);
        all.any(|one| {
            one.stage == stage
                && one.arm == arm
                && one.against == against
                && one.workload == workload
        })
    };
    for workload in ["filecopy", "bonnie-direct", "archive"] {
        assert!(asked(Stage::Xen, "phy-lvm", "native", workload), "{workload}");
    }
    for (arm, against) in [("hvm-ide", "phy-lvm"), ("hvm-pv", "hvm-ide")] {
        assert!(asked(Stage::Xen, arm, against, "dd-latency-direct"), "{arm}");
    }
    for (arm, against) in
        [("ide-cache-off", "ide-writeback"), ("virtio-cache-off", "virtio-default")]
    {
        assert!(asked(Stage::Vm, arm, against, "dd-latency-direct"), "{arm}");
    }
    assert!(asked(Stage::TwoVms, "ringtap-vhost", "loop", "two-bonnie"));
    assert!(plan.runs(Stage::TwoVms, "two-bonnie", "loop"));
}

#[test]
fn servers_of_a_kind_are_plans_of_one_word() {
    for (name, stage, ours, peer, loads) in [
        ("nbd", Stage::Host, "ringtap-nbd", "qemu-nbd", 6),
        ("vhost-user", Stage::Host, "ringtap-vhost", "qsd-vhost", 6),
        ("remote", Stage::Remote, "ringtap-on-qemu-nbd", "qsd-on-qemu-nbd", 4),
    ] {
        assert!(servers::PLANS.iter().any(|(of, _)| *of == name));
        let plan = plan(&format!("{name} --dir /tmp --rounds 7")).unwrap();
        assert_eq!((plan.stages.clone(), plan.rounds), (vec![stage], 7), "{name}");
        // Each load is a question, Ringtap beside that peer in it; and flushes are counted.
        assert_eq!((plan.questions.len(), plan.workloads.len()), (loads, loads + 1), "{name}");
        for question in &plan.questions {
            let asked = question.primary.iter().any(|one| one.arm == ours && one.against == peer);
            assert!(asked, "{name}: {question:?}");
        }
        let generators: BTreeSet<_> = plan
            .entries(stage)
            .iter()
            .map(|entry| format!("{:?}", entry.backend.reach()))
            .collect();
        assert!(name == "remote" || generators.len() <= 2, "{name}: {generators:?}");
    }
    assert_eq!(servers::PLANS.len(), 3);
    let error = plan("nbdd --dir /tmp").unwrap_err().to_string();
    assert!(error.contains("nbd"), "{error}");
}

#[test]
fn every_published_load_shows_whether_it_could_show_a_difference() {
    let plan = plan("published --dir /tmp").unwrap();
    // What only snapshots have a curve of.
    let curves = ["snapshot-life", "bonnie-runs"];
    for &stage in &plan.stages {
        let (slow, base) = crate::backend::known_slow(stage).unwrap();
        for arm in [slow, base] {
            assert!(plan.entries(stage).iter().any(|entry| entry.name == arm), "{stage} {arm}");
            for load in plan.workloads().iter().filter(|load| load.runs_on(stage)) {
                let measured = plan.entries(stage).iter().any(|entry| {
                    plan.runs(stage, load.name(), entry.name)
                        && entry.backend.refuses(*load).is_none()
                });
                let runs = plan.runs(stage, load.name(), arm) || curves.contains(&load.name());
                assert!(runs || !measured, "{stage} {arm} {}", load.name());
            }
        }
    }
}

#[test]
fn every_published_comparison_has_a_control() {
    let plan = plan("published --dir /tmp").unwrap();
    for &stage in &plan.stages {
        let mut arms: Vec<crate::run::running::Running> = plan
            .entries(stage)
            .into_iter()
            .map(|entry| crate::run::running::Running {
                name: entry.name.into(),
                entry,
                workloads: plan
                    .workloads()
                    .into_iter()
                    .filter(|load| load.runs_on(stage))
                    .filter(|load| plan.runs(stage, load.name(), entry.name))
                    .filter(|load| entry.backend.refuses(*load).is_none())
                    .collect(),
            })
            .collect();
        crate::run::order::first_of_most(&mut arms);
        let twice: Vec<&str> = arms[0].rounds().map(|load| load.name()).collect();
        let asked = plan.questions.iter().flat_map(|question| &question.primary);
        for one in asked.filter(|one| one.stage == stage) {
            assert!(twice.contains(&one.workload.as_str()), "{stage} {}: {one:?}", arms[0].name);
        }
    }
}

#[test]
fn a_job_file_is_a_workload_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.fio");
    std::fs::write(&path, "[a]\nrw=randread\n").unwrap();
    let twice = format!("--fio-job {0} --fio-job {0}", path.display());
    let plan = plan(&format!("--dir /tmp --stages host {twice}")).unwrap();
    assert_eq!(plan.workloads.len(), 2, "named twice it is still one; durability is in every plan");
    assert_eq!(plan.workloads()[0].client(), workload::Client::Fio);
}

#[test]
fn flags_win_over_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.toml");
    std::fs::write(
        &path,
        "rounds = 7\nsize = \"64M\"\nstages = [\"host\"]\ndir = \"/tmp\"\nseed = 3\n",
    )
    .unwrap();
    let plan = plan(&format!("--plan {} --rounds 8", path.display())).unwrap();
    assert_eq!((plan.rounds, plan.size, plan.seed), (8, 64 << 20, 3));
    assert_eq!(plan.stages, [Stage::Host]);
    std::fs::write(&path, "round = 7\n").unwrap();
    let error = super::read(&path).unwrap_err().to_string();
    assert!(error.contains("line 1: no key \"round\"; did you mean rounds"), "{error}");
}

#[test]
fn what_is_wrong_in_a_file_is_named_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.toml");
    for (text, line, why) in [
        ("dir = \"/tmp\"\nrounds = = 2\n", "line 2", ""),
        ("dir = \"/tmp\"\n\nrunds = 2\n", "line 3", "did you mean rounds"),
        ("dir = \"/tmp\"\n\nbackends = [\"qemunbd\"]\n", "line 3", "did you mean qemu-nbd"),
        ("dir = \"/tmp\"\nstages = [\"hos\"]\n", "line 2", "did you mean host"),
        ("dir = \"/tmp\"\nsize = \"much\"\n", "line 2", "use for example"),
        ("dir = \"/tmp\"\nsize = \"5\"\n", "line 2", "at least 32 MiB"),
        ("dir = \"/tmp\"\nboot_limit = 0\n", "line 2", "give 1 to 3600"),
        ("rounds = 0\ndir = \"/tmp\"\n", "line 1", "give 1 to 1000"),
        ("dir = \"/tmp\"\n[only]\narchve = [\"loop\"]\n", "plan.toml", "did you mean archive"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = plan(&format!("--plan {}", path.display())).unwrap_err().to_string();
        assert!(error.contains(line) && error.contains(why), "{text}: {error}");
    }
}
