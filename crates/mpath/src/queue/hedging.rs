//! What a queue over several paths does for hedged reads: it sends them, takes the first answer, and drops the other.

use blkyard_mq::{Done, Driver, HedgeDriver, RegionTable, Status};

use super::{MultipathQueue, NOWHERE, PathQueue};
use crate::hedged::{CopyKind, ReadCopy};
use crate::policy::PathIo;

impl<D, E> MultipathQueue<D, E> {
    /// Sends the reads that are late to another path as well. Those that have been answered were taken before.
    #[cold]
    pub(super) fn send_hedges<Cx: ?Sized>(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        done: &mut Done<'_>,
        now_ns: u64,
    ) where
        D: Driver<Cx>,
    {
        let mut sent: u32 = 0;
        while let Some((slot, io)) = self.hedges.as_mut().and_then(|hedges| hedges.next_late(now_ns)) {
            match self.send_hedge(slot, io, done, now_ns) {
                Some(path) => sent |= 1 << path,
                None => self.hedges.iter_mut().for_each(|hedges| hedges.postpone(slot, now_ns)),
            }
        }
        // A poll sends what was made.
        for path in (0..self.paths.len()).filter(|path| sent & 1 << path != 0) {
            self.poll_path(cx, memory, path, done, now_ns);
        }
    }

    /// Sends the read in a slot to another path. Returns that path.
    fn send_hedge<Cx: ?Sized>(&mut self, slot: usize, io: PathIo, done: &Done<'_>, now_ns: u64) -> Option<usize>
    where
        D: Driver<Cx>,
    {
        let MultipathQueue { paths, states, requests, policy, hedges, .. } = self;
        let hedges = hedges.as_mut().filter(|hedges| hedges.has_room())?;
        let first = usize::from(requests[slot].path);
        // It cannot be given up otherwise.
        paths.get_mut(first)?.driver.hedges()?;
        let choice = states.without(first, |others| policy.choose(others, &io, now_ns))?;
        let path = choice.path;
        let PathQueue { driver, usage, .. } = &mut paths[path];
        let Some(number) = driver.hedges().and_then(|hedges| hedges.send_hedge(done.request_at(slot).0)) else {
            policy.abandon(choice);
            return None;
        };
        usage.counters.in_flight += 1;
        usage.counters.hedges += 1;
        usage.is_changed = true;
        let (kind, choice) = (CopyKind::Hedge(Some(slot)), Some(choice));
        hedges.hedged(slot, ReadCopy { path, number, start_ns: now_ns, io, kind, choice });
        Some(path)
    }

    /// Handles the copies that a path has ended: the data of the first is the answer.
    #[cold]
    pub(super) fn take_copies<Cx: ?Sized>(
        &mut self,
        number: usize,
        memory: &RegionTable,
        done: &mut Done<'_>,
        now_ns: u64,
    ) where
        D: Driver<Cx>,
    {
        while let Some(ended) = self.paths[number].driver.hedges().and_then(HedgeDriver::next_ended) {
            let MultipathQueue { paths, policy, hedges: Some(hedges), .. } = self else { return };
            let Some(copy) = hedges.ended(number, ended.number) else { continue };
            let usage = &mut paths[number].usage;
            usage.left(1);
            let latency_ns = now_ns.saturating_sub(copy.start_ns);
            if ended.is_ok {
                usage.counters.ios += 1;
                usage.counters.latency_ns += latency_ns;
            }
            match copy.choice {
                Some(choice) if ended.is_ok => policy.complete(choice, now_ns),
                Some(choice) => policy.abandon(choice),
                None => {}
            }
            match copy.kind {
                CopyKind::Original => hedges.timer.completed(&copy.io, ended.is_ok.then_some(latency_ns)),
                CopyKind::Hedge(slot) => {
                    if let Some(slot) = slot.filter(|_| ended.is_ok) {
                        self.take_hedge(slot, number, ended.number, memory, done);
                    }
                    if let Some(hedges) = self.paths[number].driver.hedges() {
                        hedges.release_hedge(ended.number);
                    }
                }
            }
        }
    }

    /// A hedge has come first: completes its read, unless the data of the original is coming in.
    fn take_hedge<Cx: ?Sized>(
        &mut self,
        slot: usize,
        number: usize,
        hedge: u16,
        memory: &RegionTable,
        done: &mut Done<'_>,
    ) where
        D: Driver<Cx>,
    {
        let MultipathQueue { paths, requests, hedges: Some(hedges), .. } = self else { return };
        let first = usize::from(requests[slot].path);
        let given_up = paths.get_mut(first).and_then(|path| path.driver.hedges()?.give_up(slot));
        let Some((tag, original)) = given_up else { return };
        let (request, segments) = done.request(&tag);
        let bytes = request.bytes();
        if let Some(hedges) = paths[number].driver.hedges() {
            hedges.copy_hedge(hedge, memory, segments);
        }
        paths[number].usage.counters.hedges_won += 1;
        hedges.give_up(slot, first, original, requests[slot].choice.take());
        requests[slot].path = NOWHERE;
        done.spend(bytes);
        done.complete(tag, Status::Ok);
    }
}
