//! Room for writes: which host cluster a write goes to, and what of the old content goes with it.
//!
//! From the choice of a host cluster until its L2 entry is set the guest cluster is *pending*. Writes
//! that need no old content share a pending cluster; one that copies old content has it, or its
//! subclusters, for itself.

use std::ops::Range;

use ringtap_io::Io;
use ringtap_io::sync::broken;

use super::entry::{Entry, Kind, bits};
use super::header::COPIED;
use super::space::Taken;
use super::table::Lookup;
use super::{Shared, State};
use crate::numbered::Numbered;
use crate::{Allocation, Error, Extent};

/// Released clusters that make an allocation ask for a flush first, so that they can be used again.
const MANY_RELEASED: usize = 1 << 16;

/// The pending guest clusters, and the allocations that wait for their commit.
#[derive(Default)]
pub(super) struct Allocations {
    pending: Numbered<Pending>,
    rooms: Numbered<Room>,
    /// Clusters of all rooms.
    reserved: u64,
    next_token: u64,
}

impl Allocations {
    /// Clusters whose entries are going to change.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    pub(super) fn is_pending(&self, cluster: u64) -> bool {
        self.pending.contains_key(&cluster)
    }
}

/// A guest cluster whose entry is going to change.
struct Pending {
    /// Where it will lie.
    host: u64,
    /// Whether the host cluster was taken for it.
    new: bool,
    /// Whether all old content is zeros and so is the room: each writes its own bytes and no more.
    open: bool,
    /// Whether the old content of the whole cluster moves with the write.
    moves: bool,
    /// Whether nobody may join: zeros past the disk's end may be written with the block that it lies in.
    alone: bool,
    /// Whether the entry has been set.
    committed: bool,
    users: Vec<User>,
}

/// A write to a pending cluster.
struct User {
    token: u64,
    /// Units that it covers.
    whole: u32,
    /// Units that it writes old content of.
    partial: u32,
}

/// What a token stands for.
struct Room {
    clusters: Range<u64>,
}

/// What to do about a write.
enum Plan {
    /// Write there.
    Go(Go),
    /// Look at the map again.
    Again,
    /// Another write to this cluster has to end first.
    Wait,
    /// A flush has to make room for notes first.
    Flush,
    /// There is no free cluster.
    NoSpace,
    /// The base's tables are not in memory here.
    Load(u64),
    /// An entry that may not be.
    Bad,
}

struct Go {
    token: u64,
    host: u64,
    head: u64,
    len: u64,
    tail: u64,
    /// Where the room past the disk's end has to be made zeros.
    beyond: Option<Range<u64>>,
}

/// What an entry means for a write to its cluster.
struct Found {
    /// The host cluster that it has for itself.
    host: Option<u64>,
    /// Whether the old content of the whole cluster moves with the write.
    moves: bool,
    /// Whether all that is not written reads as zeros, here and below.
    zeros: bool,
}

