//! In a real browser, without a window: what the first screen holds, how long the page is, that nothing runs over the edge of
//! a telephone, no complaint of the console, and tables that a keyboard sorts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringtap_lab::process;
use ringtap_lab::report::{Analysis, change, change_page, page};
use ringtap_lab::run::folder::State;
use ringtap_lab::sample::Sample;
use scraper::{Html, Selector};
use serde_json::Value;

use super::{change::faster, published, record, samples};

/// The report that the repository has.
const COMMITTED: &str = "../../docs/results/published/report.html";

#[test]
fn the_report_is_shown_and_a_keyboard_sorts_it() {
    let Some(browser) = browser() else { return };
    let analysis = Analysis::new(record(12, State::Complete), &samples(12));
    let page = page::render(&analysis);
    let seen = measured(&browser, &page, (1280, 800));
    assert_eq!(seen["sorted"], serde_json::json!(["descending", "ascending"]), "{seen}");
    assert!(seen["first"] != seen["last"], "{seen}");
    first_screen(&seen, 800.0);
    for width in [390, 1920] {
        fits(&measured(&browser, &page, (width, 800)), width);
    }
}

#[test]
fn the_changes_are_shown_and_a_keyboard_sorts_them() {
    let Some(browser) = browser() else { return };
    // A name as long as they come.
    let long = "virtio-blk-in-qemu-write-cache-off";
    let run = |mut samples: Vec<Sample>| {
        let mut record = record(12, State::Complete);
        let arms = record.arms.iter_mut().map(|arm| &mut arm.name);
        let names = arms.chain(samples.iter_mut().map(|sample| &mut sample.arm));
        names.filter(|name| *name == "loop-direct").for_each(|name| *name = long.into());
        Analysis::new(record, &samples)
    };
    let (old, new) = (run(samples(12)), run(faster(12)));
    let page = change_page::render(&old, &new, &change::compare(&old, &new));
    let seen = measured(&browser, &page, (1280, 800));
    assert_eq!(seen["sorted"], serde_json::json!(["descending", "ascending"]), "{seen}");
    fits(&measured(&browser, &page, (390, 800)), 390);
    // The verdict stands in the last column.
    for width in [1280, 1920] {
        let seen = measured(&browser, &page, (width, 800));
        fits(&seen, width);
        assert_eq!(seen["cut"], 0, "charts that are cut off at {width}: {seen}");
    }
}

#[test]
fn published_claims_stand_on_the_first_screen() {
    let Some(browser) = browser() else { return };
    let (record, samples) = published(12);
    let page = page::render(&Analysis::new(record, &samples));
    let seen = measured(&browser, &page, (1280, 800));
    first_screen(&seen, 800.0);
    assert!(seen["claims"].as_f64().is_some_and(|bottom| bottom <= 800.0), "{seen}");
}

#[test]
fn the_committed_report_answers_on_its_first_screen_and_is_short() {
    let Some(browser) = browser() else { return };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(COMMITTED);
    let page = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let seen = measured(&browser, &page, (1280, 800));
    first_screen(&seen, 800.0);
    assert!(seen["claims"].as_f64().is_some_and(|bottom| bottom <= 800.0), "{seen}");
    assert!(seen["fold"].as_f64().is_some_and(|top| top < 8000.0), "ten screens: {seen}");
    assert!(seen["words"].as_u64().is_some_and(|words| words > 800 && words < 8000), "{seen}");
    for width in [390, 1920] {
        fits(&measured(&browser, &page, (width, 800)), width);
    }
}

/// The answer, its limits and a chart of ratios, all without scrolling.
fn first_screen(seen: &Value, height: f64) {
    for part in ["answer", "limits", "forest"] {
        let bottom = seen[part].as_f64();
        assert!(bottom.is_some_and(|bottom| bottom > 0.0 && bottom <= height), "{part}: {seen}");
    }
    assert_eq!(seen["answers"], 1, "one sentence answers: {seen}");
    assert!(seen["dots"].as_u64().is_some_and(|dots| dots > 2), "{seen}");
    fits(seen, 1280);
}

