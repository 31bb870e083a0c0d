//! One queue of a chaos device: the driver with its table of ids on one side, the faulty device on the other.

use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Batch, Cid, Cids, Done, Driver, Op, Shortage, Status, Tag, TimedOut};

use super::{ChaosConfig, ChaosStep, Shared};

/// Ids that were once valid and are kept to be repeated. Fewer than an id has generations, so none becomes valid again.
const OLD_IDS: usize = 64;

/// One queue of a chaos device.
#[derive(Debug)]
pub struct ChaosQueue {
    shared: Arc<Shared>,
    config: ChaosConfig,
    rng: FaultRng,
    cids: Cids,
    depth: usize,
    /// Commands at the device.
    held: Vec<HeldCommand>,
    /// Ids that the device believes in and the driver does not any more: their completions come too late.
    late: Vec<HeldCommand>,
    /// Ids that were good once, the oldest overwritten first.
    old: Vec<Cid>,
    next_old: usize,
}

/// A command as the device knows it.
#[derive(Clone, Copy, Debug)]
struct HeldCommand {
    cid: Cid,
    /// When it completes; never, if it is lost.
    due_ns: u64,
    status: Status,
    /// Its data has moved already.
    moved: bool,
    /// Whether a discard leaves the data as it was.
    keep: bool,
    /// Write clock up to which a flush covers.
    flush_clock: u64,
}

impl ChaosQueue {
    pub(super) fn new(shared: Arc<Shared>, config: ChaosConfig, number: u64, depth: usize) -> ChaosQueue {
        ChaosQueue {
            shared,
            config,
            rng: FaultRng::new(config.seed ^ number << 48),
            cids: Cids::new(depth),
            depth,
            held: Vec::with_capacity(depth),
            late: Vec::with_capacity(depth),
            old: Vec::with_capacity(OLD_IDS),
            next_old: 0,
        }
    }

    fn due_ns(&mut self, now_ns: u64) -> u64 {
        now_ns + self.rng.below(self.config.delay_ns_max.saturating_add(1))
    }

    pub(super) fn shortage(&mut self) -> Shortage {
        [Shortage::Device, Shortage::System, Shortage::Lane][self.rng.below(3) as usize]
    }

    /// Draws the fate of a new request, except for its id.
    fn begin(&mut self, now_ns: u64, op: Op) -> HeldCommand {
        let fails = self.rng.one_in(self.config.fail_every);
        let due_ns = if self.rng.one_in(self.config.lose_every) { u64::MAX } else { self.due_ns(now_ns) };
        HeldCommand {
            cid: Cid(u32::MAX),
            due_ns,
            status: if fails { [Status::Io, Status::Medium][self.rng.below(2) as usize] } else { Status::Ok },
            moved: false,
            keep: self.rng.one_in(2),
            flush_clock: if op == Op::Flush { self.shared.store.flush_issued() } else { 0 },
        }
    }

    /// The driver redeems the id of a command that the device has completed.
    fn redeem(&mut self, cid: Cid) -> Tag {
        let Ok(tag) = self.cids.redeem(cid) else { unreachable!("what the device holds is in flight") };
        if self.old.len() < OLD_IDS {
            self.old.push(cid);
        } else {
            self.old[self.next_old] = cid;
            self.next_old = (self.next_old + 1) % OLD_IDS;
        }
        tag
    }

    /// A completion arrives that no device should send.
    fn arrive_wrong(&mut self, cid: Cid) {
        let refused = self.cids.look(cid).is_err();
        let counts = &mut self.shared.story().counts;
        counts.sent += 1;
        counts.refused += u64::from(refused);
    }

    /// The completion of a command arrives.
    fn arrive(&mut self, held: HeldCommand, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let tag = self.redeem(held.cid);
        if self.rng.one_in(self.config.requeue_every) {
            self.requeue(tag, done, now_ns);
        } else {
            self.end(tag, held, memory, done, now_ns);
        }
        if self.rng.one_in(self.config.repeat_every) {
            self.arrive_wrong(held.cid);
        }
    }

    fn requeue(&self, tag: Tag, done: &mut Done<'_>, now_ns: u64) {
        self.shared.story().tell(now_ns, ChaosStep::Requeued, tag.index(), done.request(&tag).0);
        done.requeue(tag);
    }

    fn end(&mut self, tag: Tag, held: HeldCommand, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let (request, segments) = done.request(&tag);
        let mut status = held.status;
        if !held.moved && (status.is_ok() || self.rng.one_in(2)) {
            let bytes = request.bytes();
            status = status.and(self.shared.store.transfer(memory, request, segments, done.ranges(&tag), held.keep));
            done.spend(bytes);
        }
        let (request, _) = done.request(&tag);
        if status.is_ok() {
            self.shared.store.ended(request, done.ranges(&tag), held.keep, held.flush_clock);
        }
        self.shared.story().tell(now_ns, ChaosStep::Ended(status), tag.index(), request);
        done.complete(tag, status);
    }

