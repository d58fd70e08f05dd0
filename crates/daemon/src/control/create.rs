//! `blockdev-create`: images that are made.

use ringtap_image::{Place, luks, qcow2, vhd};
use ringtap_image_tools::held::Content;

use super::command::Command;
use super::job_words::JobType;
use super::nodes::{FileRef, found};
use super::outgoing::Reply;
use super::refs::NodeOr;
use super::refusal::Refusal;
use super::secrets::{LuksNew, NewQcow2Encryption, NewQcow2EncryptionFormat};
use super::shape::{Done, arguments, choice, words};
use crate::create::New as What;
use crate::identity::identity;
use crate::jobs::New;
use crate::running::{Running, Then};

words! {
    /// Versions of qcow2.
    enum Qcow2Version { "v2" V2, "v3" V3 }
}

words! {
    /// What exists of an image from the beginning.
    enum Preallocation { "off" Off, "metadata" Metadata, "falloc" Falloc, "full" Full }
}

words! {
    /// Kinds of VHDs.
    enum VpcSubformat { "dynamic" Dynamic, "fixed" Fixed }
}

words! {
    /// What an image below may be.
    enum BackingFormat { "raw" Raw, "qcow2" Qcow2, "vpc" Vpc, "vhdx" Vhdx, "vmdk" Vmdk, "luks" Luks }
}

arguments! {
    /// A file.
    struct CreateFile {
        "filename" filename: String,
        "size" size: u64,
        "preallocation" preallocation: Option<Preallocation>,
    }
}

arguments! {
    /// A qcow2 image, in a file that is there.
    struct CreateQcow2 {
        "file" file: NodeOr<FileRef>,
        "size" size: u64,
        "version" version: Option<Qcow2Version>,
        "backing-file" backing_file: Option<String>,
        "backing-fmt" backing_fmt: Option<BackingFormat>,
        "cluster-size" cluster_size: Option<u64>,
        "preallocation" preallocation: Option<Preallocation>,
        "lazy-refcounts" lazy_refcounts: Option<bool>,
        "refcount-bits" refcount_bits: Option<u32>,
        "extended-l2" extended_l2: Option<bool>,
        "encrypt" encrypt: Option<NewQcow2Encryption>,
    }
}

arguments! {
    /// A VHD, in a file that is there.
    struct CreateVpc {
        "file" file: NodeOr<FileRef>,
        "size" size: u64,
        "subformat" subformat: Option<VpcSubformat>,
        "force-size" force_size: Option<bool>,
    }
}

arguments! {
    /// An encrypted image, in a file that is there: LUKS2.
    struct CreateLuks {
        "file" file: NodeOr<FileRef>,
        "size" size: u64,
        /// The secret, by its id.
        "key-secret" key_secret: String,
        /// For how many milliseconds a secret is worked on.
        "iter-time" iter_time: Option<u32>,
    }
}

choice! {
    /// What is made.
    struct BlockdevCreateOptions {}
    "driver" enum CreateDriver {
        "file" File(CreateFile),
        "qcow2" Qcow2(CreateQcow2),
        "vpc" Vpc(CreateVpc),
        "luks" Luks(CreateLuks),
    }
}

arguments! {
    /// `blockdev-create`
    struct BlockdevCreate { "job-id" job_id: String, "options" options: BlockdevCreateOptions }
}

/// An image in a file, which nobody uses.
fn within(running: &Running, file: NodeOr<FileRef>, image: Content) -> Result<What, Refusal> {
    let found = found(file, running, None)?;
    if found.read_only {
        return Err(Refusal::new("Block node is read-only"));
    }
    let file = identity(&found.path);
    if let Some((_, _, node)) =
        running.images().into_iter().find(|(other, _, _)| file == Some(*other))
    {
        let path = found.path.display();
        return Err(Refusal::new(format!(
            "{path} is in use: it is the image of the node '{node}'"
        )));
    }
    let place = match found.place {
        Some(place) => place,
        None => Place::hold(&found.path).map_err(|error| {
            Refusal::new(format!("Could not open '{}': {error}", found.path.display()))
        })?,
    };
    Ok(What::Image { path: found.path, place, image, encrypt: None })
}

