//! Volumes as LVM makes them: device-mapper's tables, as scripts for a shell of this machine or of a guest.

use super::Inner;

/// Sectors of 512 bytes of a thin volume's chunk: LVM's default, 64 KiB.
const THIN_CHUNK: u64 = 128;
/// Without udev nobody makes the nodes but dmsetup itself.
const HEAD: &str = "set -e\nexport DM_DISABLE_UDEV=1\n";

/// Where a volume's parts lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// What the names of all its devices end with.
    pub name: String,
    /// Sectors of the volume.
    pub sectors: u64,
    /// The device with its content, and the sector from which on.
    pub data: (String, u64),
    /// The same for copied chunks (snapshot) or metadata (thin), and how many sectors.
    pub beside: (String, u64, u64),
}

impl Parts {
    fn node(&self, role: &str) -> String {
        format!("/dev/mapper/{role}{}", self.name)
    }

    fn create(&self, role: &str, table: &str) -> String {
        format!("dmsetup create --noudevsync {role}{} --table '{table}'\n", self.name)
    }

    fn linear(&self, role: &str, sectors: u64, (device, from): (&str, u64)) -> String {
        self.create(role, &format!("0 {sectors} linear {device} {from}"))
    }

    /// The script that makes the volume, and its node. A snapshot is taken by [`Parts::refresh`] only; a thin volume is
    /// written once. `None` for what is no volume.
    pub fn make(&self, inner: Inner) -> Option<(String, String)> {
        let sectors = self.sectors;
        let (data, beside) = ((self.data.0.as_str(), self.data.1), self.beside.0.as_str());
        let (script, role) = match inner {
            Inner::None | Inner::Loop { .. } => return None,
            Inner::Linear => (self.linear("lin", sectors, data), "lin"),
            Inner::Snapshot { itself, .. } => {
                let origin = format!("0 {sectors} snapshot-origin {}", self.node("real"));
                let script = self.linear("real", sectors, data)
                    + &self.linear("cow", self.beside.2, (beside, self.beside.1))
                    + &self.create("origin", &origin);
                (script, if itself { "snap" } else { "origin" })
            }
            Inner::Thin => {
                let (meta, pool) = (self.node("meta"), self.node("pool"));
                let table = format!(
                    "0 {sectors} thin-pool {meta} {} {THIN_CHUNK} 0 1 skip_block_zeroing",
                    self.node("data")
                );
                // The pool's metadata begin where zeros say that there is none.
                let script = self.linear("meta", self.beside.2, (beside, self.beside.1))
                    + &self.linear("data", sectors, data)
                    + &format!(
                        "dd if=/dev/zero of={meta} bs=4096 count=1 oflag=direct 2>/dev/null\n"
                    )
                    + &self.create("pool", &table)
                    + &format!("dmsetup message {pool} 0 'create_thin 0'\n")
                    + &self.create("thin", &format!("0 {sectors} thin {pool} 0"))
                    + &format!(
                        "dd if={} of={} bs=1M count={} iflag=direct oflag=direct 2>/dev/null\n",
                        self.data.0,
                        self.node("thin"),
                        sectors >> 11
                    );
                (script, "thin")
            }
        };
        Some((HEAD.to_owned() + &script, self.node(role)))
    }

    /// The script that takes a snapshot anew; `None` for what is none.
    pub fn refresh(&self, inner: Inner) -> Option<String> {
        let Inner::Snapshot { chunk, .. } = inner else { return None };
        let (real, cow) = (self.node("real"), self.node("cow"));
        let table = format!("0 {} snapshot {real} {cow} P {chunk}", self.sectors);
        // A cow device whose first bytes are zero is a new one.
        Some(format!(
            "{HEAD}dmsetup remove --noudevsync snap{} 2>/dev/null || true\n\
             dd if=/dev/zero of={cow} bs=64k count=16 oflag=direct 2>/dev/null\n{}",
            self.name,
            self.create("snap", &table)
        ))
    }

    /// Names of all devices that there may be, in an order in which they can be removed.
    pub fn names(&self) -> Vec<String> {
        let roles = ["snap", "origin", "cow", "real", "thin", "pool", "data", "meta", "lin"];
        roles.iter().map(|role| format!("{role}{}", self.name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Parts {
        Parts {
            name: "7".into(),
            sectors: 2048,
            data: ("/dev/a".into(), 0),
            beside: ("/dev/b".into(), 16, 4096),
        }
    }

    #[test]
    fn what_is_made_is_removed_users_first() {
        let parts = parts();
        let names = parts.names();
        let itself = Inner::Snapshot { chunk: 128, itself: true };
        for inner in [Inner::Linear, Inner::ORIGIN, itself, Inner::Thin] {
            let (script, node) = parts.make(inner).unwrap();
            let script = script + &parts.refresh(inner).unwrap_or_default();
            let made: Vec<&str> = script
                .lines()
                .filter_map(|line| line.strip_prefix("dmsetup create --noudevsync "))
                .filter_map(|line| line.split(' ').next())
                .collect();
            assert!(node.ends_with("7") && made.contains(&&node["/dev/mapper/".len()..]));
            for (at, name) in made.iter().enumerate() {
                let place = names.iter().position(|known| known == name).unwrap();
                // A table names what was made before it: that goes later.
                let line =
                    script.lines().find(|l| l.contains(&format!("noudevsync {name} "))).unwrap();
                for below in &made[..at] {
                    if line.contains(&format!("/dev/mapper/{below}")) {
                        assert!(names.iter().position(|known| known == below).unwrap() > place);
                    }
                }
            }
        }
        assert_eq!(parts.make(Inner::None), None);
    }
}
