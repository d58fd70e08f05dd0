//! A cluster for tests, up in about two seconds: loopback, no keys, nothing on a disk but the monitor's maps.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{Server, patience, ringtap};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// A cluster; killed when dropped. Its folder is for images and sockets, too.
pub struct Cluster {
    daemons: Vec<Child>,
    pub dir: TempDir,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Whether a program is installed.
pub fn is_there(name: &str) -> bool {
    Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Whether QEMU's driver is there, which is a package of its own.
fn qemu_has_rbd() -> bool {
    let help = Command::new("qemu-img").arg("--help").output();
    help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains(" rbd"))
        && fs::read_dir("/usr/lib")
            .into_iter()
            .flatten()
            .flatten()
            .any(|folder| folder.path().join("qemu/block-rbd.so").exists())
}

/// The cluster of the tests that run now, where Ceph is installed.
pub fn cluster() -> Option<Arc<Cluster>> {
    static SHARED: Mutex<Weak<Cluster>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = shared.upgrade() {
        return Some(cluster);
    }
    let cluster = Arc::new(own_cluster()?);
    *shared = Arc::downgrade(&cluster);
    Some(cluster)
}

/// One for this test alone, where Ceph is installed.
pub fn own_cluster() -> Option<Cluster> {
    let there = ["ceph-mon", "ceph-osd", "ceph", "rbd"].iter().all(|name| is_there(name));
    if !there || !qemu_has_rbd() {
        println!("skipped: Ceph or QEMU's driver for it is not installed here");
        return None;
    }
    Some(Cluster::start())
}

impl Cluster {
    fn start() -> Cluster {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let at = dir.path().display().to_string();
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port");
        let uuid = || {
            let text = fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a UUID");
            text.trim().to_owned()
        };
        let (fsid, osd) = (uuid(), uuid());
        let monitor = format!("[v2:127.0.0.1:{}]", port.port());
        let conf = format!(
            "[global]\nfsid={fsid}\nmon_host={monitor}\npublic_addr=127.0.0.1\nauth_cluster_required=none\n\
             auth_service_required=none\nauth_client_required=none\nosd_pool_default_size=1\n\
             osd_pool_default_min_size=1\nosd_crush_chooseleaf_type=0\nmon_allow_pool_size_one=true\n\
             mon_data_avail_crit=1\nmon_data_avail_warn=2\npaxos_propose_interval=0.05\n\
             osd_objectstore=memstore\nmemstore_device_bytes=2147483648\nosd_op_num_shards=2\nms_bind_ipv6=false\n\
             mon_data={at}/mon\nosd_data={at}/osd\nkeyring=/dev/null\nlog_to_stderr=false\n\
             [mon]\nrun_dir={at}\nadmin_socket={at}/$name.asok\nlog_file={at}/$name.log\n\
             [osd]\nrun_dir={at}\nadmin_socket={at}/$name.asok\nlog_file={at}/$name.log\n"
        );
        fs::write(dir.path().join("ceph.conf"), conf).expect("a configuration");
        for folder in ["mon", "osd"] {
            fs::create_dir(dir.path().join(folder)).expect("a folder");
        }
        let mut cluster = Cluster { daemons: vec![], dir };
        let map = cluster.text("monmap");
        cluster.ok(
            "monmaptool",
            &["--create", "--clobber", "--addv", "a", &monitor, "--fsid", &fsid, &map],
        );
        cluster.ok("ceph-mon", &["--mkfs", "-i", "a", "--monmap", &map]);
        cluster.daemon("ceph-mon", "a");
        cluster.until(|it| it.path("mon.a.asok").exists());
        cluster.ok("ceph", &["osd", "new", &osd]);
        cluster.ok("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd]);
        cluster.daemon("ceph-osd", "0");
        cluster.ok("ceph", &["osd", "pool", "create", "rbd", "8"]);
        let probe = cluster.text("ceph.conf");
        cluster.until(|it| {
            it.run("timeout", &["5", "rados", "-p", "rbd", "put", "probe", &probe]).status.success()
        });
        cluster.ok("rbd", &["pool", "init", "rbd"]);
        cluster
    }

    fn daemon(&mut self, name: &str, id: &str) {
        let child = self
            .command(name)
            .args(["-i", id, "-f"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.daemons.push(child.expect("a daemon"));
    }

    /// The OSD's process.
    pub fn osd(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_raw(self.daemons[1].id() as i32).expect("a process")
    }

    fn until(&self, is_so: impl Fn(&Cluster) -> bool) {
        let end = Instant::now() + patience();
        while !is_so(self) {
            assert!(Instant::now() < end, "the cluster does not come up");
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// The name of an image of it.
    pub fn name(&self, image: &str) -> String {
        format!("rbd:rbd/{image}:conf={}", self.text("ceph.conf"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("CEPH_CONF", self.path("ceph.conf"));
        command
    }

    /// Run a program that finds the cluster by itself, within a minute.
    pub fn run(&self, program: &str, args: &[&str]) -> Output {
        let mut all = vec!["60", program];
        all.extend(args);
        self.command("timeout").args(all).output().expect("timeout")
    }

    /// What it prints, which goes well.
    pub fn ok(&self, program: &str, args: &[&str]) -> String {
        let output = self.run(program, args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {args:?}: {err}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// What `ringtap` prints.
    pub fn said(&self, args: &[&str]) -> String {
        self.ok(ringtap().to_str().expect("plain"), args)
    }

    /// Why `ringtap` fails.
    pub fn refusal(&self, args: &[&str]) -> String {
        let output = self.run(ringtap().to_str().expect("plain"), args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.status.code() != Some(124), "{args:?}: {said}");
        said
    }

    /// Serve an image over NBD and, with two queues, vhost-user; sockets bear its name.
    pub fn serve(&self, image: &str, format: &str, more: &[&str]) -> Server {
        let (nbd, vhost) = self.sockets(image);
        let (name, nbd) = (self.name(image), format!("unix:{nbd}"));
        let args = [&*name, "-f", format, "--name", "d", "--nbd", &nbd, "--vhost-user", &vhost];
        Server::start(args.iter().chain(more))
    }

    /// Where an image's server listens: NBD, vhost-user.
    pub fn sockets(&self, image: &str) -> (String, String) {
        (self.text(&format!("{image}.nbd")), self.text(&format!("{image}.vhost")))
    }

    pub fn nbd(&self, image: &str) -> String {
        format!("nbd+unix:///d?socket={}", self.sockets(image).0)
    }

    /// Have qemu-io do that on what is served of an image, and all goes well.
    pub fn io(&self, image: &str, commands: &[&str]) {
        self.io_on(&self.nbd(image), "raw", commands);
    }

    /// The same on anything that QEMU opens.
    pub fn io_on(&self, what: &str, format: &str, commands: &[&str]) {
        let mut args = vec!["-f", format];
        args.extend(commands.iter().flat_map(|one| ["-c", one]));
        args.push(what);
        let said = self.ok("qemu-io", &args);
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    }
}
