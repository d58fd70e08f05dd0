//! What a back end tells its frontend about the disk, by nodes in xenstore.
//!
//! Source: Xen, public/io/blkif.h, "Backend XenBus Nodes".

use ringtap_vbd::Disk;

use super::wire::{INDIRECT_SEGMENTS, SECTOR};

/// Rings of up to 16 pages. A frontend that was promised so many may go on using them with the next
/// server: do not lower it.
pub(crate) const MOST_RING_ORDER: u32 = 4;

/// What a frontend was promised is read again by the server that takes it over.
pub(crate) const MOST_QUEUES: &str = "multi-queue-max-queues";
pub(crate) const PERSISTENT: &str = "feature-persistent";

/// Bits of the node "info". VDISK_*.
const CDROM: u32 = 1 << 0;
const REMOVABLE: u32 = 1 << 1;
const READ_ONLY: u32 = 1 << 2;

/// What the toolstack says about a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(crate) cdrom: bool,
    pub(crate) removable: bool,
    /// Whether the guest may be offered discards.
    pub(crate) discard: bool,
}

/// Names of nodes and their values.
pub(crate) type Nodes = Vec<(&'static str, String)>;

/// Whether the frontend may discard.
pub(crate) fn discards(vbd: &Disk, wishes: &Wishes) -> bool {
    let info = vbd.info();
    wishes.discard && info.discard && !info.read_only
}

/// What the frontend may use.
pub(crate) fn features(vbd: &Disk, wishes: &Wishes, queues: u16, persistent: bool) -> Nodes {
    let info = vbd.info();
    let flag = |on: bool| u8::from(on).to_string();
    let discard = discards(vbd, wishes);
    let mut nodes = vec![
        ("feature-flush-cache", flag(!vbd.cache().writethrough())),
        ("feature-barrier", flag(!vbd.cache().writethrough())),
        (PERSISTENT, flag(persistent)),
        ("feature-max-indirect-segments", INDIRECT_SEGMENTS.to_string()),
        ("max-ring-page-order", MOST_RING_ORDER.to_string()),
        (MOST_QUEUES, queues.to_string()),
        ("feature-discard", flag(discard)),
    ];
    if discard {
        let granularity = info.discard_alignment.max(info.logical_block_size.into());
        nodes.push(("discard-granularity", granularity.to_string()));
        nodes.push(("discard-alignment", 0.to_string()));
        nodes.push(("discard-secure", 0.to_string()));
    }
    nodes
}

/// What the disk is.
pub(crate) fn properties(vbd: &Disk, wishes: &Wishes) -> Nodes {
    let info = vbd.info();
    let logical = info.logical_block_size.max(SECTOR as u32);
    // "sectors" must be a whole number of physical sectors.
    let physical = info.physical_block_size.max(logical);
    let physical = if vbd.size() % u64::from(physical) == 0 { physical } else { logical };
    let bits = [(wishes.cdrom, CDROM), (wishes.removable, REMOVABLE), (info.read_only, READ_ONLY)];
    let bits = bits.into_iter().filter(|(on, _)| *on).fold(0, |all, (_, bit)| all | bit);
    vec![
        sectors(vbd),
        ("info", bits.to_string()),
        ("sector-size", logical.to_string()),
        ("physical-sector-size", physical.to_string()),
    ]
}

/// How large the disk is.
pub(crate) fn sectors(vbd: &Disk) -> (&'static str, String) {
    ("sectors", (vbd.size() / SECTOR).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_image::{CacheMode, Null};
    use ringtap_vbd::Vbd;

    fn vbd(size: u64, read_only: bool, cache: CacheMode) -> Vbd {
        Vbd::new(Box::new(Null::new(size, read_only)), cache)
    }

    fn value<'a>(nodes: &'a Nodes, name: &str) -> Option<&'a str> {
        nodes.iter().find(|(node, _)| *node == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn a_disk_shows_what_it_is() {
        let wishes = Wishes { cdrom: true, removable: true, discard: true };
        let nodes = properties(&vbd(1 << 20, true, CacheMode::None), &wishes);
        assert_eq!(value(&nodes, "sectors"), Some("2048"));
        assert_eq!(value(&nodes, "info"), Some("7"));
        let nodes = properties(&vbd(1 << 20, false, CacheMode::None), &Wishes::default());
        assert_eq!(value(&nodes, "info"), Some("0"));
        // A size that is no multiple of the physical sectors would break the protocol's promise.
        let nodes = properties(&vbd((1 << 20) + 512, false, CacheMode::None), &wishes);
        let of = |name| value(&nodes, name).and_then(|text| text.parse::<u64>().ok());
        let (sectors, physical) = (of("sectors"), of("physical-sector-size"));
        assert_eq!((sectors, physical), (Some(2049), of("sector-size")));
    }

    #[test]
    fn a_disk_without_a_write_cache_asks_for_no_flushes() {
        let wishes = Wishes { discard: true, ..Wishes::default() };
        for (cache, flush) in [(CacheMode::None, "1"), (CacheMode::Writethrough, "0")] {
            let nodes = features(&vbd(1 << 20, false, cache), &wishes, 4, true);
            assert_eq!(value(&nodes, "feature-flush-cache"), Some(flush));
            assert_eq!(value(&nodes, "feature-barrier"), Some(flush));
        }
    }

    #[test]
    fn discards_are_offered_where_they_do_something_and_nobody_forbids_them() {
        for (read_only, wish, offered) in
            [(false, true, "1"), (false, false, "0"), (true, true, "0")]
        {
            let wishes = Wishes { discard: wish, ..Wishes::default() };
            let nodes = features(&vbd(1 << 20, read_only, CacheMode::None), &wishes, 1, false);
            assert_eq!(value(&nodes, "feature-discard"), Some(offered));
            assert_eq!(value(&nodes, "discard-granularity").is_some(), offered == "1");
        }
    }
}
