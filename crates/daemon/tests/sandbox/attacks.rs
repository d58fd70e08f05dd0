//! What whoever owns the process would try.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Error};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use io_uring::{IoUring, Parameters, opcode, squeue, types};
use ringtap_sandbox::{DeviceAct, DeviceWish, ask};

use super::modes;
use super::told::{Custom, Tell, code};

/// What is aimed at.
pub struct Aims {
    /// An image beside the disk's.
    pub other: PathBuf,
    /// A folder that is none of the server's.
    pub outside: PathBuf,
    /// A TCP port of this host.
    pub port: u16,
    /// The process that started the server.
    pub parent: u32,
    /// Whether rings come from a broker.
    pub confined: bool,
    /// Whether it has become another user.
    pub user: bool,
    /// The server's image, where it is shown as a block device, number 1; number 0 is another's, and waits.
    pub device: Option<PathBuf>,
}

/// How a ring is laid out: whoever owns the process knows that, too.
static LAYOUT: OnceLock<Parameters> = OnceLock::new();

fn builder() -> io_uring::Builder {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(4096).setup_clamp().setup_submit_all().setup_coop_taskrun();
    builder.setup_taskrun_flag().setup_single_issuer().setup_defer_taskrun();
    builder
}

/// Before anything is served.
pub fn prepare() {
    let ring: IoUring = builder().build(256).expect("io_uring");
    let _first = LAYOUT.set(ring.params().clone());
}

/// Try all, and tell of each.
pub fn attack(aims: &Aims) {
    let tell = |name: &str, end: io::Result<()>| match end {
        Ok(()) => eprintln!("attack: {name}: succeeded"),
        Err(error) => eprintln!("attack: {name}: refused: {error}"),
    };
    files(aims, &tell);
    modes::attack(&aims.other, &tell);
    processes(aims, &tell);
    signals(aims, &tell);
    root(aims, &tell);
    sockets(aims, &tell);
    let sent = datagrams(&aims.outside.join("datagrams"));
    tell("send a datagram to another's socket", sent);
    rings(aims, &tell);
    if let Some(image) = &aims.device {
        devices(aims, image, &tell);
    }
    eprintln!("attack: the end: reached");
}

fn files(aims: &Aims, tell: Tell<'_>) {
    let writable = |path: &Path| File::options().read(true).write(true).open(path).map(drop);
    tell("open /etc/shadow", File::open("/etc/shadow").map(drop));
    tell("open another tenant's image", writable(&aims.other));
    let held = File::options().read(true).custom(libc::O_PATH).open(&aims.other);
    let by = |file: File| writable(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())));
    tell("open it by a descriptor", held.and_then(by));
    tell("open an image elsewhere", writable(&aims.outside.join("other.qcow2")));
    tell("make a file elsewhere", fs::write(aims.outside.join("made"), "x"));
    tell("make a device", made(&aims.other.with_file_name("device")));
    tell("write to the kernel's settings", writable(Path::new("/proc/sys/kernel/core_pattern")));
    tell("read another's memory", File::open(format!("/proc/{}/mem", aims.parent)).map(drop));
}

fn made(path: &Path) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a path that ends.
    code(unsafe { libc::mknod(name.as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(7, 0)) }.into())?;
    fs::remove_file(path)
}

/// As a call ends that was let through and names nothing: any error but EPERM.
fn let_through(result: i64) -> io::Result<()> {
    match code(result) {
        Err(error) if error.raw_os_error() != Some(libc::EPERM) => Ok(()),
        other => other,
    }
}

