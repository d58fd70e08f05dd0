//! Disks that are elsewhere, served over vhost-user-blk: on NBD servers and in Ceph.

use crate::arms::{Arm, Kind, ringtap_program};
use crate::goals::{Goal, Metric};
use crate::image::{Fs, Images};
use crate::lines::Line;
use crate::options::Options;
use anyhow::{Context, Result};
use ringtap_lab::process::launch::{Launch, Process};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of Ringtap's arm.
pub const RINGTAP: &str = "ringtap";

/// NBD servers that hold the disk.
pub const SERVERS: [&str; 3] = ["qemu-nbd", "nbdkit", "ringtap"];

/// One of [`SERVERS`] on an image, and where it listens.
pub fn start(
    name: &str,
    options: &Options,
    images: &Images,
    run: &Path,
) -> Result<(Process, PathBuf)> {
    let socket = run.join(format!("{name}.nbd"));
    let (at, image) = (socket.display().to_string(), images.direct().display().to_string());
    let launch = match name {
        "qemu-nbd" => Launch::new(
            name,
            ["-f", "raw", "--aio=io_uring", "-t", "-e", "16", "-x", "disk", "-k", &at, &image],
        ),
        "nbdkit" => Launch::new(name, ["-f", "-U", &at, "-e", "disk", "file", &image]),
        _ => Launch::new(
            ringtap_program(options.ringtap.as_deref()),
            ["serve", &image, "-f", "raw", "--name", "disk", "--nbd", &format!("unix:{at}")],
        ),
    };
    let mut server = Process::start(&launch, &run.join(format!("{name}.log")))?;
    server.wait_listening(&socket, crate::interrupt::stop())?;
    Ok((server, socket))
}

/// A disk of an NBD server, by Ringtap and by QEMU.
pub fn nbd(options: &Options, upstream: &Path, run: &Path) -> Vec<Arm> {
    let uri = format!("nbd+unix:///disk?socket={}", upstream.display());
    let node = format!(
        "driver=nbd,node-name=disk,export=disk,server.type=unix,server.path={}",
        upstream.display()
    );
    vec![ringtap(options, &uri, &[], run), qemu(node, run)]
}

/// Images of Ceph, one for each: `ours` by Ringtap, `theirs` by QEMU; fio has one more by itself.
pub fn rbd(options: &Options, conf: &Path, [ours, theirs]: [&str; 2], run: &Path) -> Vec<Arm> {
    let name = format!("rbd:rbd/{ours}:conf={}", conf.display());
    let node = format!("driver=rbd,node-name=disk,pool=rbd,image={theirs},conf={}", conf.display());
    let fio = Arm { name: "fio rbd".into(), image: None, ..Arm::native(RINGTAP, Path::new("")) };
    vec![ringtap(options, &name, &["--queues", "1"], run), qemu(node, run), fio]
}

fn ringtap(options: &Options, disk: &str, more: &[&str], run: &Path) -> Arm {
    let socket = run.join("ringtap.sock");
    let at = socket.display().to_string();
    let words = [&["serve", disk, "-f", "raw", "--vhost-user", &at], more].concat();
    let launch = Launch::new(ringtap_program(options.ringtap.as_deref()), words);
    Arm::server(RINGTAP, Kind::Ringtap, RINGTAP, &socket, launch)
}

fn qemu(node: String, run: &Path) -> Arm {
    let socket = run.join("qsd.sock");
    let export = format!(
        "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,addr.type=unix,addr.path={}",
        socket.display()
    );
    let words = ["--blockdev".into(), node, "--export".into(), export];
    let launch = Launch::new("qemu-storage-daemon", words);
    Arm::server("qsd", Kind::Qemu, RINGTAP, &socket, launch)
}

/// Images in the pool `rbd`, every object of them written; their size is a multiple of 4 MiB.
pub fn make_images(conf: &Path, names: &[&str], size: u64) -> Result<()> {
    let size = size.to_string();
    for name in names {
        run_rbd(conf, &["create", "--size", &format!("{size}B"), name])?;
        let words = ["bench", "--io-type", "write", "--io-size", "4M", "--io-total", &size, name];
        run_rbd(conf, &words)?;
    }
    Ok(())
}

/// Remove them.
pub fn remove_images(conf: &Path, names: &[&str]) -> Result<()> {
    names.iter().try_for_each(|name| run_rbd(conf, &["rm", name]))
}

fn run_rbd(conf: &Path, words: &[&str]) -> Result<()> {
    let env = vec![("CEPH_CONF".into(), conf.into())];
    let launch = Launch { env, ..Launch::new("rbd", words.iter().map(|word| word.to_string())) };
    Ok(launch.output(Duration::from_secs(300), crate::interrupt::stop()).map(drop)?)
}

/// The cluster's configuration, without librbd's cache: by it fio's writes would end in memory.
pub fn uncached(conf: &Path, run: &Path) -> Result<PathBuf> {
    let to = run.join("uncached.conf");
    let text =
        std::fs::read_to_string(conf).with_context(|| format!("cannot read {}", conf.display()))?;
    std::fs::write(&to, text + "\n[client]\nrbd_cache = false\n")
        .with_context(|| format!("cannot write {}", to.display()))?;
    Ok(to)
}

/// What a disk on an NBD server must reach.
pub fn nbd_goals(line: &Line) -> Vec<Goal> {
    let bound = if line.small() && line.depth == 32 { 1.5 } else { 1.0 };
    vec![Goal { against: vec![Kind::Qemu], metric: Metric::Rate, bound, aim: false }]
}

/// What an image of Ceph must reach.
pub fn rbd_goals(_: &Line) -> Vec<Goal> {
    let goal = |against, metric, bound| Goal { against: vec![against], metric, bound, aim: false };
    vec![
        goal(Kind::Qemu, Metric::Rate, 1.0),
        goal(Kind::Qemu, Metric::ServerCpu, 1.0),
        goal(Kind::Native, Metric::Rate, 0.9),
    ]
}

/// The image that NBD servers hold.
pub fn image(options: &Options) -> Result<Images> {
    Images::write(Fs::Tmpfs, &options.disk(), options.size, false)
}
