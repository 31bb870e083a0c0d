//! Members of a hardware queue, round by round, with a clock controlled by the test.

use std::sync::Arc;
use std::time::Instant;

use blkyard_export::{DetachedQueue, PendingFlush, QueuePoller, QueueRemote, QueueShare, queue_pair};
use blkyard_mq::{BlockDevice, HwQueue, HwQueueConfig, Poller, PollerState, RamQueue, RateConfig, RateLimit};

use super::mini::{MiniOp, MiniQueueSession, MiniRequest, MiniRing};
use super::{IDENTITY, QUEUES, device};

const MS: u64 = 1_000_000;

/// Two running members of a hardware queue.
struct Members {
    poller: QueuePoller<RamQueue, MiniQueueSession>,
    remotes: Vec<QueueRemote<MiniQueueSession>>,
    rings: Vec<Arc<MiniRing>>,
    now_ns: u64,
    offered: u16,
}

impl Members {
    fn new(latency_ns: u64, limits: &[Arc<RateLimit>]) -> Members {
        let usual = HwQueueConfig::default();
        let config = HwQueueConfig { bios_max: usual.bios_max * QUEUES, depth: usual.depth * QUEUES, ..usual };
        let device = device(latency_ns);
        let mut hw = HwQueue::new(device.queue(config.depth), Arc::new(device.info().clone()), config);
        hw.set_rates(0, limits.to_vec());
        let (remotes, ports): (Vec<_>, Vec<_>) = (0..QUEUES).map(|_| queue_pair()).unzip();
        let share = QueueShare { bios: usual.bios_max, depth: usual.depth, devices: 1 };
        let mut detached = ports.into_iter().map(|port| DetachedQueue::new(IDENTITY, port, share).unwrap());
        let poller = QueuePoller::of_detached(hw, detached.next().unwrap());
        let rings = MiniRing::several(QUEUES);
        let mut members = Members { poller, remotes, rings, now_ns: 0, offered: 0 };
        for queue in detached {
            let mover = members.remotes[0].mover();
            assert!(members.asking(move || mover.adopt(queue, std::time::Duration::from_secs(30)).is_ok()));
        }
        let remotes = std::mem::take(&mut members.remotes);
        for (remote, ring) in remotes.iter().zip(members.rings.clone()) {
            members.asking(|| remote.run((ring, 0)).unwrap().unwrap());
        }
        members.remotes = remotes;
        members
    }

    /// Result of a call on another thread, while this thread runs the poller.
    fn asking<T: Send>(&mut self, ask: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let asking = scope.spawn(ask);
            while !asking.is_finished() {
                self.turn();
            }
            asking.join().unwrap()
        })
    }

    /// One round, a microsecond after the previous one.
    fn turn(&mut self) -> PollerState {
        self.now_ns += 1000;
        self.poller.run_once(&mut (), self.now_ns)
    }

    fn turns(&mut self, count: usize) {
        for _ in 0..count {
            self.turn();
        }
    }

    /// Whether arming reports work.
    fn nod(&mut self) -> bool {
        let work = Poller::<()>::arm(&mut self.poller);
        Poller::<()>::disarm(&mut self.poller);
        work
    }

    /// Suspends all queues.
    fn end(mut self, remotes: &[QueueRemote<MiniQueueSession>]) {
        for remote in remotes {
            self.asking(|| remote.suspend().unwrap().wait().unwrap());
        }
    }

    fn offer(&mut self, queue: usize, count: u64) {
        for _ in 0..count {
            let (id, sector) = (self.offered, u64::from(self.offered) * 2 % 2048);
            self.offered = self.offered.wrapping_add(1);
            self.rings[queue].offer(MiniRequest { id, op: MiniOp::Read, sector, slot: 0 });
        }
    }

    /// Takes the completions of a ring; returns their number.
    fn completed(&self, queue: usize) -> u64 {
        std::iter::from_fn(|| self.rings[queue].poll()).count() as u64
    }
}

