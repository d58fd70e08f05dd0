//! The machine of the stage: a Xen, its first domain with all images, and the guests that disks are attached to.

use std::path::Path;
use std::time::Duration;

use ringtap_guest::{Aio, Cache, Domain, Drive, Guest, Host, Xen};

use super::super::inside::Shell;
use crate::backend::WriteCache;
use crate::backend::xen::{Image, Node, Seat, Way};
use crate::env::{Env, FILE_SYSTEM, Missing};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::run::meter;
use crate::run::scratch::settle;
use crate::stop::Stop;

const LIBRARY: &str = include_str!("dom0.sh");
const BLOCK_NODE: &str = include_str!("block-node");
const BLOCK_RINGTAP: &str = include_str!("../../../../../contrib/xen/block-ringtap");

/// Memory of the first domain in bytes, its initramfs and the programs in it included.
pub const FIRST_MEMORY: u64 = 1 << 30;
/// Least memory of each guest in bytes, where the plan does not say it.
pub const GUEST_MEMORY: u64 = 352 << 20;
/// Memory of an HVM guest in bytes; little is in its initramfs.
const HVM_MEMORY: u64 = 192 << 20;
/// What Xen takes for an HVM guest beside its memory.
const HVM_BESIDE: u64 = 32 << 20;
/// What a guest's kernel and loads take, beside the initramfs twice: packed and unpacked.
const BESIDE: u64 = 160 << 20;
/// QEMU's words for an HVM guest's disk, as xl has it: through the page cache of the first domain.
const EMULATED: &str =
    "driver=raw,file.driver=host_device,file.locking=off,cache.direct=off,cache.no-flush=off";
/// The first domain's control group for what is measured natively.
const GROUP: &str = "/sys/fs/cgroup/lab";
/// Xen's tools on a translated processor beside other work.
const LONG: Duration = Duration::from_secs(240);

/// A booted Xen with its guests.
pub struct Machine {
    // Gone before the machine that they are part of.
    guests: Vec<Guest>,
    /// The HVM guest, or why it did not come up: the others are there all the same.
    hvm: Option<Result<Guest, String>>,
    host: Host,
    /// Bytes of a PV guest's memory.
    memory: u64,
    /// Lines by which a shell of the first domain has no more than a guest.
    within: String,
    /// The binary's place in the first domain.
    ringtap: String,
}

/// A disk that is used.
pub struct Disk {
    /// Who uses it.
    pub seat: Seat,
    /// The device's name.
    pub name: String,
}

impl Disk {
    /// The `number`th disk of a load, in the `position`th block of a round: each arm's has a name of its own, so that none is taken
    /// for the last one.
    pub fn new(way: Way, number: usize, position: u32) -> Disk {
        let letter = char::from(b'a' + (position % 16) as u8);
        let name = match way {
            // The first of device-mapper's.
            Way::Native => "dm-0".into(),
            Way::Emulated(WriteCache::On) => "sda".into(),
            Way::Emulated(WriteCache::Off) => "sdb".into(),
            _ => format!("xvd{letter}"),
        };
        Disk { seat: way.seat(number), name }
    }

    /// Whether `xl` has attached it, and not something that was there before.
    fn is_attached(&self) -> bool {
        self.name.starts_with("xvd")
    }

    /// Its node where it is used.
    pub fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }
}

/// Memory of each PV guest in bytes.
pub fn guest_memory(plan: &Plan, initramfs: u64) -> u64 {
    let usual = || (2 * initramfs + BESIDE).next_multiple_of(32 << 20).max(GUEST_MEMORY);
    plan.memory.unwrap_or_else(usual)
}

/// What a machine is booted with.
pub struct Needs<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Images on an ext4, and volumes.
    pub disks: [&'a Path; 2],
    /// PV guests.
    pub guests: usize,
    /// Whether there is an HVM guest, too.
    pub hvm: bool,
    /// Whether a load needs a file system.
    pub file_systems: bool,
}