impl BlockdevCreateOptions {
    fn what(self, running: &Running) -> Result<What, Refusal> {
        match self.of {
            CreateDriver::File(of) => match of.preallocation {
                None | Some(Preallocation::Off) => {
                    Ok(What::File { path: of.filename.into(), size: of.size })
                }
                Some(_) => Err(Refusal::new("a file is made with preallocation=off")),
            },
            CreateDriver::Qcow2(of) => {
                let usual = qcow2::CreateOptions::default();
                let options = qcow2::CreateOptions {
                    size: of.size,
                    version: if of.version == Some(Qcow2Version::V2) { 2 } else { 3 },
                    cluster_size: of.cluster_size.unwrap_or(usual.cluster_size),
                    refcount_bits: of.refcount_bits.unwrap_or(usual.refcount_bits),
                    extended_l2: of.extended_l2.unwrap_or(false),
                    lazy_refcounts: of.lazy_refcounts.unwrap_or(false),
                    preallocation: match of.preallocation {
                        None | Some(Preallocation::Off) => qcow2::Preallocation::Off,
                        Some(Preallocation::Metadata) => qcow2::Preallocation::Metadata,
                        Some(Preallocation::Falloc) => qcow2::Preallocation::Falloc,
                        Some(Preallocation::Full) => qcow2::Preallocation::Full,
                    },
                    backing_file: of.backing_file,
                    backing_format: of.backing_fmt.map(|format| format.word().to_owned()),
                    ..usual
                };
                if options.backing_format.is_some() && options.backing_file.is_none() {
                    let why = "Backing format cannot be used without backing file";
                    return Err(Refusal::new(why));
                }
                let made = within(running, of.file, Content::Qcow2(options.into()))?;
                let Some(encrypt) = of.encrypt else { return Ok(made) };
                let NewQcow2EncryptionFormat::Luks(own) = encrypt.of;
                let (secret, effort) = own.found(running)?;
                // What QEMU reads within qcow2.
                let version = luks::Version::Luks1;
                let own = luks::CreateOptions { version, effort, ..luks::CreateOptions::default() };
                Ok(made.encrypted(own, secret))
            }
            CreateDriver::Vpc(of) => {
                let kind = match of.subformat {
                    Some(VpcSubformat::Fixed) => vhd::Kind::Fixed,
                    _ => vhd::Kind::Dynamic,
                };
                let options = vhd::CreateOptions {
                    size: of.size,
                    kind,
                    force_size: of.force_size.unwrap_or(false),
                    block_size: None,
                    parent: None,
                    id: None,
                };
                within(running, of.file, Content::Vhd(options.into()))
            }
            CreateDriver::Luks(of) => {
                let own = LuksNew { key_secret: of.key_secret, iter_time: of.iter_time };
                let (secret, effort) = own.found(running)?;
                let options = luks::CreateOptions { effort, ..luks::CreateOptions::default() };
                let options = Box::new(options);
                within(running, of.file, Content::Luks { size: of.size, options, secret })
            }
        }
    }
}

impl Command for BlockdevCreate {
    const NAME: &'static str = "blockdev-create";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        reply.give(self.begin(running));
    }
}

impl BlockdevCreate {
    fn begin(self, running: &mut Running) -> Result<Done, Refusal> {
        running.check_job_id(&self.job_id)?;
        let what = self.options.what(running)?;
        let new = New {
            id: self.job_id,
            kind: JobType::Create,
            disk: None,
            other: None,
            upon: vec![],
            speed: 0,
            // As in QEMU it waits to be looked at.
            stays: true,
            copies: false,
            pends: false,
            waits: false,
            line: None,
        };
        let begun = running.begin_job(new, move |job| {
            job.is_at(ringtap_vbd::Phase::Copying);
            what.make()?;
            Ok(Box::new(|_: &mut Running| {}) as Then)
        });
        begun.map(|()| Done {}).map_err(Refusal::from)
    }
}
