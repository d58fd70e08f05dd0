//! What an image names is opened where Ringtap recorded it, where the operator names it, or where image and
//! folder are the operator's own; and nowhere else. CVE-2024-32498 is what happens otherwise.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::{Running, program};
use crate::served::Server;
use crate::{folder, run};

const TENANT: u32 = 12345;

fn qemu_img(folder: &Path, words: &str) {
    let mut command = program("qemu-img", "qemu-utils");
    command.current_dir(folder).args(words.split_whitespace());
    Running::start(command).wait().ok();
}

/// A folder that a tenant may write to, with a file in it that is not the tenant's; none where this user
/// cannot give files away.
fn shared(dir: &Path) -> Option<PathBuf> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: takes root");
        return None;
    }
    let shared = dir.join("shared");
    fs::create_dir(&shared).expect("made");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).expect("changed");
    fs::write(shared.join("secret"), vec![7; 1 << 20]).expect("written");
    fs::set_permissions(shared.join("secret"), fs::Permissions::from_mode(0o600)).expect("changed");
    Some(fs::canonicalize(shared).expect("there"))
}

fn give(path: &Path) {
    chown(path, Some(TENANT), Some(TENANT)).expect("root may");
}

/// A name in an image's header, changed into another of the same length.
fn rename_inside(image: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(image).expect("an image");
    let at = bytes.windows(from.len()).position(|it| it == from.as_bytes()).expect("the name");
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    fs::write(image, bytes).expect("written");
}

#[test]
fn no_tenant_reads_a_file_by_naming_it_as_backing_file() {
    let dir = folder();
    let Some(shared) = shared(dir.path()) else { return };
    let secret = shared.join("secret").display().to_string();
    qemu_img(&shared, "create -q -f qcow2 -b secret -F raw evil");
    qemu_img(&shared, "create -q -f qcow2 new 1M");
    give(&shared.join("evil"));
    for (words, code) in [
        ("serve evil -f qcow2 --nbd unix:s", 1),
        ("serve evil -f qcow2 --read-only --nbd unix:s", 1),
        ("convert -f qcow2 evil -O raw out", 1),
        ("dd if=evil of=out -f qcow2", 1),
        ("info -f qcow2 --backing-chain evil", 1),
        ("map -f qcow2 evil", 1),
        ("measure -f qcow2 -O raw evil", 1),
        ("compare -f qcow2 -F qcow2 evil new", 2),
        ("commit -f qcow2 evil", 1),
        ("resize -q -f qcow2 evil +1M", 1),
        ("rebase -f qcow2 -b new -F qcow2 evil", 1),
        ("convert -f qcow2 new -O qcow2 -B evil -F qcow2 out", 1),
    ] {
        let said = run(&shared, words).failed(code);
        let another = words.starts_with("convert") || words.starts_with("rebase");
        let option = if another { "--allow-backing" } else { "--backing" };
        assert!(said.contains(&format!("add {option} {secret}")), "{words}: {said}");
        assert!(!shared.join("out").exists(), "{words}");
    }
    // The name is told, and the file not looked at.
    let told = run(&shared, "info -f qcow2 evil").ok();
    assert!(told.contains("backing file: secret"), "{told}");
    // With the option that was told it may.
    for option in ["--backing", "--allow-backing"] {
        run(&shared, &format!("map -f qcow2 evil {option} {secret}")).ok();
    }
    run(&shared, &format!("map -f qcow2 evil --backing {}", shared.display())).ok();
    run(&shared, &format!("convert -f qcow2 evil -O raw out --allow-backing {secret}")).ok();
    assert_eq!(fs::read(shared.join("out")).expect("it"), vec![7; 1 << 20]);
    let words = format!("evil -f qcow2 --nbd unix:s --backing {secret}");
    Server::start(&shared, &words).stop().ok();
    // Nor does an option for one file let in another.
    let said = run(&shared, "map -f qcow2 evil --backing new").failed(1);
    assert!(said.contains("--backing"), "{said}");
    // It is the folder that counts, and the file: one of root's own in it, and the tenant's in root's.
    chown(shared.join("evil"), Some(0), Some(0)).expect("root may");
    let said = run(&shared, "map -f qcow2 evil").failed(1);
    assert!(said.contains("shared can be written to by others"), "{said}");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o755)).expect("changed");
    run(&shared, "map -f qcow2 evil").ok();
    give(&shared.join("evil"));
    let said = run(&shared, "map -f qcow2 evil").failed(1);
    assert!(said.contains("evil belongs to user 12345"), "{said}");
}

