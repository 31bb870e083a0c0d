//! A second completion ring beside a lane's: of big entries, which wakes the lane by an eventfd, and of polled I/O,
//! which keeps it awake. And the facts of io_uring behind ADR 35, on the kernel of this machine.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_mem::RegionTable;
use blkyard_mq::{
    Batch, Bio, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, IdlePolicy, Op, Poller, PollerState, QueueLimits,
    Status, Tag,
};
use blkyard_os::{LaneConfig, Ring, spawn};
use blkyard_sys::EventFd;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

/// A ring of entries of 128 bytes, as passthrough of NVMe commands wants them.
type BigRing = IoUring<squeue::Entry128, cqueue::Entry>;

/// I/Os one after another. A lane that is not woken polls once a second, and takes minutes.
const ROUNDS: u64 = 200;
const LIMIT: Duration = Duration::from_mins(1);
/// `IORING_ENTER_GETEVENTS`.
const GET_EVENTS: u32 = 1;

/// Kind of a driver's second ring.
#[derive(Clone, Copy, PartialEq)]
enum SecondRing {
    /// Its completions are handed over when it is entered, and it signals an eventfd.
    Deferred,
    /// Its completions are found by polling only.
    Polled,
}

impl SecondRing {
    fn build(self) -> BigRing {
        let mut builder = IoUring::builder();
        match self {
            SecondRing::Deferred => builder.setup_single_issuer().setup_defer_taskrun(),
            SecondRing::Polled => builder.setup_iopoll(),
        };
        builder.build(8).unwrap()
    }

    /// An entry of 128 bytes. Without a passthrough device it is a timeout or a no-op.
    fn entry(self, tag: usize) -> squeue::Entry128 {
        static MS: Timespec = Timespec::new().nsec(1_000_000);
        let entry = match self {
            SecondRing::Deferred => opcode::Timeout::new(&raw const MS).build(),
            SecondRing::Polled => opcode::Nop::new().build(),
        };
        entry.user_data(tag as u64).into()
    }
}

/// Driver of a queue with a second ring.
struct SecondRingDriver {
    kind: SecondRing,
    eventfd: EventFd,
    /// Made by the thread that uses it.
    ring: Option<BigRing>,
    tags: Vec<Option<Tag>>,
    in_flight: usize,
    /// When the device would have finished, for operations that take no time.
    due_ns: u64,
}

impl SecondRingDriver {
    fn new(kind: SecondRing, depth: usize) -> SecondRingDriver {
        let tags = (0..depth).map(|_| None).collect();
        SecondRingDriver { kind, eventfd: EventFd::new().unwrap(), ring: None, tags, in_flight: 0, due_ns: 0 }
    }

    fn ring(&mut self) -> &mut BigRing {
        self.ring.get_or_insert_with(|| {
            let ring = self.kind.build();
            if self.kind == SecondRing::Deferred {
                ring.submitter().register_eventfd(self.eventfd.as_fd().as_raw_fd()).unwrap();
            }
            ring
        })
    }
}

impl<Cx: ?Sized> Driver<Cx> for SecondRingDriver {
    fn queue_rqs(&mut self, _: &mut Cx, _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, _, _)) = batch.take() {
            let (place, entry) = (tag.index(), self.kind.entry(tag.index()));
            self.tags[place] = Some(tag);
            self.in_flight += 1;
            // SAFETY: the entry points to no memory but a static time.
            unsafe { self.ring().submission().push(&entry) }.unwrap();
        }
        self.ring().submit().unwrap();
        if self.kind == SecondRing::Polled {
            self.due_ns = batch.now_ns() + 1_000_000;
        }
    }

    fn poll(&mut self, _: &mut Cx, _: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let Some(ring) = self.ring.as_mut().filter(|_| now_ns >= self.due_ns) else { return };
        // SAFETY: only flags are passed.
        let entered = unsafe { ring.submitter().enter::<()>(0, 0, GET_EVENTS, None) };
        entered.unwrap();
        for completion in ring.completion() {
            let tag = self.tags[completion.user_data() as usize].take().unwrap();
            self.in_flight -= 1;
            let expected = if self.kind == SecondRing::Deferred { -libc::ETIME } else { 0 };
            assert_eq!(completion.result(), expected);
            done.complete(tag, Status::Ok);
        }
    }

    /// Polled I/O is found by polling: the lane does not sleep while some is in flight.
    fn arm(&mut self) -> bool {
        self.kind == SecondRing::Polled && self.in_flight > 0
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (self.kind == SecondRing::Deferred).then(|| self.eventfd.as_fd())
    }
}

