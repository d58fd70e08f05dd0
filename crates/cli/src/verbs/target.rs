//! Making images: the formats, and their options as `-o` takes them.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use ringtap_daemon::Error as Fault;
use ringtap_image::{Format, luks, parse_size};
use ringtap_image_tools::create::Space;
use ringtap_image_tools::{self as tools, BackingFile, FormatOptions, LazySecret, NamedFormat};

use crate::{names, secret};

/// Options of the verbs that make an image.
#[derive(Debug, Args)]
pub(crate) struct NewImage {
    /// Options of the format, as key=value,key=value; `-o help` lists them
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// Format of the backing file [default: as recorded when Ringtap made it]
    #[arg(
        short = 'F',
        long,
        value_parser = names::named_format(),
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    backing_format: Option<NamedFormat>,

    /// Where the secret that is to open the new image is, if it is to be encrypted
    #[arg(long, value_name = "SOURCE", value_parser = secret::lazy)]
    target_secret: Option<LazySecret>,
}

/// What is to be made, as far as it is said.
pub(crate) struct Recipe {
    pub(crate) format: Format,
    pub(crate) size: Option<u64>,
    pub(crate) backing: Option<BackingFile>,
    /// Pairs of `-o` that are the format's own.
    options: Vec<(String, String)>,
}

/// The options of a format, for people.
pub(crate) fn help(format: Format) -> Option<&'static str> {
    Some(match format {
        Format::Raw => {
            "  preallocation=off|falloc|full   space reserved, or zeros written [off]\n  \
               size=SIZE                       virtual size\n"
        }
        Format::Qcow2 => {
            "  backing_file=FILE               image below, as -b\n  \
               backing_fmt=FORMAT              its format, as -F\n  \
               cluster_size=SIZE               512 to 2M [64k]\n  \
               compat=0.10|1.1                 version 2 or 3 [1.1]\n  \
               compression_type=zlib|zstd      how compressed clusters are compressed [zlib]\n  \
               data_file=FILE                  where guest data goes instead of the image\n  \
               data_file_raw=on|off            that file is a raw image by itself [off]\n  \
               extended_l2=on|off              subclusters [on with a backing file, else off]\n  \
               lazy_refcounts=on|off           refcounts may lag behind while in use [off]\n  \
               preallocation=off|metadata|falloc|full  what exists from the beginning [off]\n  \
               refcount_bits=N                 1 to 64 [16]\n  \
               size=SIZE                       virtual size\n  \
               encrypt.format=luks             encrypt guest data; needs --target-secret\n  \
               encryption=on|off               the same by its old name [off]\n  \
               encrypt.cipher-alg, encrypt.hash-alg, encrypt.iter-time  as those of luks\n"
        }
        Format::Vhd => {
            "  subformat=dynamic|fixed         blocks on demand, or all at once [dynamic]\n  \
               force_size=on|off               keep the size as it is, as Azure wants [off]\n  \
               size=SIZE                       virtual size\n"
        }
        Format::Luks => {
            "  version=1|2                     version of the format; QEMU reads 1 [2]\n  \
               cipher-alg=aes-256|aes-128      cipher, in XTS mode [aes-256]\n  \
               hash-alg=sha256|sha512|sha1     hash of PBKDF2 and of the digest [sha256]\n  \
               iter-time=MS                    work of the key derivation, in milliseconds [2000]\n  \
               key_size=256|512                bits of the key [512]\n  \
               sector_size=512|1024|2048|4096  version 2 only [512]\n  \
               label=TEXT                      version 2 only\n  \
               preallocation=off|falloc|full   space reserved, or written to [off]\n  \
               size=SIZE                       virtual size\n"
        }
        _ => return None,
    })
}

impl NewImage {
    /// The secret of the image to be made, if one is named.
    pub(crate) fn secret(&self) -> Option<LazySecret> {
        self.target_secret.clone()
    }

    /// Print the options of the format, if that is what is asked.
    pub(crate) fn help_wanted(&self, format: Format) -> Option<String> {
        names::asks_for_help(&self.options).then(|| match help(format) {
            Some(text) => format!("Options of {format}, for -o:\n{text}"),
            None => format!("{format} has no options"),
        })
    }

    /// What is to be made at `path`. `backing` is what `-b` names.
    pub(crate) fn recipe(
        &self,
        path: &Path,
        format: Option<Format>,
        backing: Option<&str>,
    ) -> anyhow::Result<Recipe> {
        let mut name = backing.map(str::to_owned);
        let mut backing_format = self.backing_format;
        let mut size = None;
        let mut options = vec![];
        for (key, value) in names::pairs(&self.options).map_err(Fault::Usage)? {
            match key.as_str() {
                "size" => size = Some(parse_size(&value).ok_or_else(|| wrong_size(&value))?),
                "backing_file" => name = Some(value),
                "backing_fmt" => {
                    backing_format =
                        Some(value.parse().map_err(|error| Fault::Usage(format!("{error}")))?);
                }
                // Hints about the file, which QEMU's programs give the file system.
                "extent_size_hint" | "nocow" => {}
                _ => options.push((key, value)),
            }
        }
        let format = format.unwrap_or(if name.is_some() { Format::Qcow2 } else { Format::Raw });
        let backing = match name {
            Some(name) if name.is_empty() => {
                let why = "the name of the backing file is empty: name one, or leave it out";
                return Err(Fault::Usage(why.into()).into());
            }
            Some(name) => Some(BackingFile::find(path, name, backing_format)?),
            None => None,
        };
        if let Some(backing) = &backing {
            backing.fits_below(format)?;
        }
        Ok(Recipe { format, size, backing, options })
    }
}