#[test]
fn no_tenant_overwrites_a_file_by_naming_it_as_data_file() {
    let dir = folder();
    let Some(shared) = shared(dir.path()) else { return };
    let secret = shared.join("secret");
    let before = fs::read(&secret).expect("it");
    qemu_img(&shared, "create -q -f qcow2 -o data_file=othere evil 2M");
    rename_inside(&shared.join("evil"), "othere", "secret");
    give(&shared.join("evil"));
    for words in [
        "serve evil -f qcow2 --nbd unix:s",
        "serve evil -f qcow2 --read-only --nbd unix:s",
        "convert -f qcow2 evil -O raw out",
        "resize -q -f qcow2 evil +1M",
        "resize -q -f qcow2 --shrink evil 64k",
        // What is allowed to be read is not to be written to.
        "serve evil -f qcow2 --nbd unix:s --backing .",
        "serve evil -f qcow2 --nbd unix:s --backing secret",
    ] {
        let said = run(&shared, words).failed(1);
        let option = format!("add --data-file {}", secret.display());
        assert!(said.contains(&option), "{words}: {said}");
        assert!(fs::read(&secret).expect("it") == before, "{words}");
    }
    let words = format!("evil -f qcow2 --nbd unix:s --data-file {}", secret.display());
    Server::start(&shared, &words).stop().ok();
}

#[test]
fn what_ringtap_recorded_is_opened_and_nothing_in_its_place() {
    let dir = folder();
    let Some(shared) = shared(dir.path()) else { return };
    for name in ["base", "othr"] {
        fs::write(shared.join(name), vec![3; 1 << 20]).expect("written");
    }
    run(&shared, "create -q -b base -F raw over").ok();
    run(&shared, "create -q -f qcow2 -o data_file=dfil own 1M").ok();
    run(&shared, "create -q -f vpc base.vhd 4M").ok();
    run(&shared, "create -q -f vpc -b base.vhd -F vpc over.vhd").ok();
    for name in ["over", "own", "over.vhd"] {
        give(&shared.join(name));
    }
    run(&shared, "convert -f qcow2 over -O raw out").ok();
    assert_eq!(fs::read(shared.join("out")).expect("it"), vec![3; 1 << 20]);
    run(&shared, "map -f vpc over.vhd").ok();
    Server::start(&shared, "own -f qcow2 --nbd unix:s").stop().ok();
    // Its own name for another file.
    for (image, from, to) in [("over", "base", "othr"), ("own", "dfil", "othr")] {
        rename_inside(&shared.join(image), from, to);
        let said = run(&shared, &format!("map -f qcow2 {image}")).failed(1);
        assert!(said.contains("not recorded") && said.contains("othr"), "{said}");
        rename_inside(&shared.join(image), to, from);
        run(&shared, &format!("map -f qcow2 {image}")).ok();
    }
    // Another file of that name, and a link to one.
    fs::rename(shared.join("base"), shared.join("kept")).expect("moved");
    fs::write(shared.join("base"), vec![9; 1 << 20]).expect("written");
    let said = run(&shared, "map -f qcow2 over").failed(1);
    assert!(said.contains("put in its place"), "{said}");
    fs::remove_file(shared.join("base")).expect("removed");
    symlink("secret", shared.join("base")).expect("linked");
    let said = run(&shared, "map -f qcow2 over").failed(1);
    assert!(said.contains("--backing") && said.contains("secret"), "{said}");
    fs::remove_file(shared.join("base")).expect("removed");
    symlink("kept", shared.join("base")).expect("linked");
    run(&shared, "map -f qcow2 over").ok();
    // What rebase puts there counts from then on, and what was there no more.
    run(&shared, "rebase -f qcow2 -u -b othr -F raw over").ok();
    run(&shared, "map -f qcow2 over").ok();
    rename_inside(&shared.join("over"), "othr", "kept");
    assert!(run(&shared, "map -f qcow2 over").failed(1).contains("not recorded"));
    // A copy is not the image that was recorded.
    rename_inside(&shared.join("over"), "kept", "othr");
    let copied = Command::new("cp").current_dir(&shared).args(["over", "copy"]).status();
    assert!(copied.expect("cp").success());
    assert!(run(&shared, "map -f qcow2 copy").failed(1).contains("--backing"));
}

