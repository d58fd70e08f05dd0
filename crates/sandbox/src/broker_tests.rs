//! What the broker refuses, whoever asks it.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use super::*;

fn nothing(_: bool) -> io::Result<OwnedFd> {
    Err(Errno::NOSYS.into())
}

/// What is mounted, and where, is what its hook is told.
fn mount(path: &Path, source: &Path, read_only: bool) -> io::Result<OwnedFd> {
    assert_eq!((source, read_only), (Path::new("shown"), true));
    Ok(File::open(path)?.into())
}

fn unmount(path: &Path, _: bool) -> io::Result<()> {
    fs::metadata(path).map(drop)
}

fn device(wish: &DeviceWish, devices: &Devices) -> io::Result<DeviceDone> {
    match devices.may_show {
        true => Ok((wish.data.clone(), None)),
        false => Err(Errno::PERM.into()),
    }
}

fn let_go(_: &Path) -> io::Result<()> {
    Ok(())
}

/// A broker, in a folder with `served/socket` and `served/shown` on its list.
struct Bench {
    dir: tempfile::TempDir,
    broker: Broker,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().expect("a folder");
        let ring = nothing;
        let hooks = Hooks { mount, unmount, ring, device, let_go, channel: "NONE" };
        let broker = Broker::new(std::process::id(), None, hooks);
        let mut bench = Bench { dir, broker };
        for folder in ["served", "outside"] {
            fs::create_dir(bench.at(folder)).expect("a folder");
        }
        fs::write(bench.at("served/shown"), "").expect("a file");
        let list = List {
            sockets: vec![bench.at("served/socket")],
            listen: vec![("127.0.0.1".into(), 0)],
            mounts: vec![bench.at("served/shown")],
            devices: vec!["null:1M".into()],
            ..List::default()
        };
        list.lines(|line| bench.asked(line).map(drop)).expect("a list");
        bench
    }

    fn sealed() -> Bench {
        let mut bench = Bench::new();
        bench.asked(Call::new(What::Seal)).expect("sealed");
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().expect("it").join(name)
    }

    fn asked(&mut self, call: Call<'_>) -> io::Result<Answer> {
        self.asked_with(call, vec![])
    }

    fn asked_with(&mut self, call: Call<'_>, files: Vec<OwnedFd>) -> io::Result<Answer> {
        self.said(&call.bytes().expect("short"), files)
    }

    fn said(&mut self, bytes: &[u8], files: Vec<OwnedFd>) -> io::Result<Answer> {
        match self.broker.carry_out(bytes, files.into_iter())? {
            Done::Now(answer) => Ok(answer),
            Done::Later(work) => work(),
        }
    }

    #[track_caller]
    fn refuses(&mut self, call: Call<'_>, errno: Errno) {
        self.refuses_with(call, vec![], errno);
    }

    #[track_caller]
    fn refuses_with(&mut self, call: Call<'_>, files: Vec<OwnedFd>, errno: Errno) {
        let end = self.asked_with(call, files);
        let error = end.map(|answer| answer.text).expect_err("refused");
        assert_eq!(error.raw_os_error(), Some(errno.raw_os_error()), "{call:?}: {error}");
    }
}

fn by<'a>(what: What, path: &'a Path) -> Call<'a> {
    Call::path(what, path)
}

#[test]
fn lines_that_nobody_waits_for_are_on_the_list_and_one_that_is_none_spoils_it() {
    let mut bench = Bench::new();
    let more = bench.at("outside/socket");
    bench.refuses(by(What::Bind, &more), Errno::PERM);
    let lists = List { sockets: vec![more.clone()], ..List::default() };
    let mut line = vec![];
    let noted = lists.lines(|call| {
        line = call.bytes().expect("short");
        Ok(())
    });
    noted.expect("a line");
    bench.broker.take_line(&line);
    bench.asked(by(What::Bind, &more)).expect("it is on the list");
    bench.said(&line, vec![]).expect("and may be said again");
    bench.broker.take_line(b"nonsense");
    let spoiled = bench.said(&line, vec![]).map(|answer| answer.text);
    assert_eq!(spoiled.unwrap_err().raw_os_error(), Some(Errno::INVAL.raw_os_error()));
    bench.asked(Call::new(What::Seal)).expect("sealed");
    // Nor is anything but a line taken so, or a line after the end.
    let late = bench.at("outside/late");
    let lists = List { sockets: vec![late.clone()], ..List::default() };
    let said = lists.lines(|call| {
        bench.broker.take_line(&call.bytes().expect("short"));
        Ok(())
    });
    said.expect("a line");
    bench.refuses(by(What::Bind, &late), Errno::PERM);
}

