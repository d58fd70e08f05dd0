//! How much worse a change may be before it stops a build.

use std::str::FromStr;

use serde::Serialize;

/// How much worse something may become, as a share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Limit(pub(super) f64);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        let percent: f64 = text
            .strip_suffix('%')
            .unwrap_or(text)
            .trim()
            .parse()
            .map_err(|_| format!("{text:?} is no share: write 5% or 5"))?;
        if !(0.0..100.0).contains(&percent) {
            return Err(format!("{text:?} is no share from 0% to below 100%"));
        }
        Ok(Limit(percent / 100.0))
    }
}
