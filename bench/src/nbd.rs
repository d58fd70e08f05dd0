//! The arms over NBD on a UNIX socket.

use crate::arms::{Arm, Kind, ringtap_program};
use crate::image::{Fs, Images, NULL_SIZE};
use crate::options::Options;
use crate::vhost_user::{qemu_engines, qemu_node};
use anyhow::{Context, Result};
use ringtap_lab::process::launch::Launch;
use std::fs;
use std::path::Path;

/// Name of the export on every server.
pub const EXPORT: &str = "disk";

/// Name of the Ringtap arm past the page cache.
pub const DIRECT: &str = "ringtap none";
const CACHED: &str = "ringtap writeback";

/// All arms for `fs`, with their sockets and configuration in `run`.
pub fn arms(fs: Fs, options: &Options, images: &Images, run: &Path) -> Result<Vec<Arm>> {
    let socket = |name: &str| run.join(format!("{name}.sock"));
    let mut arms = vec![ringtap(fs, "none", options, images.direct(), &socket("ringtap-none"))];
    for engine in qemu_engines(fs) {
        let socket = socket(&format!("qsd-{engine}"));
        let launch = Launch::new("qemu-storage-daemon", qsd_words(fs, engine, images, &socket));
        arms.push(Arm::server(&format!("qsd {engine}"), Kind::Qemu, DIRECT, &socket, launch));
    }
    if fs == Fs::Null {
        let socket = socket("nbdkit");
        let words = nbdkit_words(&socket, &["null", &NULL_SIZE.to_string()]);
        let launch = Launch::new("nbdkit", words);
        arms.push(Arm::server("nbdkit null", Kind::Direct, DIRECT, &socket, launch));
        return Ok(arms);
    }
    for engine in qemu_engines(fs) {
        let socket = socket(&format!("qemu-nbd-{engine}"));
        let launch = Launch::new("qemu-nbd", qemu_nbd_words(engine, images.direct(), &socket));
        arms.push(Arm::server(&format!("qemu-nbd {engine}"), Kind::Qemu, DIRECT, &socket, launch));
    }
    let mut arms: Vec<Arm> = arms.into_iter().map(|arm| arm.on(images.direct())).collect();
    arms.push(Arm::native(DIRECT, images.direct()));

    let cached = images.cached();
    let mut page_cache = |name: &str, launch: Launch, socket: &Path| {
        arms.push(Arm::server(name, Kind::PageCache, CACHED, socket, launch).on(cached));
    };
    let file = format!("file={}", cached.display());
    for (name, extra) in [
        ("nbdkit file", vec![]),
        ("nbdkit fadvise", vec!["fadvise=random"]),
        ("nbdkit cache=none", vec!["cache=none"]),
    ] {
        let socket = socket(&name.replace(' ', "-"));
        let plugin: Vec<&str> = ["file", &file].into_iter().chain(extra).collect();
        page_cache(name, Launch::new("nbdkit", nbdkit_words(&socket, &plugin)), &socket);
    }
    let nbd_server_socket = socket("nbd-server");
    page_cache("nbd-server", nbd_server(cached, &nbd_server_socket, run)?, &nbd_server_socket);
    let socket = socket("ringtap-writeback");
    arms.push(ringtap(fs, "writeback", options, cached, &socket));
    Ok(arms)
}

fn ringtap(fs: Fs, cache: &str, options: &Options, image: &Path, socket: &Path) -> Arm {
    let disk = match fs {
        Fs::Null => format!("null:{}G", NULL_SIZE >> 30),
        _ => image.display().to_string(),
    };
    let nbd = format!("unix:{}", socket.display());
    let words = ["serve", &disk, "-f", "raw", "--cache", cache, "--nbd", &nbd, "--name", EXPORT];
    let launch = Launch::new(ringtap_program(options.ringtap.as_deref()), words);
    let name = if cache == "none" { DIRECT } else { CACHED };
    let arm = Arm::server(name, Kind::Ringtap, name, socket, launch);
    if fs == Fs::Null { arm } else { arm.on(image) }
}

fn qsd_words(fs: Fs, engine: &str, images: &Images, socket: &Path) -> Vec<String> {
    let node = qemu_node(fs, engine, images.direct());
    let server = format!("addr.type=unix,addr.path={}", socket.display());
    let export = format!("nbd,id=export,node-name=disk,name={EXPORT},writable=on");
    ["--blockdev", &node, "--nbd-server", &server, "--export", &export].map(String::from).into()
}

fn qemu_nbd_words(engine: &str, image: &Path, socket: &Path) -> Vec<String> {
    let (image, socket, aio) =
        (image.display().to_string(), socket.display().to_string(), format!("--aio={engine}"));
    [
        "--persistent",
        "--shared=8",
        "-f",
        "raw",
        "--cache=none",
        &aio,
        "-x",
        EXPORT,
        "-k",
        &socket,
        &image,
    ]
    .map(String::from)
    .into()
}

fn nbdkit_words(socket: &Path, plugin: &[&str]) -> Vec<String> {
    let socket = socket.display().to_string();
    ["--foreground", "--unix", &socket].iter().chain(plugin).map(|word| word.to_string()).collect()
}

/// nbd-server reads its exports from a file only, and serves more than one client only from the
/// background.
fn nbd_server(image: &Path, socket: &Path, run: &Path) -> Result<Launch> {
    let config = run.join("nbd-server.conf");
    let text = format!(
        "[generic]\nunixsock = {}\nallowlist = true\n\n[{EXPORT}]\nexportname = {}\nflush = true\nfua = true\n",
        socket.display(),
        image.display()
    );
    fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let pid_file = run.join("nbd-server.pid");
    let words = ["-C".into(), config.into_os_string(), "-p".into(), pid_file.clone().into()];
    let launch = Launch::new("nbd-server", words);
    Ok(Launch { pid_file: Some(pid_file), ..launch })
}
