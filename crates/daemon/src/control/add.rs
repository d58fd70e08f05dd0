//! `blockdev-add` carried out.

use super::command::Command;
use super::nodes::{Add, Asked};
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::Done;
use crate::running::Running;

impl Command for Add {
    const NAME: &'static str = "blockdev-add";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        match self.laid_out(running) {
            Ok((below, add)) if below.is_empty() => add.run_alone(running, reply),
            Ok((mut below, add)) => {
                below.push_back(add);
                running.add_in_turn(below, vec![], reply);
            }
            Err(refusal) => reply.give(Err(refusal)),
        }
    }
}

impl Add {
    fn run_alone(self, running: &mut Running, reply: Reply<Done>) {
        let asked = match self.asked(running) {
            Ok(asked) => asked,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let name = match &asked {
            Asked::Disk(wish) => wish.disk.node_name.clone().unwrap_or_default(),
            Asked::File(name, _) | Asked::Keep(name, _) | Asked::Show(name, _) => name.clone(),
        };
        if running.is_taken(&name) {
            let text = format!("Duplicate nodes with node-name='{name}'");
            return reply.give(Err(Refusal::new(text)));
        }
        match asked {
            Asked::Disk(wish) => {
                running.open_wish(wish, |_, end| reply.give(end.map(|()| Done {})));
            }
            Asked::File(name, wish) => running.open_file(name, wish, reply),
            Asked::Keep(name, of) => running.keep_moment(name, &of, reply),
            Asked::Show(name, of) => reply.give(running.show_moment(name, of)),
        }
    }
}
