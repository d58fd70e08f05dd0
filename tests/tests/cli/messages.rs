//! What is said of what went wrong: what was tried, on which file, what was found, and what to do.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use ringtap_tests::ringtap;
use rustix::process::Signal;

use crate::program::Running;
use crate::served::Server;
use crate::{disk, folder, run};

#[test]
fn messages_tell_of_the_file_that_is_meant_and_what_to_do() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    for words in [
        "create -q -f qcow2 base.qcow2 1M",
        "create -q -b base.qcow2 -F qcow2 over.qcow2",
        "create -q -f qcow2 -o data_file=data.raw data.qcow2 1M",
        "create -q -u -b nbd://127.0.0.1:1/x -F raw foreign.qcow2 1M",
    ] {
        run(dir.path(), words).ok();
    }
    fs::remove_file(dir.path().join("base.qcow2")).expect("the backing file");
    fs::remove_file(dir.path().join("data.raw")).expect("the data file");
    let missing = "the backing file \"base.qcow2\" of over.qcow2 is not there";
    for (code, words, said) in [
        (1, "serve over.qcow2 -f qcow2 --nbd unix:s", missing),
        (1, "info --backing-chain over.qcow2", missing),
        (1, "convert over.qcow2 -O raw x.raw", "ringtap rebase -u -b FILE -F FORMAT over.qcow2"),
        (1, "map over.qcow2", missing),
        (1, "commit over.qcow2", missing),
        (1, "serve data.qcow2 -f qcow2 --nbd unix:s", "the external data file \"data.raw\""),
        (1, "convert foreign.qcow2 -O raw x.raw", "cannot connect to 127.0.0.1:1"),
        (1, "info nbd:127.0.0.1:1:exportname=x", "cannot connect to 127.0.0.1:1"),
        (1, "serve nbd+unix:///?socket=s -f raw --nbd unix:t", "is the server running?"),
        (2, "map json:{}", "name the file"),
        (1, "check json:{}", "name the file"),
        (1, "convert a.raw -O raw rbd:pool/x", "cannot create rbd:pool/x: "),
        (2, "create -f raw https://host/x 1M", "ringtap publish"),
        (2, "create -f raw nbd://host/x 1M", "convert -n"),
        (2, "info s3:bucket/x", "s3://BUCKET/KEY"),
        (1, "dd if=file:nowhere of=x", "nowhere"),
        (2, "compare a.raw ssh://host/a.raw", "servers of that kind are not read from"),
    ] {
        let text = run(dir.path(), words).failed(code);
        assert!(text.contains(said), "{words}: {text}");
        assert!(!text.contains("create it first"), "{words}: {text}");
    }
    assert!(!dir.path().join("x.raw").exists() && !dir.path().join("rbd:pool").exists());
    disk(dir.path(), "json:1", 1 << 20);
    run(dir.path(), "info json:1").ok();
}

#[test]
fn a_lock_is_told_by_who_has_it_and_for_what() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    run(dir.path(), "create -q -f qcow2 base.qcow2 1M").ok();
    run(dir.path(), "create -q -b base.qcow2 -F qcow2 over.qcow2").ok();
    let mut server = Server::start(dir.path(), "a.raw -f raw --nbd unix:s");
    let process = format!("process {} (ringtap) has it open for writing", server.process().pid());
    let said = run(dir.path(), "serve a.raw -f raw --nbd unix:t").failed(1);
    assert!(said.contains(&format!("cannot open a.raw for writing: {process}")), "{said}");
    let said = run(dir.path(), "convert a.raw -O raw b.raw").failed(1);
    assert!(said.contains(&format!("cannot open a.raw for reading: {process}")), "{said}");
    assert!(run(dir.path(), "info a.raw").ok().contains(&format!("lock: {process}")));
    server.stop().ok();
    let server = Server::start(dir.path(), "a.raw -f raw --read-only --nbd unix:s");
    let said = run(dir.path(), "serve a.raw -f raw --nbd unix:t").failed(1);
    assert!(said.contains("for reading, and lets nobody write to it"), "{said}");
    server.stop().ok();
    // By way of an overlay the same image is in one command twice.
    // The first that is named has it, whichever is opened sooner.
    let [over, base] =
        ["over.qcow2 -f qcow2 --nbd unix:s", "base.qcow2 -f qcow2 --name b --nbd unix:s"];
    for _ in 0..8 {
        for (first, second, what) in [(over, base, "writing"), (base, over, "reading")] {
            let said = run(dir.path(), &format!("serve --strict {first} {second}")).failed(1);
            let told = format!("base.qcow2 for {what}: this command itself has it open");
            assert!(said.contains(&told), "{said}");
        }
    }
}

