//! The user's own ways in a plan.

use super::Plan;
use crate::backend::own;
use crate::cli::CompareArgs;
use crate::error::{Error, Result};
use crate::sample::Stage;

impl Plan {
    /// The user's own ways behind the lab's, on each stage of the plan that reaches them; a stage that only they are on is
    /// added with what they are set beside.
    pub(super) fn add_own(&mut self, args: &CompareArgs) -> Result<()> {
        for own in own::of(args)? {
            own.check(self.size)?;
            own::add(&own)?;
            let mut on: Vec<Stage> = own.stages();
            on.retain(|stage| self.stages.contains(stage));
            if on.is_empty() {
                let stages: Vec<&str> = own.stages().iter().map(|stage| stage.name()).collect();
                return Err(Error::Plan(format!(
                    "backend {:?} is reached on stage {}, and the plan has none of them: add --stages {}",
                    own.name,
                    stages.join(" or "),
                    stages.first().unwrap_or(&"")
                )));
            }
            for stage in on {
                // What it is compared with runs as well.
                for name in [own.rival(stage), own.name.as_str()] {
                    let one = (stage, name.to_owned());
                    if !self.backends.contains(&one) {
                        self.backends.push(one);
                    }
                }
            }
            self.own.push(own);
        }
        Ok(())
    }
}
