//! An image's file with its header, for the tools for images at rest.

use ringtap_io::Io;

use super::header_error::HeaderError;
use super::moment::Moment;
use super::tool::{ToolError, failed};
use super::{Header, extension};
use crate::bytes::{entries, table};
use crate::{Container, Error, OpenError};

/// What a disk writes whole or not at all.
const SECTOR: usize = 512;
/// Tables are read in pieces of so many bytes.
const PIECE: u64 = 1 << 20;
/// The most read at once of a table that may be little more than holes.
const USED_PIECE: u64 = 64 << 10;

/// An image at rest: nobody serves it.
pub(super) struct Offline<'a> {
    pub(super) io: &'a Io,
    pub(super) container: &'a Container,
    pub(super) header: Header,
    /// What its tables were when it was looked at, of one that is served all the same.
    pub(super) moment: Option<&'a Moment>,
}

impl<'a> Offline<'a> {
    /// Read the header, and make sure the tables can be.
    pub(super) async fn open(
        io: &'a Io,
        container: &'a Container,
    ) -> Result<Offline<'a>, ToolError> {
        let header = Header::read(io, container).await?;
        let path = || container.path().to_owned();
        header
            .check_tables(container.len())
            .map_err(|source| OpenError::Qcow2 { path: path(), source })?;
        Ok(Offline { io, container, header, moment: None })
    }

    pub(super) fn refused(&self, why: impl Into<String>) -> ToolError {
        ToolError::Refused { path: self.container.path().to_owned(), why: why.into() }
    }

    pub(super) fn corrupt(&self, found: impl Into<String>) -> ToolError {
        ToolError::Corrupt { path: self.container.path().to_owned(), found: found.into() }
    }

    /// Bytes of the file.
    pub(super) fn len(&self) -> u64 {
        self.moment.map_or_else(|| self.container.len(), |moment| moment.len)
    }

    /// Bytes of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        self.header.cluster_size()
    }

    /// The cluster that a host offset lies in.
    pub(super) fn cluster_of(&self, offset: u64) -> u64 {
        offset >> self.header.cluster_bits
    }

    /// Whether `len` > 0 bytes from a host offset lie in the file, whose last cluster may be cut off.
    pub(super) fn is_in_file(&self, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len);
        let file = self.len().checked_next_multiple_of(self.cluster());
        end.is_some_and(|end| end <= file.unwrap_or(u64::MAX))
    }

    /// Whether a host offset may be that of a table or standard cluster.
    pub(super) fn is_cluster(&self, offset: u64) -> bool {
        offset % self.cluster() == 0 && offset != 0 && self.is_in_file(offset, self.cluster())
    }

    /// Bytes from `offset`; zeros past the file's end.
    pub(super) async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, ToolError> {
        let mut bytes = vec![0; len as usize];
        let end = self.container.read(self.io, offset, &mut bytes).await;
        end.map_err(failed(self.container, "read", offset))?;
        if let Some(moment) = self.moment {
            moment.put_back(offset, &mut bytes).map_err(|why| self.refused(why))?;
        }
        Ok(bytes)
    }

    /// A table of `count` entries.
    pub(super) async fn read_table(&self, offset: u64, count: u64) -> Result<Vec<u64>, ToolError> {
        let mut table = Vec::with_capacity(count as usize);
        let mut left = count * 8;
        while left > 0 {
            let piece = self.read(offset + count * 8 - left, left.min(PIECE)).await?;
            table.extend(entries(&piece));
            left -= piece.len() as u64;
        }
        Ok(table)
    }

    /// The next entries of a table of `count`, from number `from` on, that do not lie in a hole of the
    /// file: the number of the first, and those that follow. None after the last.
    pub(super) async fn used_entries(
        &self,
        offset: u64,
        count: u64,
        from: u64,
    ) -> Result<Option<(u64, Vec<u64>)>, ToolError> {
        let Some(data) = self.container.next_data(offset + from * 8) else { return Ok(None) };
        let first = (data - offset) / 8;
        if first >= count {
            return Ok(None);
        }
        let len = ((count - first) * 8).min(USED_PIECE);
        Ok(Some((first, entries(&self.read(offset + first * 8, len).await?))))
    }

    /// An L2 table, both words of an extended entry after each other.
    pub(super) async fn read_l2(&self, offset: u64) -> Result<Vec<u64>, ToolError> {
        self.read_table(offset, self.cluster() / 8).await
    }

    /// As [`Offline::read_l2`], to look at what is in it: empty where the file has a hole there. A file of
    /// little more than holes may claim any number of tables.
    pub(super) async fn read_used_l2(&self, offset: u64) -> Result<Vec<u64>, ToolError> {
        match self.container.is_hole(offset, self.cluster()) {
            true => Ok(Vec::new()),
            false => self.read_l2(offset).await,
        }
    }

    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ToolError> {
        let end = self.container.write(self.io, offset, bytes).await;
        end.map_err(failed(self.container, "write to", offset))
    }

    /// Write a table and zeros up to the end of its last cluster.
    pub(super) async fn write_table(&self, offset: u64, of: &[u64]) -> Result<(), ToolError> {
        self.write_clusters(offset, table(of)).await
    }

    /// Write bytes and zeros up to the end of their last cluster.
    pub(super) async fn write_clusters(
        &self,
        offset: u64,
        mut bytes: Vec<u8>,
    ) -> Result<(), ToolError> {
        bytes.resize(bytes.len().next_multiple_of(self.cluster() as usize), 0);
        self.write(offset, &bytes).await
    }

    /// Free the space of clusters within the file, where that can be.
    pub(super) async fn punch(&self, clusters: std::ops::Range<u64>) -> Result<(), ToolError> {
        let bits = self.header.cluster_bits;
        let end = self.container.len() >> bits;
        let clusters = clusters.start..clusters.end.min(end);
        if clusters.is_empty() {
            return Ok(());
        }
        let offset = clusters.start << bits;
        let len = (clusters.end - clusters.start) << bits;
        let align = self.container.traits().request_alignment;
        if offset % align != 0 || len % align != 0 {
            return Ok(());
        }
        match self.container.punch(self.io, offset, len).await {
            Err(Error::Unsupported) => Ok(()),
            end => end.map_err(failed(self.container, "free space in", offset)),
        }
    }

    pub(super) async fn sync(&self) -> Result<(), ToolError> {
        self.container.sync(self.io).await.map_err(failed(self.container, "sync", 0))
    }

    /// Write the header in place of the one that is there. What it points to must have been written;
    /// all is stable afterwards. A power cut leaves one of the two headers.
    pub(super) async fn write_header(&self) -> Result<(), ToolError> {
        self.sync().await?;
        let wrong = |source| {
            let path = self.container.path().to_owned();
            ToolError::Header { path, source }
        };
        let bytes = self.header.to_bytes().map_err(wrong)?;
        let old = self.read(0, bytes.len() as u64).await?;
        let changed = old.chunks(SECTOR).zip(bytes.chunks(SECTOR)).filter(|(old, new)| old != new);
        if changed.count() > 1 {
            if let Some((name, start)) = self.in_one_sector().map_err(wrong)? {
                if let Some((offset, name)) = name {
                    self.write(offset, &name).await?;
                    self.sync().await?;
                }
                self.write(0, &start).await?;
                self.sync().await?;
                if let Some(rest) = bytes.get(SECTOR..) {
                    self.write(SECTOR as u64, rest).await?;
                    self.sync().await?;
                }
            }
        }
        self.write(0, &bytes).await?;
        self.sync().await
    }

    /// A header that means the same and lies in the first sector, but for the backing file's name,
    /// which it expects at an offset past both the header that is there and the one to come. None
    /// where such a header cannot be.
    fn in_one_sector(&self) -> Result<Option<OneSector>, HeaderError> {
        let mut short = self.header.clone();
        let name = short.backing_file.take();
        short.set_extension(extension::FEATURE_NAMES, None);
        let mut start = short.to_bytes()?;
        let room = self.cluster() as usize;
        if start.len() > SECTOR {
            return Ok(None);
        }
        start.resize(SECTOR, 0);
        let Some(name) = name else { return Ok(Some((None, start))) };
        // Old and new headers begin at the front; the cluster's end is as far from both as can be.
        let at = (room - name.len()) / SECTOR * SECTOR;
        let used = self.header.to_bytes()?.len() + 2 * name.len() + SECTOR;
        if at < used.next_multiple_of(SECTOR) {
            return Ok(None);
        }
        let (offset, len) = ((at as u64).to_be_bytes(), (name.len() as u32).to_be_bytes());
        for (to, from) in start.iter_mut().skip(8).zip(offset.iter().chain(&len)) {
            *to = *from;
        }
        Ok(Some((Some((at as u64, name)), start)))
    }
}

/// Where a name is written and its bytes, and the sector that points there.
type OneSector = (Option<(u64, Vec<u8>)>, Vec<u8>);
