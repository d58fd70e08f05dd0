//! A disk of another host, reached as a store is: operations take time to get there and back, overtake each other and fail,
//! connections break, and the server is killed or loses its power while its clients live on.
//!
//! It keeps what stores promise: an operation that was in flight on a connection that broke is sent again; one that is given
//! up may still be carried out, though never after the next connection has begun. [`Lapse`] breaks that.

mod client;
mod server;

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use ringtap_io::{File, OpenRemote, Tasks};

use crate::{Disk, Sim, is_power_cut};
use client::Net;
use server::Desk;

/// What befalls requests and connections, as odds of one in so many; 0 is never.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Requests that fail, carried out or not.
    pub errors: u32,
    /// Turns in which the connection breaks.
    pub breaks: u32,
    /// Turns in which the server is killed, and another takes its place.
    pub kills: u32,
    /// Turns without a connection in which a request is given up.
    pub timeouts: u32,
}

impl Weather {
    /// Delays and disorder alone.
    pub const FAIR: Weather = Weather { errors: 0, breaks: 0, kills: 0, timeouts: 0 };
}

/// A way of being broken that a test must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lapse {
    /// A write or flush is acknowledged as it arrives, and carried out later.
    EarlyAnswers,
    /// The next connection begins while what came by the last one is still being carried out.
    Overtaken,
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Befell {
    /// Connections that broke.
    pub breaks: usize,
    /// Servers that were killed.
    pub kills: usize,
    /// Requests that were given up.
    pub timeouts: usize,
}

/// What is called at each turn of the server, as by [`Sim::at_every_turn`].
type Hook = Rc<dyn Fn(&Disk)>;

/// A file of a disk that is elsewhere.
pub struct RemoteDisk {
    net: Arc<Net>,
    open: Option<OpenRemote>,
    disk: Disk,
    file: File,
    /// The server's process.
    tasks: Tasks,
    desk: Rc<Desk>,
    rng: fastrand::Rng,
    weather: Weather,
    lapse: Option<Lapse>,
    hook: Option<Hook>,
    now: u64,
    connection: u64,
    connected: bool,
    befell: Befell,
}

impl RemoteDisk {
    /// This file of that disk, in fair weather; all that happens follows from the seed.
    pub fn new(disk: &Disk, file: File, seed: u64) -> RemoteDisk {
        let mut rng = fastrand::Rng::with_seed(seed);
        let net = Arc::new(Net::default());
        let tasks = Tasks::new(Box::new(Sim::new(disk, rng.u64(..))));
        RemoteDisk {
            open: Some(OpenRemote::new(net.clone())),
            net,
            disk: disk.clone(),
            file,
            tasks,
            desk: Rc::default(),
            rng,
            weather: Weather::FAIR,
            lapse: None,
            hook: None,
            now: 0,
            connection: 0,
            connected: true,
            befell: Befell::default(),
        }
    }

    /// From now on the weather is so.
    pub fn set_weather(&mut self, weather: Weather) {
        self.weather = weather;
    }

    /// Be broken in this way.
    pub fn lapse(mut self, lapse: Option<Lapse>) -> RemoteDisk {
        self.lapse = lapse;
        self
    }

    /// Call `hook` in the server's turns with a disk as a power cut there would leave it.
    pub fn at_every_turn(mut self, hook: impl Fn(&Disk) + 'static) -> RemoteDisk {
        self.hook = Some(Rc::new(hook));
        self.start();
        self
    }

    /// It, to be listed in a store; once.
    ///
    /// # Panics
    /// The second time.
    pub fn open(&mut self) -> OpenRemote {
        self.open.take().expect("it is opened once")
    }

    /// How often what happened.
    pub fn befell(&self) -> Befell {
        self.befell
    }

    fn start(&mut self) {
        let mut sim = Sim::new(&self.disk, self.rng.u64(..));
        if let Some(hook) = self.hook.clone() {
            sim = sim.at_every_turn(move |disk| hook(disk));
        }
        self.tasks = Tasks::new(Box::new(sim));
        self.desk = Rc::default();
    }

