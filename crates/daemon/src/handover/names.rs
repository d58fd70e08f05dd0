//! Names given at run time that are no disks': secrets, certificates, files that images lie in, and images below a disk. The
//! next server finds anew what is behind them, a secret and a certificate where they were read; jobs and clients go on to call
//! them so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ringtap_image::{CacheMode, Place, SecretSource};
use serde::{Deserialize, Serialize};

use super::come::asked;
use super::nbd_comes::NbdComes;
use crate::Address;
use crate::facts::cache_name;
use crate::graph::{FileNode, Lower};
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::layers::depth;
use crate::running::Running;
use crate::tls::NamedCredentials;
use crate::transports::Transport;

/// All of them.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Names {
    pub(crate) secrets: Vec<SecretName>,
    pub(crate) files: Vec<FileName>,
    pub(crate) images: Vec<ImageName>,
    pub(crate) disks: Vec<DiskNames>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) certificates: Vec<CertificatesName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nbd: Option<NbdName>,
}

/// Certificates: never the keys themselves.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CertificatesName {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    /// For a server; else for connections to others.
    pub(crate) server: bool,
    pub(crate) verify_peer: bool,
}

/// The NBD server that a client has started.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NbdName {
    /// As it was asked for.
    pub(crate) address: String,
    /// What it shows: they may have a name no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) certificates: Option<CertificatesName>,
    /// The most clients at a time, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) most: Option<u32>,
    /// Whether it shows a disk: then its exports say where it is, too.
    #[serde(default)]
    pub(crate) is_used: bool,
}

impl CertificatesName {
    fn of((id, named): (&String, &NamedCredentials)) -> CertificatesName {
        let (folder, verify_peer) = (named.folder.clone(), named.verify_peer);
        CertificatesName { id: id.clone(), folder, server: named.server.is_some(), verify_peer }
    }

    fn read(&self) -> Result<(String, NamedCredentials), String> {
        let CertificatesName { id, folder, server, verify_peer } = self;
        let read = match server {
            true => {
                NamedCredentials::of_server(folder, *verify_peer).map_err(|why| why.to_string())
            }
            false => NamedCredentials::of_client(folder),
        };
        let named = read.map_err(|why| format!("the certificates {id}: {why}"))?;
        Ok((id.clone(), named))
    }
}

/// A secret.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SecretName {
    pub(crate) id: String,
    /// As on the command line.
    pub(crate) source: String,
}

/// A file that has a name of its own.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileName {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// As QEMU calls it.
    pub(crate) driver: String,
    #[serde(default)]
    pub(crate) read_only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<String>,
    #[serde(default)]
    pub(crate) keeps_space: bool,
    /// It goes with the image in it.
    #[serde(default)]
    pub(crate) implicit: bool,
}

/// An image below a disk, or that was below one.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ImageName {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) format: String,
    pub(crate) size: u64,
    /// The name of the file that it lies in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) in_file: Option<String>,
}

/// What names have to do with a disk.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct DiskNames {
    pub(crate) disk: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) in_file: Option<String>,
    /// It is called by its topmost image's.
    #[serde(default)]
    pub(crate) by_image: bool,
    /// The disk whose image its own was opened upon, whatever that names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) upon: Option<String>,
    /// How many images it consists of, where more are named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) layers: Option<u32>,
    /// Nothing was to lie below its image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) alone: bool,
    /// It was described within the one upon it, and goes with that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) within: bool,
}

const DRIVERS: [&str; 4] = ["file", "host_device", "nbd", "rbd"];
const CACHES: [CacheMode; 5] = [
    CacheMode::None,
    CacheMode::Writeback,
    CacheMode::Writethrough,
    CacheMode::DirectSync,
    CacheMode::Unsafe,
];

/// That a path still leads to what was named.
fn is_there(name: &str, path: &Path, was: Option<Identity>) -> Result<(), String> {
    if identity(path) == was {
        return Ok(());
    }
    Err(format!(
        "{} is another file now than the one that was named {name}, which the next process would find: blockdev-del {name} first",
        path.display()
    ))
}