/// The records of users, and of file systems without attributes that only root writes.
#[test]
fn records_are_kept_in_the_state_folder_too() {
    let dir = folder();
    let Some(shared) = shared(dir.path()) else { return };
    fs::write(shared.join("base"), vec![3; 1 << 20]).expect("written");
    let state = dir.path().join("state");
    let own = |words: &str| {
        // Without the capability for such attributes.
        let mut command = program("setpriv", "util-linux");
        command.current_dir(&shared).env("STATE_DIRECTORY", &state);
        command.args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
        command.arg(ringtap_tests::ringtap()).args(words.split_whitespace());
        Running::start(command).wait()
    };
    own("create -q -b base -F raw over").ok();
    assert!(state.is_dir(), "nothing was kept");
    give(&shared.join("over"));
    own("map -f qcow2 over").ok();
    assert!(run(&shared, "map -f qcow2 over").failed(1).contains("--backing"));
    fs::set_permissions(&state, fs::Permissions::from_mode(0o777)).expect("changed");
    assert!(own("map -f qcow2 over").failed(1).contains("--backing"));
}

#[test]
fn a_folder_that_is_allowed_has_no_way_out() {
    let dir = folder();
    let Some(shared) = shared(dir.path()) else { return };
    let allowed = dir.path().join("allowed");
    fs::create_dir(&allowed).expect("made");
    fs::write(allowed.join("base"), vec![3; 1 << 20]).expect("written");
    symlink(shared.join("secret"), allowed.join("away")).expect("linked");
    for (name, opens) in [
        ("base", true),
        ("away", false),
        ("../shared/secret", false),
        ("../allowed/base", true),
        ("/proc/self/root/etc/passwd", false),
    ] {
        let place = allowed.join(name).display().to_string();
        qemu_img(&shared, &format!("create -q -u -f qcow2 -b {place} -F raw evil 1M"));
        give(&shared.join("evil"));
        let end = run(&shared, "map -f qcow2 evil --backing ../allowed");
        assert_eq!(end.status.success(), opens, "{name}: {}", end.stderr);
        fs::remove_file(shared.join("evil")).expect("removed");
    }
}

