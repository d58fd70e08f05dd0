//! What others have published of pairs of backends, as data: `findings.rs` asks it again.

use Published::{AtMost, Direction, Equal, Nothing, Ratio};

use crate::sample::{Metric, Stage};

/// A published claim: `arm` beside `against` is better or worse.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Where it can be asked.
    pub stages: &'static [Stage],
    /// Which arm.
    pub arm: &'static str,
    /// Against which.
    pub against: &'static str,
    /// In which workload.
    pub workload: &'static str,
    /// By which metrics.
    pub metrics: &'static [Metric],
    /// What was published of it.
    pub published: Published,
}

/// What was published of a pair, as times as good.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Published {
    /// From and to; the same twice where it was one figure.
    Ratio(f64, f64),
    /// As good as equal: this ratio.
    Equal(f64),
    /// At most so many times as good: the other's figure was a bound.
    AtMost(f64),
    /// Charts without figures: worse (or better).
    Direction {
        /// Which way.
        worse: bool,
    },
    /// Nothing: the pair is Ringtap's own question.
    Nothing,
}

/// What is told of an arm by itself.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Where.
    pub stages: &'static [Stage],
    /// In which workload.
    pub workload: &'static str,
    /// By which metrics.
    pub metrics: &'static [Metric],
}

/// What one of two loads at once was published to keep of what it has alone.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Where.
    pub stage: Stage,
    /// On which arm.
    pub arm: &'static str,
    /// In which workload.
    pub workload: &'static str,
    /// What it keeps.
    pub metric: Metric,
    /// From and to, as shares.
    pub published: (f64, f64),
}

/// A question that was published, with its claims.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Its name, for flags.
    pub name: &'static str,
    /// The question.
    pub question: &'static str,
    /// What was published.
    pub published: &'static str,
    /// What the arms did by themselves.
    pub told: &'static [Told],
    /// Arms of which it was published that two loads get less each than one alone.
    pub shared: &'static [Shared],
    /// Its claims.
    pub claims: &'static [Claim],
}

const BONNIE: &str = "bonnie-direct";
const TWO_BONNIE: &str = "two-bonnie";
const LATENCY: &str = "dd-latency-direct";
const WORSE: Published = Direction { worse: true };
/// Each guest's columns, alone and beside the other.
const OF_FIRST: &[Metric] = &[
    Metric::FirstPutAlone,
    Metric::FirstPut,
    Metric::FirstPutKeeps,
    Metric::FirstRewriteAlone,
    Metric::FirstRewrite,
    Metric::FirstRewriteKeeps,
    Metric::FirstGetAlone,
    Metric::FirstGet,
    Metric::FirstGetKeeps,
    Metric::FirstSeeksAlone,
    Metric::FirstSeeks,
    Metric::FirstSeeksKeeps,
];
const OF_SECOND: &[Metric] = &[
    Metric::SecondPutAlone,
    Metric::SecondPut,
    Metric::SecondPutKeeps,
    Metric::SecondRewriteAlone,
    Metric::SecondRewrite,
    Metric::SecondRewriteKeeps,
    Metric::SecondGetAlone,
    Metric::SecondGet,
    Metric::SecondGetKeeps,
    Metric::SecondSeeksAlone,
    Metric::SecondSeeks,
    Metric::SecondSeeksKeeps,
];
/// Rates with the slowest operation of each.
const WITH_SLOWEST: &[Metric] = &[
    Metric::PutBlock,
    Metric::PutBlockSlowest,
    Metric::Rewrite,
    Metric::RewriteSlowest,
    Metric::GetBlock,
    Metric::GetBlockSlowest,
    Metric::Seeks,
    Metric::SeeksSlowest,
];
/// Stages inside a guest.
pub const VM: &[Stage] = &[Stage::Vm, Stage::Guest];
const GUESTS: &[Stage] = &[Stage::TwoVms, Stage::TwoGuests, Stage::Xen];
const PAIRS: &[Stage] = &[Stage::TwoVms, Stage::TwoGuests, Stage::Two];
const EVEN: &[Metric] = &[
    Metric::SumIops,
    Metric::Keeps,
    Metric::SecondKeeps,
    Metric::FirstShare,
    Metric::Jain,
    Metric::P99Factor,
    Metric::SecondP99Factor,
];
const BLOCKS: &[Metric] = &[Metric::PutBlock, Metric::Rewrite, Metric::GetBlock, Metric::Seeks];

