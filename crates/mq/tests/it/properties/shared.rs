//! Queues that several threads share, in an order that is drawn and not left to them: properties 9 and 11. Under
//! schedules of all kinds: `shuttle_*.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blkyard_mq::{Bio, BlockDevice, HwQueue, Op, Parker, QueueLimits, SwQueue, Wake};
use blkyard_sim::ChaosDevice;
use proptest::prelude::*;

use super::world::{Doorbell, DoorbellDriver, Plan, any_plan, infos};

/// Sleeps by turning the clock on.
struct ClockParker(Arc<AtomicU64>, Doorbell);

impl Wake for ClockParker {
    fn wake(&self) {}
}

impl Parker for ClockParker {
    fn sleep(&self) {
        panic!("a thread went to sleep, and all the others are at rest");
    }

    fn watch(&self, deadline_ns: u64) {
        assert_eq!(self.1.0.lock().unwrap().unannounced, 0, "slept on what was not announced");
        self.0.fetch_max(deadline_ns, Ordering::Relaxed);
    }
}

/// Actions of a shared queue's threads, one at a time.
#[derive(Clone, Debug)]
enum Act {
    Submit(usize, u64),
    Ring(usize),
    Poll(usize),
    Wait(usize),
    /// The thread goes.
    Leave(usize),
}

fn any_acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        8 => (0_usize..4, 0_u64..20).prop_map(|(end, sector)| Act::Submit(end, sector * 8)),
        3 => (0_usize..4).prop_map(Act::Ring),
        3 => (0_usize..4).prop_map(Act::Poll),
        1 => (0_usize..4).prop_map(Act::Wait),
        1 => (0_usize..4).prop_map(Act::Leave),
    ];
    proptest::collection::vec(act, 1..200)
}

struct SharedRing {
    ends: Vec<Option<SwQueue<DoorbellDriver, Doorbell>>>,
    /// By end: bios submitted and given back.
    counts: Vec<(u64, u64)>,
    clock: Arc<AtomicU64>,
    eventfd: Doorbell,
    device: ChaosDevice,
}

impl SharedRing {
    fn new(plan: &Plan) -> SharedRing {
        let limits = QueueLimits { write_zeroes_sectors_max: 64, ..QueueLimits::default() };
        let infos = infos(&Plan { limits, volatile_cache: true, ..plan.clone() });
        let device = ChaosDevice::new(infos.clone(), plan.chaos).unwrap();
        let driver = DoorbellDriver(device.queue(plan.config.depth));
        let hw = HwQueue::with_namespaces(driver, infos, plan.config);
        let (clock, eventfd) = (Arc::new(AtomicU64::new(0)), Doorbell::default());
        let parker = |_| Arc::new(ClockParker(Arc::clone(&clock), eventfd.clone())) as Arc<dyn Parker>;
        let ends: Vec<_> = SwQueue::share(hw, eventfd.clone(), 16, (0..4).map(parker).collect());
        SharedRing { ends: ends.into_iter().map(Some).collect(), counts: vec![(0, 0); 4], clock, eventfd, device }
    }

    /// Executes one action. All requests of the device have been announced afterwards.
    fn act(&mut self, act: &Act) {
        let SharedRing { ends, counts, clock, eventfd, .. } = self;
        let clock = || clock.fetch_add(1000, Ordering::Relaxed);
        let (Act::Submit(end, _) | Act::Ring(end) | Act::Poll(end) | Act::Wait(end) | Act::Leave(end)) = *act;
        let Some(queue) = &mut ends[end] else { return };
        let mut sink = |bio: Box<Bio>| {
            assert_eq!(bio.cookie, end as u64, "given back to another thread");
            counts[end].1 += 1;
        };
        match *act {
            Act::Submit(_, sector) if queue.room() > 0 => {
                let mut bio = Bio::with_capacity(0);
                bio.op = if sector % 3 == 0 { Op::Flush } else { Op::WriteZeroes };
                (bio.sector, bio.sectors, bio.cookie) = (sector, 8, end as u64);
                queue.submit(bio);
                self.counts[end].0 += 1;
                return;
            }
            Act::Submit(..) => return,
            Act::Ring(_) => queue.ring(&clock),
            Act::Poll(_) => {
                queue.poll(&clock, &mut sink);
            }
            Act::Wait(_) => {
                queue.wait(&clock, &mut sink);
            }
            Act::Leave(_) => {
                let Some(queue) = ends[end].take() else { return };
                queue.leave(&clock, &mut sink);
                assert_eq!(counts[end].0, counts[end].1, "something of a thread that went is still there");
            }
        }
        assert_eq!(eventfd.0.lock().unwrap().unannounced, 0, "{act:?} left requests that were not announced");
    }

    fn finish(&mut self) {
        (0..4).for_each(|end| self.act(&Act::Leave(end)));
        let counts = self.device.counts();
        assert_eq!(counts.sent, counts.refused);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // 9
    #[test]
    fn whenever_a_run_ends_all_that_the_device_was_given_is_announced(plan in any_plan(), acts in any_acts()) {
        let mut shared = SharedRing::new(&plan);
        acts.iter().for_each(|act| shared.act(act));
        shared.finish();
        let submitted: u64 = shared.counts.iter().map(|(submitted, _)| submitted).sum();
        prop_assert_eq!(shared.eventfd.0.lock().unwrap().taken > 0, submitted > 0);
    }

    // 11
    #[test]
    fn a_thread_that_leaves_leaves_nothing_in_its_ring_while_others_go_on(plan in any_plan(), acts in any_acts(), gone in 0_usize..4) {
        let mut shared = SharedRing::new(&plan);
        let middle = acts.len() / 2;
        acts[..middle].iter().for_each(|act| shared.act(act));
        // Also bios that are still in the plug: the thread leaves without having made them visible.
        (0..5).for_each(|at| shared.act(&Act::Submit(gone, at * 8)));
        shared.act(&Act::Leave(gone));
        acts[middle..].iter().for_each(|act| shared.act(act));
        shared.finish();
        prop_assert!(shared.counts.iter().all(|(submitted, ended)| submitted == ended));
    }
}