// Each gives the kernel numbers, or memory that outlives the call.
#[allow(clippy::undocumented_unsafe_blocks)]
fn processes(aims: &Aims, tell: Tell<'_>) {
    let parent = aims.parent as i32;
    let null = std::ptr::null::<libc::c_char>();
    let nothing = c"/nonexistent/program".as_ptr();
    tell(
        "exec",
        let_through(unsafe { libc::execve(nothing, [null].as_ptr(), [null].as_ptr()) }.into()),
    );
    let program = std::process::Command::new("/bin/true").status();
    tell("start a program", program.map(drop));
    let traced = unsafe { libc::ptrace(libc::PTRACE_SEIZE, parent, 0, 0) };
    tell("trace another", code(traced));
    tell("signal another", code(unsafe { libc::kill(parent, 0) }.into()));
    let mut byte = [0u8; 1];
    let ours = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let code_of_it = processes_code(aims.parent);
    let theirs = libc::iovec { iov_base: code_of_it as *mut _, iov_len: 1 };
    let read = unsafe { libc::process_vm_readv(parent, &ours, 1, &theirs, 1, 0) };
    tell("look into another", let_through(read as i64));
    let target = CString::new(aims.outside.as_os_str().as_bytes()).expect("a path");
    let (none, kind) = (c"none".as_ptr(), c"tmpfs".as_ptr());
    let mounted = unsafe { libc::mount(none, target.as_ptr(), kind, 0, std::ptr::null()) };
    if mounted == 0 {
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
    tell("mount", code(mounted.into()));
    tell("a namespace of its own", code(unsafe { libc::unshare(libc::CLONE_FS) }.into()));
    let bpf = unsafe { libc::syscall(libc::SYS_bpf, 9999, 0, 0) };
    tell("bpf", let_through(bpf));
    let (len, anonymous) = (4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let prot = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let code = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, anonymous, -1, 0) };
    let mapped = if code == libc::MAP_FAILED { Err(Error::last_os_error()) } else { Ok(()) };
    tell("code of its own", mapped);
}

/// What of another process can be set, and signals that the kernel sends in a file's name. Nothing is changed by it.
#[allow(clippy::undocumented_unsafe_blocks)]
fn signals(aims: &Aims, tell: Tell<'_>) {
    let parent = aims.parent as i32;
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    let null = std::ptr::null();
    let limited = unsafe { libc::prlimit64(parent, libc::RLIMIT_CPU, null, &mut limit) };
    tell("limit another's processor time", code(limited.into()));
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let size = size_of_val(&set);
    let placed = unsafe {
        libc::sched_getaffinity(parent, size, &mut set);
        libc::sched_setaffinity(parent, size, &set)
    };
    tell("say where another runs", code(placed.into()));
    let file = fs::File::open("/dev/null").expect("a file");
    let number = file.as_raw_fd();
    let owned = unsafe { libc::fcntl(number, libc::F_SETOWN, parent) };
    tell("have the kernel send another signals", code(owned.into()));
    let kill = unsafe { libc::fcntl(number, F_SETSIG, libc::SIGTERM) };
    tell("say which signals", code(kill.into()));
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("sockets");
    let owned = unsafe { libc::ioctl(ours.as_raw_fd(), FIOSETOWN, &raw const parent) };
    tell("have the kernel send another signals by a socket", code(owned.into()));
}

/// Source: asm-generic/fcntl.h.
const F_SETSIG: i32 = 10;
/// Source: asm-generic/sockios.h.
const FIOSETOWN: libc::Ioctl = 0x8901;

/// What root has, and the broker with it.
#[allow(clippy::undocumented_unsafe_blocks)]
fn root(aims: &Aims, tell: Tell<'_>) {
    let broker = broker();
    let there = broker.unwrap_or(aims.parent);
    // Who is root and confined keeps its number, what images of others take, and how many files others of root's have open.
    if aims.user || !aims.confined {
        let open = fs::read_dir(format!("/proc/{there}/fd"));
        tell("count what the broker has open", open.map(drop));
        tell("be root", roots_number());
        let rights = rustix::thread::capabilities(None).expect("its own");
        let any = !(rights.effective | rights.permitted | rights.inheritable).is_empty();
        tell("have a capability", if any { Ok(()) } else { Err(Error::other("none")) });
    }
    // By this thread alone.
    let becomes = |call, number: u32| {
        code(unsafe { libc::syscall(call, number, number, number) }).and_then(|()| roots_number())
    };
    tell("become root again", becomes(libc::SYS_setresuid, 0));
    tell("have root's group again", becomes(libc::SYS_setresgid, 0));
    let groups = [0u32];
    let set = unsafe { libc::syscall(libc::SYS_setgroups, 1, groups.as_ptr()) };
    tell("be in root's group", code(set));
    tell("signal the broker", code(unsafe { libc::kill(there as i32, 0) }.into()));
    let traced = broker.map_or(0, |it| unsafe { libc::ptrace(libc::PTRACE_SEIZE, it, 0, 0) });
    tell("trace the broker", code(traced));
    tell("read the broker's memory", File::open(format!("/proc/{there}/mem")).map(drop));
    let by = format!("/proc/{there}/root{}", aims.other.display());
    tell("open another's image by the broker's root", File::open(by).map(drop));
}