const fn claim(
    arm: &'static str,
    against: &'static str,
    metrics: &'static [Metric],
    published: Published,
) -> Claim {
    Claim { stages: VM, arm, against, workload: BONNIE, metrics, published }
}

/// All of them.
pub const QUESTIONS: &[Question] = &[
    Question {
        name: "file-lvm",
        question: "A file against LVM",
        published: "a file (loop) writes blocks at 18–23 MB/s where LVM writes 107–120, reads at 122–154 where LVM reads 150–159, \
                    and swings more",
        told: &[],
        shared: &[],
        claims: &[
            claim("loop", "lvm", &[Metric::PutBlock], Ratio(0.17, 0.19)),
            claim("loop", "lvm", &[Metric::GetBlock], Ratio(0.81, 0.97)),
            reads("loop", "lvm", Ratio(0.81, 0.97)),
            claim("loop", "lvm", &[Metric::Seeks], Ratio(0.79, 0.91)),
            claim("ringtap-vhost", "lvm", BLOCKS, Nothing),
        ],
    },
    Question {
        name: "loop-tap",
        question: "Loop against the tap",
        published: "loop reads from the host's cache (938 MB/s against 132) at a high cost of CPU and writes blocks at a fifth of \
                    the tap's rate; the tap is balanced",
        told: &[],
        shared: &[],
        claims: &[
            claim("ringtap-vhost", "loop", &[Metric::PutBlock], Ratio(5.18, 5.18)),
            claim("ringtap-vhost", "loop", &[Metric::Rewrite], Ratio(0.19, 0.19)),
            claim("ringtap-vhost", "loop", &[Metric::GetBlock], Ratio(0.14, 0.14)),
            reads("ringtap-vhost", "loop", Ratio(0.14, 0.14)),
            claim("ringtap-vhost", "loop", &[Metric::Seeks], AtMost(0.016)),
        ],
    },
    Question {
        name: "snapshot",
        question: "A fresh snapshot",
        published: "a volume with a fresh LVM snapshot writes blocks at 12–18 MB/s instead of 107–120, and at 57–65 once what is \
                    written has been copied",
        told: &[
            Told {
                stages: VM,
                workload: "snapshot-life",
                metrics: &[Metric::FreshWrite, Metric::SettledWrite, Metric::FirstWriteCost],
            },
            Told {
                stages: VM,
                workload: "bonnie-runs",
                metrics: &[
                    Metric::FreshWrite,
                    Metric::SettledWrite,
                    Metric::FirstWriteCost,
                    Metric::GetBlock,
                ],
            },
        ],
        shared: &[],
        claims: &[
            claim("lvm-snapshot", "lvm", &[Metric::PutBlock], Ratio(0.11, 0.15)),
            Claim {
                stages: VM,
                arm: "ringtap-overlay",
                against: "lvm-snapshot",
                workload: "snapshot-life",
                metrics: &[Metric::FreshWrite, Metric::SettledWrite],
                published: Nothing,
            },
            small("lvm-snapshot", "lvm", Direction { worse: true }),
            small("ringtap-overlay", "lvm-snapshot", Nothing),
            small("ringtap-overlay", "virtio-overlay", Nothing),
        ],
    },
    Question {
        name: "two-guests",
        question: "Two guests on one disk",
        published: "on files both got 8–11 MB/s of block writes instead of 18–23 alone, and one of them 15–30 % less than the other",
        told: &[
            Told { stages: PAIRS, workload: "two-write", metrics: EVEN },
            Told { stages: PAIRS, workload: "two-read", metrics: EVEN },
            Told { stages: GUESTS, workload: TWO_BONNIE, metrics: OF_FIRST },
            Told { stages: GUESTS, workload: TWO_BONNIE, metrics: OF_SECOND },
            Told {
                stages: PAIRS,
                workload: "quiet-read",
                metrics: &[
                    Metric::AloneIops,
                    Metric::Keeps,
                    Metric::P99Factor,
                    Metric::SecondKeeps,
                    Metric::SecondP99Factor,
                ],
            },
        ],
        shared: &[
            keeps(Stage::TwoVms, "two-write", Metric::Keeps, 0.42, 0.50),
            keeps(Stage::TwoGuests, "two-write", Metric::Keeps, 0.42, 0.50),
            keeps(Stage::Two, "two-write", Metric::Keeps, 0.42, 0.50),
            keeps(Stage::TwoVms, TWO_BONNIE, Metric::FirstPutKeeps, 0.39, 0.61),
            keeps(Stage::TwoVms, TWO_BONNIE, Metric::SecondPutKeeps, 0.35, 0.61),
            keeps(Stage::TwoVms, TWO_BONNIE, Metric::FirstGetKeeps, 0.37, 0.70),
            keeps(Stage::TwoVms, TWO_BONNIE, Metric::SecondGetKeeps, 0.36, 0.98),
            keeps(Stage::TwoVms, TWO_BONNIE, Metric::FirstSeeksKeeps, 0.38, 0.72),
            keeps(Stage::TwoVms, TWO_BONNIE, Metric::SecondSeeksKeeps, 0.37, 1.13),
        ],
        claims: &[
            both("ringtap-vhost", "loop", &[Metric::PutBlock, Metric::GetBlock]),
            both("ringtap-vhost", "lvm", &[Metric::PutBlock, Metric::GetBlock]),
            pair(Stage::TwoVms, "ringtap-vhost", "loop", "two-write", Metric::SumIops),
            pair(Stage::TwoVms, "ringtap-vhost", "lvm", "two-write", Metric::SumIops),
            pair(Stage::TwoVms, "ringtap-vhost", "loop", "quiet-read", Metric::Keeps),
            pair(Stage::TwoVms, "ringtap-vhost", "lvm", "quiet-read", Metric::Keeps),
            pair(Stage::TwoGuests, "ringtap-vhost", "loop", "two-write", Metric::SumIops),
            pair(Stage::TwoGuests, "ringtap-vhost", "lvm", "two-write", Metric::SumIops),
            pair(Stage::TwoGuests, "ringtap-vhost", "loop", "quiet-read", Metric::Keeps),
            pair(Stage::TwoGuests, "ringtap-vhost", "lvm", "quiet-read", Metric::Keeps),
            pair(Stage::Two, "ringtap-nbd", "loop", "two-write", Metric::SumIops),
            pair(Stage::Two, "ringtap-nbd", "loop", "quiet-read", Metric::Keeps),
        ],
    },
    Question {
        name: "emulation",
        question: "Emulation against paravirtual disks",
        published: "an IDE disk by full emulation is far behind virtio; Xen's paravirtual disk the best of the three",
        told: &[],
        shared: &[],
        claims: &[
            dd("ide", "virtio-raw", "dd-throughput", Metric::Bandwidth, Direction { worse: true }),
            dd(
                "ide",
                "virtio-raw",
                "dd-latency-direct",
                Metric::TimePerOp,
                Direction { worse: true },
            ),
            dd("virtio-raw", "virtio-default", "dd-latency-direct", Metric::TimePerOp, Nothing),
            dd("ide", "ide-writeback", "dd-latency-direct", Metric::TimePerOp, Nothing),
            dd("ringtap-vhost", "virtio-raw", "dd-throughput", Metric::Bandwidth, Nothing),
            dd("ringtap-vhost", "virtio-raw", "dd-latency-direct", Metric::TimePerOp, Nothing),
            dd("virtio-cache-off", "virtio-default", LATENCY, Metric::TimePerOp, Nothing),
            dd("ide-cache-off", "ide-writeback", LATENCY, Metric::TimePerOp, Nothing),
            xen("hvm-ide", "phy-lvm", "dd-throughput", &[Metric::Bandwidth], WORSE),
            xen("hvm-ide", "phy-lvm", LATENCY, &[Metric::TimePerOp], WORSE),
            xen("hvm-pv", "hvm-ide", LATENCY, &[Metric::TimePerOp], Nothing),
            xen("hvm-ide-cache-off", "hvm-ide", LATENCY, &[Metric::TimePerOp], Nothing),
        ],
    },
    Question {
        name: "native-xen",
        question: "Native against a Xen PV guest",
        published: "a PV guest with the same memory and one processor copies files, writes and reads blocks as fast as the native \
                    system, seeks 7 % less often, and takes 7 % longer for find | cpio over 24,000 files",
        told: &[Told { stages: &[Stage::Xen], workload: BONNIE, metrics: WITH_SLOWEST }],
        shared: &[],
        claims: &[
            xen("phy-lvm", "native", "filecopy", &[Metric::Copy256], Equal(1.004)),
            xen("phy-lvm", "native", "filecopy", &[Metric::Copy1024], Equal(1.026)),
            xen("phy-lvm", "native", "filecopy", &[Metric::Copy4096], Equal(1.004)),
            xen("phy-lvm", "native", BONNIE, &[Metric::PutBlock], Equal(1.023)),
            xen("phy-lvm", "native", BONNIE, &[Metric::Rewrite], Equal(1.010)),
            xen("phy-lvm", "native", BONNIE, &[Metric::GetBlock], Equal(1.000)),
            xen("phy-lvm", "native", BONNIE, &[Metric::Seeks], Ratio(0.93, 0.93)),
            xen("phy-lvm", "native", "archive", &[Metric::Elapsed], Ratio(0.93, 0.93)),
            xen("tap-raw", "phy-lvm", BONNIE, &[Metric::PutBlock, Metric::GetBlock], Nothing),
            xen("tap-raw", "phy-lvm", "archive", &[Metric::Elapsed], Nothing),
        ],
    },
    Question {
        name: "archive",
        question: "Archiving a tree",
        published: "find | cpio over 24,000 files takes 7 % longer on a paravirtual disk than natively",
        told: &[],
        shared: &[],
        claims: &[
            dd("ringtap-vhost", "virtio-raw", "archive", Metric::Elapsed, Nothing),
            dd("loop", "lvm", "archive", Metric::Elapsed, Nothing),
        ],
    },
];

