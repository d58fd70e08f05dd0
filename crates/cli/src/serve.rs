//! `ringtap serve`: the command line turned into a configuration, each option bound to its disk.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Args};
use ringtap_daemon::{Address, Announce, Config, Disk, Error, Polling};
use ringtap_image::{CacheMode, Format, OpenOptions, RestartLog, Secret, SecretSource};

use crate::args::Output;
use crate::log::{self, LogArgs};
use crate::names::{self, CacheName, RestartLogName};
use crate::nbd::NbdArgs;
use crate::secret;

/// Queues offered unless told otherwise. One that no guest uses costs nothing, and QEMU refuses a
/// server that offers fewer than its guest has CPUs.
const QUEUES: u16 = 16;

/// What `ringtap serve` is told.
#[derive(Debug, Args)]
#[command(
    override_usage = "ringtap serve [OPTIONS] <DISK> [ITS OPTIONS] [<DISK> [ITS OPTIONS]]..."
)]
pub(crate) struct ServeArgs {
    /// An image (a file or a block device), or null:SIZE for a disk that holds nothing
    #[arg(required = true, value_name = "DISK", num_args = 1..)]
    disk: Vec<PathBuf>,

    /// Serve nothing where one of the disks cannot be opened [default: serve the others, say which is
    /// out, and end with status 1]
    #[arg(long)]
    strict: bool,

    /// Whether queues with nothing to do wait awake: off; adaptive, for as long as it has lately paid, on no more than
    /// half the processors and on none that others want; or adaptive for so long at most, like 50us
    #[arg(long, value_name = "off|adaptive|MAX", default_value = "adaptive")]
    poll: Polling,

    /// Permissions of the UNIX sockets, and of files by --fuse, in octal
    #[arg(long, value_name = "MODE", value_parser = octal, default_value = "600")]
    socket_mode: u32,

    /// Keep the process id in this file while serving
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,

    #[command(flatten)]
    log: LogArgs,

    /// What to print on stdout once every socket listens: the word ready, or one line of JSON
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    output: Output,

    #[command(flatten, next_help_heading = "TLS and limits for NBD clients")]
    nbd_clients: NbdArgs,

    // Last: the heading goes on to whatever follows.
    #[command(flatten, next_help_heading = "Options of the DISK before them")]
    of_disk: DiskArgs,
}

/// What a disk is told: each value belongs to the DISK before it.
#[derive(Debug, Args)]
#[command(mut_args = flag)]
struct DiskArgs {
    /// Format of the image [default, and for '': as Ringtap wrote it down when it made the image, or first
    /// served it]; never guessed, for a guest can write any header into a raw disk
    #[arg(short, long, value_parser = named_format, value_name = "FORMAT")]
    format: Vec<NamedFormat>,

    /// Write to the image as the format named by -f though it is recorded as another, or bears another's
    /// signature: what it held is lost
    #[arg(long)]
    force_format: Vec<bool>,

    /// File that the image may name as its backing file, parent or extent, or folder with such; needed
    /// where Ringtap has not recorded it, and image and folder are not your own; repeatable
    #[arg(long = "backing", alias = "allow-backing", value_name = "FILE|DIR")]
    allow_backing: Vec<PathBuf>,

    /// File that the image may name as its external data file; needed where Ringtap has not recorded it,
    /// and image and folder are not your own; repeatable
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,

    /// How host caching is used, as in QEMU [default: none]
    #[arg(long, value_enum, value_name = "MODE")]
    cache: Vec<CacheName>,

    /// Refuse writes
    #[arg(long)]
    read_only: Vec<bool>,

    /// Where the secret of an encrypted image is: file:PATH, fd:N (a descriptor inherited), or
    /// credential:NAME (of systemd); all its bytes count, a newline at the end, too
    #[arg(long, value_name = "SOURCE", value_parser = secret::source)]
    secret: Vec<SecretSource>,

