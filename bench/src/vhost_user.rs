//! The arms over vhost-user-blk.

use crate::arms::{Arm, Kind, ringtap_program};
use crate::image::{Fs, Images, NULL_SIZE};
use crate::options::Options;
use crate::qemu10::Qemu10;
use anyhow::{Context, Result};
use ringtap_lab::process::find;
use ringtap_lab::process::launch::Launch;
use std::fs;
use std::path::Path;

/// Name of the only Ringtap arm here.
pub const RINGTAP: &str = "ringtap";

/// All arms for `fs`, with their sockets and configuration in `run`.
pub fn arms(
    fs: Fs,
    options: &Options,
    images: &Images,
    qemu10: Option<&Qemu10>,
    run: &Path,
) -> Result<Vec<Arm>> {
    let socket = |name: &str| run.join(format!("{name}.sock"));
    let mut arms = vec![ringtap(fs, options, images, &socket("ringtap"))];
    for engine in qemu_engines(fs) {
        let socket = socket(&format!("qsd-{engine}"));
        let launch = Launch::new("qemu-storage-daemon", qsd_words(fs, engine, images, &socket));
        arms.push(qemu(&format!("qsd {engine}"), fs, images, &socket, launch));
    }
    for engine in qemu_engines(fs) {
        let socket = socket(&format!("qsd10-{engine}"));
        let words = qsd_words(fs, engine, images, &socket);
        let known = qemu10.map(|qemu| qemu.launch("qemu-storage-daemon", words));
        let missing = known.is_none().then(|| "QEMU 10 is not fetched: use --qemu10".into());
        let launch = known.unwrap_or_else(|| Launch::new("qemu-storage-daemon", [""; 0]));
        let mut arm = qemu(&format!("qsd10 {engine}"), fs, images, &socket, launch);
        arm.missing = missing.or(arm.missing);
        arms.push(arm);
    }
    // QEMU's export in a thread that polls before it sleeps: faster at depth 1, dearer in CPU.
    let (engine, socket_path) = (qemu_engines(fs)[0], socket("qsd-iothread"));
    let mut words = qsd_words(fs, engine, images, &socket_path);
    words.extend(["--object".into(), "iothread,id=thread".into()]);
    for word in words.iter_mut().filter(|word| word.starts_with("vhost-user-blk")) {
        word.push_str(",iothread=thread");
    }
    // --object must come before the export that names it.
    words.rotate_right(2);
    let launch = Launch::new("qemu-storage-daemon", words);
    let mut arm = qemu(&format!("qsd {engine} iothread"), fs, images, &socket_path, launch);
    arm.kind = Kind::Direct;
    arms.push(arm);
    if fs != Fs::Null {
        arms.push(ubiblk(images, run, &socket("ubiblk"))?);
        arms.push(Arm::native(RINGTAP, images.direct()));
    }
    Ok(arms)
}

fn ringtap(fs: Fs, options: &Options, images: &Images, socket: &Path) -> Arm {
    let disk = match fs {
        Fs::Null => format!("null:{}G", NULL_SIZE >> 30),
        _ => images.direct().display().to_string(),
    };
    let socket_path = socket.display().to_string();
    let words = ["serve", &disk, "-f", "raw", "--cache", "none", "--vhost-user", &socket_path];
    let launch = Launch::new(ringtap_program(options.ringtap.as_deref()), words);
    let arm = Arm::server(RINGTAP, Kind::Ringtap, RINGTAP, socket, launch);
    if fs == Fs::Null { arm } else { arm.on(images.direct()) }
}

fn qemu(name: &str, fs: Fs, images: &Images, socket: &Path, launch: Launch) -> Arm {
    let arm = Arm::server(name, Kind::Qemu, RINGTAP, socket, launch);
    if fs == Fs::Null { arm } else { arm.on(images.direct()) }
}

/// The ways QEMU reaches a file here. tmpfs knows no native aio.
pub fn qemu_engines(fs: Fs) -> &'static [&'static str] {
    match fs {
        Fs::Tmpfs => &["io_uring", "threads"],
        Fs::Ext4 => &["io_uring", "native"],
        Fs::Null => &["null-co"],
    }
}

/// The image as a node of QEMU's, for `--blockdev`.
pub fn qemu_node(fs: Fs, engine: &str, image: &Path) -> String {
    match fs {
        Fs::Null => format!("driver=null-co,node-name=disk,size={NULL_SIZE},read-zeroes=off"),
        _ => {
            // On tmpfs O_DIRECT changes nothing but QEMU's alignment work: it is faster without.
            let direct = if fs == Fs::Tmpfs { "off" } else { "on" };
            let image = image.display();
            format!(
                "driver=file,node-name=disk,filename={image},cache.direct={direct},aio={engine}"
            )
        }
    }
}

fn qsd_words(fs: Fs, engine: &str, images: &Images, socket: &Path) -> Vec<String> {
    let export = format!(
        "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,addr.type=unix,addr.path={}",
        socket.display()
    );
    let node = qemu_node(fs, engine, images.direct());
    vec!["--blockdev".into(), node, "--export".into(), export]
}

/// ubiblk, if somebody has put it into PATH: no package has it.
fn ubiblk(images: &Images, run: &Path, socket: &Path) -> Result<Arm> {
    let names = ["ubiblk-vhost-backend", "vhost-backend", "ubiblk"];
    let program = names.iter().find_map(|name| find(name));
    let config = run.join("ubiblk.toml");
    let text = format!(
        "[device]\ndata_path = {:?}\nvhost_socket = {:?}\n\n\
         [tuning]\nqueue_size = 256\nseg_size_max = 1048576\n\n\
         [danger_zone]\nenabled = true\nallow_unencrypted_disk = true\n",
        images.direct(),
        socket
    );
    fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let program = program.unwrap_or_else(|| "ubiblk".into());
    let launch = Launch::new(program, ["--config".into(), config.into_os_string()]);
    Ok(Arm::server("ubiblk", Kind::Direct, RINGTAP, socket, launch).on(images.direct()))
}
