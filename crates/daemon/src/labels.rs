//! Short names for disks, by which their threads are told apart.

use ringtap_vbd::{LABEL, shortened};

use crate::Disk;

/// What each disk's threads are called: its own name, else its file's; numbered where they would be alike.
pub(crate) fn labels(disks: &[Disk]) -> Vec<String> {
    let whole: Vec<String> = disks.iter().map(name).collect();
    let short: Vec<String> = whole.iter().map(|name| shortened(name, LABEL)).collect();
    let alike = |label: &String| short.iter().filter(|other| *other == label).count() > 1;
    let one = |(place, label): (usize, &String)| match alike(label) {
        false => label.clone(),
        true => {
            let number = format!("~{}", place + 1);
            shortened(&whole[place], LABEL.saturating_sub(number.len())) + &number
        }
    };
    short.iter().enumerate().map(one).collect()
}

fn name(disk: &Disk) -> String {
    let file = || disk.path.file_stem().unwrap_or(disk.path.as_os_str()).to_string_lossy();
    if disk.name.is_empty() { file().into_owned() } else { disk.name.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_image::OpenOptions;

    #[test]
    fn no_two_disks_are_called_alike() {
        let disk = |(path, name): (&str, &str)| Disk {
            name: name.into(),
            ..Disk::new(path, OpenOptions::default())
        };
        let disks = [
            ("/srv/web01.qcow2", ""),
            ("/srv/x.raw", "database"),
            ("/a/disk.raw", ""),
            ("/b/disk.raw", ""),
            ("/srv/customer-one-root.raw", ""),
            ("/srv/customer-two-root.raw", ""),
            ("null:1M", ""),
        ];
        let labels = labels(&disks.map(disk));
        let expected =
            ["web01", "database", "disk~3", "disk~4", "cus~root~5", "cus~root~6", "null:1M"];
        assert_eq!(labels, expected);
    }
}