    fn one_in(&mut self, odds: u32) -> bool {
        odds > 0 && self.rng.u32(0..odds) == 0
    }

    /// Have the server and the network go on a little.
    fn turn(&mut self) {
        self.now += 1;
        if self.connected {
            for parcel in self.net.take_unsent() {
                let due = self.now + self.rng.u64(0..12);
                self.desk.send(parcel, self.connection, due);
            }
        }
        for parcel in self.desk.arrived(self.now) {
            let fails = self.one_in(self.weather.errors);
            let seed = self.rng.u64(..);
            let early = self.lapse == Some(Lapse::EarlyAnswers);
            self.desk.take(&self.tasks, self.file, parcel, fails, early, seed);
        }
        self.tasks.run_ready();
        if let Err(error) = self.tasks.turn(false) {
            panic!("the server's simulation: {error}");
        }
        for answer in self.desk.answers(self.now, &mut self.rng) {
            if self.connected && answer.connection == self.connection {
                self.net.answered(answer.number, answer.result, &answer.data);
            }
        }
        if self.one_in(self.weather.kills) {
            self.kill();
        } else if self.connected && self.one_in(self.weather.breaks) {
            // What was on its way gets there, or does not.
            self.desk.lose_some(&mut self.rng);
            self.connected = false;
            self.befell.breaks += 1;
        }
        if !self.connected {
            self.without_connection();
        }
    }

    fn without_connection(&mut self) {
        if self.one_in(self.weather.timeouts) && self.net.give_one_up(&mut self.rng) {
            self.befell.timeouts += 1;
        }
        let over = self.desk.is_idle() || self.lapse == Some(Lapse::Overtaken);
        if over && self.one_in(4) {
            self.connection += 1;
            self.connected = true;
            self.net.send_again();
        }
    }

    /// The server's process is gone: what was in flight there has happened in part.
    fn kill(&mut self) {
        self.stop();
        self.disk = self.disk.after_kill(self.rng.u64(..));
        self.start();
        self.connected = false;
        self.befell.kills += 1;
    }

    fn stop(&mut self) {
        self.disk.cut_power_at_turn(0);
        let end = self.tasks.turn(false);
        assert!(end.is_err_and(|error| is_power_cut(&error)), "the power is gone");
    }

    /// The power of the server's host goes; what that leaves, with the same file.
    pub fn cut_power(mut self, seed: u64) -> Disk {
        self.stop();
        self.disk.after_power_cut(seed)
    }

    /// Its clients are gone: what they had in flight is carried out, or is lost on the way. The disk as it is then.
    pub fn settle(mut self) -> Disk {
        self.desk.lose_some(&mut self.rng);
        self.weather = Weather::FAIR;
        while !self.desk.is_idle() {
            self.turn();
        }
        self.disk.clone()
    }

    /// Have a client run one task to its end.
    pub fn block_on<T: 'static>(
        &mut self,
        client: &mut Tasks,
        task: impl Future<Output = T> + 'static,
    ) -> T {
        let result = Rc::new(RefCell::new(None));
        let keep = result.clone();
        client.spawn(async move {
            let value = task.await;
            *keep.borrow_mut() = Some(value);
        });
        self.run(std::slice::from_mut(client), usize::MAX);
        let value = result.borrow_mut().take();
        value.expect("the task has ended")
    }

    /// Clients and server take turns until the clients' tasks have ended, or for so many turns; whether they have.
    ///
    /// # Panics
    /// Where nothing happens any more, though tasks wait.
    pub fn run(&mut self, clients: &mut [Tasks], most: usize) -> bool {
        for turn in 0..most {
            for tasks in &mut *clients {
                tasks.run_ready();
                if let Err(error) = tasks.turn(false) {
                    panic!("a client's simulation: {error}");
                }
                tasks.run_ready();
            }
            if clients.iter().all(|tasks| tasks.count() == 0) {
                return true;
            }
            self.turn();
            assert!(turn < 2_000_000, "tasks wait, and nothing happens: {:?}", self.befell);
        }
        false
    }
}
