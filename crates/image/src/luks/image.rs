//! A LUKS container as an image: its payload, deciphered.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use ringtap_io::Io;

use super::{Error as LuksError, Keyed, read_header, unlock};
use crate::{
    Boxed, CacheMode, Cipher, Container, Discard, Error, Extent, Image, Info, LayerState,
    OpenError, OpenOptions, Place, Secret, SectorCipher, Status, Traits,
};

/// Bytes that are enciphered and written at a time where a container grows.
const PIECE: u64 = 1 << 20;

/// The payload of a LUKS container.
///
/// What a discard frees reads as noise afterwards, as under dm-crypt: zeros, deciphered.
#[derive(Clone)]
pub struct Luks {
    container: Container,
    cipher: Arc<Keyed>,
    offset: u64,
    /// Where the header says the payload ends; else it ends with the file.
    len: Option<u64>,
    info: Info,
    /// Its size at opening, or since it has grown.
    size: Arc<AtomicU64>,
    /// Up to where it may grow: zeros have been written behind it.
    zeros_to: Arc<AtomicU64>,
    /// Whether the file is longer than the disk meanwhile.
    grows: Arc<AtomicBool>,
}

impl Luks {
    /// Open and lock a container, and open it with the secret of the options. A payload that begins
    /// inside a block of the file's is reached through the page cache.
    pub async fn open(
        io: &Io,
        place: impl Into<Place>,
        options: &OpenOptions,
    ) -> Result<Luks, OpenError> {
        let place = place.into();
        let path = place.path();
        let failed = |source| OpenError::Luks { path: path.to_owned(), source };
        let secret = options.secret.as_ref().ok_or(LuksError::NoSecret).map_err(failed)?;
        let mut container = Container::open(&place, options)?;
        let header = read_header(io, &container).await.map_err(failed)?;
        if header.payload_offset % container.traits().request_alignment != 0 {
            let cache = match options.cache {
                CacheMode::DirectSync => CacheMode::Writethrough,
                CacheMode::None => CacheMode::Writeback,
                other => other,
            };
            drop(container);
            container = Container::open(&place, &OpenOptions { cache, ..options.clone() })?;
        }
        Luks::on(io, container, secret, options.allow_discards).await.map_err(failed)
    }

    /// Open a container with its secret. `discard` passes discards on, which tells whoever sees the
    /// file which parts of the payload are in use.
    pub async fn on(
        io: &Io,
        container: Container,
        secret: &Secret,
        discard: bool,
    ) -> Result<Luks, LuksError> {
        let header = read_header(io, &container).await?;
        let (offset, len) = (header.payload_offset, header.payload_len);
        let sector = header.sector_size as u64;
        let traits = *container.traits();
        let need = offset + len.unwrap_or(0);
        if need > container.len() {
            return Err(LuksError::Short { what: "the payload", need, have: container.len() });
        }
        if offset % traits.request_alignment != 0 {
            return Err(LuksError::Field {
                what: "payload offset",
                found: offset,
                wanted: "a multiple of the block size that O_DIRECT asks for: open it through the \
                         page cache",
            });
        }
        let key = unlock::volume_key(io, &container, &header, secret).await?;
        let cipher = Arc::new(header.cipher(&key)?);
        let Traits { regular, read_only, memory_alignment, .. } = traits;
        let logical_block_size = traits.logical_block_size.max(header.sector_size as u32);
        let request_alignment = traits.request_alignment.max(sector);
        let discard_alignment =
            if regular { request_alignment } else { u64::from(logical_block_size) };
        let info = Info {
            format: "luks",
            size: len.unwrap_or(payload_of(container.len(), offset, sector)),
            read_only,
            request_alignment,
            memory_alignment,
            discard_alignment,
            logical_block_size,
            physical_block_size: traits.physical_block_size.max(logical_block_size),
            discard: discard || header.allow_discards,
            fast_zero: false,
            rotational: container.is_rotational(),
        };
        let [size, zeros_to] = [info.size; 2].map(|size| Arc::new(AtomicU64::new(size)));
        Ok(Luks { container, cipher, offset, len, info, size, zeros_to, grows: Arc::default() })
    }

    /// Whether the disk ends where the file does, and that can be changed.
    fn ends_with_file(&self) -> bool {
        self.len.is_none() && self.container.traits().regular && !self.info.read_only
    }