#[test]
fn a_reload_tells_of_a_file_that_is_gone_or_replaced() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let mut server = Server::start(dir.path(), "a.raw -f raw --nbd unix:s");
    let reload = |server: &mut Server, said: &str| {
        server.process().signal(Signal::HUP);
        let until = Instant::now() + Duration::from_secs(60);
        while !server.process().stderr().contains(said) {
            assert!(Instant::now() < until, "{}", server.process().stderr());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    reload(&mut server, "a.raw: still 1048576 bytes");
    fs::remove_file(dir.path().join("a.raw")).expect("the image");
    reload(&mut server, "WARN a.raw: its file was deleted or moved away");
    disk(dir.path(), "a.raw", 2 << 20);
    reload(&mut server, "WARN a.raw: another file has taken its place");
    server.stop().ok();
}

#[test]
fn the_limit_of_a_file_is_an_error_and_not_the_end() {
    let dir = folder();
    let mut command = Command::new("sh");
    command.current_dir(dir.path()).args(["-c", "ulimit -f 1024; exec \"$@\"", "sh"]);
    command.arg(ringtap()).args(["create", "-f", "raw", "a.raw", "1G"]);
    let said = Running::start(command).wait().failed(1);
    assert!(said.contains("cannot extend a.raw") && said.contains("ulimit -f"), "{said}");
}

#[test]
fn a_container_that_takes_restart_logs_with_it_is_told_at_the_start() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    fs::create_dir(dir.path().join("state")).expect("a folder");
    for (state_dir, told) in [("", true), ("--state-dir state ", false)] {
        let mut command =
            crate::served::command(dir.path(), &format!("{state_dir}a.raw -f raw --nbd unix:s"));
        command.env("container", "podman");
        let said = Server::started(command).stop().stderr;
        let is_told = said.contains("ends with this container") && said.contains("--state-dir");
        assert_eq!(is_told, told, "{state_dir}: {said}");
    }
}

#[test]
fn a_folder_of_logs_that_is_no_memory_or_that_others_may_write_to_is_told_of() {
    let dir = folder();
    disk(dir.path(), "a.raw", 1 << 20);
    let memory = tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs");
    let on_tmpfs = memory.path().to_str().expect("plain");
    fs::create_dir(dir.path().join("state")).expect("a folder");
    for (state_dir, told) in [("state", true), (on_tmpfs, false)] {
        let words = format!("--state-dir {state_dir} a.raw -f raw --nbd unix:s");
        let said = Server::started(crate::served::command(dir.path(), &words)).stop().stderr;
        assert_eq!(said.contains("which is not in memory"), told, "{state_dir}: {said}");
    }
    let shared = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(memory.path(), shared).expect("everybody's");
    let words = format!("--state-dir {on_tmpfs} a.raw -f raw --nbd unix:s");
    let said = Running::start(crate::served::command(dir.path(), &words)).wait().failed(1);
    assert!(said.contains("others may write to") && said.contains("0777"), "{said}");
}

/// Without any sign of its manager's, as containerd leaves none.
#[test]
fn a_namespace_of_processes_is_a_container() {
    let dir = folder();
    // A root without hidden files, so that signs of a container that the test itself runs in are not seen.
    let in_bare_root = "mount -t tmpfs none \"$0\" && for e in /*; do \
        if [ -L \"$e\" ]; then cp -P \"$e\" \"$0$e\"; \
        elif [ -d \"$e\" ]; then mkdir \"$0$e\" && mount --rbind \"$e\" \"$0$e\"; fi; done; \
        exec chroot \"$0\" \"$@\"";
    fs::create_dir(dir.path().join("root")).expect("a folder");
    for (namespace, told) in [("--pid", true), ("--uts", false)] {
        let mut command = Command::new("unshare");
        command.env_remove("container").env_remove("KUBERNETES_SERVICE_HOST");
        command.args(["--mount", namespace, "--fork", "sh", "-c", in_bare_root]);
        command.arg(dir.path().join("root")).arg(ringtap()).args(["serve", "--sandbox", "off"]);
        command.args(["--nbd", "unix:/run/none.sock", "-f", "raw", "/none.raw"]);
        let said = Running::start(command).wait().failed(1);
        assert!(said.contains("none.raw"), "{said}");
        assert_eq!(said.contains("ends with this container"), told, "{namespace}: {said}");
    }
}
