//! The mappings of a process, as `/proc/PID/maps` and `/proc/PID/smaps` tell of them (proc(5)).

use std::ops::Range;

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    /// Its addresses.
    pub(crate) range: Range<usize>,
    /// It is code or constants: of a file, private, and not to be written to.
    pub(crate) constant: bool,
    /// KiB that are no longer as the file has them; only smaps tells.
    pub(crate) changed: Option<u64>,
}

/// The mappings in either text, in order; lines that are neither are passed over.
pub(crate) fn areas(text: &str) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for line in text.lines() {
        if let Some(area) = area(line) {
            areas.push(area);
        } else if let (Some(area), Some(size)) = (areas.last_mut(), line.strip_prefix("Anonymous:"))
        {
            area.changed = size.trim().strip_suffix("kB").and_then(|n| n.trim().parse().ok());
        }
    }
    areas
}

/// None where the line does not begin an area.
fn area(line: &str) -> Option<Area> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    let rights = words.next()?;
    let is_file = words.nth(2)? != "0";
    let constant = is_file && matches!(rights, "r--p" | "r-xp");
    Some(Area { range, constant, changed: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0200000 r--p 00000000 fe:00 123 /usr/bin/ringtap
Rss:                 700 kB
Anonymous:             0 kB
VmFlags: rd mr mw me sd
55d0c0200000-55d0c0a00000 r-xp 00200000 fe:00 123 /usr/bin/a program (deleted)
Anonymous:           200 kB
55d0c0b00000-55d0c0b02000 rw-p 00b00000 fe:00 123 /usr/bin/ringtap
Anonymous:             8 kB
7f0000000000-7f0000200000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000200000-7f0000300000 r--s 00000000 fe:00 124 /var/lib/disk
Anonymous:             0 kB
7ffff7ffa000-7ffff7ffc000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
";

    #[test]
    fn both_texts_tell_of_the_same_areas() {
        let from_smaps = areas(SMAPS);
        let told: Vec<_> = from_smaps.iter().map(|area| (area.constant, area.changed)).collect();
        let no = (false, Some(0));
        assert_eq!(told, [(true, Some(0)), (true, Some(200)), (false, Some(8)), no, no, no]);
        assert_eq!(from_smaps[0].range, 0x55d0_c000_0000..0x55d0_c020_0000);
        let maps: String = SMAPS
            .lines()
            .filter(|line| !line.contains(": "))
            .fold(String::new(), |text, line| text + line + "\n");
        let untold = from_smaps.into_iter().map(|area| Area { changed: None, ..area });
        assert_eq!(areas(&maps), untold.collect::<Vec<_>>());
    }

    #[test]
    fn other_text_is_passed_over() {
        for text in ["", "Anonymous: 0 kB", "-", "1-", "1-x r--p", "1-2 r--p 0 0", "a b c d e f"] {
            assert_eq!(areas(text), [], "{text:?}");
        }
        let odd = areas("1-2 r--p 0 0:0 7\nAnonymous: many kB\n");
        assert_eq!(odd, [Area { range: 1..2, constant: true, changed: None }]);
    }

    #[test]
    fn this_process_has_code() {
        let text = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let here = both_texts_tell_of_the_same_areas as fn() as usize;
        let own = areas(&text).into_iter().find(|area| area.range.contains(&here));
        assert!(own.is_some_and(|area| area.constant && area.changed.is_some()));
    }
}
