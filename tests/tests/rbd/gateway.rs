//! Objects behind Ceph's own gateway, which speaks S3.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ringtap_tests::{listens, patience, ringtap};

use crate::cluster::{Cluster, MIB, cluster, is_there};

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The gateway of a cluster; killed when dropped.
struct Gateway {
    _process: Killed,
    cluster: Arc<Cluster>,
    endpoint: String,
}

/// One is started, where it is installed.
fn gateway() -> Option<Gateway> {
    let cluster = cluster()?;
    if !is_there("radosgw") || !is_there("radosgw-admin") {
        println!("skipped: radosgw is not installed here");
        return None;
    }
    let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port");
    let port = port.port();
    let at = cluster.dir.path().display();
    // Without tcp_nodelay every answer takes 45 ms.
    let own = format!(
        "[client]\nkeyring={at}/rgw/keyring\nms_mon_client_mode=crc secure\nauth_client_required=none\n\
         rgw_frontends=beast endpoint=127.0.0.1:{port} tcp_nodelay=1\nrgw_data={at}/rgw\nrun_dir={at}\n\
         log_file={at}/rgw.log\nadmin_socket={at}/rgw.asok\nrgw_enable_usage_log=false\nrgw_gc_max_objs=2\n\
         rgw_lc_max_objs=2\nrgw_num_control_oids=1\nrgw_usage_max_shards=1\nrgw_num_rados_handles=1\n\
         rgw_dns_name=127.0.0.1\n[mon]"
    );
    let conf = fs::read_to_string(cluster.path("ceph.conf")).expect("a configuration");
    let conf = conf.replacen("[mon]", &own, 1);
    fs::create_dir_all(cluster.path("rgw")).expect("a folder");
    fs::write(cluster.path("rgw.conf"), conf).expect("a configuration");
    let keyring = cluster.text("rgw/keyring");
    cluster.ok("ceph-authtool", &["--create-keyring", &keyring, "--gen-key", "-n", "client.admin"]);
    let conf = cluster.text("rgw.conf");
    let user = ["user", "create", "--uid=images", "--display-name=images"];
    let keys = ["--access-key=images", "--secret-key=secretkey"];
    cluster.ok("radosgw-admin", &[&["-c", &conf][..], &user, &keys].concat());
    let process = Command::new("radosgw")
        .args(["-f", "-n", "client.admin", "-c", &conf])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Killed)
        .expect("radosgw");
    let end = Instant::now() + patience();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < end, "radosgw does not listen");
        thread::sleep(Duration::from_millis(50));
    }
    let endpoint = format!("http://127.0.0.1:{port}");
    let gateway = Gateway { _process: process, cluster, endpoint };
    gateway.curl("PUT", &[], "images");
    Some(gateway)
}

impl Gateway {
    fn text(&self, name: &str) -> String {
        self.cluster.text(name)
    }

    /// What another client does with an object.
    fn curl(&self, method: &str, args: &[&str], key: &str) {
        let url = format!("{}/{key}", self.endpoint);
        let sign = ["-c", include_str!("sign.py"), method, &url, "images", "secretkey"];
        let signed = self.cluster.ok("python3", &sign);
        let head = ["-sS", "--fail", "-X", method];
        self.cluster.ok("curl", &[&head[..], args, &[signed.trim()]].concat());
    }

    fn command(&self, args: &[&str]) -> Command {
        let credentials = self.cluster.path("credentials");
        let text = "[images]\naws_access_key_id = images\naws_secret_access_key = secretkey\n";
        fs::write(&credentials, text).expect("written");
        let mut command = Command::new(ringtap());
        command.args(args).env("AWS_SHARED_CREDENTIALS_FILE", credentials);
        command.env("AWS_PROFILE", "images").env("AWS_ENDPOINT_URL", &self.endpoint);
        command.env("AWS_REGION", "us-east-1").env_remove("AWS_ACCESS_KEY_ID");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("ringtap")
    }

