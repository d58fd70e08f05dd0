//! For tests: an image that panics where it is told to.

use std::sync::Arc;

use ringtap_image::qcow2::BitmapSet;
use ringtap_image::{Allocation, Discard, Epochs, Error, Extent, Image, Info, LayerState, Status};
use ringtap_io::{Io, Mem};

/// What [`Image`] calls its futures.
type Boxed<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + 'a>>;

/// Is told each step before it is taken, by the method's name and the offset, and may panic.
pub type Trap = Arc<dyn Fn(&'static str, u64) + Send + Sync>;

/// Another image with a trap at each step.
pub struct Trapped {
    image: Box<dyn Image>,
    trap: Trap,
}

impl Trapped {
    /// Set a trap in all the image does.
    pub fn boxed(image: Box<dyn Image>, trap: Trap) -> Box<dyn Image> {
        Box::new(Trapped { image, trap })
    }

    fn step(&self, what: &'static str, offset: u64) {
        (self.trap)(what, offset);
    }
}

impl Image for Trapped {
    fn info(&self) -> &Info {
        self.image.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        self.step("fork", 0);
        Trapped::boxed(self.image.fork(), self.trap.clone())
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        self.step("map", offset);
        self.image.map(offset, len)
    }

    fn load<'a>(&'a self, io: &'a Io, offset: u64) -> Boxed<'a, Result<(), Error>> {
        self.step("load", offset);
        self.image.load(io, offset)
    }

    fn decompress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        mem: Mem,
    ) -> Boxed<'a, Result<usize, Error>> {
        self.step("decompress", offset);
        self.image.decompress(io, offset, mem)
    }

    fn compress<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        bytes: &'a [u8],
    ) -> Boxed<'a, Result<(), Error>> {
        self.step("compress", offset);
        self.image.compress(io, offset, bytes)
    }

    fn allocate<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
    ) -> Boxed<'a, Result<Option<Allocation<'a>>, Error>> {
        self.step("allocate", offset);
        self.image.allocate(io, offset, len)
    }

    fn allocate_at_once(&self, offset: u64, len: u64) -> Option<Allocation<'_>> {
        self.step("allocate", offset);
        self.image.allocate_at_once(offset, len)
    }

    fn commit(&self, room: Allocation<'_>, written: bool) {
        self.step("commit", room.offset);
        self.image.commit(room, written);
    }

    fn is_dirty(&self) -> bool {
        self.image.is_dirty()
    }

    fn epochs(&self) -> Option<&Arc<Epochs>> {
        self.image.epochs()
    }

    fn bitmaps(&self) -> Option<&Arc<BitmapSet>> {
        self.image.bitmaps()
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.step("flush", 0);
        self.image.flush(io)
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.step("discard", offset);
        self.image.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.step("status", offset);
        self.image.status(io, offset, len)
    }

    fn current_size(&self) -> Result<u64, Error> {
        self.step("current_size", 0);
        self.image.current_size()
    }

    fn grow(&self, size: u64) -> Result<(), Error> {
        self.step("grow", size);
        self.image.grow(size)
    }

    fn state(&self) -> LayerState {
        self.image.state()
    }

    fn takes_durable_writes(&self) -> bool {
        self.image.takes_durable_writes()
    }

    fn abandon(&self) {
        self.image.abandon();
    }

    fn below(&self) -> Option<&dyn Image> {
        self.image.below()
    }

    fn container(&self) -> Option<&ringtap_image::Container> {
        self.image.container()
    }

    fn data_file(&self) -> Option<&ringtap_image::Container> {
        self.image.data_file()
    }

    fn place(&self) -> Option<ringtap_image::Place> {
        self.image.place()
    }

    fn let_write(&self, may: bool) {
        self.image.let_write(may);
    }

    fn read_beside(&self, beside: bool) {
        self.image.read_beside(beside);
    }

    fn stop_writing(&self) {
        self.image.stop_writing();
    }

    fn opens_again(&self) {
        self.image.opens_again();
    }

    fn close<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.step("close", 0);
        self.image.close(io)
    }
}