#[test]
fn a_data_file_belongs_to_one_image() {
    let dir = folder();
    run(dir.path(), "create -q -f qcow2 -o data_file=data a 1M").ok();
    fs::write(dir.path().join("data"), vec![5; 1 << 20]).expect("written");
    let copied = Command::new("cp").current_dir(dir.path()).args(["a", "b"]).status();
    assert!(copied.expect("cp").success());
    let said = run(dir.path(), "serve b -f qcow2 --nbd unix:s");
    if said.status.code() != Some(1) {
        eprintln!("skipped: there is nowhere to record an image");
        return;
    }
    let a = fs::canonicalize(dir.path().join("a")).expect("it").display().to_string();
    for words in [
        "serve b -f qcow2 --nbd unix:s",
        "serve b -f qcow2 --nbd unix:s --data-file data",
        "convert -f qcow2 b -O raw out",
        "resize -q -f qcow2 b +1M",
        "create -q -f qcow2 -o data_file=data c 1M",
    ] {
        let said = run(dir.path(), words).failed(1);
        assert!(said.contains(&format!("that of {a}")), "{words}: {said}");
        assert_eq!(fs::read(dir.path().join("data")).expect("it"), vec![5; 1 << 20], "{words}");
    }
    Server::start(dir.path(), "a -f qcow2 --nbd unix:s").stop().ok();
    fs::rename(dir.path().join("a"), dir.path().join("a2")).expect("moved");
    Server::start(dir.path(), "a2 -f qcow2 --nbd unix:s").stop().ok();
    // Its image is gone.
    fs::remove_file(dir.path().join("a2")).expect("removed");
    let said = run(dir.path(), "serve b -f qcow2 --nbd unix:s").failed(1);
    assert!(said.contains("add --data-file"), "{said}");
    Server::start(dir.path(), "b -f qcow2 --nbd unix:s --data-file data").stop().ok();
    Server::start(dir.path(), "b -f qcow2 --nbd unix:s").stop().ok();
    // It is locked as long as it is written to.
    let server = Server::start(dir.path(), "b -f qcow2 --nbd unix:s");
    let said = run(dir.path(), "resize -q -f raw data +1M").failed(1);
    assert!(said.contains("process"), "{said}");
    server.stop().ok();
}

#[test]
fn a_disk_of_its_own_is_no_data_file() {
    let dir = folder();
    crate::disk(dir.path(), "disk", 1 << 20);
    Server::start(dir.path(), "disk -f raw --nbd unix:s").stop().ok();
    qemu_img(dir.path(), "create -q -f qcow2 -o data_file=othr a 1M");
    rename_inside(&dir.path().join("a"), "othr", "disk");
    let said = run(dir.path(), "serve a -f qcow2 --nbd unix:s").failed(1);
    assert!(said.contains("recorded as an image itself"), "{said}");
}

/// Even of one's own: whose guest wrote the header is nobody's to trust.
#[test]
fn what_a_guest_wrote_onto_its_raw_disk_names_nothing() {
    let dir = folder();
    crate::disk(dir.path(), "disk", 1 << 20);
    Server::start(dir.path(), "disk -f raw --nbd unix:s").stop().ok();
    fs::write(dir.path().join("base"), vec![7; 1 << 20]).expect("written");
    qemu_img(dir.path(), "create -q -f qcow2 -b base -F raw evil");
    let image = fs::read(dir.path().join("evil")).expect("an image");
    fs::write(dir.path().join("disk"), image).expect("written");
    let said = run(dir.path(), "convert -f qcow2 disk -O raw out").failed(1);
    assert!(said.contains("recorded as raw"), "{said}");
    run(dir.path(), "convert -f qcow2 evil -O raw out").ok();
}

#[test]
fn extents_are_files_that_an_image_names() {
    let dir = folder();
    let Some(shared) = shared(dir.path()) else { return };
    qemu_img(&shared, "create -q -f vmdk -o subformat=monolithicFlat disk.vmdk 1M");
    give(&shared.join("disk.vmdk"));
    for (extent, ok) in [("disk-flat.vmdk", false), ("secret", false)] {
        let text = fs::read_to_string(shared.join("disk.vmdk")).expect("a descriptor");
        fs::write(shared.join("disk.vmdk"), text.replace("disk-flat.vmdk", extent))
            .expect("written");
        let end = run(&shared, "convert -f vmdk disk.vmdk -O raw out");
        assert_eq!(end.status.success(), ok, "{}", end.stderr);
        assert!(end.stderr.contains("--allow-backing"), "{}", end.stderr);
        fs::write(shared.join("disk.vmdk"), text).expect("written");
    }
    run(&shared, "convert -f vmdk disk.vmdk -O raw out --allow-backing disk-flat.vmdk").ok();
}