    async fn append(&self, io: &Io, range: Range<u64>) -> Result<(), Error> {
        if !self.ends_with_file() {
            return Err(Error::Unsupported);
        }
        self.grows.store(true, Relaxed);
        let (place, len) = (self.offset + range.start, range.end.saturating_sub(range.start));
        // Before what others have here is used up.
        match self.container.reserve(io, place, len).await {
            Ok(()) | Err(Error::Unsupported) => {}
            Err(error) => {
                let _ = self.container.punch(io, place, len).await;
                return Err(error);
            }
        }
        let mut at = range.start;
        let mut bytes = vec![0; PIECE.min(range.end.saturating_sub(at)) as usize];
        while at < range.end {
            // The next one begins with a block.
            let next = (at - at % PIECE + PIECE).min(range.end);
            let piece = bytes.get_mut(..(next - at) as usize).ok_or(Error::Range)?;
            piece.fill(0);
            self.cipher.encrypt(at, piece);
            self.container.write(io, self.offset + at, piece).await?;
            at = next;
        }
        // Of the last block the file has all.
        self.cut(io, range.end).await?;
        self.container.sync(io).await?;
        self.zeros_to.store(range.end, Relaxed);
        Ok(())
    }

    async fn cut(&self, io: &Io, size: u64) -> Result<(), Error> {
        if !self.ends_with_file() {
            return Err(Error::Unsupported);
        }
        match self.container.present_len()? > self.offset + size {
            true => self.container.set_len(io, self.offset + size).await,
            false => Ok(()),
        }
    }
}

/// Bytes of a payload that goes to the end of the file, in whole sectors.
fn payload_of(file: u64, offset: u64, sector: u64) -> u64 {
    let bytes = file.saturating_sub(offset);
    bytes - bytes % sector
}

impl Image for Luks {
    fn info(&self) -> &Info {
        &self.info
    }

    fn state(&self) -> LayerState {
        LayerState { encrypted: true, ..LayerState::of(&self.info, Some(&self.container)) }
    }

    fn container(&self) -> Option<&Container> {
        Some(&self.container)
    }

    fn place(&self) -> Option<Place> {
        Some(self.container.place())
    }

    fn let_write(&self, may: bool) {
        self.container.let_write(may);
    }

    fn stop_writing(&self) {
        self.container.stop_writing();
    }

    fn fork(&self) -> Box<dyn Image> {
        let mut own = self.clone();
        // Who opens an image upon it reads as far as it reaches now.
        own.info.size = own.size.load(Relaxed);
        Box::new(own)
    }

    #[inline]
    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        let key: &dyn SectorCipher = &*self.cipher;
        Extent::Data {
            file: self.container.file(),
            offset: self.offset + offset,
            len,
            writable: true,
            cipher: Some(Cipher { key, offset }),
        }
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.container.sync(io))
    }

    /// Zeros have to be written, for those in the file would be deciphered to noise.
    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async move {
            match mode {
                Discard::Zero { .. } => Err(Error::Unsupported),
                Discard::Free if !self.info.discard => Ok(()),
                Discard::Free => match self.container.punch(io, self.offset + offset, len).await {
                    Err(Error::Unsupported) => Ok(()),
                    end => end,
                },
            }
        })
    }

    /// All of it is data: a hole in the file is none in the payload.
    fn status<'a>(&'a self, _: &'a Io, _: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async move { Ok(Status::data(len)) })
    }

    fn current_size(&self) -> Result<u64, Error> {
        if self.len.is_some() {
            return Ok(self.info.size);
        }
        let known = self.size.load(Relaxed);
        if self.grows.load(Relaxed) {
            return Ok(known);
        }
        let size =
            payload_of(self.container.present_len()?, self.offset, self.cipher.sector_size());
        // A write to an incomplete last block made the file longer, not the disk.
        let whole = known.next_multiple_of(self.info.request_alignment);
        if size > known && size <= whole {
            return Ok(known);
        }
        self.size.store(size, Relaxed);
        Ok(size)
    }

    fn grow(&self, size: u64) -> Result<(), Error> {
        // It does not grow by itself, as a guest writes behind its end.
        if size > self.zeros_to.load(Relaxed) || size <= self.size.load(Relaxed) {
            return Err(Error::Unsupported);
        }
        self.size.fetch_max(size, Relaxed);
        self.grows.store(false, Relaxed);
        Ok(())
    }

    fn append_zeros<'a>(&'a self, io: &'a Io, range: Range<u64>) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.append(io, range))
    }

    fn cut_to<'a>(&'a self, io: &'a Io, size: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async move {
            self.zeros_to.store(size, Relaxed);
            let end = self.cut(io, size).await;
            self.grows.store(false, Relaxed);
            end
        })
    }
}
