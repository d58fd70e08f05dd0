//! Images that are described within those upon them, as in the `json:` names of images: each is a disk of its own, opened
//! before the one upon it, and goes with that.

use std::collections::{BTreeSet, VecDeque};

use super::nodes::{
    Add, Asked, CacheOptions, Driver, FileDriver, FileRef, PlainOptions, Qcow2Options,
    ThrottleOptions,
};
use super::outgoing::Reply;
use super::refs::{Backing, NodeOr};
use super::refusal::Refusal;
use super::shape::Done;
use crate::node::is_name;
use crate::running::Running;

impl Add {
    /// What lies below it, where something can.
    pub(super) fn backing(&mut self) -> Option<&mut Option<Backing<Add>>> {
        match &mut self.of {
            Driver::Qcow2(Qcow2Options { below, .. }) => Some(below),
            Driver::Throttle(ThrottleOptions { file, .. }) => file.backing(),
            _ => None,
        }
    }

    /// What is described to lie below it, by itself.
    fn take_below(&mut self) -> Option<Add> {
        let slot = self.backing()?;
        match slot.take() {
            Some(Backing::Of(below)) => Some(*below),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// What an image below is where nothing else is said.
    fn put_below(mut self, cache: Option<&CacheOptions>) -> Add {
        self.read_only.get_or_insert(true);
        let same = |of: &CacheOptions| CacheOptions { direct: of.direct, no_flush: of.no_flush };
        self.cache = self.cache.or(cache.map(same));
        // The bytes of a file are an image, too.
        let raw = |of| {
            let (read_only, cache, discard, _detect_zeroes) = Default::default();
            let file = NodeOr::Of(FileRef { read_only, cache, discard, _detect_zeroes, of });
            let (force_format, restart_log, backing) = Default::default();
            Driver::Raw(PlainOptions { file, force_format, restart_log, backing })
        };
        self.of = match self.of {
            Driver::File(of) => raw(FileDriver::File(of)),
            Driver::Device(of) => raw(FileDriver::Device(of)),
            Driver::Nbd(of) => raw(FileDriver::Nbd(of)),
            Driver::Rbd(of) => raw(FileDriver::Rbd(of)),
            other => other,
        };
        self
    }

    /// Those that are described below it, the lowest first, and itself upon them by name.
    pub(super) fn laid_out(mut self, running: &Running) -> Result<(VecDeque<Add>, Add), Refusal> {
        let mut all = vec![];
        while let Some(below) = self.take_below() {
            let below = below.put_below(self.cache.as_ref());
            all.push(std::mem::replace(&mut self, below));
        }
        all.push(self);
        let mut names = BTreeSet::new();
        for name in all.iter().filter_map(|one| one.node_name.as_ref()) {
            if !is_name(name) {
                return Err(Refusal::new(format!("Invalid node-name: '{name}'")));
            }
            if running.is_taken(name) || !names.insert(name.clone()) {
                return Err(Refusal::new(format!("Duplicate nodes with node-name='{name}'")));
            }
        }
        for at in 1..all.len() {
            let free = |name: &String| !running.is_taken(name) && names.insert(name.clone());
            let made = || (0..).map(|number| format!("below{number}")).find(free);
            let name = all[at].node_name.take().or_else(made);
            all[at].node_name.clone_from(&name);
            if let Some(slot) = all[at - 1].backing() {
                *slot = name.map(Backing::Node);
            }
        }
        let top = all.remove(0);
        if top.node_name.is_none() && !all.is_empty() {
            return Err(Refusal::new("'node-name' must be specified for the root node"));
        }
        Ok((all.into_iter().rev().collect(), top))
    }
}

impl Running {
    /// Open one after the other, each upon the one before; where that fails none of them stays.
    pub(super) fn add_in_turn(
        &mut self,
        mut rest: VecDeque<Add>,
        mut come: Vec<String>,
        reply: Reply<Done>,
    ) {
        let Some(next) = rest.pop_front() else {
            come.pop();
            come.iter().for_each(|name| self.goes_with_others(name));
            return reply.give(Ok(Done {}));
        };
        let name = next.node_name.clone().unwrap_or_default();
        let wish = match next.asked(self) {
            Ok(Asked::Disk(_)) if self.is_taken(&name) => {
                Err(Refusal::new(format!("Duplicate nodes with node-name='{name}'")))
            }
            Ok(Asked::Disk(wish)) => Ok(wish),
            Ok(_) => Err(Refusal::new(format!("Node '{name}' is no disk: none lies upon such"))),
            Err(refusal) => Err(refusal),
        };
        let undo = |running: &mut Running, come: Vec<String>, why: Refusal, reply: Reply<Done>| {
            come.iter().for_each(|name| running.goes_with_others(name));
            running.close_unused(Box::new(|_| reply.give(Err(why))));
        };
        match wish {
            Ok(wish) => self.open_wish(wish, move |running, end| match end {
                Ok(()) => {
                    come.push(name);
                    running.add_in_turn(rest, come, reply);
                }
                Err(why) => undo(running, come, why, reply),
            }),
            Err(why) => undo(self, come, why, reply),
        }
    }

    /// It is closed as soon as nothing lies upon it any more.
    fn goes_with_others(&mut self, name: &str) {
        let Some(id) = self.node(name) else { return };
        if let Some(served) = self.disks.get_mut(&id) {
            served.ties.within = true;
        }
    }
}