impl Machine {
    /// Boots Xen with these disks and makes the guests; each of them may take as long as the plan's limit.
    pub fn boot(env: &Env, stop: &Stop, needs: &Needs<'_>) -> Result<Machine> {
        stop.check()?;
        let lost = |missing: Missing| Error::Guest(missing.reason);
        let limit = needs.plan.boot_limit.map(Duration::from_secs_f64);
        let (mut first, other) = env.xen().map_err(lost)?;
        let hvm = needs.hvm.then(|| env.xen_hvm().map_err(lost)).transpose()?;
        let hvm = hvm.map(|(with_model, hvm)| {
            first = with_model;
            hvm
        });
        let memory = guest_memory(needs.plan, size_of_file(other.initrd())?);
        let ([files, volumes], guests) = (needs.disks, needs.guests);
        settle(files)?;
        settle(volumes)?;
        let drive = |path: &Path| Drive::raw(path).cache(Cache::None).aio(Aio::Native);
        let mut host = Xen::new(&first, &other)
            .memory(FIRST_MEMORY)
            .interrupt(stop.flag())
            .domains_memory(
                guests as u64 * memory + hvm.as_ref().map_or(0, |_| HVM_MEMORY + HVM_BESIDE),
            )
            .disk(drive(files))
            .disk(drive(volumes));
        if let Some(limit) = limit {
            host = host.boot_timeout(limit);
        }
        if let Some(hvm) = &hvm {
            host = host.hvm(hvm);
        }
        let host = host.boot()?;
        let ringtap = env.guest_ringtap().display().to_string();
        let within = String::new();
        let mut machine = Machine { guests: Vec::new(), hvm: None, host, memory, within, ringtap };
        let script = format!(
            "cat >/etc/xen/scripts/block-ringtap <<'END OF SCRIPT'\n{BLOCK_RINGTAP}END OF SCRIPT\n\
             cat >/etc/xen/scripts/block-node <<'END OF SCRIPT'\n{BLOCK_NODE}END OF SCRIPT\n\
             prepare {} {guests}",
            needs.plan.size / 512
        );
        machine.first("mount the images", &script, stop)?;
        for number in 1..=guests {
            stop.check()?;
            let mut made = Domain::new(Seat::Guest(number).domain()).memory(memory);
            if let Some(limit) = limit {
                made = made.boot_timeout(limit);
            }
            let made = machine.host.create(&made)?;
            machine.guests.push(made);
            // The first start of a program is not at the cost of the first arm.
            let shell = machine.shell(Seat::Guest(number), stop)?;
            shell.run("fio --version; dd --version; true", LONG)?;
            for module in FILE_SYSTEM.iter().filter(|_| needs.file_systems) {
                shell.run(&format!("modprobe {module}"), LONG)?;
            }
        }
        machine.within = machine.confine(stop)?;
        if hvm.is_some() {
            stop.check()?;
            // The second for the arm that turns its write cache off.
            let drive = format!("{EMULATED},file.filename={}", Image::Volume.path(1));
            let mut made =
                Domain::new(Seat::Hvm.domain()).hvm([drive.clone(), drive]).memory(HVM_MEMORY);
            if let Some(limit) = limit {
                made = made.boot_timeout(limit);
            }
            machine.hvm = Some(match machine.host.create(&made) {
                Ok(hvm) => Ok(hvm),
                Err(_) if stop.asked() => return Err(Error::Interrupted),
                Err(error) => Err(error.to_string()),
            });
        }
        Ok(machine)
    }