#[test]
fn what_is_no_call_is_refused() {
    let mut bench = Bench::new();
    let good = by(What::Bind, Path::new("/a")).bytes().expect("short");
    for bytes in [&b""[..], &good[..good.len() - 3], &[&[99], &good[1..]].concat()] {
        let error = bench.said(bytes, vec![]).map(|answer| answer.text).expect_err("refused");
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{bytes:?}");
    }
}

#[test]
fn nobody_adds_to_a_list_that_is_closed() {
    let mut bench = Bench::sealed();
    let other = bench.at("outside/socket");
    bench.refuses(by(What::Allow, &other).number(1), Errno::PERM);
    bench.refuses(Call::new(What::Allow).number(5), Errno::PERM);
    bench.refuses(Call::new(What::Seal), Errno::PERM);
    bench.refuses(by(What::Bind, &other), Errno::PERM);
    assert!(!other.exists());
    let own = bench.at("served/socket");
    bench.asked(by(What::Bind, &own)).expect("what is on it is had");
    assert!(own.exists());
}

#[test]
fn a_line_of_no_kind_is_refused_before_that_too() {
    let mut bench = Bench::new();
    bench.refuses(by(What::Allow, Path::new("/tmp")).number(77), Errno::INVAL);
    let host = Call { first: b"\xff", numbers: [3, 80, 0, 0], ..Call::new(What::Allow) };
    bench.refuses(host, Errno::INVAL);
    let port = Call { first: b"host", numbers: [3, 1 << 16, 0, 0], ..Call::new(What::Allow) };
    bench.refuses(port, Errno::INVAL);
}

#[test]
fn a_path_is_compared_where_it_leads() {
    let mut bench = Bench::sealed();
    // A folder on the way that is a link to what is not on the list, and one to what is.
    symlink(bench.at("outside"), bench.at("served/out")).expect("a link");
    symlink(bench.at("served"), bench.at("in")).expect("a link");
    for path in ["served/out/socket", "served/../outside/socket", "served/socket/..", "served"] {
        let path = bench.at(path);
        let end = bench.asked(by(What::Bind, &path)).map(|answer| answer.text);
        assert!(end.is_err(), "{path:?}");
    }
    assert_eq!(fs::read_dir(bench.at("outside")).expect("it").count(), 0);
    let own = bench.at("in/socket");
    bench.asked(by(What::Bind, &own)).expect("the same socket by another way");
    assert!(bench.at("served/socket").exists());
}

#[test]
fn a_link_in_the_place_of_a_socket_is_not_followed() {
    let mut bench = Bench::sealed();
    let other = bench.at("outside/socket");
    let _listens = UnixListener::bind(&other).expect("a socket");
    symlink(&other, bench.at("served/socket")).expect("a link");
    let own = bench.at("served/socket");
    bench.refuses(by(What::Connect, &own).number(1), Errno::LOOP);
    bench.refuses(by(What::Connect, &other).number(1), Errno::PERM);
    bench.refuses(by(What::Bind, &own), Errno::ADDRINUSE);
}