    fn said(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {err}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn refusal(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(!output.status.success(), "{args:?} should have been refused");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Serve an object for reading over NBD, as `NAME.nbd`; what the server says goes to `NAME.log`.
    fn serve(&self, object: &str, name: &str) -> Killed {
        let nbd = self.cluster.path(&format!("{name}.nbd"));
        let listen = format!("unix:{}", nbd.display());
        let log = fs::File::create(self.cluster.path(&format!("{name}.log"))).expect("a file");
        let args = ["serve", object, "-f", "raw", "--read-only", "--name", "d", "--nbd", &listen];
        let mut command = self.command(&args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut server = command.spawn().map(Killed).expect("ringtap");
        let end = Instant::now() + patience();
        while !listens(&nbd) {
            let log = || fs::read_to_string(self.cluster.path(&format!("{name}.log")));
            assert!(server.0.try_wait().expect("its status").is_none(), "{:?}", log());
            assert!(Instant::now() < end, "ringtap does not listen: {:?}", log());
            thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

/// Bytes of which no two chunks are alike, and none is zeros.
fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at >> 12) as u8 ^ (at >> 20) as u8 | 1).collect()
}

#[test]
fn an_image_is_published_to_radosgw_and_served_from_there() {
    let Some(gateway) = gateway() else { return };
    // Several parts, of which the last is short.
    let path = gateway.text("a.img");
    fs::write(&path, pattern(17 * MIB + 512)).expect("written");
    let printed = gateway.said(&["publish", &path, "s3://images/x/"]);
    let name = printed.lines().next().expect("a name").to_owned();
    assert!(name.starts_with("s3://images/x/a.img?digest=sha256:"), "{name}");
    let copy = gateway.text("copy");
    gateway.curl("GET", &["-o", &copy], "images/x/a.img");
    assert!(fs::read(&copy).expect("the copy") == fs::read(&path).expect("the image"));
    let served = gateway.serve(&name, "published");
    gateway.cluster.ok(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", &path, &gateway.cluster.nbd("published")],
    );
    drop(served);

    // The same again goes on; another is refused, and replaces only where that is said.
    let plain = "s3://images/x/a.img";
    gateway.said(&["publish", &path, plain]);
    fs::write(&path, pattern(3 * MIB)).expect("written");
    let why = gateway.refusal(&["publish", &path, plain]);
    assert!(why.contains("another image is published there") && why.contains("--replace"), "{why}");
    gateway.said(&["publish", "--replace", &path, plain]);
    let why = gateway.refusal(&["info", "-f", "raw", &name]);
    assert!(why.contains("is not the one that digest="), "{why}");

    // One without an index that is replaced while it is read: an error, and no mixture.
    let mut bytes = pattern(8 * MIB);
    let put = |bytes: &[u8]| {
        fs::write(gateway.cluster.path("b.img"), bytes).expect("written");
        gateway.curl("PUT", &["-T", &gateway.text("b.img")], "images/b.img");
    };
    put(&bytes);
    let served = gateway.serve("s3://images/b.img", "replaced");
    let nbd = gateway.cluster.nbd("replaced");
    let first = gateway.cluster.ok("qemu-io", &["-r", "-f", "raw", "-c", "read -P 1 0 4k", &nbd]);
    assert!(!first.contains("failed"), "{first}");
    bytes.iter_mut().for_each(|byte| *byte ^= 2);
    put(&bytes);
    let read = gateway.cluster.run("qemu-io", &["-r", "-f", "raw", "-c", "read 6M 4k", &nbd]);
    let said = String::from_utf8_lossy(&[read.stdout, read.stderr].concat()).into_owned();
    assert!(said.contains("read failed"), "{said}");
    let log = fs::read_to_string(gateway.cluster.path("replaced.log")).expect("a log");
    assert!(log.contains("was replaced while it was open"), "{log}");
    drop(served);
}
