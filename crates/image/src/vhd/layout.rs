//! What lies where in a VHD, read and checked before anything is believed.

use ringtap_io::Io;

use super::footer::{Footer, FooterError, Kind, MOST, SECTOR};
use super::header::{Header, LEN, UNUSED};
use super::{BLOCK_ALIGN, bad, os};
use crate::{Container, OpenError};

/// The most of the table that is read at once.
const PIECE: usize = 1 << 20;
const REPAIR: &str = "ringtap check shows more";

/// A VHD's structures.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) footer: Footer,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Whether a footer is at the file's end.
    pub(super) tail: bool,
    /// None of a fixed VHD.
    pub(super) sparse: Option<Sparse>,
}

/// The structures of a VHD with blocks.
#[derive(Debug)]
pub(super) struct Sparse {
    pub(super) header: Header,
    /// The block allocation table: where each block begins, in sectors.
    pub(super) table: Vec<u32>,
    /// Where the last structure or block ends.
    pub(super) data_end: u64,
    /// Whether the copy of the footer at the file's beginning is good.
    pub(super) head: bool,
}

/// The two footers of a file, as far as they are there.
pub(super) struct Footers {
    pub(super) head: Result<Footer, FooterError>,
    pub(super) tail: Result<Footer, FooterError>,
}

impl Footers {
    pub(super) async fn read(io: &Io, container: &Container) -> Result<Footers, OpenError> {
        let len = container.len();
        if len < SECTOR {
            let found = format!("the file has {len} bytes, and a VHD's footer alone has {SECTOR}");
            return Err(bad(container, 0, found, "is it a VHD?"));
        }
        let mut bytes = [0; SECTOR as usize];
        let failed = |error| os(container, "read a VHD's footer from", error);
        container.read(io, 0, &mut bytes).await.map_err(failed)?;
        let head = Footer::parse(&bytes);
        container.read(io, len - SECTOR, &mut bytes).await.map_err(failed)?;
        Ok(Footers { head, tail: Footer::parse(&bytes) })
    }

    /// The footer that counts. The beginning of a fixed disk is its guest's, and so is the end of a
    /// file that was cut short; only one that knows the image's id can have written both.
    pub(super) fn choose(self, container: &Container) -> Result<(Footer, bool, bool), OpenError> {
        let end = container.len() - SECTOR;
        match (self.head, self.tail) {
            (Ok(head), Ok(tail)) if head.kind != Kind::Fixed => {
                if head.id != tail.id || head.kind != tail.kind {
                    let found = "the footers at the file's beginning and end are of two images";
                    let advice = "a guest may have written one of them, so neither is believed";
                    return Err(bad(container, end, found, advice));
                }
                Ok((head, true, true))
            }
            (_, Ok(tail)) => Ok((tail, false, true)),
            (Ok(head), Err(_)) if head.kind != Kind::Fixed => Ok((head, true, false)),
            (_, Err(error)) => Err(bad(container, end, error, "is it a VHD, and whole?")),
        }
    }
}

impl Layout {
    pub(super) async fn read(io: &Io, container: &Container) -> Result<Layout, OpenError> {
        let (footer, head, tail) = Footers::read(io, container).await?.choose(container)?;
        let (size, len) = (footer.disk_size(), container.len());
        if size == 0 || size > MOST {
            let found = format!("the disk has {size} bytes");
            return Err(bad(container, 48, found, "a VHD's disk has up to 2040 GiB"));
        }
        if footer.kind != Kind::Fixed {
            let sparse = Sparse::read(io, container, &footer, size, head).await?;
            return Ok(Layout { footer, size, tail, sparse: Some(sparse) });
        }
        // A device is as long as it is; its footer is at its end all the same.
        if size > len - SECTOR {
            let found = format!("the file has {len} bytes, too few for a fixed disk of {size}");
            return Err(bad(container, len, found, "the file was cut short"));
        }
        Ok(Layout { footer, size, tail, sparse: None })
    }

    /// Whether no block of so many bytes holds both the guest's bytes and anything else.
    pub(super) fn is_aligned(&self, align: u64) -> bool {
        let Some(sparse) = &self.sparse else { return self.size % align == 0 };
        let bitmap = sparse.header.bitmap_size();
        let begins = |entry: &u32| u64::from(*entry) * SECTOR + bitmap;
        BLOCK_ALIGN % align == 0
            && u64::from(sparse.header.block_size) % align == 0
            && sparse.table.iter().filter(|entry| **entry != UNUSED).all(|e| begins(e) % align == 0)
    }
}

impl Sparse {
    async fn read(
        io: &Io,
        container: &Container,
        footer: &Footer,
        size: u64,
        head: bool,
    ) -> Result<Sparse, OpenError> {
        let sparse = Sparse::read_unchecked(io, container, footer, size, head).await?;
        match sparse.problems(footer.header_at, container.len(), 1).into_iter().next() {
            Some(problem) => Err(bad(container, problem.at, problem.found, REPAIR)),
            None => Ok(sparse),
        }
    }

    /// As far as there is a header and a table for the disk, whatever the table says.
    pub(super) async fn read_unchecked(
        io: &Io,
        container: &Container,
        footer: &Footer,
        size: u64,
        head: bool,
    ) -> Result<Sparse, OpenError> {
        let at = footer.header_at;
        let header = read_header(io, container, at).await?;
        let blocks = header.blocks(size).map_err(|error| bad(container, at, error, REPAIR))?;
        let table = read_table(io, container, &header, blocks).await?;
        let mut sparse = Sparse { header, table, data_end: 0, head };
        let batmap_end = sparse.batmap_end(io, container).await?;
        sparse.data_end = sparse.find_data_end(at, container.len()).max(batmap_end);
        Ok(sparse)
    }