impl Shared {
    /// Room for a write of `len` bytes at `offset`, as [`crate::Image::allocate`] says.
    pub(super) async fn allocate(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
    ) -> Result<Option<Allocation<'_>>, Error> {
        if self.info.read_only {
            return Err(Error::ReadOnly);
        }
        let cluster = offset >> self.tables.geometry.cluster_bits;
        let slice = self.tables.geometry.slice_of(cluster);
        let crowded = self.is_crowded(&self.state());
        if crowded {
            self.flush(io).await?;
        }
        self.own_table(io, cluster).await?;
        let end = self.find_room(io, offset, len).await;
        match end {
            // The pin goes on until the commit.
            Ok(Some(go)) => Ok(Some(self.allocation(&go))),
            other => {
                self.state().cache.unpin(&self.tables, slice);
                other.map(|_| None)
            }
        }
    }

    /// The same where all that it takes is in memory, which is looked at under one lock.
    pub(super) fn allocate_at_once(&self, offset: u64, len: u64) -> Option<Allocation<'_>> {
        let geometry = &self.tables.geometry;
        let cluster = offset >> geometry.cluster_bits;
        let whole_clusters = geometry.size & !(geometry.cluster() - 1);
        if self.info.read_only || self.is_corrupt() || offset + len > whole_clusters {
            return None;
        }
        let mut state = self.state();
        let slice = geometry.slice_of(cluster);
        let owned = self.owns_table(geometry.table_of(cluster));
        if !owned || self.is_crowded(&state) || !state.cache.pin_frame(&self.tables, slice) {
            return None;
        }
        match self.plan(&mut state, offset, len, false) {
            Plan::Go(go) => Some(self.allocation(&go)),
            _ => {
                state.cache.unpin(&self.tables, slice);
                None
            }
        }
    }

    fn allocation(&self, go: &Go) -> Allocation<'_> {
        Allocation {
            file: self.guest_file,
            offset: go.host,
            head: go.head,
            len: go.len,
            tail: go.tail,
            cipher: self.cipher(go.host),
            token: go.token,
        }
    }

    fn is_crowded(&self, state: &State) -> bool {
        state.cache.is_crowded(&self.tables)
            || state.released.len() + state.retired.len() > MANY_RELEASED
                && !self.flushes.is_running()
    }

    async fn find_room(&self, io: &Io, offset: u64, len: u64) -> Result<Option<Go>, Error> {
        let mut full = false;
        loop {
            let (plan, settled) = {
                let mut state = self.state();
                let plan = self.plan(&mut state, offset, len, full);
                let waits = matches!(plan, Plan::Wait);
                (plan, waits.then(|| self.events.settled.listen()))
            };
            match plan {
                Plan::Go(go) => {
                    if let Some(beyond) = go.beyond.clone() {
                        let zeros = vec![0; (beyond.end - beyond.start) as usize];
                        let written = self.container.write(io, beyond.start, &zeros).await;
                        if let Err(error) = written {
                            self.state().cache.pin(&self.tables, self.slice_at(offset));
                            self.commit(go.token, false);
                            return Err(error);
                        }
                    }
                    return Ok(Some(go));
                }
                Plan::Again => return Ok(None),
                Plan::Wait => {
                    if let Some(settled) = settled {
                        settled.await;
                    }
                    return Ok(None);
                }
                Plan::Flush => {
                    self.flush(io).await?;
                    return Ok(None);
                }
                Plan::NoSpace if full => {
                    // What was released lately may be had after a flush.
                    let reclaims = !self.state().retired.is_empty();
                    if !reclaims {
                        return Err(Error::Full);
                    }
                    self.flush(io).await?;
                    if self.plan_is_hopeless() {
                        return Err(Error::Full);
                    }
                }
                Plan::NoSpace => match self.grow(io).await {
                    Err(Error::Full) => full = true,
                    end => end?,
                },
                Plan::Load(at) => {
                    let Some(base) = self.base.image() else { return Err(Error::Corrupt) };
                    base.load(io, at).await?;
                }
                Plan::Bad => return Err(self.mark_corrupt(io).await),
            }
        }
    }

    fn slice_at(&self, offset: u64) -> u64 {
        self.tables.geometry.slice_of(offset >> self.tables.geometry.cluster_bits)
    }

    /// Whether no cluster at all is to be had.
    pub(super) fn plan_is_hopeless(&self) -> bool {
        let mut state = self.state();
        match state.space.take_any(1) {
            Some(taken) => {
                state.space.give_back(taken.clusters, taken.fresh);
                false
            }
            None => true,
        }
    }

    /// What to do about a write; where it is to go on, it has its room from now on.
    fn plan(&self, state: &mut State, offset: u64, len: u64, full: bool) -> Plan {
        let geometry = &self.tables.geometry;
        let (len, clusters) = self.noted_at_once(offset, len);
        if self.log_is_crowded(state, clusters) {
            return Plan::Flush;
        }
        let cluster = offset >> geometry.cluster_bits;
        let start = offset & (geometry.cluster() - 1);
        let mut range = start..(start + len).min(geometry.bytes_of(cluster));
        let found = match self.look(cluster, &mut range) {
            Ok(found) => found,
            Err(plan) => return plan,
        };
        if let Some(plan) = self.join(state, cluster, &found, &range) {
            return plan;
        }
        if let Some(host) = found.host {
            return self.use_host(state, cluster, &found, range, offset, len, host);
        }
        self.use_new(state, cluster, &found, range, offset, len, full)
    }

    /// What the cluster's entry means for a write to this range of it, which is cut where it meets
    /// what may be written to as it is.
    fn look(&self, cluster: u64, range: &mut Range<u64>) -> Result<Found, Plan> {
        let geometry = &self.tables.geometry;
        let Lookup::Entry(entry) = self.tables.entry(cluster) else { return Err(Plan::Again) };
        let mut unit = range.start >> geometry.unit_bits;
        match entry.kind(geometry, unit) {
            Kind::Bad => return Err(Plan::Bad),
            Kind::Data { own: true, .. } => return Err(Plan::Again),
            _ => {}
        }
        let own = entry.host(geometry).filter(|_| entry.is_own());
        let has_data = match geometry.extended() {
            true => entry.allocated() != 0,
            false => matches!(entry.kind(geometry, 0), Kind::Data { .. }),
        };
        let moves = entry.is_compressed() || has_data && own.is_none();
        let host = match geometry.data_file {
            true => Some(cluster << geometry.cluster_bits),
            false => own.filter(|_| !moves),
        };
        if host.is_some() && geometry.extended() {
            while unit << geometry.unit_bits < range.end && entry.allocated() >> unit & 1 == 0 {
                unit += 1;
            }
            range.end = range.end.min(unit << geometry.unit_bits);
        }
        let zeros = !moves
            && !geometry.extended()
            && match entry.kind(geometry, 0) {
                Kind::Zero { .. } => true,
                _ => self.base_is_zero(cluster)?,
            };
        Ok(Found { host, moves, zeros })
    }

    /// Whether all that lies below a cluster is zeros.
    fn base_is_zero(&self, cluster: u64) -> Result<bool, Plan> {
        let geometry = &self.tables.geometry;
        let mut at = cluster << geometry.cluster_bits;
        let end = at + geometry.bytes_of(cluster);
        while at < end {
            match self.base.map(at, end - at) {
                Extent::Zero { len, .. } => at += len,
                Extent::NotLoaded => return Err(Plan::Load(at)),
                Extent::Data { .. } | Extent::Compressed { .. } => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The range with what of the old content goes along, for a cluster of which nothing is shared.
    fn widened(&self, cluster: u64, moves: bool, range: &Range<u64>) -> Range<u64> {
        let geometry = &self.tables.geometry;
        let unit = 1 << geometry.unit_bits;
        let end = geometry.bytes_of(cluster);
        if moves {
            return 0..end;
        }
        range.start - range.start % unit..range.end.next_multiple_of(unit).min(end)
    }

    /// A user that writes `range` and takes the old content of the rest of `wide` along.
    fn user(&self, cluster: u64, token: u64, range: &Range<u64>, wide: &Range<u64>) -> User {
        let geometry = &self.tables.geometry;
        let whole = geometry.covered(cluster, range) & geometry.touched(wide);
        User { token, whole, partial: geometry.touched(wide) & !whole }
    }

    /// Share the room of a cluster that is pending, or say to wait; nothing where it is not pending.
    fn join(
        &self,
        state: &mut State,
        cluster: u64,
        found: &Found,
        range: &Range<u64>,
    ) -> Option<Plan> {
        let geometry = &self.tables.geometry;
        let token = state.allocations.next_token;
        let pending = state.allocations.pending.get_mut(&cluster)?;
        let (user, wide) = if pending.open {
            let whole = geometry.touched(range);
            (User { token, whole, partial: 0 }, range.clone())
        } else {
            let wide = self.widened(cluster, false, range);
            let user = self.user(cluster, token, range, &wide);
            let conflict = pending.users.iter().any(|other| {
                user.partial & (other.whole | other.partial) != 0 || user.whole & other.partial != 0
            });
            if conflict || pending.moves || pending.alone || found.moves || !geometry.extended() {
                return Some(Plan::Wait);
            }
            (user, wide)
        };
        pending.users.push(user);
        let host = pending.host;
        Some(self.go(
            state,
            cluster..cluster + 1,
            host,
            range,
            &wide,
            range.end - range.start,
            None,
        ))
    }

    #[allow(clippy::too_many_arguments)]
    fn go(
        &self,
        state: &mut State,
        clusters: Range<u64>,
        host: u64,
        range: &Range<u64>,
        wide: &Range<u64>,
        len: u64,
        beyond: Option<Range<u64>>,
    ) -> Plan {
        let token = state.allocations.next_token;
        state.allocations.next_token += 1;
        state.allocations.reserved += clusters.end - clusters.start;
        state.allocations.rooms.insert(token, Room { clusters });
        Plan::Go(Go {
            token,
            host: host + wide.start,
            head: range.start - wide.start,
            len,
            tail: wide.end - range.end,
            beyond,
        })
    }

    /// Write to the host cluster that the entry has already.
    #[allow(clippy::too_many_arguments)]
    fn use_host(
        &self,
        state: &mut State,
        cluster: u64,
        found: &Found,
        range: Range<u64>,
        offset: u64,
        len: u64,
        host: u64,
    ) -> Plan {
        let geometry = &self.tables.geometry;
        let wide = self.widened(cluster, found.moves, &range);
        // Where the range was cut, the rest of the cluster is to be looked at again.
        let to_end = range.end == geometry.bytes_of(cluster);
        let end = match geometry.data_file && wide == range && to_end {
            true => self.run_end(state, cluster, offset, len),
            false => cluster + 1,
        };
        let clusters = cluster..end.max(cluster + 1);
        let token = state.allocations.next_token;
        for one in clusters.clone() {
            let host = host + ((one - cluster) << geometry.cluster_bits);
            let user = if one == cluster {
                self.user(cluster, token, &range, &wide)
            } else {
                User { token, whole: bits(0..geometry.units()), partial: 0 }
            };
            let moves = one == cluster && found.moves;
            let (new, open, alone, committed, users) = (false, false, false, false, vec![user]);
            let pending = Pending { host, new, open, moves, alone, committed, users };
            state.allocations.pending.insert(one, pending);
        }
        let written = self.len_in(&clusters, &range, offset, len);
        self.go(state, clusters, host, &range, &wide, written, None)
    }

    /// Take new clusters for the write: for all it covers, as far as they can be had together.
    #[allow(clippy::too_many_arguments)]
    fn use_new(
        &self,
        state: &mut State,
        cluster: u64,
        found: &Found,
        range: Range<u64>,
        offset: u64,
        len: u64,
        full: bool,
    ) -> Plan {
        let geometry = &self.tables.geometry;
        let wide = self.widened(cluster, found.moves, &range);
        let can_be_open = found.zeros && self.key.is_none();
        let alone = wide != range && !can_be_open;
        let end = if alone { cluster + 1 } else { self.run_end(state, cluster, offset, len) };
        let count = end.max(cluster + 1) - cluster;
        let space = &mut state.space;
        let taken = if full { space.take_any(count) } else { space.take(count) };
        let Some(Taken { mut clusters, fresh }) = taken else { return Plan::NoSpace };
        let open = can_be_open && fresh;
        if !open && wide != range && clusters.end - clusters.start > 1 {
            state.space.give_back(clusters.start + 1..clusters.end, fresh);
            clusters.end = clusters.start + 1;
        }
        let guest = cluster..cluster + (clusters.end - clusters.start);
        // What lies past the disk's end would be seen once the disk has grown.
        let last = guest.end - 1;
        let used = geometry.bytes_of(last);
        let beyond = (!fresh && used < geometry.cluster()).then(|| {
            let host = (clusters.end - 1) << geometry.cluster_bits;
            host + used..host + geometry.cluster()
        });
        let token = state.allocations.next_token;
        for (one, host) in guest.clone().zip(clusters.clone()) {
            let user = match one == cluster {
                true if open => User { token, whole: geometry.touched(&range), partial: 0 },
                true => self.user(cluster, token, &range, &wide),
                false => User { token, whole: bits(0..geometry.units()), partial: 0 },
            };
            let pending = Pending {
                host: host << geometry.cluster_bits,
                new: true,
                open: open && one == cluster,
                moves: found.moves && one == cluster,
                alone: beyond.is_some() && one == last && !broken("end shared"),
                committed: false,
                users: vec![user],
            };
            state.allocations.pending.insert(one, pending);
        }
        let wide = if open { range.clone() } else { wide };
        let written = self.len_in(&guest, &range, offset, len);
        let host = clusters.start << geometry.cluster_bits;
        self.go(state, guest, host, &range, &wide, written, beyond)
    }

    /// How much of a write lies in these clusters, the first of which it meets in `range`.
    fn len_in(&self, clusters: &Range<u64>, range: &Range<u64>, offset: u64, len: u64) -> u64 {
        if clusters.end - clusters.start == 1 {
            return range.end - range.start;
        }
        len.min((clusters.end << self.tables.geometry.cluster_bits) - offset)
    }

    /// How far the clusters behind the first are covered by the write and need new room too.
    fn run_end(&self, state: &State, cluster: u64, offset: u64, len: u64) -> u64 {
        let geometry = &self.tables.geometry;
        let last = geometry.clusters_of_slice(geometry.slice_of(cluster)).end;
        let write_end = offset + len;
        let mut end = cluster + 1;
        while end < last.min(geometry.clusters()) {
            let to = (end << geometry.cluster_bits) + geometry.bytes_of(end);
            let Lookup::Entry(entry) = self.tables.entry(end) else { break };
            let own = entry.is_own() && entry.host(geometry).is_some();
            if to > write_end
                || (own && !geometry.data_file)
                || self.is_writable(entry)
                || entry.kind(geometry, 0) == Kind::Bad
                || state.allocations.is_pending(end)
            {
                break;
            }
            end += 1;
        }
        end
    }

    /// Whether some of a cluster may be written to as it is.
    fn is_writable(&self, entry: Entry) -> bool {
        let geometry = &self.tables.geometry;
        (0..geometry.units())
            .any(|unit| matches!(entry.kind(geometry, unit), Kind::Data { own: true, .. }))
    }

    /// A write to its room has ended, as [`crate::Image::commit`] says.
    pub(super) fn commit(&self, token: u64, written: bool) {
        let mut state = self.state();
        let Some(room) = state.allocations.rooms.remove(&token) else { return };
        let slice = self.tables.geometry.slice_of(room.clusters.start);
        state.allocations.reserved -= room.clusters.end - room.clusters.start;
        for cluster in room.clusters {
            self.commit_cluster(&mut state, cluster, token, written);
        }
        state.cache.unpin(&self.tables, slice);
        drop(state);
        if !broken("settled in silence") {
            self.events.settled.notify();
        }
    }

    fn commit_cluster(&self, state: &mut State, cluster: u64, token: u64, written: bool) {
        let geometry = &self.tables.geometry;
        let Some(mut pending) = state.allocations.pending.remove(&cluster) else { return };
        let user = pending.users.iter().position(|user| user.token == token);
        let user = user.map(|index| pending.users.swap_remove(index));
        if let (Some(user), true, Lookup::Entry(old)) = (user, written, self.tables.entry(cluster))
        {
            let units = user.whole | user.partial;
            let word = pending.host | COPIED;
            let bitmap = match geometry.extended() {
                false => 0,
                true if pending.moves => u64::from(u32::MAX),
                true => {
                    let zeros = old.zeros() & !units;
                    u64::from(zeros) << 32 | u64::from(old.allocated() | units)
                }
            };
            self.set_entry(state, cluster, Entry { word, bitmap });
            if pending.new && !pending.committed {
                let host = pending.host >> geometry.cluster_bits;
                state.refer(host..host + 1);
                self.release_entry(state, old);
            }
            pending.committed = true;
        }
        if !pending.users.is_empty() {
            state.allocations.pending.insert(cluster, pending);
        } else if pending.new && !pending.committed {
            let host = pending.host >> geometry.cluster_bits;
            state.space.give_back(host..host + 1, false);
        }
    }
}