    /// Makes a control group in the first domain with what a guest has: one processor, and the memory that the first guest has to
    /// spare. Gives the lines by which a shell joins it.
    fn confine(&self, stop: &Stop) -> Result<String> {
        let shell = self.shell(Seat::Guest(1), stop)?;
        let spare = shell.run("grep ^MemAvailable: /proc/meminfo", LONG)?.stdout;
        let bytes = spare_memory(&spare)?;
        let script = format!(
            "mount -t cgroup2 none /sys/fs/cgroup\necho '+memory +cpuset' >/sys/fs/cgroup/cgroup.subtree_control\n\
             mkdir {GROUP}\necho {bytes} >{GROUP}/memory.max\necho 0 >{GROUP}/cpuset.cpus"
        );
        self.first("give native loads what a guest has", &script, stop)?;
        Ok(format!("echo $$ >{GROUP}/cgroup.procs"))
    }

    /// The first domain.
    pub fn dom0(&self) -> &Guest {
        self.host.dom0()
    }

    /// Bytes of the memory that whoever sits there has for what it runs.
    pub fn memory(&self, seat: Seat) -> u64 {
        match seat {
            Seat::Hvm => HVM_MEMORY,
            _ => self.memory,
        }
    }

    /// Who sits there.
    pub fn guest(&self, seat: Seat) -> Result<&Guest> {
        let found = match seat {
            Seat::Guest(number) => number.checked_sub(1).and_then(|at| self.guests.get(at)),
            Seat::First => Some(self.dom0()),
            Seat::Hvm => match &self.hvm {
                Some(Err(why)) => return Err(Error::Guest(why.clone())),
                Some(Ok(hvm)) => Some(hvm),
                None => None,
            },
        };
        found.ok_or_else(|| Error::Plan(format!("the stage xen has no {}", seat.domain())))
    }

    /// A shell there, in the first domain with no more than a guest has.
    pub fn shell<'a>(&'a self, seat: Seat, stop: &'a Stop) -> Result<Shell<'a>> {
        let first = if seat == Seat::First { self.within.as_str() } else { "" };
        Ok(Shell::new(self.guest(seat)?, stop).after(first))
    }

    /// Gives a guest its disk, and waits until it has it.
    pub fn attach(&self, way: Way, disk: &Disk, stop: &Stop) -> Result<()> {
        let what = format!("attach {} to {}", disk.name, disk.seat.domain());
        if let Some(script) = attach(way, disk) {
            self.first(&what, &script, stop)?;
        }
        let node = disk.node();
        let wait = format!(
            "for i in $(seq 300); do [ ! -b {node} ] || exit 0; sleep 0.1; done\n\
             echo '{node} did not come up' >&2; exit 1"
        );
        self.shell(disk.seat, stop)?.run(&wait, LONG)?;
        if let Way::Emulated(cache) = way {
            self.shell(disk.seat, stop)?.run(&cache.script(&node), LONG)?;
        }
        Ok(())
    }

    /// Takes the disks away again and ends what served them; gives what the server said.
    pub fn release(&self, disks: &[Disk], stop: &Stop) -> Result<String> {
        let words: Vec<String> = disks
            .iter()
            .filter(|disk| disk.is_attached())
            .map(|disk| format!("{} {}", disk.seat.domain(), disk.name))
            .collect();
        let words = words.join(" ");
        self.first(&format!("detach {words}"), &format!("release {words}"), stop)
    }

    /// Takes the disks away and gives them back, overlays with nothing written to them; gives what the server said.
    pub fn renew(&self, way: Way, disks: &[Disk], stop: &Stop) -> Result<String> {
        let said = self.release(disks, stop)?;
        for disk in disks {
            // The guest lets go of the last one of this name in its own time.
            let node = disk.node();
            let wait = format!(
                "for i in $(seq 300); do [ -b {node} ] || exit 0; sleep 0.1; done\n\
                 echo '{node} did not go' >&2; exit 1"
            );
            self.shell(disk.seat, stop)?.run(&wait, LONG)?;
            self.attach(way, disk, stop)?;
        }
        Ok(said)
    }

