//! The lowest image of a chain.

use std::cell::RefCell;

use ringtap_image::luks::{CreateOptions, Derivation, Effort, Version, create};
use ringtap_image::{Container, Image, Luks, Raw, Secret};
use ringtap_io::{File, Io, Mem, Tasks};
use ringtap_sim::{Disk, SECTOR, Sim};
use ringtap_vbd::{Kind, Request, Vbd};

use super::{CacheMode, SIZE, timed};

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Below {
    Raw,
    Qcow2,
    Luks,
}

fn secret() -> Secret {
    Secret::new(b"hunter2").expect("memory")
}

impl Below {
    pub fn of(seed: u64) -> Below {
        match seed % 16 {
            15 => Below::Luks,
            seed if seed % 2 == 0 => Below::Qcow2,
            _ => Below::Raw,
        }
    }

    /// A disk with its file, which is empty where it is still to be made.
    pub fn begin(self) -> (Disk, File) {
        let disk = Disk::new(SECTOR);
        match self {
            Below::Raw => (disk.clone(), disk.add_file(SIZE, 512)),
            Below::Qcow2 => (disk.clone(), disk.add_file(0, 512)),
            Below::Luks => {
                // Keys take long to be derived: it is made once, and copied.
                thread_local! {
                    static MADE: RefCell<Option<(Disk, File)>> = RefCell::default();
                }
                MADE.with_borrow_mut(|made| {
                    let (disk, file) = made.get_or_insert_with(luks);
                    (disk.after_power_cut(0), *file)
                })
            }
        }
    }

    /// It, where it is there already.
    pub async fn open(self, io: &Io, container: Container) -> Result<Box<dyn Image>, String> {
        match self {
            Below::Luks => {
                let opened = Luks::on(io, container, &secret(), false).await;
                Ok(Box::new(opened.map_err(|error| error.to_string())?))
            }
            _ => Ok(Box::new(Raw::new(container))),
        }
    }
}

/// A container full of zeros, stable.
fn luks() -> (Disk, File) {
    let disk = Disk::new(SECTOR);
    let file = disk.add_file(0, 512);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 0)));
    let (io, own) = (tasks.io().clone(), disk.clone());
    let made = async move {
        let options = CreateOptions {
            version: Version::Luks1,
            derivation: Some(Derivation::Pbkdf2),
            effort: Effort::Exactly { iterations: 1000, memory: 0, cpus: 0 },
            ..CreateOptions::default()
        };
        let made = timed(&own, file);
        create(&io, &made, SIZE, &options, &secret()).await.expect("a container");
        let opened = Below::Luks.open(&io, timed(&own, file)).await.expect("it opens");
        let vbd = Vbd::new(opened, CacheMode::None);
        let zero = Kind::WriteZeroes { unmap: false, fast: false };
        for (kind, len) in [(zero, SIZE), (Kind::Flush, 0)] {
            let request = Request { kind, offset: 0, len, mem: Mem::EMPTY, fua: false };
            vbd.serve(&io, request).await.expect("zeros");
        }
    };
    tasks.block_on(made).expect("the simulation runs");
    (disk, file)
}