/// Between the look at a path and the bind, somebody puts a link in the place of a folder on the way.
#[test]
fn a_folder_that_is_swapped_meanwhile_has_nobody_get_a_socket_elsewhere() {
    for (linked, long) in [(false, false), (true, false), (false, true)] {
        let bench = Bench::new();
        let name = if long { "s".repeat(85) } else { "socket".into() };
        for folder in ["served/in/a", "outside/in/a"] {
            fs::create_dir_all(bench.at(folder)).expect("folders");
        }
        symlink(bench.at("served/in"), bench.at("link")).expect("a link");
        let place = bench.at("served/in/a").join(&name);
        let said = if linked { bench.at("link/a").join(&name) } else { place.clone() };
        let bind =
            |swap: &dyn Fn()| crate::sockets::bind_in_place(&said, &place, 0o600, None, swap);
        drop(bind(&|| {}).expect("nobody is in the way"));
        assert!(place.exists());
        fs::remove_file(&place).expect("removed");
        let swapped = bind(&|| {
            fs::rename(bench.at("served"), bench.at("aside")).expect("moved");
            symlink(bench.at("outside"), bench.at("served")).expect("a link");
        });
        let error = swapped.expect_err("refused");
        let expected = if long { libc::ELOOP } else { libc::EAGAIN };
        assert_eq!(error.raw_os_error(), Some(expected), "{said:?}");
    }
}

#[test]
fn a_socket_is_removed_where_it_is_ours_or_dead() {
    let mut bench = Bench::sealed();
    let (own, other) = (bench.at("served/socket"), bench.at("outside/socket"));
    let numbers = |path: &Path| crate::sockets::look_at(path).map(|it| [it.device, it.inode, 0, 0]);
    let remove = |path, numbers| Call { numbers, ..by(What::Remove, path) };
    bench.asked(by(What::Bind, &own).number(0o640)).expect("a socket");
    let found = numbers(&own).expect("it is there");
    let told = bench.asked(by(What::Look, &own)).expect("told").text;
    assert_eq!(String::from_utf8_lossy(&told), format!("{} {} true", found[0], found[1]));
    bench.refuses(remove(&own, [found[0], found[1] + 1, 0, 0]), Errno::PERM);
    bench.asked(remove(&own, found)).expect("it is the server's");
    bench.refuses(by(What::Look, &own), Errno::NOENT);
    // Elsewhere nothing is looked at, and nothing that is no socket is removed.
    let live = UnixListener::bind(&other).expect("a socket");
    bench.refuses(by(What::Look, &other), Errno::PERM);
    bench.refuses(remove(&other, numbers(&other).expect("it")), Errno::PERM);
    fs::write(&own, "precious").expect("a file");
    bench.refuses(remove(&own, numbers(&own).expect("it")), Errno::PERM);
    assert_eq!(fs::read(&own).expect("it"), b"precious");
    // Another user's is removed once nobody listens.
    if rustix::process::geteuid().is_root() {
        bench.broker.owner = Some(Owner { user: 65534, group: 65534 });
        fs::rename(&other, &own).expect("moved");
        bench.refuses(remove(&own, numbers(&own).expect("it")), Errno::PERM);
        drop(live);
        bench.asked(remove(&own, numbers(&own).expect("it"))).expect("it is a dead server's");
        assert!(own.symlink_metadata().is_err());
    }
}

#[test]
fn a_socket_has_the_mode_that_is_asked_for_and_is_the_servers_users() {
    use std::os::unix::fs::MetadataExt;
    let mut bench = Bench::new();
    let own = bench.at("served/socket");
    let facts = || own.symlink_metadata().map(|it| (it.mode() & 0o7777, it.uid(), it.gid()));
    let user = rustix::process::geteuid();
    for mode in [0o600, 0o666] {
        bench.asked(by(What::Bind, &own).number(mode)).expect("a socket");
        let (found, uid, _) = facts().expect("it");
        assert_eq!((u64::from(found), uid), (mode, user.as_raw()));
        fs::remove_file(&own).expect("removed");
    }
    if user.is_root() {
        let owner = Call { numbers: [65534, 65533, 0, 0], ..Call::new(What::Owner) };
        bench.asked(owner).expect("said");
        bench.asked(Call::new(What::Seal)).expect("closed");
        bench.refuses(owner, Errno::PERM);
        bench.asked(by(What::Bind, &own).number(0o660)).expect("in a folder of root's");
        assert_eq!(facts().expect("it"), (0o660, 65534, 65533));
    }
}

