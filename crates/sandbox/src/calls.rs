//! Which system calls are let through, by seccomp. What is not named here fails with EPERM.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Cmp, SeccompCondition,
    SeccompFilter, SeccompRule, apply_filter_all_threads,
};

/// What depends on how the server works.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// It has rings.
    pub(crate) rings: bool,
    /// It makes sockets itself: it has no broker, or a library does.
    pub(crate) sockets: bool,
    /// It binds sockets itself, which have a mode: it has no broker.
    pub(crate) modes: bool,
}

/// Descriptors and memory that are there, threads, time.
const USUAL: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_syncfs,
    libc::SYS_sync_file_range,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_memfd_create,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mlockall,
    libc::SYS_munlockall,
    libc::SYS_brk,
    libc::SYS_membarrier,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    // Answered with ENOSYS: its flags lie in memory, where no filter looks. Who asks takes `clone` then.
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getpriority,
    libc::SYS_getcpu,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_capget,
    libc::SYS_getrusage,
    libc::SYS_getrlimit,
    libc::SYS_setrlimit,
    libc::SYS_times,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // A second wall inside this one.
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
];

/// Files by their names: landlock says which. It looks at no change of a mode, an owner or an attribute, so there is none.
const FILES: &[libc::c_long] = &[
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_readlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_umask,
    libc::SYS_getxattr,
    libc::SYS_fgetxattr,
    libc::SYS_lgetxattr,
    libc::SYS_listxattr,
    libc::SYS_flistxattr,
    libc::SYS_name_to_handle_at,
];

/// The same, of machines that have had them for long.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = &[
    libc::SYS_creat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_unlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_mknod,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_arch_prctl,
    libc::SYS_time,
    libc::SYS_getpgrp,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

/// Sockets that are there.
const CONNECTED: &[libc::c_long] = &[
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
];

const NEW_SOCKETS: &[libc::c_long] = &[libc::SYS_socket, libc::SYS_bind, libc::SYS_connect];

const MODES: &[libc::c_long] = &[libc::SYS_fchmod];

const RINGS: &[libc::c_long] =
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

fn backend(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, error.to_string())
}

/// A rule that looks at the lower half of an argument.
fn masked(argument: u8, mask: u32, value: u32) -> Result<SeccompRule, seccompiler::BackendError> {
    let cmp = Cmp::MaskedEq(u64::from(mask));
    SeccompRule::new(vec![SeccompCondition::new(argument, Len::Dword, cmp, u64::from(value))?])
}

fn equal(argument: u8, value: u32) -> Result<SeccompRule, seccompiler::BackendError> {
    masked(argument, u32::MAX, value)
}

fn none_of(argument: u8, values: &[u64]) -> Result<SeccompRule, seccompiler::BackendError> {
    let not = |value: &u64| SeccompCondition::new(argument, Len::Dword, Cmp::Ne, *value);
    SeccompRule::new(values.iter().map(not).collect::<Result<_, _>>()?)
}

type Rules = BTreeMap<libc::c_long, Vec<SeccompRule>>;

