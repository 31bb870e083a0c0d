//! Turns: the device serves one stream for a while, so that the seek to its position is paid once.
//!
//! A turn is as long as the owner's credit, counted from its first completion, so that a stream does not pay for the
//! seek from another's position. Requests still in flight at its end are waited for and charged to their stream. The
//! scheduler idles for an owner without bios as long as its history makes a worthwhile return likely. After that the
//! turn ends, and the owner keeps the rest of its credit for this round. An owner that has used up its credit goes to
//! the back at once, also while it thinks, so no stream has two turns while another waits for one. An owner whose turn
//! is cut short, by another queue or a more urgent bio, stays in front.
//!
//! Asynchronous writes save up their shares until they have a whole slice. Each of their turns leaves a disk with a
//! full write cache and includes its [hold-off](super::hold_off). Time that reads lose to destaging all the same is
//! charged to the writers, together with that of their turns, [by price](super::write_cost).
//!
//! Of several returning streams, such as those that wait for room in one page cache, the least served one is next. The
//! random streams come first: each of their streams waits for one bio.
//!
//! While other streams wait, an owner has only as much in flight as fits in the rest of its turn, by the service time
//! of its bios. So a turn of random streams ends in time, and a sequential stream uses all the depth it needs.

use super::history;
use super::{Fair, FairConfig, FairStream, WEIGHT};
use crate::sched::Selected;

/// Smallest share of a round, for any number of streams: five times a seek to another stream's position.
const SLICE_MIN_NS: u64 = 50_000_000;
/// Smallest credit for a turn: two seeks, each with half a revolution and some reading. It must be well below a share,
/// or a stream that slightly exceeded its turn would miss the next.
const TURN_MIN_NS: u64 = SLICE_MIN_NS / 2;
/// A queue of this length keeps no position for idle streams: that many slots exist beyond those with bios, for three
/// classes.
const KEPT_MAX: u32 = 64;
/// The front has a turn once this many more members than the queue's length have been passed over for debts or savings:
/// some hundred rounds, in which a member with a hundredth of a turn saves up for all of it.
const PASSED_MAX: u32 = 1024;
/// Bios of a stream that are sorted at one time: some more than a disk sorts by itself.
const BATCH: usize = 64;
/// The same for asynchronous writes: some MiB of small ones.
const BATCH_ASYNC: usize = 1024;

/// A device is kept for this long after the time for which it is idled for: a timer may be late.
const LATE_NS: u64 = 2_000_000;

/// The turn that lasts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ActiveTurn {
    pub(super) who: u32,
    class: usize,
    pub(super) since_ns: u64,
    /// Its clock runs since the first end.
    began_ns: Option<u64>,
    slice_ns: u64,
    /// It was given because a lower class had waited for too long: a more urgent one waits for it.
    late: bool,
    /// No further dispatch.
    closing: bool,
    /// Bytes dispatched in the turn.
    pub(super) bytes: u64,
    /// [Price](super::write_cost) of the writes in the turn, bytes.
    pub(super) price: u64,
    /// Time that its reads lost to earlier writes.
    lost_ns: u64,
    /// When something of it ended last, and of which stream that was.
    ended_ns: u64,
    last: u32,
}

/// The credit it takes to have a turn, nanoseconds.
pub(super) fn least_ns(config: &FairConfig) -> i64 {
    TURN_MIN_NS.min(u64::from(config.slice_ms.max(1)) * 500_000) as i64
}

/// How long a member that has used up its share waits while returning ones go first, ns: one more turn, with the seek
/// to it and the requests that are waited for at its end, is over within the length of a round.
pub(super) fn passed_ns(config: &FairConfig) -> u64 {
    (u64::from(config.target_ms) * 1_000_000).saturating_sub(u64::from(config.slice_ms) * 1_500_000)
}

/// Share of this weight in a round, ns, where all have so much.
pub(super) fn share_ns(config: &FairConfig, weight: u32, all: u64) -> u64 {
    let usual = u64::from(WEIGHT);
    let slice_ns = u64::from(config.slice_ms.max(1)) * 1_000_000;
    let target_ns = u64::from(config.target_ms) * 1_000_000;
    let each_ns = (target_ns / all.max(1)).clamp(SLICE_MIN_NS.min(slice_ns) / usual, slice_ns / usual);
    (u64::from(weight) * each_ns).max(1)
}