#[test]
fn servers_that_images_name_are_known_until_the_list_is_closed() {
    let mut bench = Bench::new();
    let (named, other) = (bench.at("outside/named"), bench.at("outside/other"));
    let _listens = [&named, &other].map(|path| UnixListener::bind(path).expect("a socket"));
    bench.asked(by(What::Connect, &named).number(1)).expect("an image names it");
    bench.asked(Call::new(What::Seal)).expect("closed");
    bench.asked(by(What::Connect, &named).number(1)).expect("known");
    bench.refuses(by(What::Connect, &other).number(1), Errno::PERM);
    // To name one is not to be allowed to take its place.
    fs::remove_file(&named).expect("gone");
    let end = bench.asked(by(What::Bind, &named)).map(|answer| answer.text);
    assert!(end.is_err() && !named.exists(), "{end:?}");
}

#[test]
fn ports_are_those_of_the_list() {
    let mut bench = Bench::sealed();
    let call = |what, host: &'static [u8], port| {
        let call = Call { first: host, ..Call::new(what) };
        Call { numbers: [port, 100, 0, 0], ..call }
    };
    let answer = bench.asked(call(What::Listen, b"127.0.0.1", 0)).expect("on the list");
    assert_eq!(answer.files.len(), 1);
    let open = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port");
    bench.refuses(call(What::Listen, b"127.0.0.1", 81), Errno::PERM);
    bench.refuses(call(What::Listen, b"0.0.0.0", 0), Errno::PERM);
    bench.refuses(call(What::Dial, b"127.0.0.1", open.port().into()), Errno::PERM);
    bench.refuses(call(What::Dial, b"127.0.0.1", 1 << 16), Errno::INVAL);
    bench.refuses(call(What::Listen, b"\xff\xfe", 0), Errno::INVAL);
}

#[test]
fn mounts_are_those_of_the_list() {
    let mut bench = Bench::sealed();
    let (own, socket) = (bench.at("served/shown"), bench.at("served/socket"));
    let other = bench.at("outside/shown");
    fs::write(&other, "").expect("a file");
    let mount = |path| Call { second: b"shown", ..by(What::Mount, path) }.number(1);
    let answer = bench.asked(mount(&own)).expect("on the list");
    assert_eq!(answer.files.len(), 1);
    bench.asked(by(What::Unmount, &own)).expect("on the list");
    for path in [&other, &socket] {
        bench.refuses(mount(path), Errno::PERM);
        bench.refuses(by(What::Unmount, path), Errno::PERM);
    }
}

#[test]
fn block_devices_show_what_is_on_the_list() {
    let mut bench = Bench::sealed();
    let add = Call { second: b"\0\x01", ..Call::new(What::Device) };
    let add = Call { numbers: [1 | 7 << 32, 3, 0, 0], ..add };
    let listed = bench.asked(Call { first: b"null:1M", ..add }).expect("on the list");
    assert_eq!(listed.text, b"\0\x01");
    bench.refuses(Call { first: b"null:2M", ..add }, Errno::PERM);
    bench.refuses(Call { numbers: [9, 3, 0, 0], ..add }, Errno::INVAL);
    bench.refuses(Call { numbers: [1, u64::MAX, 0, 0], ..add }, Errno::INVAL);
    // What is mounted where others see it is not let go of.
    bench.refuses(by(What::LetGo, Path::new("/")), Errno::PERM);
}

