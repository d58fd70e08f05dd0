//! TLS, against programs that speak it and clients that abuse it.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ringtap_export::nbd::wire::{cmd, opt, rep};
use ringtap_export::nbd::{Credentials, Limits, Tls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    ClientConfig, ClientConnection, ConnectionTrafficSecrets, RootCertStore, StreamOwned,
    SupportedProtocolVersion,
};
use tempfile::TempDir;

use crate::harness::{How, Served, assert_same, direct, pattern, run, secured, try_run};
use crate::raw::{Raw, Reply, request};

const MIB: usize = 1 << 20;

/// Folders of certificates, made once for all tests.
struct Folders(TempDir);

impl Folders {
    fn new() -> Folders {
        let dir = TempDir::new().expect("a folder");
        let script = dir.path().join("certificates.py");
        fs::write(&script, include_str!("certificates.py")).expect("written");
        run("/usr/bin/python3", &[path(&script), path(dir.path())]);
        Folders(dir)
    }

    fn of(&self, kind: &str) -> String {
        path(&self.0.path().join(kind)).to_owned()
    }

    fn credentials(&self, kind: &str, verify: bool) -> Credentials {
        Credentials::load(&self.0.path().join(kind), verify).expect("credentials")
    }

    fn required(&self) -> Tls {
        Tls::Require(self.credentials("server", true))
    }

    /// Of a client of this kind.
    fn uri(&self, served: &Served, kind: &str) -> String {
        format!("nbds://localhost:{}/disk?tls-certificates={}", served.port, self.of(kind))
    }

    fn client(&self, kind: &str, versions: &[&'static SupportedProtocolVersion]) -> ClientConfig {
        let dir = self.0.path().join(kind);
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_file(dir.join("ca-cert.pem"));
        roots.add(authority.expect("a certificate")).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("versions")
            .with_root_certificates(roots);
        let chain = CertificateDer::from_pem_file(dir.join("client-cert.pem")).expect("a chain");
        let key = PrivateKeyDer::from_pem_file(dir.join("client-key.pem")).expect("a key");
        builder.with_client_auth_cert(vec![chain], key).expect("a client")
    }
}

type Secret = Raw<StreamOwned<ClientConnection, UnixStream>>;

/// Go on through TLS, from the greeting.
fn secret(served: &Served, config: ClientConfig) -> Secret {
    let mut raw = Raw::connect(&served.socket);
    raw.send(&3u32.to_be_bytes());
    assert_eq!(raw.ask(opt::STARTTLS, b"")[0].0, rep::ACK);
    let name = "localhost".try_into().expect("a name");
    let session = ClientConnection::new(Arc::new(config), name).expect("a session");
    Raw(StreamOwned::new(session, raw.0))
}

/// Go on to the requests, with simple replies.
fn chosen(served: &Served, config: ClientConfig) -> Secret {
    let mut raw = secret(served, config);
    raw.option(opt::EXPORT_NAME, b"disk");
    raw.take(10);
    raw
}

const VERSIONS: [&[&SupportedProtocolVersion]; 2] =
    [&[&rustls::version::TLS13], &[&rustls::version::TLS12]];

#[test]
fn programs_copy_through_tls() {
    let folders = Folders::new();
    for how in [How::default(), direct()] {
        let content = pattern(12 * MIB, 8);
        let served = secured(content.len() as u64, how, folders.required());
        let (source, back) = (served.dir.path().join("source"), served.dir.path().join("back"));
        fs::write(&source, &content).expect("written");
        let uri = folders.uri(&served, "client");
        let text = run("nbdinfo", &["--json", &uri]);
        assert!(text.contains("\"TLS\": true"), "{text}");
        run("nbdcopy", &["--connections=4", "--requests=32", "--flush", path(&source), &uri]);
        assert_same(&served.content(), &content);
        for size in ["--request-size=262144", "--request-size=8388608"] {
            run("nbdcopy", &["--connections=2", size, &uri, path(&back)]);
            assert_same(&fs::read(&back).expect("read"), &content);
        }
        let creds = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", folders.of("client"));
        let target =
            format!("driver=nbd,host=localhost,port={},export=disk,tls-creds=tls0", served.port);
        let qemu = ["--object", &creds, "--image-opts"];
        let from = format!("driver=raw,file.driver=file,file.filename={}", path(&source));
        let compare = [&["compare"], &qemu[..], &[&from, &target]].concat();
        run("qemu-img", &compare);
        let other = pattern(content.len(), 9);
        fs::write(&source, &other).expect("written");
        let convert = ["convert", "-n", "--object", &creds, "--target-image-opts", "-fraw"];
        run("qemu-img", &[&convert[..], &[path(&source), &target]].concat());
        assert_same(&served.content(), &other);
        run("qemu-img", &compare);
        let script = "write -P 0xab 0 64k\nwrite -P 0xcd 1000 3000\nflush\nread -P 0xab 4000 60k\n\
                      read -P 0xcd 1000 3000\ndiscard 1M 1M\nquit\n";
        let io = ["--object", &creds, "--image-opts", &target];
        let output = try_run("qemu-io", &io, script);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.matches("ops; ").count() == 5, "{text}");
        assert!(!text.contains("failed"), "{text}");
    }
}

