//! Servers that go away, for a while or for good.

use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::is_well;

use crate::bench::{Bench, Kind, MIB};

#[test]
fn a_server_that_comes_back_is_not_missed() {
    for kind in [Kind::Nbdkit, Kind::NbdkitOne, Kind::QemuOne] {
        let bench = Bench::new();
        bench.raw("a.raw", 64 * MIB);
        let source = bench.source(kind, "a.raw");
        let server = bench.serve(&bench.uri(), &["-f", "raw"]);
        let guest = bench.load("4");
        let mut source = Some(source);
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(500));
            // Killed, and so without a word.
            drop(source.take());
            thread::sleep(Duration::from_millis(200));
            source = Some(bench.source(kind, "a.raw"));
        }
        is_well(guest);
        let said = server.stop();
        assert!(said.matches("the connection is lost").count() >= 3, "{kind:?}: {said}");
        assert!(said.contains("connected again"), "{kind:?}: {said}");
    }
}

#[test]
fn requests_fail_where_the_server_stays_away_and_go_well_when_it_is_back() {
    let bench = Bench::new();
    bench.raw("a.raw", 8 * MIB);
    let source = bench.source(Kind::Nbdkit, "a.raw");
    let uri = format!("{}&reconnect=1", bench.uri());
    let server = bench.serve(&uri, &["-f", "raw"]);
    bench.io_well(&["write -P 5 0 64k"]);
    drop(source);
    let begun = Instant::now();
    let said = bench.io(&["read 0 4k"]);
    assert!(said.contains("error"), "{said}");
    assert!(begun.elapsed() >= Duration::from_millis(900), "{:?}", begun.elapsed());
    let _source = bench.source(Kind::Nbdkit, "a.raw");
    let until = Instant::now() + ringtap_tests::patience();
    while bench.io(&["read -P 5 0 64k"]).contains("error") {
        assert!(Instant::now() < until, "it is back, and not seen");
        thread::sleep(Duration::from_millis(100));
    }
    let said = server.stop();
    assert!(said.contains("requests fail until the server is back"), "{said}");
}

#[test]
fn a_server_that_has_another_disk_now_is_not_taken_for_it() {
    let bench = Bench::new();
    bench.raw("a.raw", 8 * MIB);
    bench.raw("b.raw", 4 * MIB);
    let source = bench.source(Kind::Nbdkit, "a.raw");
    let server = bench.serve(&format!("{}&reconnect=1", bench.uri()), &["-f", "raw"]);
    bench.io_well(&["read 0 4k"]);
    drop(source);
    let _source = bench.source(Kind::Nbdkit, "b.raw");
    assert!(bench.io(&["read 0 4k"]).contains("error"));
    let said = server.stop_badly();
    assert!(said.contains("it had 8388608 bytes and has 4194304 now"), "{said}");
}
