//! What is published, and what is not.

use std::fs;

use ringtap_tests::ok;

use crate::bench::{Bench, MIB, pattern, refusal, said};

#[test]
fn what_a_verb_has_not_ended_is_not_published() {
    let bench = Bench::new();
    fs::write(bench.path("disk.img"), pattern(MIB)).expect("written");
    let (image, www) = (bench.text("disk.img"), bench.text("www"));
    fs::create_dir(&www).expect("made");
    // As a `ringtap convert` that was killed leaves it.
    let mark = "import os, sys; os.setxattr(sys.argv[1], 'user.ringtap.unfinished', b'convert')";
    ok("python3", "python3", &["-c", mark, &image]);
    let why = refusal(&["publish", &image, &www]);
    assert!(why.contains("not whole") && why.contains("convert"), "{why}");
    assert_eq!(fs::read_dir(&www).expect("it").count(), 0);
    let whole = "import os, sys; os.removexattr(sys.argv[1], 'user.ringtap.unfinished')";
    ok("python3", "python3", &["-c", whole, &image]);
    assert!(said(&["publish", &image, &www]).contains("digest="));
}
