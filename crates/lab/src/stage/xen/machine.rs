//! The machine of the stage: a Xen, its first domain with all images, and the guests that disks are attached to.

use std::path::Path;
use std::time::Duration;

use ringtap_guest::{Aio, Cache, Domain, Drive, Guest, Host, Xen};

use super::super::inside::Shell;
use crate::backend::xen::{Image, Way};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::run::meter;
use crate::run::scratch::settle;
use crate::stop::Stop;

const LIBRARY: &str = include_str!("dom0.sh");
const BLOCK_NODE: &str = include_str!("block-node");
const BLOCK_RINGTAP: &str = include_str!("../../../../../contrib/xen/block-ringtap");

/// Memory of the first domain in bytes, its initramfs and the programs in it included.
pub const FIRST_MEMORY: u64 = 1 << 30;
/// Memory of each guest in bytes.
pub const GUEST_MEMORY: u64 = 352 << 20;
/// Xen's tools on a translated processor beside other work.
const LONG: Duration = Duration::from_secs(240);

/// A booted Xen with its guests.
pub struct Machine {
    // Gone before the machine that they are part of.
    guests: Vec<Guest>,
    host: Host,
    /// The binary's place in the first domain.
    ringtap: String,
}

/// A disk that a guest has.
pub struct Disk {
    /// The guest's number, from 1.
    pub domain: usize,
    /// The device's name.
    pub name: String,
}

impl Disk {
    /// The `position`th device of a guest: each arm's has a name of its own, so that none is taken for the last one.
    pub fn new(domain: usize, position: u32) -> Disk {
        let letter = char::from(b'a' + (position % 16) as u8);
        Disk { domain, name: format!("xvd{letter}") }
    }

    /// Its node in the guest.
    pub fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }
}

fn domain(number: usize) -> String {
    format!("guest{number}")
}

impl Machine {
    /// Boots Xen with these disks and makes so many guests; each of them may take as long as `limit`.
    pub fn boot(
        env: &Env,
        stop: &Stop,
        limit: Option<Duration>,
        [files, volumes]: [&Path; 2],
        size: u64,
        guests: usize,
    ) -> Result<Machine> {
        stop.check()?;
        let (first, other) = env.xen().map_err(|missing| Error::Guest(missing.reason))?;
        settle(files)?;
        settle(volumes)?;
        let drive = |path: &Path| Drive::raw(path).cache(Cache::None).aio(Aio::Native);
        let mut host = Xen::new(&first, &other)
            .memory(FIRST_MEMORY)
            .interrupt(stop.flag())
            .domains_memory(guests as u64 * GUEST_MEMORY)
            .disk(drive(files))
            .disk(drive(volumes));
        if let Some(limit) = limit {
            host = host.boot_timeout(limit);
        }
        let host = host.boot()?;
        let ringtap = env.guest_tool().display().to_string();
        let mut machine = Machine { guests: Vec::new(), host, ringtap };
        let script = format!(
            "cat >/etc/xen/scripts/block-ringtap <<'END OF SCRIPT'\n{BLOCK_RINGTAP}END OF SCRIPT\n\
             cat >/etc/xen/scripts/block-node <<'END OF SCRIPT'\n{BLOCK_NODE}END OF SCRIPT\n\
             prepare {} {guests}",
            size / 512
        );
        machine.first("mount the images", &script, stop)?;
        for number in 1..=guests {
            stop.check()?;
            let mut made = Domain::new(domain(number)).memory(GUEST_MEMORY);
            if let Some(limit) = limit {
                made = made.boot_timeout(limit);
            }
            let made = machine.host.create(&made)?;
            machine.guests.push(made);
            // The first start of a program is not at the cost of the first arm.
            machine.shell(number, stop)?.run("fio --version; dd --version; true", LONG)?;
        }
        Ok(machine)
    }

    /// The first domain.
    pub fn dom0(&self) -> &Guest {
        self.host.dom0()
    }

    /// The guest with that number, from 1.
    pub fn guest(&self, number: usize) -> Result<&Guest> {
        let found = number.checked_sub(1).and_then(|at| self.guests.get(at));
        found.ok_or_else(|| Error::Plan(format!("the stage xen has no guest {number}")))
    }

    /// A shell in that guest.
    pub fn shell<'a>(&'a self, number: usize, stop: &'a Stop) -> Result<Shell<'a>> {
        Ok(Shell { machine: self.guest(number)?, stop })
    }

    /// Gives a guest its disk, and waits until it has it.
    pub fn attach(&self, way: Way, disk: &Disk, stop: &Stop) -> Result<()> {
        let what = format!("attach {} to {}", disk.name, domain(disk.domain));
        self.first(&what, &attach(way, disk), stop)?;
        let node = disk.node();
        let wait = format!(
            "for i in $(seq 300); do [ ! -b {node} ] || exit 0; sleep 0.1; done\n\
             echo '{node} did not come up' >&2; exit 1"
        );
        self.shell(disk.domain, stop)?.run(&wait, LONG).map(drop)
    }

    /// Takes the disks away again and ends what served them; gives what the server said.
    pub fn release(&self, disks: &[Disk], stop: &Stop) -> Result<String> {
        let words: Vec<String> =
            disks.iter().map(|disk| format!("{} {}", domain(disk.domain), disk.name)).collect();
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
            self.shell(disk.domain, stop)?.run(&wait, LONG)?;
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
        let shell = Shell { machine: self.host.dom0(), stop };
        shell.run(&named(what, &self.ringtap, script), LONG).map(|output| output.stdout)
    }
}

/// A script for the first domain. Its first line is what an error says of it.
fn named(what: &str, ringtap: &str, script: &str) -> String {
    format!("# {what} (Xen's first domain)\nringtap='{ringtap}'\n{LIBRARY}\n{script}")
}

/// What has the first domain serve a disk; see `dom0.sh`.
fn attach(way: Way, disk: &Disk) -> String {
    let (number, name) = (disk.domain, &disk.name);
    let guest = domain(number);
    match way {
        Way::Blkback(node) => {
            format!("node=$({})\nby_blkback {guest} {name} $node", node.find(number))
        }
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
    }
}

/// For the report: what serves an arm's disk in the first domain.
pub fn command(way: Way) -> String {
    match way {
        Way::Blkback(node) => format!("xen-blkback on the device that `{}` prints", node.find(1)),
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
    use crate::backend::xen::{Mode, Node};

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
        let disk = Disk::new(2, 1);
        let way = Way::Blkback(Node::Loop { direct: true });
        let script = format!("{}\nrelease guest2 xvdb", attach(way, &disk));
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
            attach(way, &Disk::new(1, 0)),
            attach(way, &Disk::new(2, 0))
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
        let overlay = attach(Way::Ringtap(Image::Overlay, Mode::Usual), &Disk::new(1, 0));
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
        let script = format!(
            "printf '#!/bin/sh\\necho no ring >&2\\nexit 1' >$ringtap\n{}",
            attach(Way::Ringtap(Image::Raw, Mode::Usual), &Disk::new(1, 3))
        );
        let (done, said) = called(&script);
        assert!(!done);
        assert_eq!(said, "ringtap xen --cache none is not ready\nno ring\n");
    }
}
