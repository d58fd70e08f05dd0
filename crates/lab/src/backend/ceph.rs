//! Disks in a Ceph of the lab's own: one monitor and one OSD that keeps all in memory, on loopback, without keys.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::remote::Client;
use super::{Access, Backend, Context, Entry, File, Peers, Reach, Served, qemu};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process::{self, Server};
use crate::sample::Stage;
use crate::stop::Stop;
use crate::workload::Workload;

/// The image that all arms use, one after the other, in the pool `rbd`.
pub const IMAGE: &str = "lab";
/// How long one step of the cluster's start may take.
const STEP: Duration = Duration::from_secs(60);
/// How long the image's objects may take to be written.
const FILLED: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(20);

/// The cluster's folder, among those of the run's sockets.
pub const FOLDER: &str = "ceph";

/// Its configuration, for an arm with that folder for sockets.
fn conf_beside(sockets: &Path) -> PathBuf {
    sockets.with_file_name(FOLDER).join("ceph.conf")
}

/// A cluster with one image, every object of it written. It ends when this is dropped.
#[derive(Debug)]
pub struct Cluster {
    // The OSD goes first.
    daemons: Vec<Server>,
    folder: PathBuf,
    conf: PathBuf,
}

impl Cluster {
    /// Starts one in an empty folder, with an image of `bytes`, whole MiB.
    pub fn start(folder: PathBuf, bytes: u64, stop: &Stop) -> Result<Cluster> {
        let conf = folder.join("ceph.conf");
        // Ceph takes such a path for several.
        if folder.as_os_str().as_encoded_bytes().iter().any(|byte| b" \t,;=:".contains(byte)) {
            let place = folder.display();
            return Err(Error::Plan(format!(
                "Ceph takes no path like {place}: set TMPDIR to another"
            )));
        }
        let made = |folder: &Path| fs::create_dir_all(folder).map_err(Error::file("make", folder));
        ["mon", "osd"].iter().try_for_each(|part| made(&folder.join(part)))?;
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
        let port = port.map_err(Error::file("find a port for", &folder))?.port();
        let monitor = format!("[v2:127.0.0.1:{port}]");
        let (cluster, osd) = (uuid()?, uuid()?);
        fs::write(&conf, configuration(&folder, &monitor, &cluster, bytes))
            .map_err(Error::file("write", &conf))?;
        let mut all = Cluster { daemons: vec![], folder: folder.clone(), conf };
        let map = folder.join("monmap").display().to_string();
        let words = ["--create", "--clobber", "--addv", "a", &monitor, "--fsid", &cluster, &map];
        all.run("monmaptool", &words, STEP, stop)?;
        all.run("ceph-mon", &["--mkfs", "-i", "a", "--monmap", &map], STEP, stop)?;
        let socket = folder.join("mon.a.asok");
        all.daemon("ceph-mon", "a")?.wait_until(&socket, STEP, stop, || socket.exists())?;
        all.run("ceph", &["osd", "new", &osd], STEP, stop)?;
        all.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd], STEP, stop)?;
        all.daemon("ceph-osd", "0")?;
        all.run("ceph", &["osd", "pool", "create", "rbd", "8"], STEP, stop)?;
        let probe = all.conf.display().to_string();
        let until = Instant::now() + STEP;
        let put = ["-p", "rbd", "put", "probe", &probe];
        while let Err(error) = all.run("rados", &put, Duration::from_secs(5), stop) {
            stop.check()?;
            if Instant::now() > until {
                return Err(error);
            }
            std::thread::sleep(PAUSE);
        }
        all.run("rbd", &["pool", "init", "rbd"], STEP, stop)?;
        let size = bytes.to_string();
        all.run("rbd", &["create", "--size", &format!("{size}B"), IMAGE], STEP, stop)?;
        let fill = ["bench", "--io-type", "write", "--io-size", "1M", "--io-total", &size, IMAGE];
        all.run("rbd", &fill, FILLED, stop)?;
        Ok(all)
    }

    fn run(&self, program: &str, words: &[&str], limit: Duration, stop: &Stop) -> Result<()> {
        let mut command = Command::new(program);
        command.args(words).env("CEPH_CONF", &self.conf);
        process::run(command, limit, stop).map(drop)
    }

    fn daemon(&mut self, program: &str, id: &str) -> Result<&mut Server> {
        let mut command = Command::new(program);
        command.args(["-i", id, "-f"]).env("CEPH_CONF", &self.conf);
        let server = Server::start(command, &self.folder.join(format!("{program}.log")))?;
        self.daemons.insert(0, server);
        Ok(&mut self.daemons[0])
    }
}

