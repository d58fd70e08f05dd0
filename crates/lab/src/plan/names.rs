//! Names that there are not, and those near them.

use crate::error::Error;

/// An error about a name that there is not, with those near it.
pub fn unknown(what: &str, name: &str, known: &[&str]) -> Error {
    Error::Plan(unlisted(what, name, known))
}

/// Above this two names are near.
pub const NEAR: f64 = 0.75;

/// How near two names are, from 0 to 1.
pub fn nearness(name: &str, known: &str) -> f64 {
    strsim::jaro_winkler(name, known)
}

/// The same as a sentence.
pub fn unlisted(what: &str, name: &str, known: &[&str]) -> String {
    let mut near: Vec<(f64, &str)> = known
        .iter()
        .map(|known| (nearness(name, known), *known))
        .filter(|(near, _)| *near > NEAR)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    let near: Vec<&str> = near.iter().take(3).map(|(_, name)| *name).collect();
    if near.is_empty() {
        format!("no {what} {name:?}; there are: {}", known.join(", "))
    } else {
        // Plans are two words of the help, and keys those of its manual.
        let all = if matches!(what, "plan" | "key") {
            ""
        } else {
            " (ringtap compare --list names them all)"
        };
        format!("no {what} {name:?}; did you mean {}?{all}", near.join(" or "))
    }
}
