//! An older program that is put in the place of this one: it takes over and is followed by this one again, or it cannot, and
//! then who asked for it hears why and what to do, and guests see nothing of it. `RINGTAP_OLDER=PATH` names a real one.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::bench::{Bench, READY, ends, lives, said, stop};
use crate::jobs::until;
use crate::mirrors::{FILE, ask, serve, target_image};

/// A real older program, where one is named.
fn older() -> Option<PathBuf> {
    let named = PathBuf::from(std::env::var_os("RINGTAP_OLDER").filter(|path| !path.is_empty())?);
    Some(fs::canonicalize(&named).unwrap_or_else(|error| panic!("{}: {error}", named.display())))
}

/// Whether a sentence says what to do where a program knows of no handover, or does not read what it is passed.
fn says_what_to_do(why: &str) -> bool {
    let knows_none = why.contains("before `ringtap upgrade`") && why.contains("stop this server");
    let reads_less = why.contains("this program reads") && why.contains("try again");
    knows_none || reads_less
}

#[test]
fn clients_go_on_with_an_older_program_and_back() {
    let Some(older) = older() else {
        println!("skipped: RINGTAP_OLDER names no older program");
        return;
    };
    let mut bench = Bench::new();
    for (name, format) in
        [("a.raw", "raw"), ("b.qcow2", "qcow2"), ("c.raw", "raw"), ("d.qcow2", "qcow2")]
    {
        bench.ends_with(&format!("create -q -f {format} {name} 64M"), 0);
    }
    let line = "serve --control unix:c.sock a.raw -f raw --vhost-user a.sock b.qcow2 -f qcow2 \
                --vhost-user b.sock c.raw -f raw --name c --nbd unix:n.sock d.qcow2 -f qcow2 --name d --nbd unix:n.sock";
    let (_child, mut server) = bench.serve(line);
    let guests = [bench.load("a.sock", 12), bench.load("b.sock", 12)];
    let clients = [bench.nbd_load("n.sock", "c", 12), bench.nbd_load("n.sock", "d", 12)];
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..2 {
        bench.install_file(&older);
        let asked = bench.command("upgrade unix:c.sock --output json").output().expect("it runs");
        match asked.status.success() {
            true => {
                let next = bench.followed_by(&asked);
                ends(server);
                server = next;
                println!("{} took over", older.display());
            }
            false => {
                let why = said(&asked);
                println!("{} did not: {why}", older.display());
                assert!(says_what_to_do(&why), "{why}\n{}", bench.log());
                assert!(lives(server), "{}", bench.log());
            }
        }
        std::thread::sleep(Duration::from_secs(1));
        bench.install_again();
        let next = bench.upgrade("unix:c.sock");
        ends(server);
        server = next;
        std::thread::sleep(Duration::from_secs(1));
    }
    guests.into_iter().for_each(|load| bench.verified(load));
    for load in clients {
        let output = load.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    }
    stop(server);
    for (format, name) in [("qcow2", "b.qcow2"), ("qcow2", "d.qcow2")] {
        bench.ends_with(&format!("check -f {format} {name}"), 0);
    }
}

/// What is newer than the program is told of, and what to do; once that is done it takes over.
#[test]
fn what_a_program_does_not_read_is_named() {
    let mut bench = Bench::new();
    target_image(&mut bench, FILE);
    let server = serve(&mut bench, FILE);
    let rest = r#""device":"vm","target":"there","sync":"full","auto-dismiss":false"#;
    ask(&bench, "blockdev-backup", &format!("{rest},\"job-id\":\"daily\""));
    until(&bench, |jobs| jobs.contains("concluded"));
    // What programs say that read all but the newest.
    let why = "its state is of version 9, and this program reads 1 to 8";
    let refuses = format!(
        "exec 3>&\"${{RINGTAP_HANDOVER#*:}}\"; printf '\\5\\0\\0\\0\\{:o}\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0{why}' >&3; exec sleep 60",
        why.len()
    );
    bench.install(&refuses);
    let said = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(said.contains(why) && says_what_to_do(&said), "{said}");
    assert!(said.contains("daily") && said.contains("job-dismiss"), "{said}");
    assert!(lives(server), "{}", bench.log());
    ask(&bench, "job-dismiss", r#""id":"daily""#);
    bench.install_again();
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    stop(next);
}

/// Such a one begins as a server of its own, with the same words, and finds its sockets and images in use.
#[test]
fn a_program_that_knows_of_no_handover_is_told_apart() {
    let mut bench = Bench::new();
    bench.ends_with("create -q -f raw a.raw 64M", 0);
    let (_child, server) =
        bench.serve("serve --control unix:c.sock a.raw -f raw --vhost-user a.sock");
    let load = bench.load("a.sock", 3);
    bench.install("exit 2");
    let why = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(why.contains("status 2") && says_what_to_do(&why), "{why}");
    // One that does not end, and says nothing.
    bench.install("exec sleep 60");
    let why = bench.ends_with("upgrade unix:c.sock --timeout 1", 1);
    assert!(why.contains("after 1 s"), "{why}");
    // One that has begun to prepare is of a later time.
    bench.install(&format!("{READY}; sleep 0.3; exit 4"));
    let why = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(why.contains("has ended") && !says_what_to_do(&why), "{why}");
    assert!(lives(server), "{}", bench.log());
    bench.verified(load);
    stop(server);
}
