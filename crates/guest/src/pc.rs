//! What every virtual PC of QEMU's has: nothing but what is asked for, a log on its first serial line, and the agent's
//! stream on a virtio port.

use std::path::Path;
use std::process::Command;

/// QEMU's program, and the package that has it.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
pub(crate) const PACKAGE: &str = "qemu-system-x86";

/// A virtual PC.
pub(crate) struct Pc<'a> {
    /// QEMU.
    pub(crate) program: &'a Path,
    /// Where it runs, and its links and sockets are.
    pub(crate) dir: &'a Path,
    pub(crate) cpus: u16,
    /// What they are in: those of one are on one NUMA node.
    pub(crate) sockets: u16,
    /// Bytes.
    pub(crate) memory: u64,
    pub(crate) accelerator: &'a str,
    /// The processor that is translated where there is no KVM.
    pub(crate) translated: &'a str,
    /// Options of its virtio devices, each with a comma before it.
    pub(crate) virtio: &'a str,
}

impl Pc<'_> {
    /// QEMU's command, without a kernel; its stdin is the agent's stream.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.program);
        command.current_dir(self.dir);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none"]);
        let processors = format!("{},sockets={}", self.cpus, self.sockets);
        command.args(["-no-reboot", "-machine", "pc", "-smp", &processors]);
        command.args(match self.accelerator {
            "kvm" => ["-accel", "kvm", "-cpu", "host"],
            _ => ["-accel", "tcg,thread=multi,tb-size=256", "-cpu", self.translated],
        });
        command.args(["-m", &format!("{}K", self.memory >> 10)]);
        command.args(["-chardev", "file,id=log,path=/dev/stdout", "-serial", "chardev:log"]);
        command.args(["-chardev", "socket,id=agent,fd=0"]);
        command.args(["-device", &format!("virtio-serial-pci{}", self.virtio)]);
        command.args(["-device", "virtserialport,chardev=agent,name=ringtap.agent"]);
        command
    }
}