#[test]
fn attributes_are_ringtaps_own_of_a_file_that_may_be_written() {
    let mut bench = Bench::sealed();
    let path = bench.at("served/image");
    let open = |write: bool| -> OwnedFd {
        let file =
            File::options().read(true).write(write).create(write).truncate(false).open(&path);
        file.expect("the file").into()
    };
    drop(open(true));
    let set = |name: &'static [u8]| {
        let call = Call { first: name, second: b"qcow2", ..Call::new(What::SetAttribute) };
        call.number(1)
    };
    let get = |name: &'static [u8]| Call { first: name, ..Call::new(What::Attribute) };
    for name in [&b"security.capability"[..], b"trusted.overlay.opaque", b"user.another", b""] {
        bench.refuses_with(set(name), vec![open(true)], Errno::PERM);
        bench.refuses_with(get(name), vec![open(false)], Errno::PERM);
    }
    let ours = b"trusted.ringtap.test";
    bench.refuses_with(get(b"user.ringtap.test"), vec![open(false)], Errno::PERM);
    // Opened for neither nobody was asked whether it may be.
    let neither = || {
        let flags = OFlags::ACCMODE | OFlags::CLOEXEC;
        rustix::fs::open(&path, flags, Mode::empty()).expect("the file")
    };
    for name in [&ours[..], b"user.ringtap.test"] {
        bench.refuses_with(set(name), vec![open(false)], Errno::PERM);
        bench.refuses_with(set(name), vec![neither()], Errno::PERM);
    }
    bench.refuses(set(ours), Errno::BADF);
    bench.refuses(get(ours), Errno::BADF);
}

#[test]
fn there_is_one_notifier_and_it_is_given_once() {
    let mut bench = Bench::sealed();
    let file = || OwnedFd::from(File::open("/dev/null").expect("a descriptor"));
    bench.asked_with(Call::new(What::Rings), vec![file()]).expect("the first");
    bench.refuses_with(Call::new(What::Rings), vec![file()], Errno::PERM);
}

#[test]
fn where_a_file_is_mapped_is_told_of_memory_without_a_name_alone() {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let mut bench = Bench::sealed();
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&file, 4096).expect("its size");
    let (rights, own) = (ProtFlags::READ, u64::from(std::process::id()));
    // SAFETY: a new mapping, where the kernel finds room; nothing is read or written there.
    let at = unsafe { mmap(std::ptr::null_mut(), 4096, rights, MapFlags::PRIVATE, &file, 0) };
    let at = at.expect("a mapping");
    let call = |address| Call { numbers: [own, address, 0, 0], ..Call::new(What::Private) };
    let copy = || vec![file.try_clone().expect("a copy")];
    let told = bench.asked_with(call(at as u64), copy()).expect("told").text;
    assert_eq!(told, [1]);
    assert_eq!(bench.asked_with(call(0), copy()).expect("told").text, [0]);
    // SAFETY: the mapping made above, which nobody uses.
    unsafe { munmap(at, 4096) }.expect("unmapped");
    let named = File::open("/proc/self/exe").expect("this program");
    bench.refuses_with(call(0), vec![named.into()], Errno::PERM);
    bench.refuses(call(0), Errno::BADF);
}

/// A file system may be of whoever sends the file, and never answer: nobody else is to wait for that.
#[test]
fn no_file_system_is_asked_before_others_are_heard() {
    let mut bench = Bench::sealed();
    let place = bench.at("served/nameless");
    let nameless = File::create(&place).expect("a file");
    let is_sealed = rustix::fs::fcntl_get_seals(&nameless).is_ok();
    fs::remove_file(&place).expect("its name goes");
    let call = Call { numbers: [std::process::id().into(), 0, 0, 0], ..Call::new(What::Private) };
    let said = |bench: &mut Bench, call: &Call<'_>, file: &OwnedFd| {
        let files = vec![file.try_clone().expect("a copy")];
        bench.broker.carry_out(&call.bytes().expect("short"), files.into_iter())
    };
    let nameless = OwnedFd::from(nameless);
    // In a folder in memory it is as good as a memfd.
    if !is_sealed {
        let refused = said(&mut bench, &call, &nameless).err().and_then(|it| it.raw_os_error());
        assert_eq!(refused, Some(Errno::PERM.raw_os_error()));
    }
    let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC);
    let ours = &b"trusted.ringtap.test"[..];
    for (call, file) in [
        (call, memory.expect("memory")),
        (Call { first: ours, ..Call::new(What::Attribute) }, nameless.try_clone().expect("it")),
        (Call { first: ours, ..Call::new(What::SetAttribute) }, nameless),
    ] {
        let done = said(&mut bench, &call, &file);
        assert!(matches!(done, Ok(Done::Later(_))), "{call:?}");
    }
}