#[test]
fn neither_side_is_talked_out_of_tls() {
    let folders = Folders::new();
    let required = secured(1 << 20, How::default(), folders.required());
    let offered = secured(1 << 20, How::default(), Tls::On(folders.credentials("server", true)));
    let plain = secured(1 << 20, How::default(), Tls::Off);
    let tells_size = |uri: &str| try_run("nbdinfo", &["--size", uri], "").status.success();
    let clear = |served: &Served| tells_size(&served.uri());
    let secret = |served: &Served| tells_size(&folders.uri(served, "client"));
    assert_eq!([clear(&required), secret(&required)], [false, true]);
    assert_eq!([clear(&offered), secret(&offered)], [true, true]);
    // A client that insists on TLS does not go on without.
    assert_eq!([clear(&plain), secret(&plain)], [true, false]);
    assert!(!tells_size(&folders.uri(&required, "deceived")), "the server is not the client's");
    let output = try_run("qemu-img", &["info", &required.uri()], "");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("TLS"), "{said}");
    // Nothing is told, and nothing taken, before TLS.
    let mut raw = Raw::connect(&required.socket);
    raw.send(&3u32.to_be_bytes());
    for option in [opt::LIST, opt::STRUCTURED_REPLY, opt::INFO, opt::GO, 11, 99] {
        let told = raw.ask(option, b"");
        assert_eq!((told.len(), told[0].0), (1, rep::ERR_TLS_REQD), "{option}");
    }
    raw.option(opt::EXPORT_NAME, b"disk");
    assert!(raw.is_closed());
}

#[test]
fn clients_show_a_certificate_that_is_believed() {
    let folders = Folders::new();
    let with = |credentials| secured(1 << 20, How::default(), Tls::Require(credentials));
    let served = with(folders.credentials("server", true));
    let listed = with(folders.credentials("server-crl", true));
    let anybody = with(folders.credentials("server", false));
    let lets_in = |served: &Served, kind: &str| {
        let uri = folders.uri(served, kind);
        try_run("nbdinfo", &["--size", &uri], "").status.success()
    };
    let kinds = ["client", "nobody", "stranger", "expired", "server-as-client", "revoked"];
    let all = |served: &Served| kinds.map(|kind| lets_in(served, kind));
    assert_eq!(all(&served), [true, false, false, false, false, true]);
    assert_eq!(all(&listed), [true, false, false, false, false, false]);
    assert_eq!(all(&anybody), [true; 6]);
}

#[test]
fn folders_that_are_not_whole_are_told_by_their_file() {
    let folders = Folders::new();
    let dir = folders.0.path().join("server");
    let load =
        |dir: &Path| Credentials::load(dir, true).map(drop).map_err(|error| error.to_string());
    assert_eq!(load(&dir), Ok(()));
    let mixed = load(&folders.0.path().join("server-mixed")).expect_err("another's key");
    assert!(mixed.contains("server-mixed"), "{mixed}");
    for file in ["server-cert.pem", "server-key.pem", "ca-cert.pem", "ca-crl.pem"] {
        let kept = fs::read(dir.join(file)).unwrap_or_default();
        for content in [&b""[..], b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"] {
            fs::write(dir.join(file), content).expect("written");
            let error = load(&dir).expect_err(file);
            assert!(error.contains(file), "{error}");
        }
        fs::remove_file(dir.join(file)).expect("removed");
        if file == "ca-crl.pem" {
            assert_eq!(load(&dir), Ok(()));
            continue;
        }
        let error = load(&dir).expect_err(file);
        assert!(error.contains(file), "{error}");
        fs::write(dir.join(file), kept).expect("written");
    }
}

