//! Encrypted disks, with each way to name their secret.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
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

/// What a killed server left is in no table yet: without the key it is taken up all the same.
#[test]
fn an_encrypted_image_is_repaired_with_what_a_killed_server_left() {
    let dir = folder();
    fs::write(dir.path().join("key"), SECRET).expect("a key");
    run(dir.path(), "create -q -f qcow2 -o encrypt.format=luks disk 16M --target-secret file:key")
        .ok();
    // A leak: cluster 200, which nobody refers to.
    let image = dir.path().join("disk");
    let file = fs::File::options().read(true).write(true).open(image).expect("the image");
    let long_at = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("it is there");
        u64::from_be_bytes(bytes)
    };
    let refcounts = long_at(long_at(48));
    file.set_len(201 << 16).expect("a size");
    file.write_all_at(&[0, 1], refcounts + 2 * 200).expect("a refcount");
    drop(file);
    let words = "disk -f qcow2 --secret file:key --nbd unix:sock";
    let server = Server::start(dir.path(), words);
    let bytes: Vec<u8> = (0..4u32 << 20).map(|n| (n * 31 >> 9) as u8).collect();
    fs::write(dir.path().join("data"), &bytes).expect("a file");
    // nbdcopy does not flush.
    let mut copy = program("nbdcopy", "libnbd-bin");
    copy.arg("data").arg(server.uri(0)).current_dir(dir.path());
    Running::start(copy).wait().ok();
    server.kill();
    let said = run(dir.path(), "check disk -f qcow2 --repair leaks").ok();
    assert!(said.contains("repaired: 1 leaked"), "{said}");
    let server = Server::start(dir.path(), words);
    let mut copy = program("nbdcopy", "libnbd-bin");
    copy.arg(server.uri(0)).arg("back").current_dir(dir.path());
    Running::start(copy).wait().ok();
    server.stop().ok();
    let back = fs::read(dir.path().join("back")).expect("the copy");
    assert!(back[..bytes.len()] == bytes, "what was acknowledged is lost");
}

/// The image is newer for it than what the killed server noted, and all of that is in it by then.
#[test]
fn keyslots_are_changed_with_what_a_killed_server_left() {
    let dir = folder();
    fs::write(dir.path().join("key"), SECRET).expect("a key");
    fs::write(dir.path().join("next"), "another").expect("a key");
    let create = "create -q -f qcow2 -o encrypt.format=luks,encrypt.iter-time=10 disk 16M";
    run(dir.path(), &format!("{create} --target-secret file:key")).ok();
    let server = Server::start(dir.path(), "disk -f qcow2 --secret file:key --nbd unix:sock");
    let bytes: Vec<u8> = (0..4u32 << 20).map(|n| (n * 31 >> 9) as u8).collect();
    fs::write(dir.path().join("data"), &bytes).expect("a file");
    // nbdcopy does not flush.
    let mut copy = program("nbdcopy", "libnbd-bin");
    copy.arg("data").arg(server.uri(0)).current_dir(dir.path());
    Running::start(copy).wait().ok();
    server.kill();
    let options = "encrypt.state=active,encrypt.new-secret=file:next,encrypt.iter-time=10";
    run(dir.path(), &format!("amend -f qcow2 --secret file:key -o {options} disk")).ok();
    let server = Server::start(dir.path(), "disk -f qcow2 --secret file:next --nbd unix:sock");
    let mut copy = program("nbdcopy", "libnbd-bin");
    copy.arg(server.uri(0)).arg("back").current_dir(dir.path());
    Running::start(copy).wait().ok();
    server.stop().ok();
    let back = fs::read(dir.path().join("back")).expect("the copy");
    assert!(back[..bytes.len()] == bytes, "what was acknowledged is lost");
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
