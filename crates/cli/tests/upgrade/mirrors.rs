//! Mirrors at work when a server is followed by another: they go on where they were left, and miss no write.

use serde_json::Value;

use crate::bench::{Bench, READY, ends, image, stop};
use crate::jobs::{is_at_work, is_paused, jobs, qmp, until};
use crate::said::members;

/// Have something done to the job, or the disk.
pub fn ask(bench: &Bench, command: &str, arguments: &str) {
    let asked = format!(r#"{{"execute":"{command}","arguments":{{{arguments}}}}}"#);
    let answer = qmp(bench, &asked);
    assert!(answer.contains("return"), "{asked}\n{answer}\n{}", bench.log());
}

/// How many bytes the job has dealt with.
fn dealt_with(bench: &Bench) -> u64 {
    let jobs = jobs(bench);
    let dealt = members(&jobs, "current-progress").first().and_then(Value::as_u64);
    dealt.unwrap_or_else(|| panic!("{jobs}\n{}", bench.log()))
}

/// How often the job was gone on with.
pub fn went_on(bench: &Bench) -> usize {
    bench.log().matches("goes on, which a server before this one began").count()
}

/// A disk and the node `there`, which `target` describes, in a server; its process.
pub fn serve(bench: &mut Bench, target: &str) -> u32 {
    let file = image(bench, "raw");
    let line =
        format!("serve --control unix:c.sock {file} -f raw --node-name vm --vhost-user vu.sock");
    let (_child, server) = bench.serve(&line);
    let load = bench.load("vu.sock", 1);
    bench.verified(load);
    there(bench, target);
    server
}

/// Have the node `there`.
pub fn there(bench: &Bench, target: &str) {
    let target = target.replace("DIR", &bench.dir.path().display().to_string());
    ask(bench, "blockdev-add", &format!(r#""node-name":"there",{target}"#));
}

/// The image that `target` is about; where that is an export, the server of it.
pub fn target_image(bench: &mut Bench, target: &str) -> Option<u32> {
    bench.ends_with("create -q -f qcow2 b.qcow2 64M", 0);
    let line = "serve b.qcow2 -f qcow2 --name there --nbd unix:n.sock";
    (target == EXPORT).then(|| bench.serve(line).1)
}

pub const FILE: &str = r#""driver":"qcow2","file":{"driver":"file","filename":"DIR/b.qcow2"}"#;
pub const EXPORT: &str = r#""driver":"raw","file":{"driver":"nbd","server":{"type":"unix","path":"DIR/n.sock"},"export":"there"}"#;

#[test]
fn mirrors_go_on_where_they_were_left() {
    for (target, sync, end) in [
        (FILE, "full", "block-job-complete"),
        (EXPORT, "full", "block-job-cancel"),
        (FILE, "top", "block-job-cancel"),
    ] {
        let mut bench = Bench::new();
        let other = target_image(&mut bench, target);
        let mut server = serve(&mut bench, target);
        let load = bench.load("vu.sock", 6);
        let begin = format!(
            r#""device":"vm","target":"there","job-id":"j","sync":"{sync}","speed":1048576,"target-is-zero":true,"auto-dismiss":false"#
        );
        ask(&bench, "blockdev-mirror", &begin);
        until(&bench, is_at_work);
        // Programs that cannot take over, at once or once the disks stand still: it goes on here.
        for text in ["exit 1".to_owned(), format!("{READY}; sleep 0.3; exit 4")] {
            std::thread::sleep(std::time::Duration::from_millis(300));
            let before = dealt_with(&bench);
            assert!(before > 0);
            bench.install(&text);
            bench.ends_with("upgrade unix:c.sock", 1);
            until(&bench, is_at_work);
            assert!(dealt_with(&bench) >= before, "it has begun anew\n{}", bench.log());
        }
        bench.install_again();
        for paused in [false, true] {
            if paused {
                ask(&bench, "job-pause", r#""id":"j""#);
            }
            let before = dealt_with(&bench);
            let next = bench.upgrade("unix:c.sock");
            ends(server);
            server = next;
            until(&bench, if paused { is_paused } else { is_at_work });
            assert!(dealt_with(&bench) >= before, "it has begun anew\n{}", bench.log());
        }
        ask(&bench, "job-resume", r#""id":"j""#);
        ask(&bench, "block-job-set-speed", r#""device":"j","speed":0"#);
        bench.verified(load);
        until(&bench, |jobs| jobs.contains("ready"));
        // What is ready is so at once in the next, while guests write on.
        let load = bench.load("vu.sock", 3);
        for _ in 0..2 {
            let next = bench.upgrade("unix:c.sock");
            ends(server);
            server = next;
            let jobs = jobs(&bench);
            assert!(jobs.contains("\"ready\""), "{jobs}\n{}", bench.log());
        }
        bench.verified(load);
        ask(&bench, end, r#""device":"j""#);
        until(&bench, |jobs| jobs.contains("concluded"));
        ask(&bench, "job-dismiss", r#""id":"j""#);
        stop(server);
        other.into_iter().for_each(stop);
        assert_eq!(went_on(&bench), 6, "{}", bench.log());
        let log = bench.log();
        assert!(!log.contains("begin it again") && !log.contains("has failed"), "{log}");
        assert_eq!(log.contains("it goes on in"), end == "block-job-complete", "{log}");
        bench.ends_with("compare -f raw -F qcow2 a.raw b.qcow2", 0);
        bench.ends_with("check -f qcow2 b.qcow2", 0);
    }
}

/// A mirror that waits for a word, and one that has had it.
#[test]
fn what_a_mirror_was_told_is_known_to_the_next() {
    let mut bench = Bench::new();
    target_image(&mut bench, FILE);
    let mut server = serve(&mut bench, FILE);
    let begin = r#""device":"vm","target":"there","job-id":"j","sync":"full","speed":0,"auto-finalize":false,"auto-dismiss":false"#;
    ask(&bench, "blockdev-mirror", begin);
    until(&bench, |jobs| jobs.contains("ready"));
    ask(&bench, "job-complete", r#""id":"j""#);
    until(&bench, |jobs| jobs.contains("pending"));
    let next = bench.upgrade("unix:c.sock");
    ends(server);
    server = next;
    until(&bench, |jobs| jobs.contains("pending"));
    ask(&bench, "job-finalize", r#""id":"j""#);
    until(&bench, |jobs| jobs.contains("concluded"));
    stop(server);
    assert!(bench.log().contains("it goes on in"), "{}", bench.log());
    bench.ends_with("compare -f raw -F qcow2 a.raw b.qcow2", 0);
}

/// An older program reads no state with a job in it that it would not go on with.
#[test]
fn a_program_that_knows_of_no_jobs_does_not_take_over_with_one() {
    let mut bench = Bench::new();
    target_image(&mut bench, FILE);
    let server = serve(&mut bench, FILE);
    let begin = r#""device":"vm","target":"there","job-id":"j","sync":"full","speed":1048576"#;
    ask(&bench, "blockdev-mirror", begin);
    until(&bench, is_at_work);
    // What the state says in its first line is all that such a program reads of it.
    bench.install("exec python3 \"$(dirname \"$0\")/ringtap.py\" \"${RINGTAP_HANDOVER#*:}\"");
    std::fs::write(
        bench.path("bin/ringtap.py"),
        "import array, os, socket, struct, sys\n\
         s = socket.socket(fileno=int(sys.argv[1]))\n\
         s.recv(16, socket.MSG_WAITALL)\n\
         _, anc, _, _ = s.recvmsg(1, 4096)\n\
         fds = array.array('i')\n\
         [fds.frombytes(d[:len(d) - len(d) % 4]) for _, _, d in anc]\n\
         head = os.pread(fds[0], 64, 0).split(b'\\n')[0]\n\
         text = b'it begins ' + head\n\
         s.sendall(struct.pack('IIII', 5, len(text), 0, 0) + text)\n",
    )
    .expect("a script");
    let said = bench.ends_with("upgrade unix:c.sock", 1);
    assert!(said.contains("it begins ringtap-handover 2 "), "{said}");
    until(&bench, is_at_work);
    stop(server);
}
