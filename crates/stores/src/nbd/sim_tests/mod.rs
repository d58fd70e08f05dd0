//! The client on a simulated network, before a server that delays, reorders and fails, says that it is shutting down while it
//! still works, and is killed; at the end the power goes. What was acknowledged is there, nothing else appears, and what was
//! in flight on one connection is never carried out after what was sent on the next. `RINGTAP_SEEDS` sets how many seeds
//! are tried; a failure names its seed.

mod server;
mod stream;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};

use ringtap_io::{File, Io, Mem, Op, OpenRemote, Tasks};
use ringtap_sim::{
    Ask, Device, Disk, Guest, Promise, SECTOR, Sim, is_power_cut, random_asks, seeds, stamps,
};

use super::channel::Channel;
use super::dial::Connection;
use super::handshake::{ALLOCATION, Agreed, Replies};
use super::near::Places;
use super::redial::{Attempt, News};
use super::wire::can;
use super::{Nbd, Shared, Uri};
use server::Export;
pub(super) use stream::Stream;

/// Who wants a connection.
pub(super) type Wishes = Mutex<Vec<Weak<Attempt>>>;

const SECTORS: u64 = 96;
const SIZE: u64 = SECTORS * SECTOR as u64;
const SLOTS: usize = 6;
const ASKS: usize = 60;
/// More turns than any run has that goes on.
const TURNS: usize = 400_000;

/// The store as a guest sees it.
struct Plain(File);

impl Device for Plain {
    type Error = i32;

    async fn serve(&self, io: &Io, ask: &Ask, mem: Mem) -> Result<(), i32> {
        let file = self.0;
        let bytes = |sectors: u64| sectors * SECTOR as u64;
        match ask {
            Ask::Read(range) => {
                let read = io.read(file, bytes(range.start), mem).await?;
                if read == mem.len() { Ok(()) } else { Err(libc::ENODATA) }
            }
            Ask::Write { range, durable } => {
                io.write(file, bytes(range.start), mem, *durable).await
            }
            Ask::Zero { range, unmap, durable } => {
                let (offset, len) = (bytes(range.start), bytes(range.end - range.start));
                let op = match unmap {
                    true => Op::PunchHole { file, offset, len },
                    false => Op::ZeroRange { file, offset, len },
                };
                match io.to_the_end(op).await {
                    Err(libc::EOPNOTSUPP) => {
                        let mut zeros = io.buffer(len as usize)?;
                        zeros.bytes_mut().fill(0);
                        io.write(file, offset, zeros.mem(), *durable).await
                    }
                    Ok(()) if *durable => io.sync(file).await,
                    end => end,
                }
            }
            Ask::Discard(range) => {
                let (offset, len) = (bytes(range.start), bytes(range.end - range.start));
                match io.to_the_end(Op::Forget { file, offset, len }).await {
                    Err(libc::EOPNOTSUPP) => Ok(()),
                    end => end,
                }
            }
            Ask::Flush => io.sync(file).await,
        }
    }
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    connections: usize,
    kills: usize,
    left: usize,
    given_up: usize,
    failed: usize,
}

/// A client, a server on another host, and what is between them.
struct World {
    rng: fastrand::Rng,
    seed: u64,
    near: Disk,
    clients: Vec<Tasks>,
    nbd: Arc<Nbd>,
    remote: OpenRemote,
    guest: Guest,
    far: Disk,
    file: File,
    /// None where its process is gone.
    server: Option<(Tasks, Rc<Export>)>,
    /// The server's ends of connections.
    ends: Vec<File>,
    wishes: Vec<(Weak<Attempt>, bool)>,
    /// One turn in so many ends with the server being killed; 0 is never.
    kills: u32,
    leaves: u32,
    count: Count,
}