/// A pair of Xen's stage.
const fn xen(
    arm: &'static str,
    against: &'static str,
    workload: &'static str,
    metrics: &'static [Metric],
    published: Published,
) -> Claim {
    Claim { stages: &[Stage::Xen], arm, against, workload, metrics, published }
}

/// bonnie++ in two virtual PCs at once: what both get together.
const fn both(arm: &'static str, against: &'static str, metrics: &'static [Metric]) -> Claim {
    let stages: &[Stage] = &[Stage::TwoVms];
    Claim { stages, arm, against, workload: TWO_BONNIE, metrics, published: Nothing }
}

/// What one of two on files keeps.
const fn keeps(stage: Stage, workload: &'static str, metric: Metric, from: f64, to: f64) -> Shared {
    Shared { stage, arm: "loop", workload, metric, published: (from, to) }
}

const fn pair(
    stage: Stage,
    arm: &'static str,
    against: &'static str,
    workload: &'static str,
    metric: Metric,
) -> Claim {
    let stages: &[Stage] = match stage {
        Stage::Two => &[Stage::Two],
        Stage::TwoVms => &[Stage::TwoVms],
        _ => &[Stage::TwoGuests],
    };
    let metrics: &[Metric] =
        if matches!(metric, Metric::Keeps) { &[Metric::Keeps] } else { &[Metric::SumIops] };
    Claim { stages, arm, against, workload, metrics, published: Published::Nothing }
}

/// Writes of 4 KiB right after the snapshot was taken.
const fn small(arm: &'static str, against: &'static str, published: Published) -> Claim {
    let metrics: &[Metric] = &[Metric::Iops];
    Claim { stages: VM, arm, against, workload: "randwrite-4k-qd32", metrics, published }
}

/// Published of bonnie++'s block reads; asked of fio's, too.
const fn reads(arm: &'static str, against: &'static str, published: Published) -> Claim {
    let metrics: &[Metric] = &[Metric::Bandwidth];
    Claim { stages: VM, arm, against, workload: "read-1m-qd8", metrics, published }
}

const fn dd(
    arm: &'static str,
    against: &'static str,
    workload: &'static str,
    metric: Metric,
    published: Published,
) -> Claim {
    let metrics: &[Metric] = match metric {
        Metric::Bandwidth => &[Metric::Bandwidth],
        Metric::Elapsed => &[Metric::Elapsed],
        _ => &[Metric::TimePerOp],
    };
    Claim { stages: VM, arm, against, workload, metrics, published }
}