/// Whether this thread is root by any of its numbers.
#[allow(clippy::undocumented_unsafe_blocks)]
fn roots_number() -> io::Result<()> {
    let mut numbers = [1u32; 6];
    let [a, b, c, d, e, f] = &mut numbers;
    code(unsafe { libc::getresuid(a, b, c) }.into())?;
    code(unsafe { libc::getresgid(d, e, f) }.into())?;
    let groups = rustix::process::getgroups()?;
    match numbers.contains(&0) || groups.iter().any(|group| group.as_raw() == 0) {
        true => Ok(()),
        false => Err(Error::other(format!("{numbers:?}, {groups:?}"))),
    }
}

/// The broker, which is a child of this process.
fn broker() -> Option<u32> {
    let own = std::process::id().to_string();
    let numbers = fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|number: &u32| {
        let text = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        let rest = text.split_once(" (ringtap-broker) ").map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split(' ').nth(1)) == Some(&*own)
    })
}

fn processes_code(id: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{id}/maps")).unwrap_or_default();
    usize::from_str_radix(maps.split('-').next().unwrap_or_default(), 16).unwrap_or(4096)
}

fn sockets(aims: &Aims, tell: Tell<'_>) {
    for (name, family) in [("a UNIX socket", libc::AF_UNIX), ("a TCP socket", libc::AF_INET)] {
        // SAFETY: numbers.
        let made = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        tell(name, code(made.into()));
    }
    tell("connect by TCP", TcpStream::connect(("127.0.0.1", aims.port)).map(drop));
    let unix = aims.outside.join("socket");
    let connected = std::os::unix::net::UnixStream::connect(&unix);
    tell("connect to a UNIX socket", connected.map(drop));
    // Whom it may ask.
    tell("ask for a socket elsewhere", ask::bind(&aims.outside.join("bound"), 0o600).map(drop));
    tell("ask for a connection elsewhere", ask::connect(&unix, true).map(drop));
    let dialled = ask::dial("127.0.0.1", aims.port, Duration::from_secs(5));
    tell("ask for a connection by TCP", dialled.map(drop));
    let over = aims.outside.join("other.qcow2");
    let mounted = ask::mount(&over, Path::new("none"), true);
    let mounted =
        mounted.unwrap_or_else(|| ringtap_export::fuse::mount_by(&over, Path::new("none"), true));
    if let Ok(device) = &mounted {
        let _ = device;
        let off = ask::unmount(&over, true);
        let _ = off.unwrap_or_else(|| ringtap_export::fuse::unmount_by(&over, true));
    }
    tell("ask for a mount elsewhere", mounted.map(drop));
}

/// By a socket that it has, or one of a pair of its own.
#[allow(clippy::undocumented_unsafe_blocks)]
fn datagrams(path: &Path) -> io::Result<()> {
    let kind = |number: i32| {
        let (mut kind, mut len) = (0i32, 4);
        let at = (&raw mut kind).cast();
        unsafe { libc::getsockopt(number, libc::SOL_SOCKET, libc::SO_TYPE, at, &mut len) };
        kind
    };
    let mut pair = [-1; 2];
    unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_DGRAM, 0, pair.as_mut_ptr()) };
    let refused = Error::last_os_error();
    let address = rustix::net::SocketAddrUnix::new(path)?;
    let sent = (3..256).filter(|number| kind(*number) == libc::SOCK_DGRAM).any(|number| {
        let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        rustix::net::sendto(socket, b"x", rustix::net::SendFlags::DONTWAIT, &address).is_ok()
    });
    if sent { Ok(()) } else { Err(refused) }
}

/// Codes of the driver's commands. Source: linux/ublk_cmd.h.
const ADD: u32 = 0xc020_7504;
const DELETE: u32 = 0xc020_7505;
const STOP: u32 = 0xc020_7507;
const TAKE_OVER: u32 = 0xc020_7510;
const LOOK: u32 = 0x8020_7512;

