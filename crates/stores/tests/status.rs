//! What a server says of its blocks is asked in whole ones.

use std::process::{Command, Stdio};

use ringtap_io::{Holds, Op, Tasks, reactor};
use ringtap_stores::{Options, Store};

const BLOCK: u64 = 4096;

#[test]
fn a_server_of_large_blocks_is_asked_of_whole_ones() {
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (image, socket) = (folder.path().join("image"), folder.path().join("s"));
    let mut bytes = vec![0; 1 << 20];
    bytes[16 * 4096..32 * 4096].fill(7);
    std::fs::write(&image, &bytes).expect("written");
    // So that the rest is a hole.
    let dig = Command::new("fallocate").args(["-d"]).arg(&image).status().expect("fallocate");
    assert!(dig.success());
    let mut server = Command::new("nbdkit");
    server.args(["-f", "--filter=blocksize-policy", "-U"]).arg(&socket).arg("file").arg(&image);
    server.args(["blocksize-error-policy=error", "blocksize-minimum=4096"]);
    let mut server = server.stderr(Stdio::null()).spawn().expect("nbdkit");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let begun = std::time::Instant::now();
    let store = loop {
        match Store::open(&uri, &Options { read_only: true }) {
            Ok(store) => break store,
            Err(error) => assert!(begun.elapsed().as_secs() < 60, "{error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let mut tasks = Tasks::new(reactor().expect("a reactor"));
    let (io, file) = (tasks.io().clone(), store.file());
    let told = tasks.block_on(async move {
        let mut told = vec![];
        for (offset, len) in
            [(512, 15 * BLOCK), (16 * BLOCK - 512, BLOCK), (16 * BLOCK + 512, 1024)]
        {
            told.push(io.run(Op::Status { file, offset, len }).await);
        }
        told
    });
    drop(store);
    let _ = (server.kill(), server.wait());
    let told = told.expect("turns").into_iter().map(|one| match one {
        0.. => Ok(Holds::of_result(one)),
        errno => Err(errno),
    });
    let zeros = |len| Ok(Holds { len, hole: true, zero: true });
    let data = Ok(Holds { len: 1024, hole: false, zero: false });
    assert_eq!(told.collect::<Vec<_>>(), [zeros(15 * BLOCK), zeros(512), data]);
}