#[test]
fn many_requests_of_every_size_at_once_and_keys_that_change() {
    let folders = Folders::new();
    for (versions, how) in VERSIONS.into_iter().flat_map(|v| [(v, How::default()), (v, direct())]) {
        let served = secured(64 << 20, how, folders.required());
        let mut raw = chosen(&served, folders.client("client", versions));
        let sizes = [1, 512, 4095, 4096, 8192, 16 << 10, 16385, 100_000, 256 << 10, MIB, 3 * MIB];
        let content = pattern(sizes.iter().sum(), 11);
        for turn in 0..3 {
            let mut from = 0;
            for (cookie, len) in sizes.iter().enumerate() {
                let at = (from + turn * 77) as u64;
                raw.send(&request(cmd::WRITE, 0, cookie as u64, at, *len as u32));
                raw.send(&content[from..from + len]);
                from += len;
                if versions[0].version == rustls::ProtocolVersion::TLSv1_3 && cookie % 3 == 1 {
                    raw.0.conn.refresh_traffic_keys().expect("new keys");
                }
            }
            for _ in sizes {
                assert!(matches!(raw.reply(), Reply::Simple { error: 0, .. }));
            }
            let (mut from, mut asked) = (0, vec![]);
            for (cookie, len) in sizes.iter().enumerate() {
                let at = (from + turn * 77) as u64;
                raw.send(&request(cmd::READ, 0, cookie as u64, at, *len as u32));
                asked.push(from..from + len);
                from += len;
            }
            for _ in sizes {
                let Reply::Simple { error: 0, cookie } = raw.reply() else { panic!("no reply") };
                let range = asked[cookie as usize].clone();
                assert_same(&raw.take(range.len()), &content[range]);
            }
        }
        // Polite to the end: the server says that nothing follows.
        raw.send(&request(cmd::DISC, 0, 1, 0, 0));
        assert_eq!(raw.0.read(&mut [0]).expect("a closed session"), 0);
    }
}

#[test]
fn starttls_is_said_once_and_what_follows_it_is_never_taken_for_an_option() {
    let folders = Folders::new();
    let served = secured(1 << 20, How::default(), folders.required());
    let mut raw = secret(&served, folders.client("client", VERSIONS[0]));
    assert_eq!(raw.ask(opt::STARTTLS, b"")[0].0, rep::ERR_INVALID);
    assert_eq!(raw.ask(opt::STARTTLS, b"data")[0].0, rep::ERR_INVALID);
    assert_eq!(raw.ask(opt::LIST, b"").len(), 3);
    // What somebody puts behind the option, in the clear, is no part of what is encrypted.
    let mut raw = Raw::connect(&served.socket);
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT\0\0\0\x05\0\0\0\0IHAVEOPT\0\0\0\x03\0\0\0\0");
    raw.send(&bytes);
    assert_eq!(raw.answer(opt::STARTTLS).0, rep::ACK);
    let mut rest = vec![];
    let _ = raw.0.read_to_end(&mut rest);
    assert!(rest.len() < 16 && !rest.starts_with(b"\0\x03"), "{rest:?}");
}

#[test]
fn garbage_and_silence_in_the_middle_of_tls_harm_nobody_else() {
    let folders = Folders::new();
    let limits = Limits { handshake: Duration::from_secs(3), ..Limits::default() };
    let served = secured(1 << 20, How { limits, ..How::default() }, folders.required());
    let mut hello = vec![];
    let config = Arc::new(folders.client("client", VERSIONS[0]));
    let name = "localhost".try_into().expect("a name");
    let mut session = ClientConnection::new(config, name).expect("a session");
    session.write_tls(&mut hello).expect("a hello");
    let half = &hello[..hello.len() / 2];
    let mut torn = hello.clone();
    torn.iter_mut().skip(40).step_by(7).for_each(|byte| *byte ^= 0x55);
    let endless = [&[22, 3, 1, 0x40, 0][..], &[1; 0x4000]].concat().repeat(40);
    let garbage: [&[u8]; 6] = [&[0xff; 4096], b"\x16\x03\x01\xff\xff", half, &torn, &endless, b""];
    for bytes in garbage {
        let mut raw = Raw::connect(&served.socket);
        raw.send(&3u32.to_be_bytes());
        assert_eq!(raw.ask(opt::STARTTLS, b"")[0].0, rep::ACK);
        // The server may close in the middle of it.
        let _ = raw.0.write_all(bytes);
        assert!(raw.is_closed(), "{}", bytes.len());
    }
    // Past the handshake: a record that is too short, one that is none, and half of one.
    for bytes in [&[23, 3, 3, 0, 32][..], &[0x17; 64], &[23, 3, 3, 0x40]] {
        let mut raw = chosen(&served, folders.client("client", VERSIONS[0]));
        for cookie in 0..20 {
            raw.send(&request(cmd::READ, 0, cookie, 0, 65536));
        }
        let _ = raw.0.sock.write_all(bytes);
        let _ = raw.0.sock.write_all(&[7; 100]);
        drop(raw);
    }
    let mut raw = chosen(&served, folders.client("client", VERSIONS[0]));
    raw.send(&request(cmd::FLUSH, 0, 10, 0, 0));
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 10 });
}