    /// The most memory that the L2 tables of a qcow2 image take, and of each image below it
    /// [default: 64M, enough for 512G of clusters of 64k]
    #[arg(long, value_name = "SIZE", value_parser = names::size)]
    l2_cache_size: Vec<u64>,

    /// What becomes of changes that a killed server left, where it cannot be told whether they belong to
    /// the image as it is now [default: it is not opened]
    #[arg(long, value_enum, value_name = "WHAT")]
    restart_log: Vec<RestartLogName>,

    /// Pass discards on through encryption, which shows others which parts of the disk are in use
    #[arg(long)]
    allow_discards: Vec<bool>,

    /// Serve NBD at unix:PATH, tcp:HOST:PORT, or sockets handed over: systemd, systemd:NAME; repeatable
    #[arg(long, value_name = "ADDRESS", value_parser = Address::nbd)]
    nbd: Vec<Address>,

    /// Name of the NBD export [default: the empty name, the default export]
    #[arg(long, value_name = "EXPORT")]
    name: Vec<String>,

    /// Show this dirty bitmap of a qcow2 image to NBD clients, as qemu:dirty-bitmap:NAME; repeatable
    #[arg(long, value_name = "NAME")]
    bitmap: Vec<String>,

    /// Serve vhost-user-blk at a UNIX socket, or one handed over: systemd, systemd:NAME; repeatable
    #[arg(long, value_name = "PATH", value_parser = Address::vhost_user)]
    vhost_user: Vec<Address>,

    /// Show the disk as a file, by FUSE: mounted over a regular file, which is made if need be;
    /// repeatable
    #[arg(long, value_name = "PATH")]
    fuse: Vec<PathBuf>,

    /// Let writes past the end of the file make it, and the raw image, larger
    #[arg(long)]
    growable: Vec<bool>,

    /// Make the disk a block device of this host, /dev/ublkbN, by ublk (Linux 6.5 or later); one
    /// that a killed server of the same disk left is taken over
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "any",
        value_parser = DeviceNumber::parse
    )]
    ublk: Vec<DeviceNumber>,

    /// The most virtqueues a guest may use, each a thread once used; with --fuse and --ublk the most
    /// threads that serve the file or device [default: 16]
    #[arg(long, value_name = "N")]
    queues: Vec<u16>,

    /// Sector size that vhost-user guests and --ublk see, as logical-block-size of QEMU's storage
    /// daemon: 512, 1024, 2048 or 4096 [default: 512, or what the image's device or format asks for]
    #[arg(long, value_name = "BYTES")]
    logical_block_size: Vec<u32>,

    /// Hold each answer back for so many percent of the time that it took: the lab's arm that is known to be slower
    #[arg(long, value_name = "PERCENT", hide = true)]
    hold: Vec<u32>,

    /// Serial number that vhost-user guests see, at most 20 characters [default: the export's name]
    #[arg(long, value_name = "TEXT")]
    serial: Vec<String>,
}

/// `--read-only` is `--read-only=true`, and takes no other word after it: that would be the next DISK.
fn flag(arg: Arg) -> Arg {
    if !["read_only", "allow_discards", "growable", "force_format"].contains(&arg.get_id().as_str())
    {
        return arg;
    }
    arg.value_name("BOOL")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .hide_possible_values(true)
}

/// The N of /dev/ublkbN; none: the next that is free.
#[derive(Clone, Copy, Debug)]
struct DeviceNumber(Option<u32>);

impl DeviceNumber {
    fn parse(text: &str) -> Result<DeviceNumber, String> {
        match text {
            "any" => Ok(DeviceNumber(None)),
            _ => text
                .parse()
                .map(|id| DeviceNumber(Some(id)))
                .map_err(|_| "write a number, such as --ublk=3, or --ublk alone".to_owned()),
        }
    }
}

/// A format that a unit's FORMAT= names, or leaves out.
#[derive(Clone, Copy, Debug)]
struct NamedFormat(Option<Format>);

