//! The arms of image formats, over vhost-user-blk.

use crate::arms::{Arm, Kind, ringtap_program};
use crate::image::{Fs, Images};
use crate::options::Options;
use crate::scatter::scatter;
use crate::vhost_user::{RINGTAP, qemu_engines};
use anyhow::{Context, Result};
use clap::ValueEnum;
use ringtap_lab::process::launch::Launch;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What state the images are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Every cluster is there.
    Allocated,
    /// Nothing is there: every write is the first to its cluster.
    Fresh,
    /// A snapshot was just taken of a full disk.
    Overlay,
    /// A dynamic VHD without a block.
    Vhd,
    /// A full disk, enciphered.
    Luks,
    /// Every cluster of 1 TiB has its place: tables of 128 MiB, in memory or a quarter of them.
    Wide,
    /// Every cluster is there, and two queues are served, each by its thread.
    Queues,
}

/// MiB of memory that are taken and given back before first writes to tmpfs: as much as they may fill.
const TOUCHED: &str = "1536";
/// Virtual size of an image that begins empty: so much that writes at random seldom meet twice.
const EMPTY: &str = "64G";
/// The virtual size whose L2 tables take [`ALL_TABLES`].
const WIDE: &str = "1T";
/// Bytes of the L2 tables of [`WIDE`] with clusters of 64 KiB.
const ALL_TABLES: u64 = 128 << 20;
/// Seconds after which the tables that find room are in memory.
const WARM: f64 = 4.0;
const PASSPHRASE: &str = "ringtap bench";

/// Makes the arms of one scenario.
pub struct Formats<'a> {
    /// What lies under the servers.
    pub fs: Fs,
    /// The command line.
    pub options: &'a Options,
    /// The full raw image.
    pub images: &'a Images,
    /// Folder for sockets.
    pub run: &'a Path,
}

