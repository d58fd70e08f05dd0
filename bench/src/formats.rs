//! The arms of image formats, over vhost-user-blk.

use crate::arms::{Arm, Kind, ringtap_program};
use crate::image::{Fs, Images};
use crate::options::Options;
use crate::process::{Launch, Process};
use crate::vhost_user::{RINGTAP, qemu_engines};
use anyhow::{Context, Result};
use clap::ValueEnum;
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
}

/// Virtual size of an image that begins empty: so much that writes at random seldom meet twice.
const EMPTY: &str = "64G";
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
                let mut arms = vec![ringtap, self.sparse(EMPTY)];
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
        }
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
        let log = self.run.join("prepare.log");
        let process = Process::start(&qemu_img(words.iter().copied()), &log, true, None)?;
        process.output(Duration::from_secs(600))?;
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
        let path_text = text(&path);
        let make = vec![
            Launch::new("rm", ["-f", &path_text]),
            Launch::new("truncate", ["-s", size, &path_text]),
        ];
        let mut arm = Arm::native(RINGTAP, &path).after(make);
        arm.name = "sparse raw, native".into();
        arm
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

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn qemu_img<'a>(words: impl IntoIterator<Item = &'a str>) -> Launch {
    Launch::new("qemu-img", words)
}
