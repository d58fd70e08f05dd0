//! Clients of the control socket that come just as a server is followed by another.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::bench::{Bench, RINGTAP, ends, image, said, stop};

/// A client, connected.
struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(bench: &Bench) -> Client {
        let socket = UnixStream::connect(bench.path("c.sock")).expect("it listens");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        Client(BufReader::new(socket))
    }

    fn greeted(bench: &Bench) -> Client {
        let mut client = Client::connect(bench);
        let greeting = client.line();
        assert!(greeting.contains("\"QMP\""), "{greeting:?}\n{}", bench.log());
        client
    }

    fn say(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).expect("it hears");
    }

    /// The next line; nothing where there will be none.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line, or the end");
        line
    }

    /// It is greeted, and has something done.
    fn is_served(&mut self, bench: &Bench) {
        let greeting = self.line();
        assert!(greeting.contains("\"QMP\""), "{greeting:?}\n{}", bench.log());
        self.is_answered(bench);
    }

    fn is_answered(&mut self, bench: &Bench) {
        for command in ["qmp_capabilities", "query-named-block-nodes"] {
            self.say(&format!("{{\"execute\":\"{command}\"}}\n"));
            let answer = self.line();
            assert!(answer.contains("\"return\""), "{command}: {answer:?}\n{}", bench.log());
        }
    }
}

fn begin_upgrade(bench: &Bench) -> Child {
    let mut command = bench.command("upgrade unix:c.sock");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it begins")
}

#[test]
fn who_comes_as_another_takes_over_is_served() {
    let mut bench = Bench::new();
    let file = image(&bench, "raw");
    let line = format!(
        "serve --control unix:c.sock --pid-file pid --metrics unix:m.sock {file} -f raw --node-name vm --vhost-user vu.sock"
    );
    let (_child, server) = bench.serve(&line);
    // One that does not come about leaves all of them here.
    let mut early = Client::greeted(&bench);
    bench.install("sleep 1; exit 1");
    let upgrade = begin_upgrade(&bench);
    std::thread::sleep(Duration::from_millis(500));
    let mut late = Client::connect(&bench);
    let output = upgrade.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    late.is_served(&bench);
    early.is_answered(&bench);
    // One of two says something while the next prepares.
    let [mut silent, mut early] = [(); 2].map(|()| Client::greeted(&bench));
    bench.install(&format!("sleep 1; exec {RINGTAP} \"$@\""));
    let upgrade = begin_upgrade(&bench);
    std::thread::sleep(Duration::from_millis(500));
    early.say("{\"execute\":\"qmp_cap");
    let [mut late, mut hasty] = [(); 2].map(|()| Client::connect(&bench));
    hasty.say("{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-jobs\"}\n");
    let mut scraper = UnixStream::connect(bench.path("m.sock")).expect("it listens");
    scraper.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    scraper.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("it is asked");
    let output = upgrade.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}\n{}", said(&output), bench.log());
    ends(server);
    let next = fs::read_to_string(bench.path("pid")).expect("it is written");
    let next = next.trim().parse().expect("a process");
    bench.pids.push(next);
    late.is_served(&bench);
    assert!(hasty.line().contains("QMP"));
    for _ in 0..2 {
        let answer = hasty.line();
        assert!(answer.contains("return"), "{answer:?}\n{}", bench.log());
    }
    silent.is_answered(&bench);
    early.say("abilities\"}\n");
    assert!(early.line().contains("return"), "{}", bench.log());
    let mut page = String::new();
    BufReader::new(scraper).read_line(&mut page).expect("a page");
    assert!(page.contains("200 OK"), "{page:?}\n{}", bench.log());
    stop(next);
}