    /// Flushes that the first domain has sent to its disks so far.
    pub fn flushes(&self, stop: &Stop) -> Result<f64> {
        let wrong = |found: String| Error::Output { what: "statistics of the first domain", found };
        let text = self.first("count flushes", "cat /sys/block/vd[a-z]/stat", stop)?;
        let disks: Option<Vec<f64>> =
            text.lines().map(|line| Some(meter::layer(line)?.0.flushes)).collect();
        let disks = disks.filter(|disks| !disks.is_empty());
        disks.map(|disks| disks.iter().sum()).ok_or_else(|| wrong(format!("{text:?}")))
    }

    fn first(&self, what: &str, script: &str, stop: &Stop) -> Result<String> {
        let shell = Shell::new(self.host.dom0(), stop);
        shell.run(&named(what, &self.ringtap, script), LONG).map(|output| output.stdout)
    }
}

/// A script for the first domain. Its first line is what an error says of it.
fn named(what: &str, ringtap: &str, script: &str) -> String {
    format!("# {what} (Xen's first domain)\nringtap='{ringtap}'\n{LIBRARY}\n{script}")
}

/// What has the first domain serve a disk, see `dom0.sh`; none where it is there.
fn attach(way: Way, disk: &Disk) -> Option<String> {
    let (number, name) = (disk.seat.images(), &disk.name);
    let guest = disk.seat.domain();
    let by_blkback =
        |node: Node| format!("node=$({})\nby_blkback {guest} {name} $node", node.find(number));
    Some(match way {
        Way::Native | Way::Emulated(_) => return None,
        Way::Blkback(node) => by_blkback(node),
        Way::InHvm => by_blkback(Node::Volume),
        Way::Ringtap(image, mode) => {
            let (path, format, options) = (image.path(number), image.format(), mode.options());
            let fresh = match image {
                Image::Overlay => {
                    let base = Image::Raw.path(number);
                    format!(
                        "rm -f {path}\n$ringtap create -q -f qcow2 -b {base} -F raw {path} >&2\n"
                    )
                }
                _ => String::new(),
            };
            format!("{fresh}by_ringtap {guest} {name} {format}:{path} {options}")
        }
    })
}

/// Bytes that `MemAvailable:` of /proc/meminfo says.
fn spare_memory(line: &str) -> Result<u64> {
    let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| Error::Output {
        what: "the memory that a guest has to spare",
        found: format!("{line:?}"),
    })
}

/// Bytes of a file.
pub fn size_of_file(path: &Path) -> Result<u64> {
    Ok(std::fs::metadata(path).map_err(Error::file("look at", path))?.len())
}