    /// An id that is not in flight.
    fn forged(&mut self) -> Cid {
        let place = self.rng.below(self.depth as u64) as u32;
        match self.rng.below(3) {
            // A slot that does not exist, for any depth.
            0 => Cid(0xffff | place << 16),
            // A valid slot, in another generation.
            1 if !self.held.is_empty() => {
                let held = self.held[self.rng.below(self.held.len() as u64) as usize].cid;
                Cid(held.0.wrapping_add(1 << 16))
            }
            _ if !self.old.is_empty() => self.old[self.rng.below(self.old.len() as u64) as usize],
            _ => Cid(u32::MAX),
        }
    }
}

impl<Cx: ?Sized> Driver<Cx> for ChaosQueue {
    fn queue_rqs(&mut self, _cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        let mut doubtful = None;
        while !batch.is_empty() {
            if self.held.len() >= self.config.ring {
                batch.short_of(Shortage::Device);
                break;
            }
            if self.rng.one_in(self.config.refuse_every) {
                batch.short_of(self.shortage());
                break;
            }
            let Some((tag, request, _)) = batch.take_inline() else { break };
            let op = request.op();
            if doubtful.is_none() && self.rng.one_in(self.config.put_back_every) {
                doubtful = Some(tag);
                batch.short_of(self.shortage());
                continue;
            }
            let mut held = self.begin(now_ns, op);
            let instant = held.due_ns != u64::MAX && self.rng.one_in(self.config.instant_every);
            let early = instant || self.rng.one_in(2);
            let (request, segments) = batch.request(&tag);
            self.shared.story().tell(now_ns, ChaosStep::Taken, tag.index(), request);
            if early && (held.status.is_ok() || self.rng.one_in(2)) {
                held.moved = true;
                let moved = self.shared.store.transfer(memory, request, segments, batch.ranges(&tag), held.keep);
                held.status = held.status.and(moved);
            }
            if instant {
                if held.status.is_ok() {
                    self.shared.store.ended(request, batch.ranges(&tag), held.keep, held.flush_clock);
                }
                self.shared.story().tell(now_ns, ChaosStep::Ended(held.status), tag.index(), request);
                batch.complete(tag, held.status);
            } else {
                held.cid = self.cids.park(tag);
                self.held.push(held);
            }
        }
        if let Some(tag) = doubtful {
            batch.put_back(tag);
        }
    }

    fn poll(&mut self, _cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let mut at = 0;
        while at < self.held.len() && !done.is_spent() {
            // One of those not visited yet.
            let other = at + self.rng.below((self.held.len() - at) as u64) as usize;
            self.held.swap(at, other);
            if self.held[at].due_ns <= now_ns {
                let held = self.held.swap_remove(at);
                self.arrive(held, memory, done, now_ns);
            } else {
                at += 1;
            }
        }
        while let Some(at) = self.late.iter().position(|late| late.due_ns <= now_ns) {
            let late = self.late.swap_remove(at);
            self.arrive_wrong(late.cid);
        }
        if self.rng.one_in(self.config.forge_every) {
            let forged = self.forged();
            self.arrive_wrong(forged);
        }
    }

    fn timed_out(
        &mut self,
        _cx: &mut Cx,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        let Some(at) = self.held.iter().position(|held| self.cids.look(held.cid) == Ok(place)) else {
            return TimedOut::MoreTime;
        };
        match self.rng.below(5) {
            // Asked about again.
            0 => return TimedOut::MoreTime,
            // It turns up after all.
            1 => {
                self.held[at].due_ns = self.due_ns(now_ns);
                return TimedOut::MoreTime;
            }
            // It is given up, and turns up as such later.
            2 => {
                self.held[at].due_ns = self.due_ns(now_ns);
                self.held[at].status = Status::Timeout;
                return TimedOut::TakenBack;
            }
            // It is taken back at once, and done again.
            3 => {
                let held = self.held.swap_remove(at);
                let tag = self.redeem(held.cid);
                self.requeue(tag, done, now_ns);
            }
            // It is taken back at once, and completes. No data of it may move any more; the device completes it all the
            // same.
            _ => {
                let held = self.held.swap_remove(at);
                let tag = self.redeem(held.cid);
                self.end(tag, HeldCommand { status: Status::Timeout, moved: true, ..held }, memory, done, now_ns);
                if self.late.len() < self.depth {
                    let due_ns = self.due_ns(now_ns);
                    self.late.push(HeldCommand { due_ns, ..held });
                }
            }
        }
        TimedOut::TakenBack
    }

    fn deadline_ns(&self) -> Option<u64> {
        // Late completions are not waited for.
        self.held.iter().map(|held| held.due_ns).filter(|due_ns| *due_ns != u64::MAX).min()
    }
}

/// Random numbers (xorshift64*, stirred by splitmix64). Seeds that once found a fault stay good with it.
#[derive(Clone, Debug)]
struct FaultRng(u64);

impl FaultRng {
    fn new(seed: u64) -> FaultRng {
        let n = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        FaultRng((n ^ n >> 31).max(1))
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(bound)) >> 64) as u64
    }

    /// True about once in `every` times; never, for zero.
    fn one_in(&mut self, every: u32) -> bool {
        every != 0 && self.below(u64::from(every)) == 0
    }
}