impl Fair {
    /// Queues a member that is in no queue for turns.
    pub(super) fn line_up(&mut self, at: u32, now_ns: u64) {
        let slice_ns = i64::from(self.config.slice_ms.max(1)) * 1_000_000;
        let stream = self.streams.get_mut(at);
        let (class, sync) = (usize::from(stream.class), stream.sync);
        stream.share.needs = if sync { 0 } else { slice_ns };
        let due = self.turn_due(at);
        self.turns[class].enter(&mut self.streams, at, due, sync, now_ns);
    }

    /// Share of a member in a round, ns, of the length of a round.
    fn turn_due(&mut self, at: u32) -> i64 {
        let class = usize::from(self.streams.get(at).class);
        if at == self.seek_groups[class] {
            // While all streams think, the total weight stays.
            let weight = self.mixes[class].weight().min(1 << 20) as u32;
            let share = &mut self.streams.get_mut(at).share;
            share.weight = if weight > 0 { weight } else { share.weight.max(1) };
        }
        let share = &self.streams.get(at).share;
        let owner = self.turn.filter(|turn| turn.who != at && turn.class == class);
        let owner = owner.map_or(0, |turn| self.streams.get(turn.who).share.weight);
        let own = if share.queued { 0 } else { share.weight };
        let all = self.turns[class].weight() + u64::from(own) + u64::from(owner);
        share_ns(&self.config, share.weight, all) as i64
    }

    pub(super) fn next_turn(&mut self, now_ns: u64) -> Selected {
        loop {
            let Some(mut turn) = self.turn else {
                if self.waiting.iter().all(|waiting| *waiting == 0) {
                    self.tenure.leave(now_ns);
                    return Selected::Wait(u64::MAX);
                }
                if let Some(again_ns) = self.tenure.take(now_ns) {
                    return Selected::Wait(again_ns);
                }
                if self.take_turn(now_ns) {
                    continue;
                }
                return Selected::Wait(u64::MAX);
            };
            let own = self.waiting_of(turn.who, turn.class);
            let others = self.waiting.iter().sum::<usize>() > own || self.tenure.is_wanted(now_ns);
            let preempted = !turn.late && self.waiting[..turn.class].iter().any(|waiting| *waiting > 0);
            let end_ns = turn.began_ns.map_or(u64::MAX, |began_ns| began_ns + turn.slice_ns);
            if now_ns >= end_ns && !others {
                turn.began_ns = Some(now_ns);
            }
            turn.closing |=
                preempted || (now_ns >= end_ns && others) || self.tenure.is_over(now_ns) || !self.tenure.holds();
            self.turn = Some(turn);
            let in_flight = self.in_flight();
            if turn.closing {
                if self.config.drain && in_flight > 0 {
                    return Selected::Wait(u64::MAX);
                }
                let hold_off_end_ns = self.hold_off_end_ns(&turn);
                if !preempted && now_ns < hold_off_end_ns {
                    self.tenure.keep(hold_off_end_ns + LATE_NS);
                    return Selected::Wait(hold_off_end_ns);
                }
                self.end_turn(now_ns);
            } else if own > 0 {
                if others && in_flight > 0 && !self.fits(&turn, in_flight, now_ns) {
                    return Selected::Wait(u64::MAX);
                }
                if let Some(next) = self.next_of_turn(&turn, now_ns) {
                    self.tenure.works();
                    return next;
                }
            } else if !others || (in_flight > 0 && self.config.idle_ms > 0) {
                return Selected::Wait(u64::MAX);
            } else {
                let until_ns = self.idle_until_ns(&turn).min(end_ns);
                if now_ns < until_ns {
                    self.tenure.keep(until_ns + LATE_NS);
                    return Selected::Wait(until_ns);
                }
                if let Some(turn) = &mut self.turn {
                    turn.closing = true;
                }
            }
        }
    }

    /// How many bios of a member of the line for turns wait.
    fn waiting_of(&self, who: u32, class: usize) -> usize {
        if who == self.seek_groups[class] { self.mixing[class] } else { self.streams.get(who).bios.len() }
    }

