//! Latency curves, two loads at once, how disks were made ready, and writes that do not settle, as the report shows them.

use ringtap_lab::run::folder::Written;

use super::*;

/// Two loads at once on two arms, six rounds: the second load of `qemu-nbd` is too slow for a percentile.
fn contended() -> (Record, Vec<Sample>) {
    let mut record = record(6, State::Complete);
    record.plan.workloads = vec!["quiet-read".into(), "two-write".into()];
    let mut list = samples(6);
    list.retain(|s| s.workload == "randread-4k-qd32");
    for sample in &mut list {
        sample.workload = "quiet-read".into();
        let slow = sample.arm == "qemu-nbd";
        let mut metrics: Vec<(Metric, Value)> = vec![
            (Metric::FirstShare, 0.1.into()),
            (Metric::Keeps, 0.25.into()),
            (Metric::SecondKeeps, 0.9.into()),
            (Metric::P99, (800_000.0 + 1e3 * f64::from(sample.round)).into()),
            (Metric::P99Factor, 8.0.into()),
        ];
        if !slow {
            metrics.push((Metric::SecondP99, 3e6.into()));
            metrics.push((Metric::SecondP99Factor, 1.5.into()));
        }
        sample.metrics = metrics.into_iter().collect();
    }
    (record, list)
}

#[test]
fn each_of_two_loads_has_its_p99_alone_and_together() {
    let (record, samples) = contended();
    let analysis = Analysis::new(record, &samples);
    let of = |arm: &str, load: &str| {
        let mut all = analysis.contention.iter();
        all.find(|row| row.arm == arm && row.load == load).unwrap().clone()
    };
    let quiet = of("ringtap-nbd", "quiet");
    assert_eq!((quiet.together, quiet.times), (Some(802_500.0), Some(8.0)));
    assert!((quiet.alone.unwrap() - 802_500.0 / 8.0).abs() < 1.0, "{quiet:?}");
    assert_eq!((quiet.share, quiet.keeps), (Some(0.1), Some(0.25)));
    assert!(quiet.interval.is_some_and(|(low, high)| low < 802_500.0 && high > 802_500.0));
    let loud = of("ringtap-nbd", "loud");
    assert_eq!((loud.alone, loud.together), (Some(2e6), Some(3e6)));
    assert!((loud.share.unwrap() - 0.9).abs() < 1e-12);
    assert_eq!((of("qemu-nbd", "loud").together, of("qemu-nbd", "loud").keeps), (None, Some(0.9)));

    let page = Html::parse_document(&page::render(&analysis));
    let all = |selector: &str| page.select(&Selector::parse(selector).unwrap()).count();
    // A chart for each load of each way that has a p99; what has none says so. The twin is no way of its own.
    assert_eq!(all(".contention tbody tr"), 2 * (ARMS.len() - 1));
    assert_eq!(all(".contention tbody svg"), 2 * (ARMS.len() - 1) - 1);
    let text: String =
        page.select(&Selector::parse(".contention").unwrap()).next().unwrap().text().collect();
    assert!(text.contains("too few I/Os for a p99") && text.contains("802 µs"), "{text}");
    let markdown = report::markdown::render(&analysis);
    assert!(
        markdown.contains("| ringtap-nbd | quiet | 100 µs | 802 µs | 8.00 | 10.0 % | 25.0 % |"),
        "{markdown}"
    );
}

#[test]
fn writes_that_do_not_settle_are_marked_wherever_they_stand() {
    let record = |workload: &str| {
        let mut record = record(6, State::Complete);
        record.plan.workloads = vec![workload.into()];
        record
    };
    // Every arm rises by a fifth from round to round, but for one that is level.
    let mut list = samples(6);
    list.retain(|s| s.workload == "randread-4k-qd32");
    for sample in &mut list {
        sample.workload = "randwrite-4k-qd32".into();
        if sample.arm == "loop" {
            sample.metrics.insert(Metric::Iops, 5e4.into());
        }
        sample.movement = Some(if sample.round == 0 { 0.5 } else { 0.1 });
    }
    let analysis = Analysis::new(record("randwrite-4k-qd32"), &list);
    let from: Vec<_> = analysis.steadiness.iter().map(|one| (one.arm.as_str(), one.from)).collect();
    assert!(from.contains(&("loop", Some(0))) && from.contains(&("ringtap-nbd", None)), "{from:?}");
    let text = table::render(&analysis, false, None);
    assert!(text.contains("1 of 6 series of writes came to a steady rate"), "{text}");
    assert!(text.contains("Within 6 of 36 runs the rate moved by more than 20 %"), "{text}");
    let marked = |arm: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(arm)).unwrap();
        line.contains("not steady")
    };
    assert!(marked("ringtap-nbd") && !marked("loop"), "{text}");
    let page = page::render(&analysis);
    assert!(page.contains("Were the writes steady?") && page.contains("1 of 6 series of writes"));
    assert!(page.contains("not steady: its rate moved by 50% within the run"));
    assert!(report::markdown::render(&analysis).contains("/s, not steady "));
    // Reads, and writes that hold their level, are not marked.
    let read = Analysis::new(record("randread-4k-qd32"), &samples(6));
    assert!(read.steadiness.is_empty() && !page::render(&read).contains("not steady"));
}

