use super::*;
use clap::FromArgMatches;

fn parse(line: &str) -> Result<Config, String> {
    let words = ["ringtap", "serve"].into_iter().chain(line.split_whitespace());
    let matches =
        crate::args::command().try_get_matches_from(words).map_err(|error| error.to_string())?;
    let matches = matches.subcommand_matches("serve").expect("serve");
    let args = ServeArgs::from_arg_matches(matches).map_err(|error| error.to_string())?;
    config(args, matches).map_err(|error| error.to_string())
}

#[test]
fn options_bind_to_the_disk_before_them() {
    let config = parse(
        "--cache writeback a.raw -f raw --nbd unix:a --nbd tcp:h:1 --name x --bitmap m --bitmap n \
         b.raw --read-only -f raw --vhost-user b --queues 3 --l2-cache-size 32M \
         --logical-block-size 4096 c.raw --nbd unix:c --read-only=false",
    )
    .expect("three disks");
    let [a, b, c] = &config.disks[..] else { panic!("{config:?}") };
    assert_eq!((a.path.to_str(), a.options.cache), (Some("a.raw"), CacheMode::Writeback));
    assert_eq!((a.nbd.len(), a.name.as_str(), a.options.read_only), (2, "x", false));
    assert_eq!((a.options.bitmaps.join(","), b.options.bitmaps.len()), ("m,n".to_owned(), 0));
    assert_eq!((b.path.to_str(), b.options.cache), (Some("b.raw"), CacheMode::None));
    assert_eq!((b.options.table_memory, c.options.table_memory), (Some(32 << 20), None));
    assert_eq!((b.logical_block_size, c.logical_block_size), (Some(4096), None));
    assert_eq!((b.queues, b.options.read_only, b.vhost_user.len()), (3, true, 1));
    assert_eq!((c.options.format, c.options.read_only), (None, false));
    assert_eq!(c.nbd, [Address::Unix("c".into())]);
}

#[test]
fn a_flag_does_not_swallow_the_next_disk() {
    let config = parse("a.raw --read-only b.raw --read-only --nbd unix:b").expect("two disks");
    assert_eq!(config.disks.len(), 2);
    assert!(config.disks.iter().all(|disk| disk.options.read_only));
}

#[test]
fn files_and_devices_of_the_host_bind_as_sockets_do() {
    let config = parse("a --ublk b --ublk=3 --queues 2 c --fuse x --fuse y --queues 1");
    let config = config.expect("three disks");
    let [a, b, c] = &config.disks[..] else { panic!("{config:?}") };
    assert_eq!((a.ublk, b.ublk, c.ublk), (Some(None), Some(Some(3)), None));
    assert_eq!((b.queues, c.queues, c.fuse.len()), (2, 1, 2));
    for (line, said) in [
        ("a --ublk=x", "write a number"),
        ("a --ublk --ublk", "given twice for a"),
        ("a --fuse x --serial y", "--serial"),
    ] {
        let message = parse(line).expect_err(line);
        assert!(message.contains(said), "{line}: {message}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_advice() {
    for (line, said) in [
        ("", "DISK"),
        ("a --cache none --cache unsafe", "given twice for a"),
        ("--name x a --name y", "given twice for a"),
        ("a --cache fast", "writeback"),
        ("a -f qcow3", "qcow2"),
        ("a --nbd /run/x", "unix:PATH"),
        ("a --vhost-user tcp:h:1", "UNIX socket"),
        ("a --nbd unix:x --nbd-connections 0", "at least 1"),
        ("a --nbd unix:x --nbd-client-memory 1M", "at least 32M"),
        ("a --nbd unix:x --nbd-memory 63M", "at least 64M"),
        ("a --nbd unix:x --nbd-idle-timeout 5m", "whole seconds"),
        ("a --nbd unix:x --nbd-idle-timeout 99999999999", "century"),
        ("a --socket-mode 999", "octal"),
        ("a --nbd unix:x --queues 2", "--vhost-user PATH"),
        ("a --nbdd unix:x", "--nbd"),
        ("a --control /run/x", "unix:PATH"),
        ("a --node-name x --node-name y", "given twice for a"),
        ("a --iops 5:1", "less than"),
        ("a --iops 5 --iops 6", "given twice for a"),
        ("a --iops-size 4k", "iops-size needs a limit"),
        ("a --throttle-group g,iop=5", "iops-read"),
        ("a --secret hunter2", "file:PATH"),
        ("a --secret file:/nonexistent/key", "/nonexistent/key"),
        ("a --secret fd:0 --secret fd:3", "given twice for a"),
    ] {
        let message = parse(line).expect_err(line);
        assert!(message.contains(said), "{line}: {message}");
    }
}

#[test]
fn limits_hold_for_all_nbd_clients() {
    let limits = |line: &str| parse(line).expect("a disk").nbd_limits;
    assert_eq!(limits("a --nbd unix:x"), Default::default());
    let told = limits(
        "a --nbd unix:x --nbd-connections 3 --nbd-peer-connections 2 --nbd-memory 1G \
         --nbd-client-memory 32M --nbd-handshake-timeout 0 --nbd-idle-timeout 60",
    );
    assert_eq!((told.connections, told.peer_connections), (3, 2));
    assert_eq!((told.memory, told.memory_of_all), (32 << 20, 1 << 30));
    assert_eq!((told.handshake.as_secs(), told.idle.map(|idle| idle.as_secs())), (1, Some(60)));
}

#[test]
fn tls_belongs_to_the_socket_before_it() {
    use ringtap_daemon::TlsMode::{Off, On, Require};
    let tls = |line: &str| parse(line).expect("a disk").nbd_tls;
    assert_eq!(tls("a --nbd unix:x --tls off"), None);
    let told = tls("a --nbd unix:x --nbd tcp:h:1 --tls-dir d").expect("TLS");
    assert!((told.mode, told.verify_peer, told.of.len()) == (Require, true, 0));
    let told = tls(
        "a --tls on --nbd unix:x --nbd unix:y --tls off b --nbd unix:z --name b --tls require \
         --tls-dir d --tls-verify-peer=false",
    );
    let told = told.expect("TLS");
    let at = |path: &str| Address::Unix(path.into());
    assert_eq!((told.mode, told.verify_peer), (On, false));
    assert_eq!(told.of, [(at("y"), Off), (at("z"), Require)]);
    let message = parse("a --nbd unix:x --tls require").expect_err("no certificates");
    assert!(message.contains("--tls-dir"), "{message}");
}

#[test]
fn a_secret_belongs_to_its_disk() {
    let dir = tempfile::tempdir().expect("a folder");
    let key = dir.path().join("key");
    std::fs::write(&key, "hunter2\n").expect("a key file");
    let line = format!("a b -f luks --secret file:{} --allow-discards c", key.display());
    let config = parse(&line).expect("three disks");
    let [a, b, c] = &config.disks[..] else { panic!("{config:?}") };
    assert!(a.options.secret.is_none() && c.options.secret.is_none());
    assert_eq!(b.options.secret.as_ref().map(Secret::bytes), Some(&b"hunter2\n"[..]));
    assert!(b.options.allow_discards && !c.options.allow_discards);
    assert!(!format!("{config:?}").contains("hunter2"));
}

#[test]
fn the_name_serves_as_serial_where_it_fits() {
    let serial = |line: &str| parse(line).expect("a disk").disks[0].serial.clone();
    assert_eq!(serial("a --vhost-user x --name data"), "data");
    assert_eq!(serial("a --vhost-user x --name data --serial S1"), "S1");
    assert_eq!(serial("a --vhost-user x --name a-name-longer-than-a-serial-number"), "");
}
