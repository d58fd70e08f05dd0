//! Ways of serving a disk that the user adds, beside the lab's.

use ringtap_lab::report::ranking::{self, Generator};
use ringtap_lab::workload;

use super::*;

/// A server from a catalogue runs on the lab's disk as any other; a raw image that exists is read, and left as it was.
#[test]
fn ways_of_the_users_own() {
    let bench = Bench::new();
    let catalogue = bench.dir.path().join("run-ways.toml");
    std::fs::write(
        &catalogue,
        "[[backend]]\nname = \"mine\"\ntitle = \"my server\"\nstages = [\"host\"]\n\
         serve_nbd = \"qemu-nbd --persistent --shared=0 -f raw --cache none -k '{socket}' '{disk}'\"\n",
    )
    .unwrap();
    let image = bench.dir.path().join("run-image.raw");
    let content: Vec<u8> = (0..32u32 << 20).map(|at| (at / 4096 % 251) as u8).collect();
    std::fs::write(&image, &content).unwrap();
    let mut words: Vec<std::ffi::OsString> =
        "compare --stages host --rounds 2 --seconds 0.2 --seed 5 --size 32M --ramp 0 \
         --backends native,qemu-nbd --workloads randread-4k-qd32,randwrite-4k-qd32,durability"
            .split_whitespace()
            .map(Into::into)
            .collect();
    for (flag, path) in
        [("--dir", bench.dir.path()), ("--catalogue", &catalogue), ("--image", &image)]
    {
        words.extend([flag.into(), path.into()]);
    }
    let plan = Plan::from_args(&Cli::parse_from(words).args).unwrap();
    let ended = run::run(&plan, &bench.env, &bench.out(), &Stop::default()).unwrap();
    bench.assert_clean();
    assert_eq!((ended.state, ended.failures), (State::Complete, 0));
    assert_eq!(std::fs::read(&image).unwrap(), content, "an image of the user's is only read");

    let analysis = report::load(&bench.out()).unwrap();
    let ran = |arm: &str, workload: &str| {
        analysis.find(Stage::Host, arm, workload, Metric::Iops).is_some()
    };
    assert!(ran("mine", "randread-4k-qd32") && ran("mine", "randwrite-4k-qd32"));
    assert!(ran("my-image", "randread-4k-qd32") && !ran("my-image", "randwrite-4k-qd32"));
    let refused = |workload: &str| {
        let of = |skip: &&run::folder::Skip| {
            skip.backend == "my-image" && skip.workload.as_deref() == Some(workload)
        };
        analysis.run.skipped.iter().find(of).unwrap().missing.clone()
    };
    assert!(refused("randwrite-4k-qd32").remedy.contains("--overwrite"));
    assert!(refused("durability").reason.contains("cannot be counted"));
    let arm = |name: &str| analysis.run.arms.iter().find(|arm| arm.name == name).unwrap();
    assert_eq!(arm("mine").title, "my server");
    assert!(arm("mine").command.as_ref().unwrap().contains("qemu-nbd"));
    assert_eq!(ranking::generator(arm("mine")), Generator::Nbd);
    assert_eq!(ranking::generator(arm("my-image")), Generator::Device);
    // Named before the run beside what the same generator drives.
    let primary = analysis.run.plan.questions.iter().flat_map(|question| &question.primary);
    let pairs: Vec<_> = primary.map(|one| (one.arm.as_str(), one.against.as_str())).collect();
    assert!(pairs.contains(&("mine", "ringtap-nbd")) && pairs.contains(&("my-image", "native")));
    let best = ranking::best(
        &analysis,
        Stage::Host,
        workload::find("randread-4k-qd32").unwrap(),
        Metric::Iops,
    );
    assert_ne!(
        best.map(|best| best.0.name.as_str()),
        Some("my-image"),
        "its flushes are not counted"
    );
}

/// Its rows had the speed of --dir's file system.
#[test]
fn no_files_are_measured_on_an_image_of_the_users() {
    // Of the lab's own tool, which its loads need.
    let lab = env!("CARGO_BIN_EXE_ringtap-lab").into();
    let bench = Bench { env: Env::new("/nonexistent/ringtap".into(), lab), ..Bench::new() };
    let image = bench.dir.path().join("image.raw");
    std::fs::write(&image, vec![0; 32 << 20]).unwrap();
    let mut words: Vec<std::ffi::OsString> =
        "compare --stages host --rounds 2 --seconds 0.2 --size 32M --overwrite --backends native \
         --workloads randread-4k-qd32,filecopy,filecopy-durable"
            .split_whitespace()
            .map(Into::into)
            .collect();
    words.extend(["--image".into(), image.into()]);
    let plan = Plan::from_args(&Cli::parse_from(words).args).unwrap();
    let (stages, skipped) = run::matrix(&plan, &bench.env);
    let loads = |name: &str| {
        let arm = stages[0].1.iter().find(|arm| arm.name == name).unwrap();
        arm.workloads.iter().map(|load| load.name()).collect::<Vec<_>>()
    };
    assert_eq!(loads("my-image"), ["randread-4k-qd32"]);
    assert!(loads("native").contains(&"filecopy-durable"), "{:?}", loads("native"));
    let why = skipped.iter().find(|skip| skip.backend == "my-image").unwrap();
    assert!(why.missing.reason.contains("no file system"), "{why:?}");
}

#[test]
fn what_is_wrong_with_a_way_is_said_before_anything_starts() {
    let bench = Bench::new();
    let refused = |words: &str| {
        let words = format!("compare --stages host --size 32M {words}");
        let args = Cli::parse_from(words.split_whitespace()).args;
        Plan::from_args(&args).unwrap_err().to_string()
    };
    let small = bench.dir.path().join("small.raw");
    std::fs::write(&small, vec![0; 1 << 20]).unwrap();
    // This folder's name has a blank in it: given as one word.
    let mut words: Vec<std::ffi::OsString> =
        vec!["compare".into(), "--stages".into(), "host".into(), "--size".into()];
    words.extend(["32M".into(), "--image".into(), small.into()]);
    let error = Plan::from_args(&Cli::parse_from(words).args).unwrap_err().to_string();
    assert!(error.contains("1048576 bytes") && error.contains("--size 1M"), "{error}");
    let error = refused("--qemu file=/x");
    assert!(error.contains("add --stages vm"), "{error}");
    let error = refused("--nbd-uri http://x");
    assert!(error.contains("no NBD URI"), "{error}");
    let error = refused("--device /nonexistent");
    assert!(error.contains("/nonexistent"), "{error}");
}