    /// What a block takes in the file.
    pub(super) fn block_len(&self) -> u64 {
        self.header.bitmap_size() + u64::from(self.header.block_size)
    }

    /// Structures beside the blocks.
    fn fixed_areas(&self, header_at: u64) -> Vec<(u64, u64, &'static str)> {
        let table_at = self.header.table_at;
        let mut areas = vec![
            (0, SECTOR, "the footer's copy"),
            (header_at, header_at.saturating_add(LEN as u64), "the dynamic header"),
            (table_at, table_at.saturating_add(self.header.table_size()), "the allocation table"),
        ];
        for locator in self.header.locators.iter().filter(|locator| locator.len > 0) {
            areas.push((locator.at, locator.end(), "a parent locator"));
        }
        areas
    }

    fn find_data_end(&self, header_at: u64, len: u64) -> u64 {
        let areas = self.fixed_areas(header_at);
        let fixed = areas.iter().map(|(_, end, _)| *end).filter(|end| *end <= len);
        let last = self.table.iter().filter(|entry| **entry != UNUSED).max();
        let blocks = last.map(|entry| u64::from(*entry) * SECTOR + self.block_len());
        fixed.chain(blocks).max().unwrap_or(0)
    }

    /// Where the map of full blocks ends that Xen's tools keep behind the table. It stays true: a block
    /// that is not in it may be full all the same.
    async fn batmap_end(&self, io: &Io, container: &Container) -> Result<u64, OpenError> {
        let at = self.header.table_at.saturating_add(self.header.table_size());
        let mut bytes = [0; 20];
        let failed = |error| os(container, "read what follows the table of", error);
        container.read(io, at, &mut bytes).await.map_err(failed)?;
        if crate::bytes::get::<8>(&bytes, 0) != *b"tdbatmap" {
            return Ok(0);
        }
        let map_at = u64::from_be_bytes(crate::bytes::get(&bytes, 8));
        let sectors = u32::from_be_bytes(crate::bytes::get(&bytes, 16));
        let end = map_at.saturating_add(u64::from(sectors) * SECTOR);
        Ok(if end <= container.len() { end } else { at + SECTOR })
    }

    /// What is wrong with the table, `most` such things at most.
    pub(super) fn problems(&self, header_at: u64, len: u64, most: usize) -> Vec<Problem> {
        let mut found = Vec::new();
        let block_len = self.block_len();
        let areas = self.fixed_areas(header_at);
        for (block, entry) in self.table.iter().enumerate().filter(|(_, entry)| **entry != UNUSED) {
            let at = u64::from(*entry) * SECTOR;
            let hit = areas.iter().find(|(from, to, _)| *from < at + block_len && at < *to);
            let entry_at = self.header.table_at + 4 * block as u64;
            if let Some((_, _, what)) = hit {
                let found_here = format!("block {block} lies at {at}, over {what}");
                found.push(Problem { at: entry_at, found: found_here });
            } else if at + block_len > len {
                let ends = at + block_len;
                let found_here =
                    format!("block {block} ends at {ends}, behind the file's end at {len}");
                found.push(Problem { at: entry_at, found: found_here });
            }
            if found.len() >= most {
                return found;
            }
        }
        let mut places: Vec<u32> =
            self.table.iter().copied().filter(|entry| *entry != UNUSED).collect();
        places.sort_unstable();
        for pair in places.windows(2) {
            if let [first, second] = pair {
                if u64::from(second - first) * SECTOR < block_len {
                    let [first, second] = [first, second].map(|place| u64::from(*place) * SECTOR);
                    let found_here = format!("blocks at {first} and {second} overlap");
                    found.push(Problem { at: self.header.table_at, found: found_here });
                    if found.len() >= most {
                        break;
                    }
                }
            }
        }
        found
    }
}

/// Something wrong, and where it says so.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) at: u64,
    pub(super) found: String,
}

pub(super) async fn read_header(
    io: &Io,
    container: &Container,
    at: u64,
) -> Result<Header, OpenError> {
    let len = container.len();
    if at < SECTOR || at.checked_add(LEN as u64).is_none_or(|end| end > len) {
        let found =
            format!("the dynamic header is said to be at {at}, and the file has {len} bytes");
        return Err(bad(container, 16, found, REPAIR));
    }
    let mut bytes = [0; LEN];
    let failed = |error| os(container, "read the dynamic header of", error);
    container.read(io, at, &mut bytes).await.map_err(failed)?;
    Header::parse(&bytes).map_err(|error| bad(container, at, error, REPAIR))
}

async fn read_table(
    io: &Io,
    container: &Container,
    header: &Header,
    blocks: u32,
) -> Result<Vec<u32>, OpenError> {
    let (at, wanted, len) = (header.table_at, u64::from(blocks) * 4, container.len());
    if at < SECTOR || at.checked_add(wanted).is_none_or(|end| end > len) {
        let found = format!("the allocation table is said to be at {at}, in a file of {len} bytes");
        return Err(bad(container, at, found, REPAIR));
    }
    let mut table = Vec::with_capacity(blocks as usize);
    let mut bytes = vec![0; PIECE.min(wanted as usize)];
    let mut done = 0;
    while done < wanted {
        let part = ((wanted - done) as usize).min(PIECE);
        let bytes = &mut bytes[..part];
        let failed = |error| os(container, "read the allocation table of", error);
        container.read(io, at + done, bytes).await.map_err(failed)?;
        table.extend(
            bytes.chunks_exact(4).map(|entry| u32::from_be_bytes(crate::bytes::get(entry, 0))),
        );
        done += part as u64;
    }
    Ok(table)
}
