//! Disks that could not be opened at the start, tried again.

use std::collections::VecDeque;

use ringtap_vbd::{Vbd, disk_span};

use crate::end;
use crate::handed::Handed;
use crate::opened::{LeftOut, device, record_formats};
use crate::plan::Plan;
use crate::running::{Running, Served};
use crate::successor;
use crate::{Address, Disk, Error, sandbox};

/// Serve those of the disks left out that can be served now.
pub(crate) fn try_again(running: &mut Running, left_out: &mut Vec<LeftOut>) {
    let wrap = running.wrap.clone();
    let mut waiting: VecDeque<LeftOut> = std::mem::take(left_out).into();
    while let Some(LeftOut { mut disk, label, error: _ }) = waiting.pop_front() {
        let later: Vec<&Disk> = left_out.iter().chain(&waiting).map(|left| &left.disk).collect();
        let _disk = disk_span(&disk.path.display().to_string()).entered();
        let found = successor::follow(&mut disk).and_then(|()| device(&disk, &label, &wrap));
        let served = found.and_then(|(vbd, named)| {
            serve(running, &disk, vbd, &later).map(|()| record_formats(named.as_slice()))
        });
        if let Err(error) = served {
            tracing::error!("still not served: {}", sandbox::hinted(error.to_string()));
            left_out.push(LeftOut { disk, label, error });
        }
    }
}

fn serve(running: &mut Running, disk: &Disk, vbd: Vbd, later: &[&Disk]) -> Result<(), Error> {
    let id = running.add(disk.clone(), vbd);
    let (bound, wanted) = (running.bound(), [(id, disk)]);
    let plan = not_handed(disk, &bound)
        .and_then(|()| Plan::of(&running.config, &wanted, &bound, later, &mut Handed::default()))
        .and_then(|plan| running.start_devices(&[id]).map(|()| plan));
    let plan = plan.inspect_err(|_| running.take_back(id).iter().for_each(close))?;
    // What has been started by then stays: it is of no other disk.
    if let Err(error) = running.start(plan, &[id]) {
        tracing::error!("not served everywhere: {error}");
    }
    running.pending.nodes.remove(disk.node_name.as_deref().unwrap_or_default());
    if let Some(served) = running.disks.get(&id) {
        tracing::info!("served from now on: {}", served.facts.line());
    }
    Ok(())
}

/// What systemd handed over for a disk that was left out is closed.
fn not_handed(disk: &Disk, bound: &[Address]) -> Result<(), Error> {
    let mut all = disk.nbd.iter().chain(&disk.vhost_user);
    match all.find(|one| matches!(one, Address::Systemd(_)) && !bound.contains(one)) {
        None => Ok(()),
        Some(address) => Err(Error::Handed(format!(
            "its socket {address} was closed when the image could not be opened: start the server again"
        ))),
    }
}

/// Nobody has used it.
fn close(served: &Served) {
    if let Err(error) = end::close(served) {
        tracing::warn!("cannot close it again: {error}");
    }
}
