//! What the program says: warnings, messages, the log.

use crate::program::{Running, python};
use crate::served::Server;
use crate::{folder, run};

#[test]
fn warnings_of_the_library_are_shown_in_every_verb() {
    let dir = folder();
    run(dir.path(), "create -f qcow2 a.qcow2 8M").ok();
    let server = Server::start(dir.path(), "a.qcow2 -f qcow2 --nbd unix:a.sock");
    let write = "import nbd, os, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); \
                 h.pwrite(b'x' * 65536, 0); os._exit(0)";
    Running::start(python(write, &[&server.uri(0)])).wait().ok();
    server.kill();
    for verb in [
        "map -f qcow2 a.qcow2",
        "measure -f qcow2 -O raw a.qcow2",
        "convert -q -f qcow2 a.qcow2 -O raw a.raw",
        "compare -f qcow2 a.qcow2 -F qcow2 a.qcow2",
    ] {
        let said = run(dir.path(), verb).stderr;
        let warning = said.lines().find(|line| line.starts_with("ringtap: warning: "));
        assert!(warning.is_some_and(|line| line.contains("killed server")), "{verb}: {said}");
    }
}