fn uuid() -> Result<String> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
    Ok(text.trim().to_owned())
}

fn configuration(folder: &Path, monitor: &str, cluster: &str, bytes: u64) -> String {
    let at = folder.display();
    // Room for what the image's objects bring along.
    let memory = 2 * bytes + (1 << 30);
    format!(
        "[global]\nfsid={cluster}\nmon_host={monitor}\npublic_addr=127.0.0.1\nauth_cluster_required=none\n\
         auth_service_required=none\nauth_client_required=none\nosd_pool_default_size=1\n\
         osd_pool_default_min_size=1\nosd_crush_chooseleaf_type=0\nmon_allow_pool_size_one=true\n\
         mon_data_avail_crit=1\nmon_data_avail_warn=2\npaxos_propose_interval=0.05\n\
         osd_objectstore=memstore\nmemstore_device_bytes={memory}\nosd_op_num_shards=2\nms_bind_ipv6=false\n\
         mon_data={at}/mon\nosd_data={at}/osd\nkeyring=/dev/null\nlog_to_stderr=false\n\
         [client]\nrbd_cache=false\n\
         [mon]\nrun_dir={at}\nadmin_socket={at}/$name.asok\nlog_file={at}/$name.log\n\
         [osd]\nrun_dir={at}\nadmin_socket={at}/$name.asok\nlog_file={at}/$name.log\n"
    )
}

/// The image, by one of its clients; `None` is fio's own engine, which serves nobody.
#[derive(Debug)]
pub struct Rbd(pub Option<Client>);

impl Backend for Rbd {
    fn reach(&self) -> Reach {
        if self.0.is_some() { Reach::VhostUser } else { Reach::Rbd }
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let packages = [
            ("ceph-mon", "ceph-mon"),
            ("ceph-osd", "ceph-osd"),
            ("ceph", "ceph-common"),
            ("rbd", "ceph-common"),
        ];
        let cluster = packages.iter().find_map(|(name, package)| env.program(name, package));
        cluster.or_else(|| self.0.and_then(|client| client.missing(env))).or_else(|| {
            (self.0 == Some(Client::Qemu) && !qemu::has_module("block-rbd.so")).then(|| {
                Missing::new("QEMU has no driver for Ceph here", "apt-get install qemu-block-extra")
            })
        })
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let conf = conf_beside(context.sockets);
        if !conf.exists() {
            return Err(Error::Plan("there is no cluster: its start failed, see above".into()));
        }
        match self.0 {
            None => Ok(Served::reached(Access::Rbd { conf })),
            Some(client) => {
                let name = format!("rbd:rbd/{IMAGE}:conf={}", conf.display());
                let quoted = qemu::quoted(&conf);
                let node =
                    format!("driver=rbd,pool=rbd,image={IMAGE},conf={quoted},cache.direct=on");
                client.serve(context, &name, &node)
            }
        }
    }

    fn in_ceph(&self) -> bool {
        true
    }

    fn refuses(&self, workload: &dyn Workload) -> Option<Missing> {
        workload.is_check().then(|| {
            Missing::new(
                "the flushes that reach a cluster are not counted",
                "ceph daemon osd.0 perf dump has the cluster's own counters",
            )
        })
    }

    fn remark(&self) -> Option<&'static str> {
        Some("a cluster of one in this machine's memory: its CPU is in the machine's alone")
    }
}

/// What this file has for the catalogue.
pub(super) const FILE: File = File {
    entries: &[
        Entry::usual(
            Stage::Remote,
            80,
            "qsd-rbd",
            "qemu-storage-daemon's rbd driver, cache off",
            &Rbd(Some(Client::Qemu)),
        ),
        Entry::usual(
            Stage::Remote,
            90,
            "ringtap-rbd",
            "ringtap serve rbd:",
            &Rbd(Some(Client::Ringtap)),
        ),
        Entry::usual(
            Stage::Remote,
            100,
            "fio-rbd",
            "fio's rbd engine, cache off, which has no guest to serve",
            &Rbd(None),
        ),
    ],
    labels: &[
        ("qsd-rbd", "QEMU on Ceph"),
        ("ringtap-rbd", "Ringtap on Ceph"),
        ("fio-rbd", "fio's own engine on Ceph"),
    ],
    peers: &[Peers { place: 320, stage: Stage::Remote, arm: "ringtap-rbd", against: &["qsd-rbd"] }],
};