fn by_path_of(asker: u64) -> Call<'static> {
    by(What::Start, Path::new("/bin/true")).number(asker)
}

#[test]
fn no_other_process_is_started_told_or_killed() {
    let mut bench = Bench::sealed();
    // Where its own program is it does not know.
    bench.refuses(Call::new(What::Start), Errno::NOENT);
    for by in [0, std::process::id().into(), 1 << 40] {
        let other = by_path_of(by);
        let end = bench.asked(other).map(|answer| answer.text);
        assert!(end.is_err() && bench.broker.next.is_none(), "{by}: {end:?}");
    }
    let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("a process");
    for signal in [0, libc::SIGTERM, libc::SIGKILL] {
        let call =
            Call { numbers: [child.id().into(), signal as u64, 0, 0], ..Call::new(What::Next) };
        bench.refuses(call, Errno::SRCH);
    }
    assert!(child.try_wait().expect("asked").is_none(), "it lives");
    next::end(&mut child);
}

#[test]
fn an_asker_is_told_by_this_servers_name_alone() {
    use std::os::linux::net::SocketAddrExt;
    let mut bench = Bench::sealed();
    let name = format!("ringtap-upgrade-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).expect("a name");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    let call = Call { first: b"another", second: b"ok 7", ..Call::new(What::Tell) };
    bench.asked(call).expect("told");
    let mut text = [0; 16];
    assert_eq!(socket.recv(&mut text).expect("heard"), 4);
    drop(socket);
    bench.refuses(call, Errno::CONNREFUSED);
}

#[test]
fn no_more_calls_wait_than_there_may() {
    let bench = Bench::sealed();
    let (blocked, waits) = std::sync::mpsc::channel::<()>();
    let waits = Arc::new(std::sync::Mutex::new(waits));
    let answered: Vec<_> = (0..=WAITING)
        .map(|_| {
            let (ours, theirs) = pair().expect("sockets");
            let waits = waits.clone();
            let work = move || {
                let _ = waits.lock().map(|waits| waits.recv());
                Ok(Answer::default())
            };
            bench.broker.later(Box::new(work), theirs);
            ours
        })
        .collect();
    let last = answered.last().expect("the last");
    let error = Answer::receive(last).and_then(Answer::result).expect_err("one too many");
    assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
    drop(blocked);
    for one in &answered[..WAITING] {
        Answer::receive(one).and_then(Answer::result).expect("carried out");
    }
}

/// The kernel waits for who made a ring as that ends, so that is nobody who may be at something else.
#[test]
fn who_makes_a_ring_has_ended_when_it_is_there() {
    static MAKER: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);
    fn ring(_: bool) -> io::Result<OwnedFd> {
        MAKER.store(rustix::thread::gettid().as_raw_nonzero().get(), SeqCst);
        Ok(File::open("/dev/null")?.into())
    }
    beside(|| ring(false)).expect("made");
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    let maker = MAKER.load(SeqCst);
    assert!(maker != 0 && maker != own);
    let task = PathBuf::from(format!("/proc/self/task/{maker}"));
    let until = Instant::now() + Duration::from_secs(60);
    while task.exists() {
        assert!(Instant::now() < until, "its thread lives on");
        std::thread::sleep(Duration::from_millis(1));
    }
    fn panics() -> io::Result<OwnedFd> {
        panic!("no ring today");
    }
    assert_eq!(beside(panics).expect_err("an error").raw_os_error(), Some(libc::EIO));
}