/// A record of TLS 1.3 as the client of these secrets would seal it.
fn record(secrets: &(u64, ConnectionTrafficSecrets), kind: u8, bytes: &[u8]) -> Vec<u8> {
    let (seq, (algorithm, key, iv)) = match secrets {
        (seq, ConnectionTrafficSecrets::Aes128Gcm { key, iv }) => (seq, (&AES_128_GCM, key, iv)),
        (seq, ConnectionTrafficSecrets::Aes256Gcm { key, iv }) => (seq, (&AES_256_GCM, key, iv)),
        _ => panic!("another cipher"),
    };
    let mut nonce: [u8; 12] = iv.as_ref().try_into().expect("twelve bytes");
    nonce[4..].iter_mut().zip(seq.to_be_bytes()).for_each(|(byte, seq)| *byte ^= seq);
    let mut inner = [bytes, &[kind]].concat();
    let head = [&[23, 3, 3][..], &(inner.len() as u16 + 16).to_be_bytes()].concat();
    let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).expect("a key"));
    let nonce = Nonce::assume_unique_for_key(nonce);
    key.seal_in_place_append_tag(nonce, Aad::from(&head), &mut inner).expect("sealed");
    [head, inner].concat()
}

#[test]
fn half_a_message_of_tls_itself_does_not_disturb_the_replies() {
    let folders = Folders::new();
    let served = secured(64 << 20, How::default(), folders.required());
    let mut config = folders.client("client", VERSIONS[0]);
    config.enable_secret_extraction = true;
    let mut raw = chosen(&served, config);
    for cookie in 0..48 {
        raw.send(&request(cmd::READ, 0, cookie, cookie << 20, 1 << 20));
    }
    let StreamOwned { conn, mut sock } = raw.0;
    #[allow(deprecated)] // nothing else is done with them
    let secrets = conn.dangerous_extract_secrets().expect("secrets");
    // The first byte of a KeyUpdate, while the server is at its replies, which nobody takes yet.
    sock.write_all(&record(&secrets.tx, 22, &[24])).expect("sent");
    std::thread::sleep(Duration::from_millis(200));
    sock.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let (mut left, mut some) = (48 * (MIB + 16), vec![0; MIB]);
    while left > 0 {
        let taken = sock.read(&mut some).expect("replies");
        assert_ne!(taken, 0, "{left} bytes are missing");
        left = left.saturating_sub(taken);
    }
    // What is no message at all ends this connection, and no other.
    let next = (secrets.tx.0 + 1, secrets.tx.1);
    sock.write_all(&record(&next, 23, b"in between")).expect("sent");
    while sock.read(&mut some).is_ok_and(|taken| taken > 0) {}
    let mut raw = chosen(&served, folders.client("client", VERSIONS[0]));
    raw.send(&request(cmd::FLUSH, 0, 10, 0, 0));
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 10 });
}

#[test]
fn a_server_stops_while_clients_speak_tls() {
    let folders = Folders::new();
    let mut served = secured(64 << 20, How::default(), folders.required());
    let mut resting = chosen(&served, folders.client("client", VERSIONS[0]));
    let mut shaking = Raw::connect(&served.socket);
    shaking.send(&3u32.to_be_bytes());
    assert_eq!(shaking.ask(opt::STARTTLS, b"")[0].0, rep::ACK);
    resting.send(&request(cmd::READ, 0, 1, 0, 65536));
    assert_eq!(resting.reply(), Reply::Simple { error: 0, cookie: 1 });
    resting.take(65536);
    served.stop();
    assert_eq!(resting.0.read(&mut [0]).expect("a closed session"), 0);
    assert!(shaking.is_closed());
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