impl Names {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Names::default()
    }

    /// Whether there is some that programs do not know which know of names.
    pub(crate) fn are_newest(&self) -> bool {
        let is_lost = |nbd: &NbdName| !nbd.is_used || nbd.certificates.is_some();
        let lies_so = |one: &DiskNames| one.upon.is_some() || one.layers.is_some() || one.alone;
        !self.certificates.is_empty()
            || self.disks.iter().any(lies_so)
            || self.nbd.as_ref().is_some_and(is_lost)
    }

    /// Whether there is some that programs do not know which know of no names.
    pub(crate) fn are_new(&self) -> bool {
        let Names { secrets, files, images, disks, .. } = self;
        let is_none =
            secrets.is_empty() && files.is_empty() && images.is_empty() && disks.is_empty();
        !is_none || self.are_newest()
    }
}

impl DiskNames {
    fn say_something(&self) -> bool {
        let DiskNames { in_file, by_image, upon, layers, alone, within, disk: _ } = self;
        let (is_upon, is_some) = (upon.is_some() || layers.is_some(), *by_image || *within);
        in_file.is_some() || is_upon || is_some || *alone
    }
}

impl Running {
    /// What the next server is told of names.
    ///
    /// # Errors
    /// One that it could not know.
    pub(super) fn names_passed(&self) -> Result<Names, String> {
        if let Some(name) = self.graph.kept.keys().next() {
            return Err(format!(
                "{name} was named at run time: the next process would not know it; remove it first"
            ));
        }
        let secret = |id: &String| {
            let source = self.secret_sources.get(id).cloned().unwrap_or_default();
            SecretName { id: id.clone(), source }
        };
        let secrets = self.secrets.keys().map(secret).collect();
        let file = |(name, node): (&String, &FileNode)| {
            is_there(name, &node.path, identity(&node.place.at()))?;
            Ok(FileName {
                name: name.clone(),
                path: node.path.clone(),
                driver: node.driver.to_owned(),
                read_only: node.read_only,
                cache: node.cache.map(|mode| cache_name(mode).to_owned()),
                keeps_space: node.keeps_space,
                implicit: node.implicit,
            })
        };
        let files = self.graph.files.iter().map(file).collect::<Result<_, String>>()?;
        // One that nothing reads any more may have been deleted, and its name with it.
        let is_left = |lower: &Lower| !lower.path.exists() && self.upon(lower).is_none();
        let image = |(name, lower): (&String, &Lower)| {
            is_there(name, &lower.path, lower.file)?;
            Ok(ImageName {
                name: name.clone(),
                path: lower.path.clone(),
                format: lower.format.clone(),
                size: lower.size,
                in_file: lower.in_file.clone(),
            })
        };
        let images = self
            .graph
            .lower
            .iter()
            .filter(|(_, lower)| !is_left(lower))
            .map(image)
            .collect::<Result<_, String>>()?;
        let lying = self.lying();
        let disks = self.disks.iter().map(|(id, served)| {
            Ok(DiskNames {
                disk: served.node().to_owned(),
                in_file: served.ties.in_file.clone(),
                by_image: served.ties.by_image,
                upon: self.upon_passed(&lying, *id)?,
                layers: served.disk.options.layers.and_then(|_| depth(served)),
                alone: served.ties.alone,
                within: served.ties.within,
            })
        });
        let disks = disks.collect::<Result<Vec<_>, String>>()?;
        let disks = disks.into_iter().filter(DiskNames::say_something);
        let certificates = self.tls_creds.iter().map(CertificatesName::of).collect();
        let (disks, nbd) = (disks.collect(), self.nbd_passed());
        Ok(Names { secrets, files, images, disks, certificates, nbd })
    }

    /// The disk whose image that one's lies upon, of those that lie upon others.
    fn upon_passed(
        &self,
        lying: &BTreeMap<DiskId, Option<DiskId>>,
        id: DiskId,
    ) -> Result<Option<String>, String> {
        let node = |id: DiskId| self.disks.get(&id).map(|served| served.node().to_owned());
        match lying.get(&id) {
            None => Ok(None),
            Some(Some(upon)) => Ok(node(*upon)),
            Some(None) => Err(format!(
                "the disk {} was opened with 'backing', and has gone on in an overlay: the next process would not find what lies \
                 between; commit that first",
                node(id).unwrap_or_default()
            )),
        }
    }