/// Nothing runs over the edge, and no text of a chart is too small to read.
fn fits(seen: &Value, width: u64) {
    assert_eq!(seen["width"], width, "the window: {seen}");
    assert!(seen["wide"].as_u64().is_some_and(|wide| wide <= width), "{seen}");
    assert!(seen["smallest"].as_f64().is_some_and(|size| size >= 9.0), "{seen}");
}

/// What a window of such a size shows, and what came of a hand on the keyboard.
fn measured(browser: &Path, page: &str, (width, height): (u64, u64)) -> Value {
    let dir = tempfile::tempdir().unwrap();
    // Chromium has no window as narrow as a telephone: a frame in it has.
    let inner = dir.path().join("inner.html");
    std::fs::write(&inner, page).unwrap();
    let outer = r#"<!doctype html><style>body{margin:0}iframe{border:0;width:WIDTHpx;height:HEIGHTpx}</style>
      <iframe src="inner.html"></iframe><script>
      document.querySelector("iframe").onload = (event) => {
        const frame = event.target, inner = frame.contentDocument, view = frame.contentWindow;
        const bottom = (css) => { const e = inner.querySelector(css); return e && e.getBoundingClientRect().bottom; };
        const size = (text) => parseFloat(view.getComputedStyle(text).fontSize);
        const seen = {
          width: view.innerWidth, wide: inner.documentElement.scrollWidth,
          answer: bottom("h1"), limits: bottom(".limits"), forest: bottom("section.first"), claims: bottom("section.claims"),
          fold: inner.querySelector(".folds") && inner.querySelector(".folds").getBoundingClientRect().top,
          answers: inner.querySelectorAll("h1").length,
          dots: inner.querySelectorAll("section.first svg circle").length,
          words: inner.querySelector("main").innerText.split(/\s+/).length,
          cut: [...inner.querySelectorAll(".cards .scroll")].filter((e) => e.scrollWidth > e.clientWidth).length,
          smallest: Math.min(...[...inner.querySelectorAll("svg text")].map(size)),
        };
        inner.querySelectorAll("details").forEach((d) => (d.open = true));
        const heads = [...inner.querySelectorAll("table.sort th")];
        const head = heads.find((c) => c.textContent.startsWith("times as good"));
        const table = head.closest("table");
        const first = () => table.tBodies[0].rows[0].textContent;
        head.focus();
        const press = () => inner.activeElement.dispatchEvent(new view.KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true}));
        seen.sorted = [];
        press(); seen.sorted.push(head.getAttribute("aria-sort")); seen.first = first();
        press(); seen.sorted.push(head.getAttribute("aria-sort")); seen.last = first();
        const p = document.createElement("p"); p.id = "seen"; p.textContent = JSON.stringify(seen); document.body.append(p);
      };
    </script>"#;
    let outer = outer.replace("WIDTH", &width.to_string()).replace("HEIGHT", &height.to_string());
    let path = dir.path().join("outer.html");
    std::fs::write(&path, outer).unwrap();
    let mut command = Command::new(browser);
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
    command.args(["--allow-file-access-from-files", "--window-size=2000,1200"]);
    command.args(["--enable-logging=stderr", "--v=0", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", dir.path().join("profile").display()));
    command.arg(format!("file://{}", path.display())).env("HOME", dir.path());
    let limit = Duration::from_secs(120);
    let output =
        process::run(command, limit, &Default::default()).unwrap_or_else(|e| panic!("{e}"));
    assert!(!output.stderr.contains(":CONSOLE"), "{}", output.stderr);
    let dom = Html::parse_document(&output.stdout);
    let seen = Selector::parse("#seen").unwrap();
    let end = dom.select(&seen).next().expect("the page's end was reached");
    serde_json::from_str(&end.text().collect::<String>()).unwrap()
}

/// A browser; without one the tests here are skipped.
fn browser() -> Option<PathBuf> {
    let known = ["chromium", "chromium-browser", "google-chrome"];
    let found = known.iter().find_map(|name| process::find(name));
    if found.is_none() {
        println!("skipped: no browser: apt-get install chromium");
    }
    found
}
