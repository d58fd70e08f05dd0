//! The page as a document: sound, whole, and in need of nothing else.

use super::*;

#[test]
fn the_page_is_sound_and_needs_nothing_else() {
    let analysis = Analysis::new(record(12, State::Interrupted), &samples(12));
    let text = page::render(&analysis);
    let page = Html::parse_document(&text);
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    let all = |selector: &str| page.select(&Selector::parse(selector).unwrap()).collect::<Vec<_>>();
    assert!(
        all("link, img, iframe, object, embed, image, use, form").is_empty(),
        "nothing is loaded"
    );
    let scripts: Vec<String> = all("script").iter().map(|s| s.text().collect()).collect();
    assert!(scripts.len() == 1 && scripts[0].contains("table.sort"), "the page's own, no other");
    assert!(all("[src], [srcset], [style*=url], [onclick], [onload]").is_empty());
    assert!(all("[href]").iter().all(|a| a.attr("href").unwrap().starts_with('#')), "no network");
    for forbidden in ["http:", "https:", "url(", "@import", "<script>alert", "fetch(", "XMLHttp"] {
        assert!(!text.contains(forbidden), "{forbidden}");
    }
    assert!(text.contains("prefers-color-scheme: dark"));
    // Every way has its bar in every load that it has numbers of.
    let charts: Vec<String> = all("table.strips").iter().map(|t| t.text().collect()).collect();
    assert_eq!(charts.len(), 3, "reads, dd and bonnie++");
    for way in ["the file itself", "loop device", "Ringtap, NBD", "qemu-nbd"] {
        assert!(charts[0].contains(way), "{way}");
    }
    assert_eq!(all("table.strips svg").len(), 5 + 3 + 3);
    assert_eq!(all("table.forest td.plot svg").len(), 4 + 2 + 2, "all but the reference");
    let outlines = "table.strips rect[fill=none]";
    assert_eq!(all(outlines).len(), 1, "the reference has bounds in bonnie++, and no bar");
    assert!(all("svg").iter().all(|svg| svg.attr("role") == Some("img")));
    assert!(all("svg").iter().all(|svg| svg.attr("aria-label").is_some_and(|l| l.len() > 8)));
    assert!(!text.contains("\"#0"), "colours are the page's: {text}");
    let words: String = page.root_element().text().collect();
    assert!(
        words.contains("PARTIAL: interrupted")
            && words.contains("device-mapper")
            && words.contains("<b>a & b</b>")
    );
    assert!(words.contains("a note <here>"));
}

#[test]
fn the_cpu_time_of_an_io_is_a_bar_of_its_parts() {
    let analysis = Analysis::new(record(12, State::Complete), &samples(12));
    let page = Html::parse_document(&page::render(&analysis));
    let row = row_of(&page, "table.forest", "Ringtap, NBD");
    let css = |selector: &str| Selector::parse(selector).unwrap();
    let bars = css("td.cost .bar i");
    let widths: Vec<String> = row.select(&bars).map(|i| i.attr("style").unwrap().into()).collect();
    // Server 5 s and client 3 s for a million I/Os; the dearest has 20 + 3.
    assert_eq!(widths, ["width:21.7%", "width:13.0%"]);
    assert!(row.text().collect::<String>().ends_with("8.00 µs"), "{:?}", row.html());
    let few: Vec<Sample> = samples(12)
        .into_iter()
        .map(|mut sample| {
            sample.metrics.remove(&Metric::ServerCpu);
            sample.metrics.remove(&Metric::ClientCpu);
            sample
        })
        .collect();
    let page = page::render(&Analysis::new(record(12, State::Complete), &few));
    assert!(!page.contains("CPU per"), "nothing was counted");
}

/// The row of a table that begins with a way's name.
fn row_of<'a>(page: &'a Html, table: &str, way: &str) -> scraper::ElementRef<'a> {
    let css = Selector::parse(&format!("{table} tbody tr")).unwrap();
    let mut rows = page.select(&css);
    let found = rows.find(|row| row.text().collect::<String>().starts_with(way));
    found.unwrap_or_else(|| panic!("no {way} in {table}"))
}

/// The first sentence names nobody faster whom the ranking leaves out.
#[test]
fn the_first_sentence_does_not_rank_who_is_not_ranked() {
    let headline = |flushes: &[(&str, f64)], speed: f64| {
        let mut all = samples(12);
        all.retain(|sample| sample.workload == "randread-4k-qd32" && !sample.arm.ends_with("nbd"));
        for sample in all.iter_mut().filter(|sample| sample.arm == "loop-direct") {
            sample.metrics.values_mut().for_each(|value| value.value *= speed);
        }
        let mut analysis = checked(flushes, all);
        analysis.run.arms.retain(|arm| arm.name != "loop" && !arm.name.ends_with("nbd"));
        let page = Html::parse_document(&page::render(&analysis));
        let h1 = Selector::parse("h1").unwrap();
        page.select(&h1).map(|h1| h1.text().collect::<String>()).collect::<String>()
    };
    let both = [("native", 1.0), ("loop-direct", 1.0)];
    assert!(headline(&both, 1.5).contains(": faster in "), "{}", headline(&both, 1.5));
    let liar = headline(&[("native", 1.0), ("loop-direct", 0.0)], 1.5);
    assert!(
        !liar.contains("faster in") && liar.contains("not ranked (passes on no flush)"),
        "{liar}"
    );
    let unchecked = headline(&[("native", 1.0)], 1.5);
    assert!(
        !unchecked.contains("faster in") && unchecked.contains("not ranked (flushes not counted)"),
        "{unchecked}"
    );
    // The reference may be who is not ranked.
    let behind = headline(&[("native", 0.0), ("loop-direct", 1.0)], 0.5);
    assert!(!behind.contains("slower in") && behind.contains("not ranked"), "{behind}");
}