fn wrong_size(text: &str) -> Fault {
    Fault::Usage(format!("size={text}: write a size like 10G"))
}

impl Recipe {
    /// It in full, with the options of its format understood.
    pub(crate) fn read(self, secret: Option<LazySecret>) -> anyhow::Result<tools::NewImage> {
        let mut options = FormatOptions::usual(self.format)?;
        let mut inside = inside_qcow2();
        for (key, value) in &self.options {
            let over = self.backing.is_some();
            match (&mut options, key.strip_prefix("encrypt.")) {
                (FormatOptions::Qcow2 { encrypt, .. }, Some("format")) => {
                    *encrypt = match value.as_str() {
                        "off" => None,
                        "luks" => Some(inside.clone()),
                        other => {
                            let why = format!("encrypt.format={other}: only luks is possible");
                            return Err(Fault::Usage(why).into());
                        }
                    };
                }
                (FormatOptions::Qcow2 { encrypt, .. }, None) if key == "encryption" => {
                    let on = names::switch(key, value).map_err(Fault::Usage)?;
                    *encrypt = on.then(|| inside.clone());
                }
                (FormatOptions::Qcow2 { .. }, Some(key)) => {
                    set_qemu_luks(&mut inside, key, value).map_err(Fault::Usage)?;
                }
                (options, _) => set(options, over, key, value).map_err(Fault::Usage)?,
            }
        }
        if let FormatOptions::Qcow2 { encrypt: Some(own), .. } = &mut options {
            *own = inside;
        }
        Ok(tools::NewImage { size: self.size, backing: self.backing, options, secret })
    }
}

/// Take an option, but for those of encryption. `over` says whether the image has another below it.
fn set(options: &mut FormatOptions, over: bool, key: &str, value: &str) -> Result<(), String> {
    let none = |text: &str, format: Format| {
        Err(format!("{text} is no option of {format}: -o help lists them"))
    };
    match options {
        FormatOptions::Raw(space) => {
            if key != "preallocation" {
                return none(key, Format::Raw);
            }
            *space = space_of(value)?;
        }
        FormatOptions::Qcow2 { own, extended_l2, .. } => {
            own.set(key, value)?;
            if key == "extended_l2" {
                *extended_l2 = Some(own.extended_l2);
            }
        }
        FormatOptions::Vhd { fixed, force_size } => match (key, value) {
            ("subformat", "fixed") if !over => *fixed = true,
            ("subformat", "dynamic") if !over => *fixed = false,
            ("force_size", text) => *force_size = names::switch("force_size", text)?,
            _ => return none(&format!("{key}={value}"), Format::Vhd),
        },
        FormatOptions::Luks { space, .. } if key == "preallocation" => *space = space_of(value)?,
        FormatOptions::Luks { own, .. } => set_luks(own, key, value)?,
    }
    Ok(())
}

fn space_of(preallocation: &str) -> Result<Space, String> {
    match preallocation {
        "off" => Ok(Space::Off),
        "falloc" => Ok(Space::Falloc),
        "full" => Ok(Space::Full),
        other => Err(format!("preallocation={other}: write off, falloc or full")),
    }
}

/// LUKS1: QEMU reads nothing else inside qcow2.
fn inside_qcow2() -> luks::CreateOptions {
    luks::CreateOptions { version: luks::Version::Luks1, ..luks::CreateOptions::default() }
}

fn set_luks(options: &mut luks::CreateOptions, key: &str, value: &str) -> Result<(), String> {
    let number =
        |want: &str| value.parse::<u32>().map_err(|_| format!("{key}={value}: write {want}"));
    match key {
        "version" => {
            options.version = match value {
                "1" => luks::Version::Luks1,
                "2" => luks::Version::Luks2,
                _ => return Err(format!("version={value}: write 1 or 2")),
            }
        }
        "key_size" => options.key_bits = number("256 or 512")?,
        "sector_size" => options.sector_size = number("512, 1024, 2048 or 4096")?,
        "label" => value.clone_into(&mut options.label),
        _ => return set_qemu_luks(options, key, value),
    }
    Ok(())
}

/// The options that qemu-img has too.
fn set_qemu_luks(options: &mut luks::CreateOptions, key: &str, value: &str) -> Result<(), String> {
    match (key, value) {
        ("cipher-alg", "aes-256") => options.key_bits = 512,
        ("cipher-alg", "aes-128") => options.key_bits = 256,
        ("cipher-alg", _) => return Err(format!("cipher-alg={value}: write aes-256 or aes-128")),
        ("cipher-mode", "xts") | ("ivgen-alg", "plain64") => {}
        ("cipher-mode", _) => return Err(format!("cipher-mode={value}: only xts is possible")),
        ("ivgen-alg", _) => return Err(format!("ivgen-alg={value}: only plain64 is possible")),
        ("hash-alg", _) => {
            options.hash = luks::Hash::parse(value).map_err(|error| error.to_string())?;
        }
        ("iter-time", _) => {
            let time: u32 = value
                .parse()
                .map_err(|_| format!("iter-time={value}: write milliseconds, such as 2000"))?;
            options.effort = luks::Effort::Time(Duration::from_millis(time.into()));
        }
        ("key-secret", _) => {
            return Err(
                "key-secret names an object of QEMU: write --target-secret file:PATH".into()
            );
        }
        _ => return Err(format!("{key} is no option of luks: -o help lists them")),
    }
    Ok(())
}
