//! In a real browser, without a window: no complaint of the console, and tables that a keyboard sorts.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringtap_lab::process;
use ringtap_lab::report::{Analysis, change, change_page, html};
use ringtap_lab::run::folder::State;
use scraper::{Html, Selector};

use super::{change::faster, record, samples};

#[test]
fn the_report_is_shown_and_a_keyboard_sorts_it() {
    let analysis = Analysis::new(record(6, State::Complete), &samples(6));
    let seen = shown(&html::render(&analysis), "table.heat");
    assert_eq!(seen, "true|ringtap-nbd|descending|loop|ascending|true|true|true|true");
}

#[test]
fn the_changes_are_shown_and_a_keyboard_sorts_them() {
    let old = Analysis::new(record(6, State::Complete), &samples(6));
    let new = Analysis::new(record(6, State::Complete), &faster(6));
    let seen = shown(&change_page::render(&old, &new, &change::compare(&old, &new)), "table.sort");
    assert_eq!(seen, "true|host|descending|host|ascending|true|true|true|true");
}

/// What a hand on the keyboard did to the second column of a page's `table`, and what came of it: focus; first row and
/// order after one press and after two; whether there are charts, whether it all fits a wide and a narrow window,
/// and whether the charts can be read in the narrow one.
fn shown(page: &str, table: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let hand = r#"<script>
      const table = document.querySelector("TABLE");
      const first = () => table.tBodies[0].rows[0].cells[0].textContent;
      const head = table.tHead.rows[0].cells[1];
      head.focus();
      const press = () => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true}));
      const seen = [document.activeElement === head];
      press(); seen.push(first(), head.getAttribute("aria-sort"));
      press(); seen.push(first(), head.getAttribute("aria-sort"));
      seen.push(document.querySelectorAll("svg rect, svg circle").length > 4);
      seen.push(document.documentElement.scrollWidth <= window.innerWidth);
      document.body.style.width = "400px";
      seen.push(document.querySelector("main").scrollWidth <= 400);
      // No text of a chart is smaller than 8 pixels then.
      const size = (text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
      seen.push(Math.min(...[...document.querySelectorAll("svg text")].map(size)) >= 8);
      const p = document.createElement("p"); p.id = "seen"; p.textContent = seen.join("|"); document.body.append(p);
    </script></body>"#;
    let path = dir.path().join("page.html");
    let page = page.replace("</body>", &hand.replace("TABLE", table));
    std::fs::write(&path, page).unwrap();
    let mut command = Command::new(browser());
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]);
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
    end.text().collect()
}

fn browser() -> &'static Path {
    let find = |name: &&&str| process::find(name).is_some();
    let known = ["chromium", "chromium-browser", "google-chrome"].iter().find(find);
    Path::new(known.unwrap_or_else(|| panic!("a browser is needed: apt-get install chromium")))
}
