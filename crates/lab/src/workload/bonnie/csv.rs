//! bonnie++'s CSV lines, from 1.03 to 2.00.
//!
//! A line says its own layout by field 0 and its length; the header that bonnie++ prints is wrong in 1.96 (46 names
//! over 48 fields) and in 1.98 to 2.00 (48 names over 50) and is never read. Rows of different layouts are not to be
//! compared: "per char" became one byte by read() in 1.92, files are synced at close since 1.90b.

use std::collections::BTreeMap;

use super::PHASES;
use crate::error::{Error, Result};
use crate::sample::{Metric, Value};

/// The layouts known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// 1.03: 27 fields, no version.
    V103,
    /// 1.96 and 1.97: 48 fields.
    V196,
    /// 1.98 to 2.00: 50 fields; field 0 says 1.98 in all of them.
    V198,
}

/// One phase of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phase {
    /// Bytes or operations a second; a bound where bonnie++ printed `+++++`; `None` when the phase was not run.
    pub rate: Option<Value>,
    /// bonnie++'s own CPU share in percent. It sees no kernel thread and no server.
    pub cpu_percent: Option<f64>,
    /// The slowest single operation, in nanoseconds (from 1.96 on).
    pub slowest_ns: Option<f64>,
}

/// A CSV line.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its layout.
    pub layout: Layout,
    /// bonnie++'s version: field 1, or "1.03".
    pub version: String,
    /// The machine's name.
    pub name: String,
    /// Bytes of the data files; `None` with `-s 0`.
    pub file_size: Option<u64>,
    /// Thousands of small files (×1024); `None` with `-n 0`.
    pub files: Option<f64>,
    /// Seeks of the seek phase.
    pub seeks: f64,
    /// The phases.
    pub phases: BTreeMap<Metric, Phase>,
}

/// Bytes of one read or write, unless bonnie++ is told otherwise.
const CHUNK: f64 = 8192.0;
/// One seek in so many writes back what it read.
const SEEKS_OF_A_WRITE: f64 = 10.0;

/// A phase shorter than this has its rate suppressed.
const SHORTEST_SECONDS: f64 = 0.5;
/// Bytes of the per-character phase since 1.92, whatever the file size.
const CHAR_BYTES: f64 = 3.0 * 1024.0 * 1024.0;