impl Formats<'_> {
    /// The arms.
    pub fn arms(&self, scenario: Scenario) -> Result<Vec<Arm>> {
        let mut arms = self.of(scenario)?;
        if self.fs == Fs::Tmpfs {
            let fresh = arms.iter_mut().filter(|arm| !arm.prepare.is_empty());
            fresh.for_each(|arm| arm.prepare.extend(self.touch_memory()));
        }
        Ok(arms)
    }

    /// Take memory and give it back. A virtual machine returns to its host what was free for seconds, and whoever
    /// takes it next waits for the host.
    fn touch_memory(&self) -> [Launch; 2] {
        let path = text(&self.file("scratch"));
        let (to, count) = (format!("of={path}"), format!("count={TOUCHED}"));
        let fill = ["if=/dev/zero", &to, "bs=1M", &count, "status=none"];
        [Launch::new("dd", fill), Launch::new("rm", ["-f", &path])]
    }

    fn of(&self, scenario: Scenario) -> Result<Vec<Arm>> {
        let raw = self.images.direct();
        match scenario {
            Scenario::Allocated => {
                let full = self.file("full.qcow2");
                self.now(&["convert", "-f", "raw", "-O", "qcow2", &text(raw), &text(&full)])?;
                let ringtap = self.ringtap(RINGTAP, Kind::Ringtap, "qcow2", &full);
                let mut arms = vec![ringtap, self.raw()];
                arms.extend(self.qemu_both("qsd", "qcow2", &full, Kind::Qemu, &[]));
                Ok(arms)
            }
            Scenario::Fresh => {
                let empty = self.file("empty.qcow2");
                let make = || vec![qemu_img(["create", "-f", "qcow2", &text(&empty), EMPTY])];
                let ringtap = self.ringtap(RINGTAP, Kind::Ringtap, "qcow2", &empty).after(make());
                let mut arms = vec![ringtap, self.sparse(EMPTY), self.sparse_served(EMPTY)];
                for arm in self.qemu_both("qsd", "qcow2", &empty, Kind::Qemu, &[]) {
                    arms.push(arm.after(make()));
                }
                Ok(arms)
            }
            Scenario::Overlay => self.overlays(),
            Scenario::Vhd => {
                let empty = self.file("empty.vhd");
                let make = vec![qemu_img(["create", "-f", "vpc", &text(&empty), EMPTY])];
                let ringtap = self.ringtap(RINGTAP, Kind::Ringtap, "vpc", &empty).after(make);
                Ok(vec![ringtap, self.sparse(EMPTY)])
            }
            Scenario::Luks => self.ciphers(),
            Scenario::Wide => self.wide(),
            Scenario::Queues => {
                let full = self.file("full.qcow2");
                self.now(&["convert", "-f", "raw", "-O", "qcow2", &text(raw), &text(&full)])?;
                let mut two = self.ringtap(RINGTAP, Kind::Ringtap, "qcow2", &full);
                two.queues = 2;
                Ok(vec![two, self.ringtap("ringtap, one queue", Kind::Raw, "qcow2", &full)])
            }
        }
    }

    /// The clusters have a place and no data: what the tables cost is all that is measured. They lie
    /// out of order, but for one arm.
    fn wide(&self) -> Result<Vec<Arm>> {
        let (scattered, ordered) = (self.file("scattered.qcow2"), self.file("ordered.qcow2"));
        for path in [&scattered, &ordered] {
            let path = text(path);
            self.now(&["create", "-f", "qcow2", "-o", "preallocation=metadata", &path, WIDE])?;
        }
        scatter(&scattered)?;
        let with_tables = |name: &str, kind, image: &Path, bytes: u64| {
            let mut arm = self.ringtap(name, kind, "qcow2", image);
            if let Some(launch) = &mut arm.launch {
                launch.args.extend(["--l2-cache-size".into(), bytes.to_string().into()]);
            }
            arm
        };
        let (all, quarter) = (ALL_TABLES, ALL_TABLES / 4);
        let mut arms = vec![
            with_tables(RINGTAP, Kind::Ringtap, &scattered, quarter),
            with_tables("ringtap, all tables", Kind::Raw, &scattered, all),
            with_tables("ringtap, in order", Kind::Other, &ordered, quarter),
        ];
        let driver = format!("qcow2,l2-cache-size={quarter}");
        arms.extend(self.qemu_both("qsd", &driver, &scattered, Kind::Qemu, &[]));
        for arm in &mut arms {
            arm.ramp = Some(WARM);
        }
        Ok(arms)
    }

    fn overlays(&self) -> Result<Vec<Arm>> {
        let raw = text(self.images.direct());
        let make = |path: &Path, more: &str| {
            let size = format!("{more},backing_file={raw},backing_fmt=raw");
            vec![qemu_img([
                "create",
                "-f",
                "qcow2",
                "-o",
                size.trim_start_matches(','),
                &text(path),
            ])]
        };
        let (usual, extended) = (self.file("usual.qcow2"), self.file("extended.qcow2"));
        let with_subclusters = "extended_l2=on";
        let mut arms = vec![
            self.ringtap(RINGTAP, Kind::Ringtap, "qcow2", &extended)
                .after(make(&extended, with_subclusters)),
            self.ringtap("ringtap, no subclusters", Kind::Other, "qcow2", &usual)
                .after(make(&usual, "")),
            self.raw(),
            self.sparse(&self.options.size.to_string()),
            self.sparse_served(&self.options.size.to_string()),
        ];
        for arm in self.qemu_both("qsd", "qcow2", &usual, Kind::Qemu, &[]) {
            arms.push(arm.after(make(&usual, "")));
        }
        for arm in self.qemu_both("qsd subclusters", "qcow2", &extended, Kind::Direct, &[]) {
            arms.push(arm.after(make(&extended, with_subclusters)));
        }
        Ok(arms)
    }

    fn ciphers(&self) -> Result<Vec<Arm>> {
        let (image, key) = (self.file("full.luks"), self.file("key"));
        fs::write(&key, PASSPHRASE).context("cannot write the passphrase")?;
        let secret = format!("secret,id=key,file={}", key.display());
        let source = text(self.images.direct());
        let target = text(&image);
        let words = ["convert", "--object", &secret, "-f", "raw", "-O", "luks"];
        let options = ["-o", "key-secret=key,iter-time=100", &source, &target];
        self.now(&[&words[..], &options[..]].concat())?;
        let mut ringtap = self.ringtap(RINGTAP, Kind::Ringtap, "luks", &image);
        if let Some(launch) = &mut ringtap.launch {
            launch.args.extend(["--secret".into(), format!("file:{}", key.display()).into()]);
        }
        let mut arms = vec![ringtap, self.raw()];
        let with_key = ["--object".to_owned(), secret];
        arms.extend(self.qemu_both("qsd", "luks,key-secret=key", &image, Kind::Qemu, &with_key));
        Ok(arms)
    }

    /// A file beside the full image.
    fn file(&self, name: &str) -> PathBuf {
        self.images.direct().with_file_name(name)
    }

    fn now(&self, words: &[&str]) -> Result<()> {
        for tries in (0..60).rev() {
            match qemu_img(words.iter().copied())
                .output(Duration::from_secs(600), crate::interrupt::stop())
            {
                // What it measures for a LUKS key is at times less than a tick of the clock.
                Err(error) if tries > 0 && error.to_string().contains("accurate CPU usage") => {}
                ended => return Ok(ended.map(drop)?),
            }
        }
        Ok(())
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.run.join(format!("{}.sock", name.replace([' ', ','], "-")))
    }

    fn ringtap(&self, name: &str, kind: Kind, format: &str, image: &Path) -> Arm {
        let socket = self.socket(name);
        let image_text = text(image);
        let words =
            ["serve", &image_text, "-f", format, "--cache", "none", "--vhost-user", &text(&socket)]
                .map(str::to_owned);
        let launch = Launch::new(ringtap_program(self.options.ringtap.as_deref()), words);
        Arm::server(name, kind, RINGTAP, &socket, launch).on(image)
    }

    fn raw(&self) -> Arm {
        self.ringtap("ringtap raw", Kind::Raw, "raw", self.images.direct())
    }

    /// First writes to a sparse file, by nobody but io_uring: as fast as the file system allows.
    fn sparse(&self, size: &str) -> Arm {
        let path = self.file("sparse.raw");
        let mut arm = Arm::native(RINGTAP, &path).after(make_sparse(&path, size));
        arm.name = "sparse raw, native".into();
        arm
    }

    /// The same through our own server, which leaves one processor to its client.
    fn sparse_served(&self, size: &str) -> Arm {
        let path = self.file("served.raw");
        let arm = self.ringtap("sparse raw, ringtap", Kind::Other, "raw", &path);
        arm.after(make_sparse(&path, size))
    }

    fn qemu_both(
        &self,
        name: &str,
        driver: &str,
        image: &Path,
        kind: Kind,
        before: &[String],
    ) -> Vec<Arm> {
        let arm = |engine: &&str| {
            let name = format!("{name} {engine}");
            let socket = self.socket(&name);
            let direct = if self.fs == Fs::Tmpfs { "off" } else { "on" };
            let file = format!(
                "driver=file,node-name=file,filename={},cache.direct={direct},aio={engine}",
                image.display()
            );
            // All of the L2 tables, as Ringtap has them.
            let cache = if driver == "qcow2" { ",l2-cache-size=67108864" } else { "" };
            let node =
                format!("driver={driver},node-name=disk,file=file{cache},cache.direct={direct}");
            let export = format!(
                "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,addr.type=unix,addr.path={}",
                socket.display()
            );
            let words = ["--blockdev", &file, "--blockdev", &node, "--export", &export];
            let words = before.iter().cloned().chain(words.map(str::to_owned));
            let launch = Launch::new("qemu-storage-daemon", words);
            Arm::server(&name, kind, RINGTAP, &socket, launch).on(image)
        };
        qemu_engines(self.fs).iter().map(arm).collect()
    }
}

fn make_sparse(path: &Path, size: &str) -> Vec<Launch> {
    let path = text(path);
    vec![Launch::new("rm", ["-f", &path]), Launch::new("truncate", ["-s", size, &path])]
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn qemu_img<'a>(words: impl IntoIterator<Item = &'a str>) -> Launch {
    Launch::new("qemu-img", words)
}
