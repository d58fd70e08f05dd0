//! A LUKS container as an image: its payload, deciphered.

use std::sync::Arc;

use ringtap_io::Io;

use super::{Error as LuksError, Keyed, read_header, unlock};
use crate::{
    Boxed, CacheMode, Cipher, Container, Discard, Error, Extent, Image, Info, LayerState,
    OpenError, OpenOptions, Place, Secret, SectorCipher, Status, Traits,
};

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
        Ok(Luks { container, cipher, offset, len, info })
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
        Box::new(self.clone())
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
        let size =
            payload_of(self.container.present_len()?, self.offset, self.cipher.sector_size());
        // A write to an incomplete last block made the file longer, not the disk.
        let whole = self.info.size.next_multiple_of(self.info.request_alignment);
        let grown_to_a_block = size > self.info.size && size <= whole;
        Ok(if grown_to_a_block { self.info.size } else { size })
    }
}