/// The driver of block devices, by itself and by the broker.
fn devices(aims: &Aims, image: &Path, tell: Tell<'_>) {
    let writable = |path: &str| File::options().read(true).write(true).open(path).map(drop);
    tell("open the driver's control device", writable("/dev/ublk-control"));
    tell("open another's block device", writable("/dev/ublkb0"));
    tell("open the file another's device is served by", writable("/dev/ublkc0"));
    let ask = |act, id, image: &Path, data: Vec<u8>| {
        let wish = DeviceWish { act, id, image: image.to_owned(), data };
        wish.ask().unwrap_or_else(|| Err(Error::other("no broker"))).map(drop)
    };
    let command = |code| DeviceAct::Command { code, inline: 0, by_path: code == LOOK };
    // One queue of 64, of 64 KiB each, for whoever comes.
    let mut info = vec![0u8; 64];
    (info[0], info[2], info[10]) = (1, 64, 1);
    info[12..16].fill(0xff);
    tell("make a device of another image", ask(command(ADD), u32::MAX, &aims.other, info.clone()));
    tell("make one that passes for another's", ask(command(ADD), u32::MAX, image, info));
    tell("look at another's device", ask(command(LOOK), 0, image, vec![0; 64]));
    for (name, code) in [
        ("take over another's device", TAKE_OVER),
        ("stop another's device", STOP),
        ("delete another's device", DELETE),
        ("a command that is none", 0x8020_7577),
    ] {
        tell(name, ask(command(code), 0, image, vec![]));
    }
    for (name, act) in [
        ("have the file another's device is served by", DeviceAct::Open),
        ("have another's device written back", DeviceAct::WriteBack),
    ] {
        tell(name, ask(act, 0, image, vec![]));
    }
    let off = ringtap_sandbox::let_go(Path::new("/mnt/share"));
    tell("unmount what is no block device's", off.unwrap_or(Ok(())));
}

fn rings(aims: &Aims, tell: Tell<'_>) {
    let shadow = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), c"/etc/shadow".as_ptr()).build();
    let other = CString::new(aims.other.as_os_str().as_bytes()).expect("a path");
    let image = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), other.as_ptr()).build();
    let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build();
    let connect = opcode::Connect::new(types::Fd(-1), std::ptr::null(), 0).build();
    tell("open /etc/shadow by a ring", ring(aims).and_then(|ring| does(ring, &shadow)));
    tell("open an image by a ring", ring(aims).and_then(|ring| does(ring, &image)));
    tell("a socket by a ring", ring(aims).and_then(|ring| does(ring, &socket)));
    // Let through it is a bad descriptor.
    let tried = ring(aims).and_then(|ring| match does(ring, &connect) {
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(()),
        other => other,
    });
    tell("connect by a ring", tried);
    let number = fs::File::open("/dev/null").expect("a file");
    let eventfd = ring(aims).and_then(|ring| {
        match ring.submitter().register_eventfd(number.as_raw_fd()) {
            // Let through it is none.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    });
    tell("register something else with a ring", eventfd);
}

fn ring(aims: &Aims) -> io::Result<IoUring> {
    if !aims.confined {
        return builder().build(256);
    }
    let mut unused = [0u32; 30];
    // SAFETY: the argument is as large as the structure that a kernel would fill.
    let number = unsafe { libc::syscall(libc::SYS_io_uring_setup, 256, unused.as_mut_ptr()) };
    code(number)?;
    // SAFETY: the call made it.
    let file = unsafe { OwnedFd::from_raw_fd(number as i32) };
    let layout = LAYOUT.get().expect("prepared").clone();
    // SAFETY: whoever made it did so in the same way.
    let ring = unsafe { IoUring::from_fd(file.into_raw_fd(), layout) }.expect("mapped");
    ring.submitter().register_enable_rings().expect("enabled");
    Ok(ring)
}

fn does(mut ring: IoUring, entry: &squeue::Entry) -> io::Result<()> {
    // SAFETY: what it names lives in the caller.
    unsafe { ring.submission().push(entry) }.expect("room");
    ring.submit_and_wait(1)?;
    match ring.completion().next().expect("an answer").result() {
        result if result < 0 => Err(Error::from_raw_os_error(-result)),
        _ => Ok(()),
    }
}