fn rules(wanted: Wanted) -> Result<Rules, seccompiler::BackendError> {
    let mut lists = vec![USUAL, FILES, OLDER, CONNECTED];
    lists.extend(wanted.rings.then_some(RINGS));
    lists.extend(wanted.sockets.then_some(NEW_SOCKETS));
    lists.extend(wanted.modes.then_some(MODES));
    let mut rules: Rules = lists.into_iter().flatten().map(|call| (*call, vec![])).collect();
    of_files(&mut rules)?;
    // No code but what is there already.
    let exec = libc::PROT_EXEC as u32;
    rules.insert(libc::SYS_mmap, vec![masked(2, exec, 0)?]);
    rules.insert(libc::SYS_mprotect, vec![masked(2, exec, 0)?]);
    // Threads, and no processes.
    let thread = libc::CLONE_THREAD as u32;
    rules.insert(libc::SYS_clone, vec![masked(0, thread, thread)?]);
    // Signals to itself, as `abort` sends one.
    let own = std::process::id();
    rules.insert(libc::SYS_tgkill, vec![equal(0, own)?]);
    // None at all: to learn whether a process is there, whose lock it would be.
    rules.insert(libc::SYS_kill, vec![equal(0, own)?, equal(1, 0)?]);
    // What is asked, and set, of its own threads: those of no other process.
    for call in [
        libc::SYS_prlimit64,
        libc::SYS_sched_setaffinity,
        libc::SYS_sched_getparam,
        libc::SYS_sched_getscheduler,
        libc::SYS_get_robust_list,
    ] {
        rules.insert(call, vec![equal(0, 0)?, equal(0, own)?]);
    }
    // No signals by the kernel's hand, of which it asks nobody before 6.12.
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    let owners = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX].map(|it| it as u64);
    rules.insert(libc::SYS_fcntl, vec![none_of(1, &owners)?]);
    const FIOSETOWN: u64 = 0x8901;
    const SIOCSPGRP: u64 = 0x8902;
    // Nothing typed into a terminal that it may have inherited.
    let refused = [libc::TIOCSTI, libc::TIOCLINUX, FIOSETOWN, SIOCSPGRP];
    rules.insert(libc::SYS_ioctl, vec![none_of(1, &refused)?]);
    // A pair that reaches nobody else: a datagram goes to whoever is named.
    let is = |argument, value| SeccompCondition::new(argument, Len::Dword, Cmp::Eq, value);
    let kind = |kind: i32| {
        let of_kind = Cmp::MaskedEq(0xf);
        let kind = SeccompCondition::new(1, Len::Dword, of_kind, kind as u64)?;
        SeccompRule::new(vec![is(0, libc::AF_UNIX as u64)?, kind])
    };
    let pairs = vec![kind(libc::SOCK_STREAM)?, kind(libc::SOCK_SEQPACKET)?];
    rules.insert(libc::SYS_socketpair, pairs);
    const NAME_MEMORY: i32 = 0x5356_4d41;
    let prctls = [
        libc::PR_SET_NAME,
        libc::PR_GET_NAME,
        libc::PR_SET_TIMERSLACK,
        libc::PR_GET_TIMERSLACK,
        libc::PR_CAPBSET_READ,
        libc::PR_SET_NO_NEW_PRIVS,
        NAME_MEMORY,
    ];
    let prctls: Result<Vec<_>, _> = prctls.into_iter().map(|it| equal(0, it as u32)).collect();
    let mut prctls = prctls?;
    // Nobody looks into it from then on, for it has secrets; never the other way round.
    prctls.push(SeccompRule::new(vec![is(0, libc::PR_SET_DUMPABLE as u64)?, is(1, 0)?])?);
    rules.insert(libc::SYS_prctl, prctls);
    Ok(rules)
}

/// How files are opened, of those calls whose arguments decide.
fn of_files(rules: &mut Rules) -> Result<(), seccompiler::BackendError> {
    // Opened for neither reading nor writing (3) landlock would let it pass, and `ioctl` works. openat2 has its flags in memory,
    // where no filter looks; who asks does without (`walk.rs`).
    let opened = |flags: u8| {
        let these = [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR].into_iter();
        these
            .map(|it| masked(flags, libc::O_ACCMODE as u32, it as u32))
            .collect::<Result<Vec<_>, _>>()
    };
    rules.insert(libc::SYS_openat, opened(2)?);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, opened(1)?);
    // To see whether it is there.
    let held = libc::O_PATH as u32;
    rules.insert(libc::SYS_open_by_handle_at, vec![masked(2, held, held)?]);
    // The times of a file that is open.
    let nothing = SeccompCondition::new(1, Len::Qword, Cmp::Eq, 0)?;
    rules.insert(libc::SYS_utimensat, vec![SeccompRule::new(vec![nothing])?]);
    Ok(())
}

fn program(rules: Rules, others: SeccompAction, these: SeccompAction) -> io::Result<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into().map_err(backend)?;
    let filter = SeccompFilter::new(rules, others, these, arch).map_err(backend)?;
    filter.try_into().map_err(backend)
}

/// From now on this process makes no other system calls.
pub(crate) fn restrict(wanted: Wanted) -> io::Result<()> {
    let errno = |errno: i32| SeccompAction::Errno(errno as u32);
    let rules = rules(wanted).map_err(backend)?;
    let listed = program(rules, errno(libc::EPERM), SeccompAction::Allow)?;
    let none = Rules::from([(libc::SYS_clone3, vec![])]);
    let absent = program(none, SeccompAction::Allow, errno(libc::ENOSYS))?;
    for filter in [absent, listed] {
        apply_filter_all_threads(&filter).map_err(backend)?;
    }
    Ok(())
}
