//! Where io_uring is forbidden, as by the seccomp profiles of container engines: the same is served.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringtap_tests::{listens, patience, program, ringtap};

/// BPF of a filter that answers io_uring_setup with EPERM and lets all else pass.
fn forbid_io_uring() -> io::Result<()> {
    let code = |bits: u32| bits as u16;
    let jump = |to: u32, on: u32| libc::sock_filter {
        code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K),
        jt: 0,
        jf: to as u8,
        k: on,
    };
    let end = |with: u32| libc::sock_filter {
        code: code(libc::BPF_RET | libc::BPF_K),
        jt: 0,
        jf: 0,
        k: with,
    };
    // The number of the system call stands first in what a filter looks at.
    let load = libc::sock_filter {
        code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS),
        jt: 0,
        jf: 0,
        k: 0,
    };
    let mut filter = [
        load,
        jump(1, libc::SYS_io_uring_setup as u32),
        end(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: it takes no memory.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the program and its filter outlive the call.
    match unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

struct Server {
    child: Child,
    log: std::path::PathBuf,
}

impl Server {
    fn start(folder: &Path) -> Server {
        let log = folder.join("log");
        let said = File::options().create(true).append(true).open(&log).expect("a log");
        let socket = folder.join("nbd.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(ringtap());
        command.env_remove("RINGTAP_IO").arg("serve").arg(folder.join("disk.qcow2"));
        command.args(["-f", "qcow2", "--nbd"]).arg(format!("unix:{}", socket.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        // SAFETY: two system calls are all it does between fork and exec.
        unsafe { command.pre_exec(forbid_io_uring) };
        let child = command.spawn().expect("ringtap starts");
        let end = Instant::now() + patience();
        while !listens(&socket) {
            assert!(Instant::now() < end, "{}", std::fs::read_to_string(&log).unwrap_or_default());
            std::thread::sleep(Duration::from_millis(10));
        }
        Server { child, log }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn qemu_io(folder: &Path, commands: &[&str]) {
    let uri = format!("nbd+unix:///?socket={}", folder.join("nbd.sock").display());
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let words = ["-f", "raw"].into_iter().chain(words).chain([&*uri]);
    let end = program("qemu-io", "qemu-utils", words);
    let said = String::from_utf8_lossy(&end.stdout).into_owned();
    let sound = end.status.success() && !said.contains("failed");
    assert!(sound, "{said}{}", String::from_utf8_lossy(&end.stderr));
}

#[test]
fn a_disk_is_served_and_outlives_kills_where_io_uring_is_forbidden() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let image = folder.join("disk.qcow2").display().to_string();
    let made = program("qemu-img", "qemu-utils", ["create", "-q", "-f", "qcow2", &image, "64M"]);
    assert!(made.status.success());
    let server = Server::start(folder);
    qemu_io(folder, &["write -P 1 0 3M", "flush", "write -P 2 1M 77k", "write -z 2M 64k"]);
    // As kill -9: what was acknowledged and not flushed is in the restart log.
    drop(server);
    let server = Server::start(folder);
    let held = ["read -P 1 0 1M", "read -P 2 1M 77k", "read -P 0 2M 64k", "read -P 1 2112k 960k"];
    qemu_io(folder, &held);
    let said = std::fs::read_to_string(&server.log).expect("its log");
    assert!(said.contains("io_uring cannot be had"), "{said}");
}