/// For the report: what serves an arm's disk in the first domain.
pub fn command(way: Way) -> String {
    match way {
        Way::Blkback(node) => format!("xen-blkback on the device that `{}` prints", node.find(1)),
        Way::InHvm => format!("xen-blkback on {}, in an HVM guest", Image::Volume.path(1)),
        Way::Native => format!("the first domain itself on {}", Image::Volume.path(1)),
        Way::Emulated(_) => {
            format!(
                "QEMU in the first domain: -drive if=ide,{EMULATED},file.filename={}",
                Image::Volume.path(1)
            )
        }
        Way::Ringtap(image, mode) => {
            format!("ringtap xen {}; target={}:{}", mode.options(), image.format(), image.path(1))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;
    use crate::backend::xen::Mode;

    /// The first domain's functions run here, with programs in the place of its own that only say how they were called.
    struct Domain0(tempfile::TempDir);

    impl Domain0 {
        fn new() -> Domain0 {
            let domain = Domain0(tempfile::tempdir().unwrap());
            let log = domain.at("calls");
            for (name, rest) in [
                // It knows which disks are attached.
                (
                    "xl",
                    "on=$0.$2.$3\ncase $1 in\nblock-attach) >$0.$2.$(expr \"$3\" : '.*vdev=\\([a-z]*\\)');;\n\
                     block-detach) [ ! -e $0.stuck ] || { echo timed out >&2; exit 1; }\n\
                     rm $on 2>/dev/null || { echo \"Error: Device $3 not connected.\" >&2; exit 1; };;\nesac",
                ),
                ("modprobe", "echo xen_blkback 57344 0 >${0%/*}/modules"),
                ("rmmod", ""),
                ("losetup", "[ \"$1\" = -D ] || echo /dev/loop7"),
                ("sync", ""),
                // It lives until it is told to end.
                (
                    "ringtap",
                    "[ \"$1\" = xen ] || { [ ! -e $0.full ]; exit; }\n\
                     trap 'echo end >>$0.end; exit' TERM\necho ready\nwhile :; do sleep 0.05; done",
                ),
                ("setsid", "exec \"$@\""),
            ] {
                let said = if name == "setsid" { "" } else { "echo \"${0##*/} $*\" >>LOG\n" };
                let text =
                    format!("#!/bin/sh\n{said}{rest}\n").replace("LOG", log.to_str().unwrap());
                std::fs::write(domain.at(name), text).unwrap();
                let mode = PermissionsExt::from_mode(0o755);
                std::fs::set_permissions(domain.at(name), mode).unwrap();
            }
            std::fs::write(domain.at("modules"), "loop 1 0\n").unwrap();
            domain
        }

        fn at(&self, name: &str) -> std::path::PathBuf {
            self.0.path().join(name)
        }

        /// Whether a script succeeds, and what it has called and said.
        fn run(&self, script: &str) -> (bool, String) {
            let here = self.0.path().display();
            let library = LIBRARY
                .replace("/proc/modules", &format!("{here}/modules"))
                .replace("/run/lab", &format!("{here}"))
                .replace("/proc/sys/vm/drop_caches", "/dev/null");
            let script =
                named("test", &format!("{here}/ringtap"), script).replace(LIBRARY, &library);
            let path = format!("{here}:{}", std::env::var("PATH").unwrap());
            let output =
                Command::new("sh").arg("-c").arg(script).env("PATH", path).output().unwrap();
            let calls = std::fs::read_to_string(self.at("calls")).unwrap_or_default();
            let _ = std::fs::remove_file(self.at("calls"));
            (output.status.success(), calls + &String::from_utf8(output.stderr).unwrap())
        }
    }

    fn called(script: &str) -> (bool, String) {
        Domain0::new().run(script)
    }

    #[test]
    fn a_disk_of_the_kernels_is_attached_and_its_driver_makes_way() {
        let way = Way::Blkback(Node::Loop { direct: true });
        let disk = Disk::new(way, 2, 1);
        let script = format!("{}\nrelease guest2 xvdb", attach(way, &disk).unwrap());
        let (done, said) = called(&script);
        assert!(done, "{said}");
        assert_eq!(
            said,
            "losetup -f --show --direct-io=on /srv/2.raw\nmodprobe xen-blkback\n\
             xl block-attach guest2 format=raw,vdev=xvdb,access=w,script=block-node,target=/dev/loop7\n\
             xl block-detach guest2 xvdb\nrmmod xen-blkback\nlosetup -D\nsync \n"
        );
    }

    #[test]
    fn one_server_has_the_disks_of_both_guests_and_ends_with_them() {
        let way = Way::Ringtap(Image::Overlay, Mode::GrantCopy);
        let script = format!(
            "{}\n{}\nrelease guest1 xvda guest2 xvda\n[ -e $ringtap.end ] && [ ! -e $run/pid ]",
            attach(way, &Disk::new(way, 1, 0)).unwrap(),
            attach(way, &Disk::new(way, 2, 0)).unwrap()
        );
        let (done, said) = called(&script);
        assert!(done, "{said}");
        let wanted = [
            "ringtap create -q -f qcow2 -b /srv/1.raw -F raw /srv/1.overlay",
            "ringtap xen --cache none --persistent-grants false",
            "xl block-attach guest1 format=raw,vdev=xvda,access=w,script=block-ringtap,target=qcow2:/srv/1.overlay",
            "ringtap create -q -f qcow2 -b /srv/2.raw -F raw /srv/2.overlay",
            "xl block-attach guest2 format=raw,vdev=xvda,access=w,script=block-ringtap,target=qcow2:/srv/2.overlay",
            "xl block-detach guest1 xvda",
            "xl block-detach guest2 xvda",
            "losetup -D",
            "sync ",
        ];
        assert_eq!(said.lines().collect::<Vec<_>>(), wanted);
    }

    /// Each step of a renewal is a script of its own.
    #[test]
    fn an_overlay_that_could_not_be_made_is_made_for_the_next_load() {
        let domain = Domain0::new();
        let way = Way::Ringtap(Image::Overlay, Mode::Usual);
        let overlay = attach(way, &Disk::new(way, 1, 0)).unwrap();
        let release = "release guest1 xvda";
        let done = |script: &str| {
            let (done, said) = domain.run(script);
            assert!(done, "{script}: {said}");
            said
        };
        done(&overlay);
        done(release);
        std::fs::write(domain.at("ringtap.full"), "").unwrap();
        let (made, said) = domain.run(&overlay);
        assert!(!made && !said.contains("block-attach"), "{said}");
        std::fs::remove_file(domain.at("ringtap.full")).unwrap();
        done(release);
        assert!(done(&overlay).contains("block-attach guest1"));
        // What is attached and does not go is another matter.
        std::fs::write(domain.at("xl.stuck"), "").unwrap();
        let (gone, said) = domain.run(release);
        assert!(!gone && said.ends_with("timed out\n"), "{said}");
        std::fs::remove_file(domain.at("xl.stuck")).unwrap();
        done(release);
    }

    #[test]
    fn a_server_that_does_not_start_fails_its_arm() {
        let way = Way::Ringtap(Image::Raw, Mode::Usual);
        let script = format!(
            "printf '#!/bin/sh\\necho no ring >&2\\nexit 1' >$ringtap\n{}",
            attach(way, &Disk::new(way, 1, 3)).unwrap()
        );
        let (done, said) = called(&script);
        assert!(!done);
        assert_eq!(said, "ringtap xen --cache none is not ready\nno ring\n");
    }

    #[test]
    fn an_hvm_guest_and_the_first_domain_use_the_volume_of_the_first_guest() {
        let lvm = Way::Blkback(Node::Volume);
        let volume = attach(lvm, &Disk::new(lvm, 1, 2)).unwrap();
        let hvm = attach(Way::InHvm, &Disk::new(Way::InHvm, 1, 2)).unwrap();
        assert_eq!(hvm, volume.replace("guest1", "hvm"));
        let node = |way| Disk::new(way, 1, 5).node();
        let emulated = [WriteCache::On, WriteCache::Off].map(|cache| node(Way::Emulated(cache)));
        assert_eq!(emulated, ["/dev/sda", "/dev/sdb"]);
        assert_eq!((node(Way::Native).as_str(), node(lvm).as_str()), ("/dev/dm-0", "/dev/xvdf"));
        // They are there, and stay.
        for way in [Way::Native, Way::Emulated(WriteCache::On)] {
            let disk = Disk::new(way, 1, 0);
            assert!(attach(way, &disk).is_none() && !disk.is_attached(), "{way:?}");
        }
    }

    #[test]
    fn a_plan_says_what_memory_guests_have() {
        use clap::Parser;
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            args: crate::cli::CompareArgs,
        }
        let memory = |words: &[&str]| {
            let head = ["compare", "--dir", "/tmp", "--stages", "xen"];
            let args = Cli::parse_from(head.iter().chain(words)).args;
            guest_memory(&Plan::from_args(&args).unwrap(), 60 << 20)
        };
        assert_eq!(memory(&["--memory", "256M"]), 256 << 20);
        assert_eq!(memory(&[]), GUEST_MEMORY);
        assert_eq!(spare_memory("MemAvailable:     1000 kB\n").unwrap(), 1_024_000);
        assert!(spare_memory("").is_err());
    }
}