impl Row {
    /// The CSV line in what bonnie++ printed: the last line that reads as one.
    pub fn find(text: &str) -> Result<Row> {
        let mut why =
            Error::Output { what: "bonnie++'s CSV line", found: "no line with commas".into() };
        for line in text.lines().rev().filter(|line| line.matches(',').count() >= 20) {
            match Row::parse(line) {
                Ok(row) => return Ok(row),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Reads one line.
    pub fn parse(line: &str) -> Result<Row> {
        let mut fields: Vec<&str> = line.trim().split(',').map(str::trim).collect();
        // 1.96 with -s 0 prints one empty field too few.
        if fields.len() == 47 && fields[0] == "1.96" && fields[5].is_empty() {
            fields.insert(5, "");
        }
        let (layout, first, files_at) = match (fields[0], fields.len()) {
            ("1.96" | "1.97", 48) => (Layout::V196, 7, 19),
            ("1.98", 50) => (Layout::V198, 9, 21),
            (zero, 27) if !zero.starts_with("1.9") && !zero.starts_with("2.") => {
                (Layout::V103, 2, 14)
            }
            (zero, count) => {
                return Err(wrong(format!(
                    "a line of {count} fields that begins with {zero:?}: neither 1.03 (27 fields), 1.96/1.97 (48) nor \
                     1.98 to 2.00 (50)"
                )));
            }
        };
        let (version, name, size) = match layout {
            Layout::V103 => ("1.03", fields[0], fields[1]),
            _ => (fields[1], fields[2], fields[5]),
        };
        // 1.03 packs the chunk into the size (1G:64k) and the rest of the file test into the count (16:100000:16/64).
        let file_size = size_bytes(size.split(':').next().unwrap_or(""))?;
        let files = number(fields[files_at].split(':').next().unwrap_or(""))?;
        let seeks = match layout {
            Layout::V103 => 8000.0,
            Layout::V196 => 8192.0,
            Layout::V198 => number(fields[7])?.unwrap_or(8192.0),
        };
        let creates_from = files_at + if layout == Layout::V103 { 1 } else { 5 };
        let latency_from = (layout != Layout::V103).then_some(creates_from + 12);

        let mut phases = BTreeMap::new();
        for (index, metric) in PHASES.into_iter().enumerate() {
            let at = if index < 6 { first + 2 * index } else { creates_from + 2 * (index - 6) };
            let in_kib = index < 5;
            let work = match (index, layout) {
                (0 | 3, Layout::V196 | Layout::V198) => Some(CHAR_BYTES),
                (0..=4, _) => file_size.map(|bytes| bytes as f64),
                (5, _) => Some(seeks),
                _ => files.map(|thousands| thousands * 1024.0),
            };
            let phase = Phase {
                rate: rate(fields[at], in_kib, work)?,
                cpu_percent: if plus(fields[at + 1]) { None } else { number(fields[at + 1])? },
                slowest_ns: match latency_from {
                    Some(from) => latency(fields[from + index])?,
                    None => None,
                },
            };
            phases.insert(metric, phase);
        }
        let (version, name) = (version.into(), name.into());
        Ok(Row { layout, version, name, file_size, files, seeks, phases })
    }
}

impl Row {
    /// Bytes that the program read and wrote in the phases that it ran: its small files are empty.
    pub fn asked(&self) -> f64 {
        let ran = |metric: &Metric| self.phases.get(metric).is_some_and(|p| p.rate.is_some());
        let size = self.file_size.map_or(0.0, |bytes| bytes as f64);
        let chars = if self.layout == Layout::V103 { size } else { CHAR_BYTES };
        let seeks = self.seeks * CHUNK * (1.0 + 1.0 / SEEKS_OF_A_WRITE);
        let of = [
            (Metric::PutChar, chars),
            (Metric::PutBlock, size),
            (Metric::Rewrite, 2.0 * size),
            (Metric::GetChar, chars),
            (Metric::GetBlock, size),
            (Metric::Seeks, seeks),
        ];
        of.into_iter().filter(|(metric, _)| ran(metric)).map(|(_, bytes)| bytes).sum()
    }
}

/// How many times as good `ours` is as `theirs`, phase by phase: (ratio, `">="` or `"<="` for a bound). Phases that both
/// only bound are left out. Rows of different versions are refused: their columns do not mean the same.
pub fn compare(ours: &Row, theirs: &Row) -> Result<BTreeMap<Metric, (f64, &'static str)>> {
    if ours.layout != theirs.layout {
        return Err(wrong(format!(
            "a row of bonnie++ {} beside one of {}: \"per char\" became one byte by read() in 1.92, files are synced at \
             close since 1.90b, the seekers are five instead of three; such columns are not compared",
            ours.version, theirs.version
        )));
    }
    let mut ratios = BTreeMap::new();
    for (metric, phase) in &ours.phases {
        let other = theirs.phases.get(metric).and_then(|phase| phase.rate);
        let (Some(a), Some(b)) = (phase.rate, other) else { continue };
        let bound = match (a.at_least, b.at_least) {
            (false, false) => "",
            (true, false) => ">=",
            (false, true) => "<=",
            (true, true) => continue,
        };
        if b.value > 0.0 {
            ratios.insert(*metric, (a.value / b.value, bound));
        }
    }
    Ok(ratios)
}

fn wrong(found: String) -> Error {
    Error::Output { what: "bonnie++'s CSV line", found }
}

fn plus(field: &str) -> bool {
    !field.is_empty() && field.bytes().all(|byte| byte == b'+')
}

fn number(field: &str) -> Result<Option<f64>> {
    match field {
        "" => Ok(None),
        text => text
            .parse::<f64>()
            .ok()
            .filter(|value| value.is_finite() && *value >= 0.0)
            .map(Some)
            .ok_or_else(|| wrong(format!("{text:?} where a number stands"))),
    }
}

/// `+++++` is the bound that the phase's work in half a second gives; without known work it says nothing.
fn rate(field: &str, in_kib: bool, work: Option<f64>) -> Result<Option<Value>> {
    if plus(field) {
        return Ok(work.map(|work| Value { value: work / SHORTEST_SECONDS, at_least: true }));
    }
    let unit = if in_kib { 1024.0 } else { 1.0 };
    Ok(number(field)?.map(|value| (value * unit).into()))
}

/// `2064M`, `1G`, `300` (MiB), nothing.
fn size_bytes(field: &str) -> Result<Option<u64>> {
    let (digits, shift) = match field.chars().last() {
        None => return Ok(None),
        Some('G' | 'g') => (&field[..field.len() - 1], 30),
        Some('M' | 'm') => (&field[..field.len() - 1], 20),
        Some('k' | 'K') => (&field[..field.len() - 1], 10),
        Some(_) => (field, 20),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|size| size.checked_mul(1 << shift))
        .map(Some)
        .ok_or_else(|| wrong(format!("{field:?} where a size stands")))
}

/// `30234us`, `104ms`, `2s`, nothing.
fn latency(field: &str) -> Result<Option<f64>> {
    let (digits, unit) = if let Some(digits) = field.strip_suffix("us") {
        (digits, 1e3)
    } else if let Some(digits) = field.strip_suffix("ms") {
        (digits, 1e6)
    } else if let Some(digits) = field.strip_suffix('s') {
        (digits, 1e9)
    } else if field.is_empty() || plus(field) {
        return Ok(None);
    } else {
        return Err(wrong(format!("{field:?} where a latency stands")));
    };
    Ok(number(digits)?.map(|value| value * unit))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOOP_103: &str = "vm101,2064M,25511,35,18075,3,199488,47,71094,98,937880,86,+++++,+++,16,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++";
    const TAP_103: &str = "vm101,2064M,69438,96,93549,20,38118,10,54955,76,131645,8,249.1,0,16,29488,79,+++++,+++,+++++,+++,+++++,+++,+++++,+++,+++++,+++";
    const HOST_196: &str = "1.96,1.96,native,1,1290000000,1G,,575,99,64203,13,29238,5,1726,96,68316,6,144.5,1,256,,,,,47219,67,304464,100,23795,31,51813,73,378017,100,6970,9,14923us,1197ms,483ms,60674us,16858us,541ms,575ms,846us,673ms,416ms,22us,1408ms";
    const HOST_200: &str = "1.98,2.00a,vm101,1,1795269239,256M,,8192,5,736,61,+++++,+++,+++++,+++,1110,55,+++++,+++,+++++,+++,4,,,,,+++++,+++,3000,1,+++++,+++,2000,2,+++++,+++,+++++,+++,30234us,6350us,7us,8us,9us,104ms,4034us,8017us,1us,2us,3us,2s";

    fn rate(row: &Row, metric: Metric) -> Value {
        row.phases[&metric].rate.unwrap()
    }

    #[test]
    fn v103_as_published() {
        let row = Row::parse(LOOP_103).unwrap();
        assert_eq!(
            (row.layout, row.name.as_str(), row.file_size),
            (Layout::V103, "vm101", Some(2064 << 20))
        );
        assert_eq!(rate(&row, Metric::PutChar), (25511.0 * 1024.0).into());
        assert_eq!(row.phases[&Metric::PutChar].cpu_percent, Some(35.0));
        assert_eq!(rate(&row, Metric::GetBlock), (937_880.0 * 1024.0).into());
        assert_eq!(rate(&row, Metric::Seeks), Value { value: 16_000.0, at_least: true });
        assert_eq!(rate(&row, Metric::SeqCreate), Value { value: 32_768.0, at_least: true });
        assert_eq!(row.phases[&Metric::SeqCreate].cpu_percent, None);

        let row = Row::parse(TAP_103).unwrap();
        assert_eq!(rate(&row, Metric::Seeks), 249.1.into());
        assert_eq!(rate(&row, Metric::SeqCreate), 29488.0.into());
    }

    #[test]
    fn v103_packs_sizes() {
        let line = TAP_103.replacen("2064M", "1G:64k", 1).replacen(",16,", ",16:100000:16/64,", 1);
        let row = Row::parse(&line).unwrap();
        assert_eq!((row.file_size, row.files), (Some(1 << 30), Some(16.0)));
    }

    #[test]
    fn v196_with_latencies() {
        let row = Row::parse(HOST_196).unwrap();
        assert_eq!((row.layout, row.version.as_str()), (Layout::V196, "1.96"));
        assert_eq!(rate(&row, Metric::PutBlock), (64203.0 * 1024.0).into());
        assert_eq!(rate(&row, Metric::Seeks), 144.5.into());
        assert_eq!(rate(&row, Metric::RandDelete), 6970.0.into());
        assert_eq!(row.phases[&Metric::PutChar].slowest_ns, Some(14_923e3));
        assert_eq!(row.phases[&Metric::PutBlock].slowest_ns, Some(1_197e6));
        assert_eq!(row.phases[&Metric::RandDelete].slowest_ns, Some(1_408e6));
    }

    #[test]
    fn v196_without_data_files_is_one_field_short() {
        // -s 0: size to seeks empty, and one of the empties is missing.
        let line = "1.96,1.96,x,1,1290000000,,,,,,,,,,,,,,16,,,,,47219,67,304464,100,23795,31,51813,73,378017,100,6970,9,,,,,,,575ms,846us,673ms,416ms,22us,1408ms";
        assert_eq!(line.split(',').count(), 47);
        let row = Row::parse(line).unwrap();
        assert_eq!((row.file_size, row.files), (None, Some(16.0)));
        assert_eq!(row.phases[&Metric::PutBlock].rate, None);
        assert_eq!(rate(&row, Metric::SeqCreate), 47219.0.into());
        assert_eq!(row.phases[&Metric::SeqCreate].slowest_ns, Some(575e6));
    }

    #[test]
    fn v200_calls_itself_198_and_has_two_fields_more() {
        let row = Row::parse(HOST_200).unwrap();
        assert_eq!((row.layout, row.version.as_str()), (Layout::V198, "2.00a"));
        assert_eq!(rate(&row, Metric::PutChar), (736.0 * 1024.0).into());
        assert_eq!(
            rate(&row, Metric::PutBlock),
            Value { value: 2.0 * f64::from(256 << 20), at_least: true }
        );
        assert_eq!(rate(&row, Metric::Seeks), Value { value: 16_384.0, at_least: true });
        assert_eq!(rate(&row, Metric::SeqCreate), Value { value: 8192.0, at_least: true });
        assert_eq!(rate(&row, Metric::SeqStat), 3000.0.into());
        assert_eq!(row.phases[&Metric::Seeks].slowest_ns, Some(104e6));
        assert_eq!(row.phases[&Metric::RandDelete].slowest_ns, Some(2e9));
    }

    #[test]
    fn a_phase_not_run_has_no_rate() {
        let line = HOST_200.replacen(",736,61,", ",,,", 1).replacen("30234us", "", 1);
        let phase = Row::parse(&line).unwrap().phases[&Metric::PutChar];
        assert_eq!(phase, Phase::default());
    }

    #[test]
    fn the_link_sizes_are_words() {
        let line = HOST_196.replacen(",256,,,,,", ",256,link,,,,", 1);
        assert_eq!(Row::parse(&line).unwrap().files, Some(256.0));
    }

    #[test]
    fn rows_of_one_version_compare_and_of_two_do_not() {
        let (one, two) = (Row::parse(TAP_103).unwrap(), Row::parse(LOOP_103).unwrap());
        let ratios = compare(&one, &two).unwrap();
        assert!((ratios[&Metric::PutBlock].0 - 93549.0 / 18075.0).abs() < 1e-9);
        // 249.1 seeks against at least 16,000; and a number against a bound the other way round.
        assert_eq!(ratios[&Metric::Seeks].1, "<=");
        assert_eq!(compare(&two, &one).unwrap()[&Metric::Seeks].1, ">=");
        assert!(!ratios.contains_key(&Metric::RandStat), "two bounds say nothing");
        let error = compare(&one, &Row::parse(HOST_200).unwrap()).unwrap_err().to_string();
        assert!(error.contains("1.03") && error.contains("2.00a"), "{error}");
        assert!(compare(&Row::parse(HOST_196).unwrap(), &Row::parse(HOST_200).unwrap()).is_err());
    }

    #[test]
    fn unknown_layouts_are_refused() {
        for line in [
            HOST_200.replacen("1.98,", "1.99,", 1),
            HOST_200.trim_end_matches(",2s").into(),
            HOST_196.replacen("1.96,", "1.91,", 1),
            TAP_103.replacen("249.1", "NaN", 1),
            TAP_103.replacen("249.1", "-3", 1),
            String::new(),
        ] {
            assert!(Row::parse(&line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_line_is_found_among_others() {
        let text = format!("Using uid:0, gid:0.\nname,file_size,putc\n{HOST_200}\n\n");
        assert_eq!(Row::find(&text).unwrap().version, "2.00a");
        assert!(Row::find("Can't open file\n").is_err());
    }

    /// The header of 1.97, the only one that fits its data; 1.96 leaves out two names, and 2.00a prints it over 50 fields.
    const NAMES: &str = "format_version,bonnie_version,name,concurrency,seed,file_size,io_chunk_size,putc,putc_cpu,put_block,put_block_cpu,rewrite,rewrite_cpu,getc,getc_cpu,get_block,get_block_cpu,seeks,seeks_cpu,num_files,max_size,min_size,num_dirs,file_chunk_size,seq_create,seq_create_cpu,seq_stat,seq_stat_cpu,seq_del,seq_del_cpu,ran_create,ran_create_cpu,ran_stat,ran_stat_cpu,ran_del,ran_del_cpu,putc_latency,put_block_latency,rewrite_latency,getc_latency,get_block_latency,seeks_latency,seq_create_latency,seq_stat_latency,seq_del_latency,ran_create_latency,ran_stat_latency,ran_del_latency";

    #[test]
    fn headers_that_do_not_fit_are_not_read() {
        let of_196 = NAMES.replacen("concurrency,seed,", "", 1);
        let of_103 = "name,file_size,putc,putc_cpu,put_block,put_block_cpu,rewrite,rewrite_cpu,getc,getc_cpu,get_block,get_block_cpu,seeks,seeks_cpu,num_files,seq_create,seq_create_cpu,seq_stat,seq_stat_cpu,seq_del,seq_del_cpu,ran_create,ran_create_cpu,ran_stat,ran_stat_cpu,ran_del,ran_del_cpu";
        for (header, names, data) in
            [(of_103, 27, TAP_103), (of_196.as_str(), 46, HOST_196), (NAMES, 48, HOST_200)]
        {
            assert_eq!(header.split(',').count(), names);
            assert!(Row::find(header).is_err(), "{header}");
            for text in [format!("{header}\n{data}\n"), format!("{data}\n{header}\n")] {
                assert_eq!(Row::find(&text).unwrap(), Row::parse(data).unwrap());
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(fields in prop::collection::vec("[-+0-9a-zG.:/]{0,6}", 1..60), version in 0..4usize) {
            let mut fields = fields;
            fields[0] = ["1.96", "1.97", "1.98", "vm"][version].into();
            let _ = Row::find(&fields.join(","));
            let _ = Row::parse(&fields.join(","));
        }
    }
}