/// A load by schedule on all arms: `loop` has too few I/Os for a p99.9, and `qemu-nbd` holds a sender up.
fn rated() -> (Record, Vec<Sample>) {
    let mut record = record(6, State::Complete);
    record.plan.workloads = vec!["rated-50".into()];
    let mut list = samples(6);
    list.retain(|s| s.workload == "randread-4k-qd32");
    for sample in &mut list {
        sample.workload = "rated-50".into();
        let held = if sample.arm == "qemu-nbd" { 100.0 } else { 1.0 };
        let mut metrics: Vec<(Metric, Value)> = vec![
            (Metric::P50, 2e5.into()),
            (Metric::P90, 3e5.into()),
            (Metric::P99, 8e5.into()),
            (Metric::ScheduleP50, 9e5.into()),
            (Metric::ScheduleP90, (1.2e6 * held).into()),
            (Metric::ScheduleP99, (3e6 * held).into()),
        ];
        if sample.arm != "loop" {
            metrics.push((Metric::P999, 2e6.into()));
            metrics.push((Metric::ScheduleP999, (9e6 * held).into()));
        }
        sample.metrics = metrics.into_iter().collect();
    }
    (record, list)
}

#[test]
fn latency_from_the_schedule_stands_beside_fios_own_on_one_scale() {
    let (record, samples) = rated();
    let analysis = Analysis::new(record, &samples);
    let page = Html::parse_document(&page::render(&analysis));
    let css = |selector: &str| Selector::parse(selector).unwrap();
    let figures: Vec<_> = page.select(&css("figure.latency")).collect();
    let texts: Vec<String> = figures.iter().map(|figure| figure.text().collect()).collect();
    assert_eq!(texts.len(), 2);
    assert!(texts[0].contains("from when it was due") && texts[0].contains("1 ms"), "{texts:?}");
    assert!(texts[1].contains("as fio counts it, from when it was sent"), "{texts:?}");
    let names = [
        "the file itself",
        "the file itself, again",
        "loop device",
        "loop device, direct I/O",
        "Ringtap, NBD",
        "qemu-nbd",
    ];
    for (figure, text) in figures.iter().zip(&texts) {
        // Every arm and the twin has its name and its points: four, and `loop` three.
        assert!(names.iter().all(|name| text.contains(name)), "{text}");
        assert_eq!(figure.select(&css("circle")).count(), 4 * ARMS.len() - 1);
    }
    // The same time is at the same height, so that the eye may compare.
    let ticks = |at: usize| -> Vec<(String, String)> {
        let texts = css("svg text[text-anchor=end]");
        let all = figures[at].select(&texts);
        all.map(|e| (e.attr("y").unwrap().into(), e.text().collect())).collect()
    };
    assert!(ticks(0).len() > 3 && ticks(0) == ticks(1), "{:?} {:?}", ticks(0), ticks(1));
    // What is under the log's millisecond is marked, in the one chart that comes of it.
    let coarse = |at: usize| figures[at].select(&css("rect[fill='var(--band)']")).count();
    assert_eq!((coarse(0), coarse(1)), (1, 0));
    // Points in the order of the arms, each from p50 on: that of p99 is the third.
    let height = |at: usize, arm: usize| -> f64 {
        let circles = css("circle");
        let dot = figures[at].select(&circles).nth(arm).expect("a point");
        dot.attr("cy").unwrap().parse().unwrap()
    };
    let (fast, held) = (4 * 4 - 1 + 2, 5 * 4 - 1 + 2);
    assert!(height(0, held) < height(0, fast), "longer is higher up");
    assert!(height(1, held) > height(0, fast));
    let markdown = report::markdown::render(&analysis);
    let rows = [
        "Latency, from when it was due; medians of the rounds:",
        "| backend | p50 | p90 | p99 | p99.9 |",
        "| qemu-nbd | 900 µs | 120 ms | 300 ms | 900 ms |",
        "| loop | 200 µs | 300 µs | 800 µs | – |",
    ];
    rows.iter().for_each(|row| assert!(markdown.contains(row), "{row}: {markdown}"));
    // One percentile of each makes no curve.
    let (record, samples) = contended();
    let page = page::render(&Analysis::new(record, &samples));
    assert!(!page.contains("figure class=\"latency\""));
}

#[test]
fn whether_the_disks_were_written_whole_is_said() {
    let said = |bytes: u64, allocated: u64, again: u32| {
        let mut run = record(6, State::Complete);
        run.written = Some(Written { bytes, allocated, again });
        let analysis = Analysis::new(run, &samples(6));
        let markdown = report::markdown::render(&analysis);
        let sentence = report::words::preconditioned(&analysis);
        assert!(markdown.contains(&sentence), "{markdown}");
        assert!(page::render(&analysis).contains(&sentence));
        sentence
    };
    let whole = said(3 << 30, 3 << 30, 0);
    assert!(whole.contains("3072 MiB in all") && whole.contains("100 % allocated"), "{whole}");
    assert!(!whole.contains("find") && !whole.contains("discarded"), "{whole}");
    let thin = said(1 << 30, 1 << 28, 2);
    assert!(thin.contains("25 % allocated") && thin.contains("find room first"), "{thin}");
    assert!(thin.contains("2 times a disk was written again"), "{thin}");
}