/// Does one I/O after another.
struct OneByOne {
    queue: HwQueue<SecondRingDriver>,
    left: u64,
    turns: Arc<AtomicU64>,
}

impl Poller<Ring> for OneByOne {
    fn run_once(&mut self, ring: &mut Ring, now_ns: u64) -> PollerState {
        self.turns.fetch_add(1, Relaxed);
        let mut moved = self.queue.reap(ring, now_ns, &mut |bio| assert_eq!(bio.status, Status::Ok));
        if self.queue.is_idle() && self.left > 0 {
            self.left -= 1;
            let mut bio = Bio::with_capacity(0);
            (bio.op, bio.sector, bio.sectors) = (Op::Discard, self.left * 8, 8);
            self.queue.submit(bio);
            moved += 1;
        }
        moved += self.queue.issue(ring, now_ns);
        if moved > 0 { PollerState::Busy } else { PollerState::Waiting }
    }

    fn arm(&mut self) -> bool {
        self.queue.arm::<Ring>()
    }

    fn disarm(&mut self) {
        self.queue.disarm::<Ring>();
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.eventfd::<Ring>()
    }

    fn is_over(&self) -> bool {
        self.left == 0 && self.queue.is_idle()
    }
}

/// Runs three queues of this kind on one lane to their end; says how often all of them were run.
fn run(kind: SecondRing) -> u64 {
    let (start, turns) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let limits = QueueLimits { discard_sectors_max: 1024, ..QueueLimits::default() };
    let info = DeviceInfo { name: "second ring".into(), capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
    let (info, counter) = (Arc::new(info), Arc::clone(&turns));
    let pollers = move |_: &mut Ring| {
        let queue = || {
            let config = HwQueueConfig { depth: 4, bios_max: 64, ..HwQueueConfig::default() };
            HwQueue::new(SecondRingDriver::new(kind, 4), Arc::clone(&info), config)
        };
        (0..3).map(|_| OneByOne { queue: queue(), left: ROUNDS, turns: Arc::clone(&counter) }).collect()
    };
    let config = LaneConfig { name: "second-ring".into(), policy: IdlePolicy::up_to(0), ..LaneConfig::default() };
    spawn(config, pollers).unwrap().join().unwrap();
    assert!(start.elapsed() < LIMIT, "{:?} for {ROUNDS} I/Os", start.elapsed());
    turns.load(Relaxed)
}

#[test]
fn a_lane_sleeps_until_a_ring_of_big_entries_signals() {
    let turns = run(SecondRing::Deferred);
    // Each I/O takes a millisecond, and some turns: to begin it, to end it, and one in vain. Not thousands of polls.
    assert!(turns < 3 * ROUNDS * 30, "{turns} turns: the lane did not sleep");
}

#[test]
fn a_lane_with_polled_io_in_flight_finds_it_without_an_eventfd() {
    run(SecondRing::Polled);
}

#[test]
fn a_ring_of_polled_io_takes_no_polls_of_eventfds() {
    let mut polled: IoUring = IoUring::builder().setup_iopoll().build(8).unwrap();
    let eventfd = EventFd::new().unwrap();
    let poll = opcode::PollAdd::new(Fd(eventfd.as_fd().as_raw_fd()), libc::POLLIN as u32).build();
    // SAFETY: the entry points to no memory.
    unsafe { polled.submission().push(&poll) }.unwrap();
    let limit = Timespec::from(LIMIT);
    polled.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&limit)).unwrap();
    assert_eq!(polled.completion().next().unwrap().result(), -libc::EINVAL, "so it cannot be the ring of the lane");
}
