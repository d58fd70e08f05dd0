//! Boots a guest and runs one command in it: `cargo run --example boot -- uml|qemu COMMAND`.

use std::time::Duration;

use ringtap_guest::{Appliance, Machine, Qemu, Result, Root, Uml};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let kind = args.next().unwrap_or_default();
    let command = args.collect::<Vec<_>>().join(" ");
    let root = if kind.ends_with("-packed") { Root::Packed } else { Root::Host };
    let cache = Appliance::default_cache();
    let builder =
        |machine| Appliance::builder(machine).root(root).programs(["fio", "dd", "mke2fs"]);
    let guest = if kind.starts_with("uml") {
        Uml::new(&builder(Machine::Uml).build(&cache)?).boot()?
    } else {
        Qemu::new(&builder(Machine::Pc).build(&cache)?).boot()?
    };
    println!("{} booted in {:?}, pid {}", guest.accelerator(), guest.boot_time(), guest.pid());
    let output = guest.exec(&command, Duration::from_secs(600))?;
    print!("{}", output.stdout);
    eprint!("{}", output.stderr);
    println!("status {} after {:?}, cpu {:?}", output.status, output.elapsed, guest.cpu_time());
    guest.shutdown(Duration::from_secs(30))
}
