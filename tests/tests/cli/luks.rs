//! Encrypted disks, with each way to name their secret.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::program::{Running, program};
use crate::served::{Server, command};
use crate::{folder, nbdinfo, qemu_io, run};

const SECRET: &str = "a secret, with a newline\n";

/// A container of cryptsetup's with a payload of 1 MiB, and its key file.
fn container(folder: &Path) {
    let key = folder.join("key");
    fs::write(&key, SECRET).expect("a key file");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("chmod");
    let disk = folder.join("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(17 << 20)).expect("a sparse file");
    let mut format = program("cryptsetup", "cryptsetup-bin");
    format.args(["luksFormat", "-q", "--type", "luks2", "--sector-size", "512"]);
    format.args(["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--key-file"]);
    format.arg(&key).arg(&disk);
    Running::start(format).wait().ok();
}

#[test]
fn an_encrypted_disk_is_served_and_its_file_tells_nothing() {
    let dir = folder();
    container(dir.path());
    let server = Server::start(dir.path(), "disk -f luks --secret file:key --nbd unix:sock");
    assert_eq!(nbdinfo(&["--size", &server.uri(0)]).ok().trim(), "1048576");
    let uri = server.uri(0);
    let wrote = qemu_io(dir.path(), &uri, "write -P 0x5a 0 256k").wait().ok();
    assert!(wrote.contains("wrote 262144/262144"), "{wrote}");
    server.stop().ok();
    let bytes = fs::read(dir.path().join("disk")).expect("the disk");
    assert!(!bytes.windows(16).any(|window| window == [0x5a; 16]), "it lies there in the clear");

    // What was written is there again, and the other ways to name the secret open it.
    let mut by_credential =
        command(dir.path(), "disk -f luks --secret credential:key --nbd unix:sock");
    by_credential.env("CREDENTIALS_DIRECTORY", dir.path());
    let server = Server::started(by_credential);
    let read = qemu_io(dir.path(), &server.uri(0), "read -P 0x5a 0 256k").wait().ok();
    assert!(!read.contains("failed"), "{read}");
    server.stop().ok();
    let flags = rustix::pipe::PipeFlags::CLOEXEC;
    let (read, write) = rustix::pipe::pipe_with(flags).expect("a pipe");
    rustix::io::write(&write, SECRET.as_bytes()).expect("written");
    drop(write);
    rustix::io::fcntl_setfd(&read, rustix::io::FdFlags::empty()).expect("to be inherited");
    let words = format!("disk -f luks --secret fd:{} --nbd unix:sock", read.as_raw_fd());
    Server::start(dir.path(), &words).stop().ok();
}

#[test]
fn a_secret_that_is_not_there_is_told() {
    let dir = folder();
    container(dir.path());
    fs::write(dir.path().join("wrong"), "another\n").expect("a key file");
    for (words, said) in [
        ("", "--secret file:PATH"),
        ("--secret file:wrong", "opens none of the 1 keyslots"),
        ("--secret file:nothing", "nothing"),
        ("--secret credential:key", "CREDENTIALS_DIRECTORY"),
    ] {
        let message = run(dir.path(), &format!("map disk -f luks {words}")).failed(1);
        assert!(message.contains(said), "{words}: {message}");
    }
    let facts = run(dir.path(), "info disk -f luks --secret file:key").ok();
    assert!(facts.contains("format: luks") && facts.contains("1 MiB"), "{facts}");
}

#[test]
fn a_secret_that_everyone_reads_is_warned_of() {
    let dir = folder();
    container(dir.path());
    let key = dir.path().join("key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("chmod");
    let server = Server::start(dir.path(), "disk -f luks --secret file:key --nbd unix:sock");
    let told = server.stop().stderr;
    assert!(told.contains("can be read") && told.contains("644"), "{told}");
}