/// A limit of this number of requests per second.
fn limit(iops: u64) -> Arc<RateLimit> {
    Arc::new(RateLimit::new(RateConfig { iops, bytes_per_s: 0, burst_ms: 10 }).unwrap())
}

#[test]
fn suspended_member_lifts_no_limit_for_others() {
    let mut members = Members::new(100 * MS, &[limit(100)]);
    members.offer(0, 1);
    members.turn();
    // It drains when its device completes; meanwhile the other member offers many requests.
    let suspension = members.remotes[0].suspend().unwrap();
    members.turn();
    members.offer(1, 200);
    let begin_ns = members.now_ns;
    assert_eq!(members.asking(|| suspension.wait().unwrap()), Some(1));
    let drained_ms = (members.now_ns - begin_ns) / MS;
    assert!(drained_ms <= 110, "it is drained once its device answers: {drained_ms} ms");
    for second in 1..=3 {
        let until_ns = begin_ns + second * 1000 * MS;
        let mut done = 0;
        while members.now_ns < until_ns {
            members.turn();
            done += members.completed(1);
        }
        assert!((70..=102).contains(&done), "{done} requests in second {second}, and a hundred may pass");
        members.offer(1, 100);
    }
    let remotes = std::mem::take(&mut members.remotes);
    members.end(&remotes);
}

#[test]
fn retired_member_at_rest_changes_nothing_for_others() {
    let mut members = Members::new(0, &[limit(100)]);
    let mut remotes = std::mem::take(&mut members.remotes);
    members.asking(|| remotes[0].suspend().unwrap().wait().unwrap());
    remotes.remove(0).retire();
    members.offer(1, 200);
    let (until_ns, mut done) = (members.now_ns + 1000 * MS, 0);
    while members.now_ns < until_ns {
        members.turn();
        done += members.completed(1);
    }
    assert!((90..=110).contains(&done), "{done} requests in a second, and a hundred may pass");
    members.end(&remotes);
}

#[test]
fn member_that_waits_for_a_drain_lets_the_lane_sleep() {
    let mut members = Members::new(100 * MS, &[limit(1000)]);
    members.offer(0, 1);
    members.turn();
    let suspension = members.remotes[0].suspend().unwrap();
    members.turn();
    members.offer(1, 1);
    members.turn();
    assert!(!members.nod(), "nothing can be done before the device answers");
    assert_eq!(members.asking(|| suspension.wait().unwrap()), Some(1));
    let mut done = 0;
    while done == 0 {
        members.turn();
        done = members.completed(1);
    }
}

#[test]
fn depth_bounds_each_member_of_a_hardware_queue() {
    let mut members = Members::new(100 * MS, &[]);
    let remotes = std::mem::take(&mut members.remotes);
    for remote in &remotes {
        assert_eq!(members.asking(|| remote.set_depth(8).unwrap()), 8);
    }
    members.offer(0, 100);
    members.turns(20);
    let ring = members.asking(|| remotes[0].watch().look().unwrap().recv().unwrap()).ring.unwrap();
    assert_eq!(ring.in_flight, 8, "its own bound, whatever the others leave");
    assert!(!members.nod(), "there is no bio for what waits");
    members.offer(1, 100);
    members.turns(20);
    let ring = members.asking(|| remotes[1].watch().look().unwrap().recv().unwrap()).ring.unwrap();
    assert_eq!(ring.in_flight, 8);
    assert_eq!(members.asking(|| remotes[0].set_depth(16).unwrap()), 16);
    members.turns(20);
    let ring = members.asking(|| remotes[0].watch().look().unwrap().recv().unwrap()).ring.unwrap();
    assert_eq!(ring.in_flight, 16);
    members.end(&remotes);
}