fn named_format(text: &str) -> Result<NamedFormat, String> {
    match text {
        "" => Ok(NamedFormat(None)),
        name => {
            name.parse().map(|format| NamedFormat(Some(format))).map_err(|error| format!("{error}"))
        }
    }
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "write permissions in octal, such as 660".to_owned())
}

/// Serve until a signal ends it.
pub(crate) fn run(args: ServeArgs, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    args.poll.choose();
    log::start(&args.log)?;
    warn_of_lost_logs();
    ringtap_daemon::serve(config(args, matches)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Say so where restart logs end with a container, though its guests may live on.
pub(crate) fn warn_of_lost_logs() {
    let folder = RestartLog::usual_folder();
    let in_container = std::env::var_os("container").is_some()
        || ["/.dockerenv", "/run/.containerenv", "/run/systemd/container"]
            .iter()
            .any(|sign| Path::new(sign).exists());
    if in_container && !is_kept(&folder) {
        tracing::warn!(
            "restart logs lie in {}, which ends with this container: what is not flushed then is lost with \
             it, though the guest may live on; give --state-dir a folder of the host that is on tmpfs",
            folder.display()
        );
    }
}

/// Whether a folder is the operator's choice, or mounted into the container.
fn is_kept(folder: &Path) -> bool {
    let device = |path: &Path| std::fs::metadata(path).ok().map(|facts| facts.dev());
    let mounted = folder.ancestors().take(2).any(|path| {
        let above = path.parent().and_then(device);
        device(path).is_some_and(|own| above.is_some_and(|above| above != own))
            && path != Path::new("/run")
            && path != Path::new("/dev/shm")
    });
    mounted || ringtap_image::has_folder()
}

fn config(args: ServeArgs, matches: &ArgMatches) -> Result<Config, Error> {
    let places: Vec<usize> = matches.indices_of("disk").into_iter().flatten().collect();
    let bound = Bound { matches, disks: &args.disk, places: &places };
    let of_disk = args.of_disk;
    let nbd_tls = args.nbd_clients.tls(matches, &of_disk.nbd)?;
    let mut format = bound.single("format", of_disk.format)?;
    let mut cache = bound.single("cache", of_disk.cache)?;
    let mut read_only = bound.single("read_only", of_disk.read_only)?;
    let mut force_format = bound.single("force_format", of_disk.force_format)?;
    let mut secret = bound.single("secret", of_disk.secret)?;
    let mut l2_cache_size = bound.single("l2_cache_size", of_disk.l2_cache_size)?;
    let mut restart_log = bound.single("restart_log", of_disk.restart_log)?;
    let mut allow_discards = bound.single("allow_discards", of_disk.allow_discards)?;
    let mut name = bound.single("name", of_disk.name)?;
    let mut queues = bound.single("queues", of_disk.queues)?;
    let mut logical_block_size = bound.single("logical_block_size", of_disk.logical_block_size)?;
    let mut serial = bound.single("serial", of_disk.serial)?;
    let mut hold = bound.single("hold", of_disk.hold)?;
    let mut nbd = bound.all("nbd", of_disk.nbd);
    let mut vhost_user = bound.all("vhost_user", of_disk.vhost_user);
    let mut allow_backing = bound.all("allow_backing", of_disk.allow_backing);
    let mut data_files = bound.all("data_file", of_disk.data_file);
    let mut fuse = bound.all("fuse", of_disk.fuse);
    let mut bitmaps = bound.all("bitmap", of_disk.bitmap);
    let mut growable = bound.single("growable", of_disk.growable)?;
    let mut ublk = bound.single("ublk", of_disk.ublk)?;

    let mut disks = vec![];
    for (i, path) in args.disk.iter().enumerate() {
        let vhost_user = std::mem::take(&mut vhost_user[i]);
        let fuse = std::mem::take(&mut fuse[i]);
        let ublk = ublk[i].take().map(|DeviceNumber(id)| id);
        let queues_used = !vhost_user.is_empty() || !fuse.is_empty() || ublk.is_some();
        if (queues[i].is_some() && !queues_used) || (serial[i].is_some() && vhost_user.is_empty()) {
            return Err(Error::Usage(format!(
                "{}: --queues and --serial are for vhost-user: add --vhost-user PATH",
                path.display()
            )));
        }
        let logical_block_size = logical_block_size[i].take();
        if logical_block_size.is_some() && vhost_user.is_empty() && ublk.is_none() {
            return Err(Error::Usage(format!(
                "{}: --logical-block-size is for --vhost-user and --ublk",
                path.display()
            )));
        }
        let name = name[i].take().unwrap_or_default();
        let short = Some(name.clone()).filter(|name| name.len() <= 20 && name.is_ascii());
        disks.push(Disk {
            path: path.clone(),
            options: OpenOptions {
                format: format[i].take().and_then(|NamedFormat(format)| format),
                force_format: force_format[i].take().unwrap_or(false),
                cache: cache[i].take().map(CacheMode::from).unwrap_or_default(),
                read_only: read_only[i].take().unwrap_or(false),
                allow_backing: std::mem::take(&mut allow_backing[i]),
                data_files: std::mem::take(&mut data_files[i]),
                bitmaps: std::mem::take(&mut bitmaps[i]),
                table_memory: l2_cache_size[i].take(),
                secret: secret[i].take().map(|source| read_secret(path, &source)).transpose()?,
                restart_log: restart_log[i].take().map(Into::into),
                allow_discards: allow_discards[i].take().unwrap_or(false),
                ..OpenOptions::default()
            },
            nbd: std::mem::take(&mut nbd[i]),
            vhost_user,
            fuse,
            growable: growable[i].take().unwrap_or(false),
            ublk,
            queues: queues[i].take().unwrap_or(QUEUES),
            logical_block_size,
            hold: hold[i].take().unwrap_or(0),
            serial: serial[i].take().or(short).unwrap_or_default(),
            name,
        });
    }
    Ok(Config {
        disks,
        strict: args.strict,
        nbd_limits: args.nbd_clients.limits(),
        nbd_tls,
        socket_mode: args.socket_mode,
        pid_file: args.pid_file,
        announce: match args.output {
            Output::Text => Announce::Text,
            Output::Json => Announce::Json,
        },
    })
}

fn read_secret(disk: &Path, source: &SecretSource) -> Result<Secret, Error> {
    let warn = |text: String| tracing::warn!("{}: {text}", disk.display());
    secret::read(source, warn).map_err(|error| Error::Usage(format!("{}: {error}", disk.display())))
}

/// Which options belong to which disk, by their places on the command line.
struct Bound<'a> {
    matches: &'a ArgMatches,
    disks: &'a [PathBuf],
    places: &'a [usize],
}

impl Bound<'_> {
    /// The values of an option, disk by disk.
    fn all<T>(&self, id: &str, values: Vec<T>) -> Vec<Vec<T>> {
        let mut bound: Vec<Vec<T>> = self.disks.iter().map(|_| vec![]).collect();
        let places = self.matches.indices_of(id).into_iter().flatten();
        for (value, place) in values.into_iter().zip(places) {
            let before = self.places.iter().take_while(|disk| **disk < place).count();
            bound[before.saturating_sub(1)].push(value);
        }
        bound
    }

    /// The value of an option that a disk has once at most.
    fn single<T>(&self, id: &str, values: Vec<T>) -> Result<Vec<Option<T>>, Error> {
        let bound = self.all(id, values).into_iter().zip(self.disks);
        bound
            .map(|(mut values, disk)| match values.len() {
                0 | 1 => Ok(values.pop()),
                _ => Err(Error::Usage(format!(
                    "--{} is given twice for {}; options bind to the DISK before them \
                     (those before the first DISK bind to the first)",
                    id.replace('_', "-"),
                    disk.display()
                ))),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    fn parse(line: &str) -> Result<Config, String> {
        let words = ["ringtap", "serve"].into_iter().chain(line.split_whitespace());
        let matches = crate::args::command()
            .try_get_matches_from(words)
            .map_err(|error| error.to_string())?;
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
}
