//! The user's own ways in a plan.

use super::Plan;
use crate::backend::own::{self, Own};
use crate::cli::CompareArgs;
use crate::error::{Error, Result};
use crate::sample::Stage;

impl Plan {
    /// The user's own ways behind the lab's, on each stage of the plan that reaches them; a stage that only they are on is
    /// added with what they are set beside.
    pub(super) fn add_own(&mut self, args: &CompareArgs) -> Result<()> {
        for own in asked(args)? {
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

/// The ways that the flags and the catalogues that they name add.
fn asked(args: &CompareArgs) -> Result<Vec<Own>> {
    let mut list: Vec<Own> = Vec::new();
    let mut add = |kind: &str, set: &dyn Fn(&mut Own)| {
        let same = list.iter().filter(|own| own.name.starts_with(kind)).count();
        let name = if same == 0 { kind.to_owned() } else { format!("{kind}-{}", same + 1) };
        let mut own = Own { overwrite: args.overwrite, ..Own::named(name) };
        set(&mut own);
        list.push(own);
    };
    args.image.iter().for_each(|path| add("my-image", &|own| own.image = Some(path.clone())));
    args.device.iter().for_each(|path| add("my-device", &|own| own.device = Some(path.clone())));
    args.nbd_uri.iter().for_each(|uri| add("my-nbd", &|own| own.nbd_uri = Some(uri.clone())));
    args.vhost_user
        .iter()
        .for_each(|path| add("my-vhost", &|own| own.vhost_user = Some(path.clone())));
    args.qemu.iter().for_each(|text| add("my-qemu", &|own| own.qemu = Some(text.clone())));
    for path in &args.catalogue {
        list.extend(own::read(path)?);
    }
    for (at, own) in list.iter().enumerate() {
        if list[..at].iter().any(|other| other.name == own.name) {
            return Err(Error::Plan(format!("backend {:?} is given twice", own.name)));
        }
    }
    Ok(list)
}
