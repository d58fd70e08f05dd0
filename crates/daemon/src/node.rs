//! What clients of the control socket know disks by.

use std::collections::HashSet;

use crate::{Disk, Error};

/// The longest name. Source: QEMU, the names of block nodes.
const LONGEST: usize = 31;

/// Whether a disk may be called so: a letter, then letters, digits, `-`, `.` and `_`.
pub(crate) fn is_name(text: &str) -> bool {
    let rest = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    text.len() <= LONGEST
        && text.bytes().next().is_some_and(|first| first.is_ascii_alphabetic())
        && text.bytes().all(rest)
}

/// Name those that have no name yet.
pub(crate) fn name_all(disks: &mut [Disk]) -> Result<(), Error> {
    let mut taken = HashSet::new();
    for disk in disks.iter() {
        let Some(name) = &disk.node_name else { continue };
        let refuse =
            |why| Err(Error::Usage(format!("{}: --node-name {name}: {why}", disk.path.display())));
        if !is_name(name) {
            return refuse(
                "write a letter and at most 30 letters, digits, hyphens, points and underscores",
            );
        }
        if !taken.insert(name.clone()) {
            return refuse("another disk has that name");
        }
    }
    let mut unnamed: Vec<_> =
        disks.iter_mut().enumerate().filter(|(_, disk)| disk.node_name.is_none()).collect();
    for (_, disk) in &mut unnamed {
        if is_name(&disk.name) && taken.insert(disk.name.clone()) {
            disk.node_name = Some(disk.name.clone());
        }
    }
    for (place, disk) in unnamed {
        if disk.node_name.is_none() {
            let free = (place..).map(|number| format!("disk{number}"));
            disk.node_name = free.into_iter().find(|name| taken.insert(name.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_image::OpenOptions;

    fn disk(node_name: Option<&str>, name: &str) -> Disk {
        Disk {
            name: name.into(),
            node_name: node_name.map(str::to_owned),
            ..Disk::new("null:1M", OpenOptions::default())
        }
    }

    #[test]
    fn each_disk_has_a_name_of_its_own() {
        let mut disks = [
            disk(None, ""),
            disk(None, "root"),
            disk(Some("disk0"), "x"),
            disk(None, "root"),
            disk(None, "no name/of a node"),
            disk(Some("root.2"), "root"),
        ];
        name_all(&mut disks).expect("names");
        let names = disks.each_ref().map(|disk| disk.node_name.as_deref().unwrap_or_default());
        assert_eq!(names, ["disk1", "root", "disk0", "disk3", "disk4", "root.2"]);
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for wrong in ["", "1a", "a b", "-a", "#block1", "a234567890123456789012345678901x"] {
            let message = name_all(&mut [disk(Some(wrong), "")]).expect_err(wrong).to_string();
            assert!(message.contains("write a letter"), "{message}");
        }
        let twice = name_all(&mut [disk(Some("a"), ""), disk(Some("a"), "")]);
        assert!(twice.expect_err("twice").to_string().contains("another disk"));
    }
}