#[test]
fn refusals_and_merges_are_counted_with_their_member() {
    let mut members = Members::new(0, &[]);
    let counted = |members: &Members, queue: usize| {
        let stats = members.remotes[queue].watch().stats()[0].snapshot();
        (stats.refused, stats.merged.iter().sum::<u64>())
    };
    for (round, queue) in [(1, 1), (1, 0), (2, 1)] {
        // A sector past the end, and two adjacent ones.
        for sector in [1 << 40, 6, 7] {
            members.rings[queue].offer(MiniRequest { id: 0, op: MiniOp::Read, sector, slot: 0 });
        }
        members.turns(5);
        assert_eq!(members.completed(queue), 3);
        assert_eq!(counted(&members, queue), (round, round), "queue {queue}");
    }
    let mover = members.remotes[0].mover();
    let limit = std::time::Duration::from_secs(30);
    let detached = members.asking(move || mover.part(limit, limit).unwrap());
    members.rings[1].offer(MiniRequest { id: 0, op: MiniOp::Read, sector: 1 << 40, slot: 0 });
    members.turns(5);
    assert_eq!([0, 1].map(|queue| counted(&members, queue)), [(1, 1), (3, 2)], "the first has left");
    drop(detached);
}

/// Times at which flushes end that are requested 0, 50 ms and so on after a write that takes 100 ms, ms after that.
fn ends_of_flushes(count: u64) -> Vec<u64> {
    let mut members = Members::new(100 * MS, &[]);
    let begin_ns = members.now_ns;
    members.rings[0].offer(MiniRequest { id: 0, op: MiniOp::Write, sector: 0, slot: 0 });
    members.turn();
    let (mut pending, mut ends) = (Vec::new(), Vec::new());
    while pending.len() + ends.len() < count as usize || !pending.is_empty() {
        members.turn();
        let now_ms = (members.now_ns - begin_ns) / MS;
        let asked = (pending.len() + ends.len()) as u64;
        if asked < count && now_ms >= asked * 50 {
            pending.push(members.remotes[0].begin_flush().unwrap());
        }
        let is_over = |flush: &mut PendingFlush| flush.wait_until(Some(Instant::now())).unwrap() == Some(true);
        ends.extend(pending.extract_if(.., is_over).map(|_| now_ms));
    }
    let remotes = std::mem::take(&mut members.remotes);
    members.end(&remotes);
    ends
}

#[test]
fn flush_begins_after_what_was_in_flight_when_it_was_requested() {
    let ends = ends_of_flushes(1);
    assert!(ends[0] >= 200, "the write may be in the cache that was flushed: {ends:?}");
}

#[test]
fn flush_in_flight_answers_no_later_request() {
    let ends = ends_of_flushes(4);
    // The first one begins at 100 ms, for the requests of 0, 50 and 100 ms; the next one for that of 150 ms.
    assert!(ends[3] >= 300, "it was in flight when the last was requested: {ends:?}");
    assert!(ends[3] < 320, "one more is enough: {ends:?}");
}

#[test]
fn others_stop_and_start_during_the_flush_of_a_member_at_rest() {
    // The other thread of a command may take many rounds.
    const LATENCY_NS: u64 = 3_600_000 * MS;
    let mut members = Members::new(LATENCY_NS, &[]);
    let remotes = std::mem::take(&mut members.remotes);
    members.asking(|| remotes[0].suspend().unwrap().wait().unwrap());
    let flush = remotes[0].begin_flush().unwrap();
    members.turns(2);
    let base = members.asking(|| remotes[1].suspend().unwrap().wait().unwrap()).unwrap();
    let ring = Arc::clone(&members.rings[1]);
    members.asking(|| remotes[1].run((ring, base)).unwrap().unwrap());
    assert_eq!(flush.wait_until(Some(Instant::now())).unwrap(), None, "it is in flight all the time");
    members.offer(1, 1);
    members.turns(2);
    members.now_ns += LATENCY_NS;
    members.turns(2);
    assert_eq!(members.completed(1), 1);
    assert_eq!(flush.wait_until(Some(Instant::now())).unwrap(), Some(true));
    members.end(&remotes[1..]);
}
