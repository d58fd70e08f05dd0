//! Boots Xen and a domain on a disk of 64 MiB, and runs one command in each:
//! `cargo run --example xen -- 'COMMAND IN THE FIRST DOMAIN' 'COMMAND IN THE OTHER'`.

use std::time::Duration;

use ringtap_guest::{Appliance, Domain, Machine, Result, Xen};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().unwrap_or_else(|| "uname -a".into());
    let (first, other) = (next(), next());
    let cache = Appliance::default_cache();
    let build = |machine, modules: &[&str]| {
        let builder = Appliance::builder(machine).programs(["fio", "dd"]);
        builder.spare_modules(modules.iter().copied()).build(&cache)
    };
    let xen = Xen::new(&build(Machine::Xen, &["xen-blkback"])?, &build(Machine::Domain, &[])?);
    let host = xen.cpus(1).boot()?;
    println!("Xen booted in {:?}, pid {}", host.dom0().boot_time(), host.dom0().pid());
    let hour = Duration::from_secs(3600);
    let output = host.dom0().exec(&first, hour)?;
    println!("{}{}status {}", output.stdout, output.stderr, output.status);
    let disk = "modprobe xen-blkback; truncate -s 64M /run/disk; losetup /dev/loop0 /run/disk";
    host.dom0().exec(disk, hour)?.success()?;
    // Xen's own script starts dozens of programs, which takes a slow machine longer than `xl` waits.
    let script = "#!/bin/sh
        [ $1 = add ] || exit 0
        node=$(xenstore-read $XENBUS_PATH/params)
        exec xenstore-write $XENBUS_PATH/physical-device $(stat -L -c %t:%T $node) \\
            $XENBUS_PATH/hotplug-status connected";
    let script = format!("cat >$0 <<'END'\n{script}\nEND\nchmod +x $0")
        .replace("$0", "/etc/xen/scripts/block-node");
    host.dom0().exec(&script, hour)?.success()?;
    let disk = "format=raw,vdev=xvda,access=w,script=block-node,target=/dev/loop0";
    let guest = host.create(&Domain::new("one").disk(disk))?;
    println!("a domain booted in {:?}", guest.boot_time());
    let output = guest.exec(&other, hour)?;
    println!("{}{}status {}", output.stdout, output.stderr, output.status);
    Ok(())
}