    /// Time at which the device has destaged the writes of a turn.
    fn hold_off_end_ns(&self, turn: &ActiveTurn) -> u64 {
        let waits = self.config.drain && !self.streams.get(turn.who).sync;
        if waits { turn.ended_ns + self.tenure.hold_off_ns() } else { 0 }
    }

    /// Whether one more would end within the turn.
    fn fits(&self, turn: &ActiveTurn, in_flight: usize, now_ns: u64) -> bool {
        let used_ns = turn.began_ns.map_or(0, |began_ns| now_ns.saturating_sub(began_ns));
        let gap_ns = u64::from(self.streams.get(turn.who).gap_ns);
        in_flight as u64 * gap_ns < turn.slice_ns.saturating_sub(used_ns)
    }

    fn idle_until_ns(&self, turn: &ActiveTurn) -> u64 {
        let last = self.streams.get(turn.last);
        let most_ns = if last.sync { u64::from(self.config.idle_ms) * 1_000_000 } else { 0 };
        turn.ended_ns.saturating_add(last.history.idle_ns(most_ns))
    }

    /// Begins the next turn. False if no stream waits for one.
    #[inline(never)]
    fn take_turn(&mut self, now_ns: u64) -> bool {
        let mut passed = 0;
        loop {
            let Some(class) = self.class(now_ns) else { return false };
            let Some(who) = self.turns[class].front(&self.streams, now_ns) else { return false };
            if self.waiting_of(who, class) == 0 {
                self.turns[class].pop(&mut self.streams);
                self.rest(who);
                continue;
            }
            let share = &self.streams.get(who).share;
            let (credit, least) = (share.credit, self.turns[class].least().max(share.needs));
            let due = self.turn_due(who);
            if credit < least && passed < PASSED_MAX + self.turns[class].len() {
                self.turns[class].rotate(&mut self.streams, due, now_ns);
                passed += 1;
                continue;
            }
            self.turns[class].pop(&mut self.streams);
            let late = self.waiting[..class].iter().any(|waiting| *waiting > 0);
            // Its due may have become less meanwhile.
            let most = if late { self.turns[class].least() } else { due.max(least) };
            let slice_ns = credit.max(self.turns[class].least()).min(most) as u64;
            self.turn = Some(ActiveTurn {
                who,
                class,
                since_ns: now_ns,
                began_ns: None,
                slice_ns,
                late,
                closing: false,
                bytes: 0,
                price: 0,
                lost_ns: 0,
                ended_ns: now_ns,
                last: who,
            });
            return true;
        }
    }

    /// Ends and charges the turn. An owner with more bios is queued again; so is one that has used up its credit and
    /// thinks, since its position would otherwise depend on the moment.
    fn end_turn(&mut self, now_ns: u64) {
        let Some(turn) = self.turn.take() else { return };
        self.batch.clear();
        let class = turn.class;
        // After the loss of the device it was others' time.
        let end_ns = if self.tenure.holds() { now_ns } else { turn.ended_ns };
        let used_ns = turn.began_ns.map_or(0, |began_ns| end_ns.saturating_sub(began_ns));
        let sync = self.streams.get(turn.who).sync;
        let charged_ns = if sync {
            self.tenure.lost(turn.lost_ns);
            used_ns.saturating_sub(turn.lost_ns)
        } else {
            self.tenure.wrote(turn.price, used_ns, now_ns)
        };
        let is_seek_group = turn.who == self.seek_groups[class];
        let FairStream { share, .. } = self.streams.get_mut(turn.who);
        share.credit = share.credit.saturating_sub_unsigned(charged_ns);
        if sync && !is_seek_group {
            let bytes = turn.bytes.saturating_mul(u64::from(WEIGHT)) / u64::from(share.weight.max(1));
            share.served = share.served.saturating_add(bytes);
        }
        if is_seek_group && self.mixing[class] == 0 {
            // The front of its queue is idle, and leaves it.
            self.front_of_mix(class, now_ns);
        }
        let wants_more = self.waiting_of(turn.who, class) > 0;
        let stream = self.streams.get(turn.who);
        if !is_seek_group && wants_more && stream.sync && stream.history.seeks() {
            return self.stand_in_line(turn.who, now_ns);
        }
        let least = self.turns[class].least().max(stream.share.needs);
        let rest_ns = (turn.slice_ns as i64).saturating_sub_unsigned(used_ns).min(stream.share.credit);
        if wants_more && rest_ns >= least {
            return self.turns[class].enter_first(&mut self.streams, turn.who, turn.since_ns);
        }
        let used_up = stream.sync && stream.share.credit < self.turns[class].least();
        if wants_more || (used_up && self.turns[class].len() < KEPT_MAX) {
            let due = self.turn_due(turn.who);
            self.turns[class].enter_last(&mut self.streams, turn.who, due, now_ns);
        } else {
            self.rest(turn.who);
        }
    }

