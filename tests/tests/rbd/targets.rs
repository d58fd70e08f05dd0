//! Disks of this host that are copied to images of Ceph.

use ringtap_tests::targets::{Source, Target};
use serde_json::json;

use crate::cluster::own_cluster;

#[test]
fn an_image_takes_copies() {
    let Some(cluster) = own_cluster() else { return };
    cluster.ok("rbd", &["create", "--size", "16M", "t"]);
    let conf = cluster.text("ceph.conf");
    let file = json!({ "driver": "rbd", "pool": "rbd", "image": "t", "conf": conf });
    let node = json!({ "driver": "raw", "file": file });
    let opened = format!("driver=rbd,pool=rbd,image=t,conf={conf}");
    let target = Target { node, opened, secret: None };
    let more = ["--allow", "rbd:"];
    let mut source = Source::new(cluster.dir.path(), &more);
    source.is_copied_by_all(&target);
    source.may_be_cancelled(&target);
    source.stands(&target, |stands| {
        let signal =
            if stands { rustix::process::Signal::STOP } else { rustix::process::Signal::CONT };
        rustix::process::kill_process(cluster.osd(), signal).expect("it is there");
    });
    source.is_killed(&target, &more);
}