    /// Each disk's image is opened again upon the one that it lies upon.
    pub(super) fn lie_as_they_did(&self) {
        let lying = self.lying();
        for (id, served) in &self.disks {
            // Of images that are to come that is known by what was said.
            let upon = lying.get(id).copied().flatten().or(served.ties.upon);
            let upon = upon.and_then(|upon| self.residence_of(upon));
            served.residence.lies_upon(upon);
        }
    }

    fn nbd_passed(&self) -> Option<NbdName> {
        let id = self.nbd_server().ok()?;
        let Transport::Nbd { places, server, .. } = &*self.servers.get(&id)?.transport else {
            return None;
        };
        let address = asked(&places.first()?.0);
        let own = self.nbd_creds.as_ref().map(|(id, named)| (id, named));
        let is_used = !server.exports().is_empty();
        Some(NbdName {
            address,
            certificates: own.map(CertificatesName::of),
            most: self.nbd_most,
            is_used,
        })
    }

    /// Have the names that the server before this one had.
    pub(super) fn names_come(&mut self, names: &Names) -> Result<(), String> {
        for SecretName { id, source } in &names.secrets {
            let read = source.parse().and_then(|source: SecretSource| source.read());
            let secret = read.map_err(|error| format!("the secret {id}: {error}"))?;
            self.secrets.insert(id.clone(), secret);
            self.secret_sources.insert(id.clone(), source.clone());
        }
        let certificates = names.certificates.iter().map(CertificatesName::read);
        self.tls_creds = certificates.collect::<Result<_, String>>()?;
        if let Some(NbdName { address, certificates, most, .. }) = &names.nbd {
            let address = Address::nbd(address)?;
            let creds = certificates.as_ref().map(CertificatesName::read).transpose()?;
            self.pending.nbd_comes = Some(NbdComes { address, creds, most: *most });
        }
        for file in &names.files {
            let FileName { name, path, .. } = file;
            let driver = DRIVERS.into_iter().find(|driver| *driver == file.driver);
            let driver = driver.ok_or_else(|| {
                format!("the file {name} is of the driver {}, which is not known", file.driver)
            })?;
            let cache = file.cache.as_deref().map(|word| {
                let mode = CACHES.into_iter().find(|mode| cache_name(*mode) == word);
                mode.ok_or_else(|| {
                    format!("the file {name} is used by cache={word}, which is not known")
                })
            });
            let held = Place::hold(path);
            let place = held.map_err(|error| format!("{} ({name}): {error}", path.display()))?;
            let node = FileNode {
                path: path.clone(),
                place,
                read_only: file.read_only,
                cache: cache.transpose()?,
                keeps_space: file.keeps_space,
                driver,
                implicit: file.implicit,
            };
            self.graph.files.insert(name.clone(), node);
        }
        for image in &names.images {
            let lower = Lower {
                path: image.path.clone(),
                file: identity(&image.path),
                format: image.format.clone(),
                size: image.size,
                in_file: image.in_file.clone(),
            };
            self.graph.lower.insert(image.name.clone(), lower);
        }
        for DiskNames { disk, upon, .. } in &names.disks {
            let Some(upon) = upon else { continue };
            let id = |node: &str| {
                let found = self.disks.iter().find(|(_, served)| served.node() == node);
                found.map(|(id, _)| *id).ok_or_else(|| format!("its state has no disk {node}"))
            };
            let (id, upon) = (id(disk)?, id(upon)?);
            if let Some(served) = self.disks.get_mut(&id) {
                served.ties.upon = Some(upon);
            }
        }
        self.lie_as_they_did();
        for named in &names.disks {
            let found = self.disks.values_mut().find(|served| served.node() == named.disk);
            let served = found.ok_or_else(|| format!("its state has no disk {}", named.disk))?;
            served.ties.in_file.clone_from(&named.in_file);
            served.ties.by_image = named.by_image;
            served.ties.alone = named.alone;
            served.ties.within = named.within;
        }
        Ok(())
    }
}
