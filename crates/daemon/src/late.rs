//! Disks that could not be opened at the start, tried again.

use std::collections::VecDeque;

use ringtap_io::Tasks;
use ringtap_vbd::{Vbd, disk_span};

use crate::handed::Handed;
use crate::opened::{LeftOut, Wrap, device, record_formats};
use crate::plan::Plan;
use crate::running::{Running, Served};
use crate::{Address, Disk, Error};

/// Serve those of the disks left out that can be served now.
pub(crate) fn try_again(running: &mut Running, left_out: &mut Vec<LeftOut>, wrap: Wrap<'_>) {
    let mut waiting: VecDeque<LeftOut> = std::mem::take(left_out).into();
    while let Some(LeftOut { disk, label, error: _ }) = waiting.pop_front() {
        let later: Vec<&Disk> = left_out.iter().chain(&waiting).map(|left| &left.disk).collect();
        let _disk = disk_span(&disk.path.display().to_string()).entered();
        let served = device(&disk, &label, wrap).and_then(|(vbd, named)| {
            serve(running, &disk, vbd, &later).map(|()| record_formats(named.as_slice()))
        });
        if let Err(error) = served {
            tracing::error!("still not served: {error}");
            left_out.push(LeftOut { disk, label, error });
        }
    }
}

fn serve(running: &mut Running, disk: &Disk, vbd: Vbd, later: &[&Disk]) -> Result<(), Error> {
    let place = running.disks.len();
    running.add(disk.clone(), vbd);
    let bound = running.bound();
    let plan = not_handed(disk, &bound)
        .and_then(|()| Plan::of(&running.config, place, &bound, later, &mut Handed::default()))
        .and_then(|plan| running.start_devices(place).map(|()| plan));
    let plan = plan.inspect_err(|_| running.take_back().iter().for_each(close))?;
    // What has been started by then stays: it is of no other disk.
    if let Err(error) = running.start(plan, place) {
        tracing::error!("not served everywhere: {error}");
    }
    tracing::info!("served from now on: {}", running.disks[place].facts.line());
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
    let closed = ringtap_io::reactor().map(|reactor| {
        let mut tasks = Tasks::new(reactor);
        let (vbd, io) = (served.vbd.clone(), tasks.io().clone());
        tasks.block_on(async move { vbd.close(&io).await })
    });
    match closed {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!("cannot close it again: {error}"),
        Ok(Err(error)) | Err(error) => tracing::warn!("cannot close it again: {error}"),
    }
}