    fn next_of_turn(&mut self, turn: &ActiveTurn, now_ns: u64) -> Option<Selected> {
        if turn.who == self.seek_groups[turn.class] {
            let at = self.front_of_mix(turn.class, now_ns)?;
            return Some(self.next_of_mix(turn.class, at));
        }
        if self.batch.is_empty() {
            self.sort_batch(turn.who);
        }
        let (_, place) = self.batch.pop()?;
        let stream = self.streams.get_mut(turn.who);
        stream.batch -= 1;
        let bio = self.slots.remove(&mut stream.bios, place);
        Some(Selected::Bio(self.hand_out(turn.who, bio)))
    }

    /// Sorts the oldest bios, or the rest of them: first those ahead of the position, then those behind.
    fn sort_batch(&mut self, at: u32) {
        let stream = self.streams.get_mut(at);
        if stream.batch == 0 {
            stream.batch = stream.bios.len().min(if stream.sync { BATCH } else { BATCH_ASYNC }) as u32;
        }
        let places = self.slots.iter(&stream.bios).take(stream.batch as usize);
        let ahead = |place: u32| (self.slots.bio(place).sector.wrapping_sub(stream.position), place);
        self.batch.extend(places.map(ahead));
        self.batch.sort_unstable_by(|one, other| other.cmp(one));
    }

    /// A request of stream `at` has ended, whose turns are those of `who`.
    #[inline(never)]
    pub(super) fn ended_in_turn(&mut self, at: u32, who: u32, start_ns: u64, now_ns: u64) {
        let Some(turn) = &mut self.turn else { return };
        if turn.who == who {
            if turn.began_ns.is_some() {
                let gap_ns = now_ns.saturating_sub(turn.ended_ns.max(start_ns));
                let stream = self.streams.get_mut(who);
                if stream.sync && who == at && self.config.drain {
                    turn.lost_ns += self.tenure.read(gap_ns, u64::from(stream.gap_ns), now_ns);
                }
                let mean_ns = &mut stream.gap_ns;
                *mean_ns = ((u64::from(*mean_ns) * 7 + gap_ns.min(history::IDLE_NS * 8)) / 8) as u32;
            }
            turn.began_ns.get_or_insert(now_ns);
            (turn.ended_ns, turn.last) = (now_ns, at);
            self.tenure.ended(now_ns);
        }
        let turn = *turn;
        if self.in_flight() == 0 {
            // Nobody asks a queue in which nothing waits.
            self.tenure.keep(self.idle_until_ns(&turn).max(self.hold_off_end_ns(&turn)) + LATE_NS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::FairDevice;
    use super::*;
    use crate::sched::Scheduler;
    use crate::{Bio, DeviceInfo, Op, Priority};

    #[test]
    fn a_turn_comes_in_bounded_steps_however_long_it_is_and_however_little_is_due() {
        for (slice_ms, async_percent) in [(3_600_000, 1), (u32::MAX, 1), (100, 1), (100, 40)] {
            let config = FairConfig { slice_ms, async_percent, device: FairDevice::Seeks, ..FairConfig::default() };
            let mut fair = Fair::new(config, 64, &DeviceInfo::default());
            let mut write = Bio::with_capacity(0);
            (write.op, write.sectors) = (Op::Write, 8);
            fair.insert(write, 0);
            assert!(matches!(fair.next(0), Selected::Bio(_)));
            let rounds = fair.turns[Priority::default() as usize].round();
            assert!(rounds < PASSED_MAX + 4, "{rounds} with {slice_ms} ms and {async_percent} %");
            let slice_ns = fair.turn.map_or(0, |turn| turn.slice_ns);
            assert!(slice_ns > 0 && slice_ns <= u64::from(slice_ms) * 1_000_000, "{slice_ns}");
        }
    }
}
