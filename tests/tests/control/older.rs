//! Commands of people to a server that is older than they are.

use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use ringtap_tests::{program, ringtap};
use serde_json::{Deserializer, Value, json};

use crate::{Empty, qemu_io};

/// The place of a key among these arguments, as the server says it.
fn place(value: &Value, key: &str, at: &str) -> Option<String> {
    let within = |name: &str| if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") };
    match value {
        Value::Object(members) => {
            let own = members.contains_key(key).then(|| within(key));
            own.or_else(|| members.iter().find_map(|(name, one)| place(one, key, &within(name))))
        }
        Value::Array(all) => {
            let mut all = all.iter().enumerate();
            all.find_map(|(number, one)| place(one, key, &within(&number.to_string())))
        }
        _ => None,
    }
}

/// Pass on what clients at a socket send to the server at another, which knows none of these keys.
fn relay(listener: UnixListener, server: &Path, unknown: &'static [&'static str]) {
    let server = server.to_owned();
    thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.expect("a client");
            let mut far = UnixStream::connect(&server).expect("the server");
            let [mut answers, mut refusals] =
                [&client, &client].map(|client| client.try_clone().expect("a socket"));
            let mut said = far.try_clone().expect("a socket");
            thread::spawn(move || {
                let _end = io::copy(&mut said, &mut answers);
                let _end = answers.shutdown(Shutdown::Both);
            });
            thread::spawn(move || {
                let requests = Deserializer::from_reader(BufReader::new(client)).into_iter();
                for request in requests.map_while(Result::<Value, _>::ok) {
                    let arguments = &request["arguments"];
                    let known = unknown.iter().find_map(|key| place(arguments, key, ""));
                    let written = match known {
                        None => far.write_all(request.to_string().as_bytes()),
                        Some(place) => {
                            let why = format!("Parameter '{place}' is unexpected");
                            let error = json!({ "class": "GenericError", "desc": why });
                            refusals
                                .write_all(format!("{}\r\n", json!({ "error": error })).as_bytes())
                        }
                    };
                    if written.is_err() {
                        break;
                    }
                }
                let _end = far.shutdown(Shutdown::Both);
            });
        }
    });
}

#[test]
fn copies_are_made_by_a_server_that_does_not_know_all_that_the_command_says() {
    let mut empty = Empty::new();
    empty.add("a", "raw", "4M");
    let uri = empty.nbd()("a");
    empty.export("e", "a", "nbd", json!({}));
    qemu_io(&uri, &["write -P 7 1M 1M", "flush"]).expect("written");
    let older = empty.path("older");
    let listener = UnixListener::bind(&older).expect("a socket");
    relay(listener, &empty.path("control"), &["__ringtap_persist", "__ringtap_checkpoint"]);
    let control = format!("unix:{}", older.display());
    for (verb, more) in [("backup", &["--checkpoint", "c"][..]), ("mirror", &["--copy"][..])] {
        let copy = empty.text(verb);
        let mut make = std::process::Command::new("qemu-img");
        crate::ok(make.args(["create", "-q", "-f", "raw", &copy, "4M"]));
        let words = ["disk", "--control", &control, verb, "a", &copy, "-f", "raw"];
        let output =
            program(ringtap().to_str().expect("plain"), "ringtap", [&words[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let of = |key: &str| said.matches(&format!("does not know {key}")).count();
        assert_eq!(of("__ringtap_persist"), 1, "{said}");
        assert_eq!(of("__ringtap_checkpoint"), usize::from(verb == "backup"), "{said}");
        let args = ["-r", "-f", "raw", "-c", "read -P 7 1M 1M", "-c", "read -P 0 0 1M", &copy];
        let read = program("qemu-io", "qemu-utils", args);
        assert!(read.status.success(), "{read:?}");
    }
    empty.control.ok("block-dirty-bitmap-remove", json!({ "node": "a", "name": "c" }));
}

#[test]
fn one_disk_is_asked_for_alone_where_the_server_knows_how() {
    let mut empty = Empty::new();
    let _uri = empty.nbd();
    for name in ["a", "b"] {
        empty.add(name, "raw", "4M");
        empty.export(&format!("export-{name}"), name, "nbd", json!({}));
    }
    for query in ["query-named-block-nodes", "query-block-exports"] {
        for (asked, expected) in [("b", 1), ("nobody", 0)] {
            let found = empty.control.ok(query, json!({ "__ringtap_node-name": asked }));
            let found = found.as_array().expect("a list");
            assert_eq!(found.len(), expected, "{query}: {found:?}");
            assert!(found.iter().all(|one| one["node-name"] == asked), "{found:?}");
        }
    }
    let older = empty.path("older");
    relay(
        UnixListener::bind(&older).expect("a socket"),
        &empty.path("control"),
        &["__ringtap_node-name"],
    );
    for socket in [empty.path("control"), older] {
        let control = format!("unix:{}", socket.display());
        let words = ["disk", "--control", &control, "info", "b", "--output", "json"];
        let output = program(ringtap().to_str().expect("plain"), "ringtap", words);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(told["node-name"], "b", "{told}");
        assert_eq!(told["exports"][0]["id"], "export-b", "{told}");
    }
}
