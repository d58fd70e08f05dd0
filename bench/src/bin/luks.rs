//! AES-XTS of a LUKS image: bytes per CPU second, ours as a ratio to QEMU's luks driver.
//!
//! Ours is the cipher alone, on one core, in the pieces that a guest's requests have; QEMU's is what
//! `qemu-img convert` takes more on a luks image than on a raw one with the same bytes, on tmpfs. What
//! requests cost besides is the part of the bench `formats --scenario luks`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ringtap_bench::{cpu, interrupt};
use ringtap_image::luks::{CreateOptions, Effort, Version, create_header};
use ringtap_image::{Secret, SectorCipher};
use ringtap_lab::process::launch::Launch;
use ringtap_lab::stats::medians::median;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long `qemu-img` may take.
const LIMIT: Duration = Duration::from_secs(120);
const MIB: usize = 1 << 20;
const PASSPHRASE: &str = "hunter2";

/// How fast the cipher of LUKS images is, beside QEMU's.
#[derive(Parser)]
struct Cli {
    /// Rounds; the medians of their ratios are shown.
    #[arg(long, default_value_t = 6)]
    rounds: usize,

    /// MiB that each round enciphers and deciphers.
    #[arg(long, default_value_t = 128)]
    size: usize,

    /// Folder on tmpfs for QEMU's images.
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    ensure!(cli.rounds > 0 && cli.size > 0, "--rounds and --size take numbers greater than 0");
    let dir = tempfile::tempdir_in(&cli.dir).context("cannot make a folder for QEMU's images")?;
    let qemu = Qemu::new(dir.path(), cli.size)?;
    let secret = Secret::new(PASSPHRASE.as_bytes())?;
    let effort = Effort::Exactly { iterations: 1000, memory: 0, cpus: 0 };
    let options = CreateOptions { version: Version::Luks1, effort, ..CreateOptions::default() };
    let (_, cipher) = create_header(&options, &secret)?;
    println!("AES-256-XTS, sectors of 512 bytes, MiB per CPU second, {} rounds", cli.rounds);
    for (what, write) in [("decipher", false), ("encipher", true)] {
        for piece in [4 << 10, MIB] {
            let (mut ours, mut theirs, mut ratios) = (vec![], vec![], vec![]);
            for _ in 0..cli.rounds {
                let own =
                    cli.size as f64 / ringtap(&*cipher, cli.size, piece, write)?.as_secs_f64();
                let other = cli.size as f64 / qemu.cipher_time(write)?.as_secs_f64().max(0.01);
                ours.push(own);
                theirs.push(other);
                ratios.push(own / other);
            }
            println!(
                "{what:8} in pieces of {:4} KiB: ringtap {:6.0}   qemu {:6.0}   ratio {:5.2}",
                piece >> 10,
                median(&ours),
                median(&theirs),
                median(&ratios)
            );
        }
    }
    Ok(())
}

/// CPU time of so many MiB.
fn ringtap(cipher: &dyn SectorCipher, size: usize, piece: usize, write: bool) -> Result<Duration> {
    let mut bytes = vec![0x5a; MIB];
    let before = cpu::of_process(std::process::id())?;
    for mib in 0..size {
        for (i, part) in bytes.chunks_mut(piece).enumerate() {
            let offset = (mib * MIB + i * piece) as u64;
            if write { cipher.encrypt(offset, part) } else { cipher.decrypt(offset, part) }
        }
    }
    std::hint::black_box(&bytes);
    Ok(cpu::of_process(std::process::id())?.saturating_sub(before))
}

/// QEMU's images: the same bytes, enciphered and in the clear.
struct Qemu {
    clear: String,
    copy: String,
    luks: String,
    secret: String,
    size: usize,
}

impl Qemu {
    fn new(dir: &Path, size: usize) -> Result<Qemu> {
        let name = |name: &str| dir.join(name).display().to_string();
        let key = name("key");
        fs::write(&key, PASSPHRASE)?;
        let (clear, copy, luks) = (name("clear"), name("copy"), name("luks"));
        let mut random = vec![0; MIB];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let mut file = File::create(&clear)?;
        for _ in 0..size {
            file.write_all(&random)?;
        }
        let secret = format!("secret,id=key,file={key}");
        let qemu = Qemu { clear, copy, luks, secret, size };
        qemu.image(&["create", "-q", "-f", "raw", &qemu.copy, &format!("{size}M")])?;
        let options = "key-secret=key,iter-time=10";
        let words = ["convert", "--object", &qemu.secret, "-f", "raw", "-O", "luks"];
        let convert = [&words[..], &["-o", options, &qemu.clear, &qemu.luks]].concat();
        // What it measures for the key is at times less than a tick of the clock.
        let unmeasured =
            |error: &anyhow::Error| format!("{error:#}").contains("accurate CPU usage");
        let mut tries = (0..60).map(|_| qemu.image(&convert));
        let ended = tries.find(|ended| !ended.as_ref().is_err_and(unmeasured));
        ended.context("qemu-img measured no CPU time 60 times")??;
        Ok(qemu)
    }

    /// CPU time of `qemu-img`.
    fn image(&self, words: &[&str]) -> Result<Duration> {
        let before = cpu::of_reaped_children(std::process::id())?;
        let launch = Launch::new("qemu-img", words.iter().copied());
        launch.output(LIMIT, interrupt::stop()).with_context(|| words.join(" "))?;
        Ok(cpu::of_reaped_children(std::process::id())?.saturating_sub(before))
    }

    /// CPU time of the cipher: that with it less that without.
    fn cipher_time(&self, write: bool) -> Result<Duration> {
        let luks =
            format!("driver=luks,key-secret=key,file.driver=file,file.filename={}", self.luks);
        let raw = |name: &str| format!("driver=raw,file.driver=file,file.filename={name}");
        let nowhere = format!("driver=null-co,size={}", self.size * MIB);
        let (clear, copy) = (raw(&self.clear), raw(&self.copy));
        let (with, without) = if write {
            ([&clear, &luks], [&clear, &copy])
        } else {
            ([&luks, &nowhere], [&clear, &nowhere])
        };
        let convert = |[from, to]: [&String; 2]| {
            let words = ["convert", "-n", "--object", &self.secret, "--image-opts", from];
            self.image(&[&words[..], &["--target-image-opts", to]].concat())
        };
        Ok(convert(with)?.saturating_sub(convert(without)?))
    }
}
