//! Images on a simulated disk, by what they are made of.

use ringtap_image::qcow2::{Header, Parts, Qcow2};
use ringtap_image::{Boxed, CacheMode, Image, Raw};
use ringtap_io::{File, Io};
use ringtap_sim::{Bench, Disk, SECTOR};
use ringtap_vbd::Vbd;

use super::common::Served;
use super::container::container;

/// What an image is made of.
#[derive(Clone, Debug)]
pub enum Spec {
    /// A raw image.
    Raw(File),
    /// A qcow2 image, and what lies below it.
    Qcow2(File, Option<Box<Spec>>),
}

impl Spec {
    /// The topmost.
    pub fn file(&self) -> File {
        match self {
            Spec::Raw(file) | Spec::Qcow2(file, _) => *file,
        }
    }

    /// The image.
    pub fn open<'a>(&'a self, io: &'a Io, disk: &'a Disk) -> Boxed<'a, Box<dyn Image>> {
        Box::pin(async move {
            match self {
                Spec::Raw(file) => Box::new(Raw::new(container(disk, *file))) as Box<dyn Image>,
                Spec::Qcow2(file, base) => {
                    let base = match base {
                        Some(base) => Some(base.open(io, disk).await),
                        None => None,
                    };
                    let header = Header::read(io, &container(disk, *file)).await.expect("a header");
                    let parts = Parts { base, ..Parts::default() };
                    let image = Qcow2::open(io, container(disk, *file), header, parts).await;
                    Box::new(image.expect("an image"))
                }
            }
        })
    }

    /// The disk, as a server on the bench opens it.
    pub fn served_by(&self, bench: &impl Bench) -> Vbd {
        let (disk, spec) = (bench.disk().clone(), self.clone());
        let image = bench.alone(async move |io| spec.open(&io, &disk).await);
        Vbd::new(image, CacheMode::None)
    }

    /// All that the disk shows.
    pub fn shown_by(&self, bench: &impl Bench) -> Vec<u8> {
        let vbd = self.served_by(bench);
        let sectors = vbd.size() / SECTOR as u64;
        bench.shown(Served::new(vbd), sectors).expect("it reads")
    }
}