fn agreed(rng: &mut fastrand::Rng) -> Agreed {
    let mut can = can::HAS_FLAGS | can::MULTI_CONN;
    for (flag, odds) in [
        (can::FLUSH, 8),
        (can::FUA, 2),
        (can::TRIM, 4),
        (can::WRITE_ZEROES, 4),
        (can::FAST_ZERO, 2),
    ] {
        // All but one in so many have it.
        can |= if rng.u8(0..odds) > 0 { flag } else { 0 };
    }
    let replies = [Replies::Simple, Replies::Structured, Replies::Extended][rng.usize(0..3)];
    let most = [2048, 8192, 1 << 20][rng.usize(0..3)];
    Agreed { size: SIZE, can, block: 1, preferred: 4096, most, replies, status: None }
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = fastrand::Rng::with_seed(seed);
        let agreed = agreed(&mut rng);
        let far = Disk::new(if rng.bool() { 4096 } else { SECTOR });
        let file = far.add_file(SIZE, 1);
        let nbd = Arc::new(Nbd {
            // Time is what the test says it is.
            uri: Uri::parse("nbd://simulated/?reconnect=1000000").expect("a URI"),
            status: ALLOCATION.to_owned(),
            tls: None,
            agreed,
            lies_in: Mutex::default(),
            shared: Mutex::new(Shared::default()),
            closed: AtomicBool::new(false),
            closing: Default::default(),
            places: Places::new(3),
            wishes: Some(Mutex::default()),
        });
        let near = Disk::new(SECTOR);
        let queues = 1 + seed % 2;
        let client = |queue| Tasks::new(Box::new(Sim::new(&near, seed ^ (queue << 32))));
        let clients: Vec<Tasks> = (0..queues).map(client).collect();
        let remote = OpenRemote::new(nbd.clone());
        let kills = [0, 300, 1500][rng.usize(0..3)];
        let leaves = [0, 12, 40][rng.usize(0..3)];
        World {
            rng,
            seed,
            near,
            clients,
            nbd,
            remote,
            guest: Guest::new(SECTORS, Promise::Flush),
            far,
            file,
            server: None,
            ends: vec![],
            wishes: vec![],
            kills,
            leaves,
            count: Count::default(),
        }
    }

    fn start_server(&mut self) {
        let (guest, file, mut turns) = (self.guest.clone(), self.file, 0);
        let sim = Sim::new(&self.far, self.rng.u64(..)).at_every_turn(move |cut| {
            turns += 1;
            if turns % 16 == 0 {
                guest.check_raw_outcomes(cut, file);
            }
        });
        let export = Rc::new(Export {
            disk: self.far.clone(),
            file,
            agreed: self.nbd.agreed,
            rng: RefCell::new(fastrand::Rng::with_seed(self.rng.u64(..))),
            leaves: self.leaves,
            left: Cell::new(0),
        });
        self.server = Some((Tasks::new(Box::new(sim)), export));
    }

    fn connect(&mut self) -> Option<Connection> {
        let (tasks, export) = self.server.as_mut()?;
        let (near, far) = self.near.connect(&self.far);
        self.ends.push(far);
        tasks.spawn(export.clone().converse(tasks.io().clone(), far));
        self.count.connections += 1;
        let channel = Channel::simulated(Stream::new(&self.near, near, self.rng.u64(..)));
        // Of a socket there is nothing but its descriptor.
        let socket = std::fs::File::open("/dev/null").expect("a descriptor").into();
        Some(Connection { channel, agreed: self.nbd.agreed, lies_in: vec![], socket })
    }

    /// Its process is gone, and its connections with it; what was in flight has happened in part.
    fn kill_server(&mut self) {
        let Some((mut tasks, export)) = self.server.take() else { return };
        self.far.cut_power_at_turn(0);
        let end = tasks.turn(false);
        assert!(end.is_err_and(|error| is_power_cut(&error)));
        for end in self.ends.drain(..) {
            self.far.close(end);
        }
        drop(tasks);
        self.count.left += export.left.get();
        self.count.kills += 1;
        self.far = self.far.after_kill(self.rng.u64(..));
    }

    /// Somebody wants a connection: there is one, or there is none for too long, or nothing happens yet.
    fn dial(&mut self) {
        if let Some(wishes) = &self.nbd.wishes {
            let new = std::mem::take(&mut *wishes.lock().expect("the lock"));
            self.wishes.extend(new.into_iter().map(|wish| (wish, false)));
        }
        self.wishes.retain(|(wish, _)| wish.strong_count() > 0);
        for index in (0..self.wishes.len()).rev() {
            if self.rng.u8(0..8) > 0 {
                continue;
            }
            let Some(wish) = self.wishes[index].0.upgrade() else { continue };
            if let Some(connection) = self.connect() {
                self.wishes.swap_remove(index);
                wish.tell(News::Connected(Box::new(connection)));
            } else if self.rng.u8(0..8) == 0 && !self.wishes[index].1 {
                self.wishes[index].1 = true;
                self.count.given_up += 1;
                wish.tell(News::TooLong("nobody is there".into()));
            }
        }
    }

    fn run(&mut self) {
        let device = Rc::new(Plain(self.remote.handle()));
        let mut asks = random_asks(&mut self.rng, SECTORS, ASKS);
        // So long that their data goes where it belongs at once.
        for _ in 0..3 {
            let place = self.rng.usize(0..asks.len());
            asks.insert(place, Ask::Read(0..SECTORS));
        }
        let slots = SLOTS / self.clients.len();
        let mut asks = Some(asks);
        for tasks in &mut self.clients {
            self.guest.spawn(tasks, &device, slots, asks.take().unwrap_or_default());
        }
        self.start_server();
        for _ in 0..TURNS {
            for tasks in &mut self.clients {
                tasks.run_ready();
                tasks.turn(false).expect("the simulation runs");
                tasks.run_ready();
            }
            if self.clients.iter().all(|tasks| tasks.count() == 0) {
                return;
            }
            match &mut self.server {
                Some((tasks, _)) => {
                    tasks.run_ready();
                    tasks.turn(false).expect("the simulation runs");
                }
                None if self.rng.u8(0..60) == 0 => self.start_server(),
                None => {}
            }
            if self.kills > 0 && self.rng.u32(0..self.kills) == 0 {
                self.kill_server();
            }
            self.dial();
        }
        panic!("seed {}: requests wait and nothing happens: {:?}", self.seed, self.count);
    }

    /// What the disk holds is what the guest may find, and so it is after a power cut.
    fn check(&mut self) {
        let seed = self.seed;
        if let Some(wrong) = self.guest.wrong() {
            panic!("seed {seed}: {wrong}");
        }
        let look = |disk: &Disk| {
            let mut found = vec![0; SIZE as usize];
            disk.peek(self.file, 0, &mut found);
            found
        };
        let model = self.guest.model();
        let values = stamps(&look(&self.far), 0).unwrap_or_else(|it| panic!("seed {seed}: {it}"));
        for (sector, value) in (0..).zip(values) {
            let may = model.may_read(sector);
            assert!(
                may.contains(&value),
                "seed {seed}: sector {sector}: {value} is none of {may:?}"
            );
        }
        drop(model);
        for cut in 0..4 {
            let left = self.far.after_power_cut(cut);
            if let Err(wrong) = self.guest.after_power_cut(&look(&left)) {
                panic!("seed {seed}, cut {cut}: {wrong}");
            }
        }
        for failure in self.guest.failures() {
            assert_eq!(failure.error, libc::EIO.to_string(), "seed {seed}: {failure:?}");
        }
        self.count.failed = self.guest.failures().len();
        self.count.left += self.server.as_ref().map_or(0, |(_, export)| export.left.get());
    }
}

#[test]
fn what_was_acknowledged_is_there_and_nothing_else_appears() {
    let mut all = Count::default();
    let (mut ran, mut quiet) = (0, 0);
    for seed in seeds(120) {
        let mut world = World::new(seed);
        world.run();
        world.check();
        let count = world.count;
        if count.kills == 0 && world.kills == 0 {
            quiet += 1;
        }
        all.connections += count.connections;
        all.kills += count.kills;
        all.left += count.left;
        all.given_up += count.given_up;
        all.failed += count.failed;
        ran += 1;
    }
    println!("{ran} runs, {quiet} of them without kills: {all:?}");
    if ran > 50 {
        let each = [all.kills, all.left, all.given_up, all.failed];
        assert!(each.iter().all(|count| *count > ran / 10), "{all:?}");
    }
}
