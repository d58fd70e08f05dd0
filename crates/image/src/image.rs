//! What every image format answers.

use std::ops::Range;
use std::sync::Arc;

use ringtap_io::{Io, Mem};

use crate::qcow2::{BitmapSet, ToolError};
use crate::{
    Allocation, Boxed, Container, Discard, Epochs, Error, Extent, Info, LayerState, OnlineCheck,
    Place, Status,
};

/// An image of some format.
///
/// Every request that uses what `map` or `allocate` gave holds a ticket of [`Image::epochs`] from
/// before until its transfer has ended; room that was freed is not used again before.
pub trait Image: Send + Sync {
    /// The facts.
    fn info(&self) -> &Info;

    /// The same image for another queue thread.
    fn fork(&self) -> Box<dyn Image>;

    /// Where the bytes at `offset` are; `len` > 0 lies within the disk. Memory only: never waits,
    /// locks nothing.
    fn map(&self, offset: u64, len: u64) -> Extent<'_>;

    /// Read what [`Image::map`] lacked for this offset.
    fn load<'a>(&'a self, _: &'a Io, _: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Corrupt) })
    }

    /// Fill `mem` from an extent that [`Image::map`] says is compressed; it may have become another
    /// kind meanwhile. Gives how many bytes it filled: 0 asks the caller to map again.
    fn decompress<'a>(&'a self, _: &'a Io, _: u64, _: Mem) -> Boxed<'a, Result<usize, Error>> {
        Box::pin(async { Err(Error::Corrupt) })
    }

    /// Write whole clusters from `offset` on, compressed where that makes them smaller; the disk's last
    /// cluster may end with the disk. For the tools: no other request may meet these clusters, and only
    /// a flush keeps what was written. [`Error::Unsupported`] where the image cannot hold it.
    fn compress<'a>(
        &'a self,
        _: &'a Io,
        _offset: u64,
        _bytes: &'a [u8],
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Unsupported) })
    }

    /// Find room for a write of `len` > 0 bytes at `offset`, where [`Image::map`] gave nothing that
    /// may be written to. `None` where it may look otherwise by now: map again. What it gives must
    /// come back by [`Image::commit`], in the same request.
    fn allocate<'a>(
        &'a self,
        _: &'a Io,
        _: u64,
        _: u64,
    ) -> Boxed<'a, Result<Option<Allocation<'a>>, Error>> {
        Box::pin(async { Err(Error::ReadOnly) })
    }

    /// As [`Image::allocate`], where that has nothing to wait for; `None` says nothing. Memory only.
    fn allocate_at_once(&self, _: u64, _: u64) -> Option<Allocation<'_>> {
        None
    }

    /// The room has been written, and is to be visible from now on; or writing failed, and it is to be
    /// given back.
    fn commit(&self, _: Allocation<'_>, _written: bool) {}

    /// Whether there may be completed writes whose metadata only [`Image::flush`] makes stable.
    fn is_dirty(&self) -> bool {
        false
    }

    /// Who keeps freed room from being used again while requests are in flight that may use it.
    fn epochs(&self) -> Option<&Arc<Epochs>> {
        None
    }

    /// The bitmaps that every change is to be noted in before it is made, and those to show.
    fn bitmaps(&self) -> Option<&Arc<BitmapSet>> {
        None
    }

    /// Whether a write to where [`Image::map`] says may be asked to be stable when it ends; else [`Image::flush`] makes it so.
    fn takes_durable_writes(&self) -> bool {
        self.container().is_none_or(Container::takes_durable_writes)
    }

    /// Make all completed writes stable.
    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>>;

    /// Free or zero a range whose ends are multiples of `discard_alignment`.
    /// [`Error::Unsupported`] where it would take writing the zeros.
    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>>;

    /// Have a part of one unit of `discard_alignment` read as zeros without writing any, where all the rest of that unit does
    /// so already. False where it does not, or the image cannot: then nothing has changed.
    fn zero_part<'a>(
        &'a self,
        _: &'a Io,
        _offset: u64,
        _len: u64,
        _unmap: bool,
    ) -> Boxed<'a, Result<bool, Error>> {
        Box::pin(async { Ok(false) })
    }

    /// What the range from `offset` holds; `len` > 0 lies within the disk. May block on the file
    /// system.
    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>>;

    /// Make the tables stable, and see that they can be looked at as they are then, whatever is written to the image since. None
    /// where images of the format have nothing to check.
    fn online_check<'a>(
        &'a self,
        _: &'a Io,
    ) -> Boxed<'a, Result<Option<Box<dyn OnlineCheck>>, ToolError>> {
        Box::pin(async { Ok(None) })
    }

    /// The disk's size as it is now, where someone may have resized the image's file.
    fn current_size(&self) -> Result<u64, Error>;

    /// Make the disk at least so large, a multiple of 512; what is new reads as zeros. Nobody else
    /// does so at the same time. [`Error::Unsupported`] where the image does not grow while it is
    /// used.
    fn grow(&self, _size: u64) -> Result<(), Error> {
        Err(Error::Unsupported)
    }

    /// Have what lies behind the disk's end read as zeros, in sectors of the image, where that takes writing: the disk may then
    /// [`Image::grow`] to the end of the range. Others may use the disk meanwhile, but not the block of `request_alignment` in
    /// which the range begins. [`Error::Unsupported`] where that is not how the image grows.
    fn append_zeros<'a>(&'a self, _: &'a Io, _range: Range<u64>) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Unsupported) })
    }

    /// Take back what [`Image::append_zeros`] has written behind the disk's end.
    fn cut_to<'a>(&'a self, _: &'a Io, _size: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Unsupported) })
    }

    /// What it has in memory, for people. Locks nothing for long.
    fn state(&self) -> LayerState {
        LayerState::of(self.info(), None)
    }

    /// Whether completed writes are lost with this process before a flush: it has their tables in memory, and no restart log.
    fn ends_with_process(&self) -> bool {
        false
    }

    /// What the flush failed with since which all fail with [`Error::Lost`], where what may be lost is only what was written to
    /// the disk: [`Image::is_written_anew`] has flushes tell again what is stable.
    fn lost_by(&self) -> Option<Error> {
        None
    }

    /// Whoever says that writes anew, from then on, all that was written to the disk since the last flush that ended well.
    fn is_written_anew(&self) {}

    /// The disk is stopped, and what another request has begun may never end: whoever waits for that is to
    /// look again, now and from now on.
    fn abandon(&self) {
        if let Some(container) = self.container() {
            container.abandon();
        }
    }

    /// The image below, where there is one.
    fn below(&self) -> Option<&dyn Image> {
        None
    }

    /// Where its file is, for as long as it is open.
    fn place(&self) -> Option<Place> {
        None
    }

    /// What holds it, where that is a file or a block device.
    fn container(&self) -> Option<&Container> {
        None
    }

    /// The file in which its data lies, where its own holds only tables.
    fn data_file(&self) -> Option<&Container> {
        None
    }

    /// Whether another handle of its file may write to it, of this process or another, while this one goes on reading what
    /// that leaves alone. Not until it is told so.
    fn let_write(&self, _may: bool) {}

    /// Whether another handle of its file goes on reading what was in it when this one was opened and has not been written
    /// to since: room that is freed is then not used again.
    fn read_beside(&self, _beside: bool) {}

    /// Nobody writes to it any more, by this handle or another: it is closed, and still read. Others may open it for
    /// reading from now on.
    fn stop_writing(&self) {}

    /// It is opened again on this host as soon as it is closed: the memory of its restart log is left for that, since to give
    /// it back and take it again is most of what either takes.
    fn opens_again(&self) {}

    /// Write what is still in memory and leave the image as other programs expect it, before it is
    /// closed for good. No other request is in flight.
    fn close<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.flush(io)
    }
}
