//! Queues that share limits, on late lanes: no rate is exceeded, no bio is lost, and none waits without need.

use std::sync::Arc;

use blkyard_mq::{
    Bio, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, Merging, NullConfig, NullDevice, NullQueue, Op, QueueLimits,
    RateConfig, RateLimit, SchedulerConfig, Segment, TimesliceConfig,
};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
/// A queue's booking: a quarter of a millisecond of its rate.
const LOT_NS: u64 = 250_000;

/// Submits so many bios to a queue.
#[derive(Clone, Debug)]
struct Submission {
    queue: usize,
    after_ns: u64,
    sectors: u32,
    count: usize,
}

fn any_submissions() -> impl Strategy<Value = Vec<Submission>> {
    let sectors = prop_oneof![4 => Just(8_u32), 2 => 1_u32..64, 1 => Just(2048)];
    let submission = (0_usize..4, 0_u64..2 * MS, sectors, 1_usize..40)
        .prop_map(|(queue, after_ns, sectors, count)| Submission { queue, after_ns, sectors, count });
    proptest::collection::vec(submission, 1..40)
}

/// Slow and fast rates alike; now and then none.
fn any_rate(least: u64, doublings: u32) -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0), 3 => (0..doublings, 0..least).prop_map(move |(times, more)| (least + more) << times)]
}

struct Rig {
    queues: Vec<HwQueue<NullQueue>>,
    now_ns: u64,
    /// When each bio passed, and how many bytes it moved: the device is done with it at once.
    passed: Vec<(u64, u64)>,
}

impl Rig {
    fn new(limits: &[Arc<RateLimit>], merging: Merging, scheduler: SchedulerConfig) -> Rig {
        let limits_of = QueueLimits { sectors_max: 4096, ..QueueLimits::default() };
        let info = DeviceInfo { capacity_sectors: 1 << 40, limits: limits_of, ..DeviceInfo::default() };
        let device = NullDevice::new(info.clone(), NullConfig::default());
        let config = HwQueueConfig { bios_max: 1600, merging, scheduler, ..HwQueueConfig::default() };
        let queue = |_| {
            let mut queue = HwQueue::new(device.queue(config.depth), Arc::new(info.clone()), config);
            queue.set_rates(0, limits.to_vec());
            queue
        };
        Rig { queues: (0..4).map(queue).collect(), now_ns: MS, passed: Vec::new() }
    }

    fn submit(&mut self, submission: &Submission) {
        for n in 0..submission.count {
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.sectors, bio.sector) =
                (Op::Write, submission.sectors, n as u64 * u64::from(submission.sectors));
            bio.segments.push(Segment { region: 0, offset: 0, len: submission.sectors << 9 });
            self.queues[submission.queue].submit(bio);
        }
    }

    fn turn(&mut self, queue: usize) {
        let (queue, passed, now_ns) = (&mut self.queues[queue], &mut self.passed, self.now_ns);
        for _ in 0..20_000 {
            queue.issue(&mut (), now_ns);
            queue.reap(&mut (), now_ns, &mut |bio| passed.push((now_ns, bio.bytes())));
            if !queue.has_work() {
                return;
            }
        }
        panic!("it turns without end: {:?}", queue.snapshot(now_ns));
    }

    /// Runs queues at their request, with a random delay, until a time or until all are idle.
    fn run_until(&mut self, end_ns: u64, late_ns: u64) {
        loop {
            let due = self.queues.iter().map(HwQueue::deadline_ns::<()>).enumerate();
            let due = due.filter_map(|(queue, due_ns)| Some((due_ns?, queue))).min();
            let Some((due_ns, queue)) = due.filter(|(due_ns, _)| due_ns + late_ns < end_ns) else { break };
            self.now_ns = self.now_ns.max(due_ns + late_ns);
            self.turn(queue);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn what_passes_is_never_more_than_rate_and_burst_allow_and_the_rate_is_reached(
        iops in any_rate(500, 11), bytes_per_s in any_rate(1 << 20, 11),
        burst_ms in 1_u32..20, late_ns in 0_u64..400_000, submissions in any_submissions(), merges: bool, sliced: bool,
    ) {
        let config = RateConfig { iops, bytes_per_s, burst_ms };
        let limits: Vec<_> = RateLimit::new(config).map(Arc::new).into_iter().collect();
        let scheduler = if sliced { SchedulerConfig::Timeslice(TimesliceConfig::default()) } else { SchedulerConfig::None };
        let mut rig = Rig::new(&limits, if merges { Merging::Recent } else { Merging::Off }, scheduler);
        let (mut bios, mut most_ns, mut all_ns) = (0, 0, [0_u128; 2]);
        let takes_ns = |bytes: u64| {
            let of = |units: u64, per_s: u64| if per_s == 0 { 0 } else { u128::from(units) * 1_000_000_000 / u128::from(per_s) };
            [of(1, iops), of(bytes, bytes_per_s)]
        };
        for submission in &submissions {
            rig.run_until(rig.now_ns + submission.after_ns, late_ns);
            rig.now_ns += submission.after_ns;
            rig.submit(submission);
            rig.turn(submission.queue);
            bios += submission.count;
            let each_ns = takes_ns(u64::from(submission.sectors) << 9);
            most_ns = most_ns.max(each_ns[0]).max(each_ns[1]);
            all_ns = [0, 1].map(|at| all_ns[at] + submission.count as u128 * each_ns[at]);
        }
        rig.run_until(u64::MAX, late_ns);
        prop_assert!(rig.queues.iter().all(HwQueue::is_idle), "something sleeps with nothing to wait for");
        prop_assert_eq!(rig.passed.len(), bios);
        rig.passed.sort_unstable();
        // In any interval: its rate, the burst, and of each queue its booking, and one bio longer than estimated.
        let slack_ns = u128::from(u64::from(burst_ms) * MS) + 4 * (u128::from(LOT_NS + late_ns) + 2 * most_ns);
        for kind in 0..2 {
            let mut least = i128::MAX;
            let mut sum_ns = 0_i128;
            for (at_ns, bytes) in &rig.passed {
                // All that passed so far, less the time that passed: it never rises by more than the slack.
                least = least.min(sum_ns - i128::from(*at_ns));
                sum_ns += takes_ns(*bytes)[kind] as i128;
                prop_assert!(sum_ns - i128::from(*at_ns) - least <= slack_ns as i128 + 1000, "{kind}: {} ns too much", sum_ns - i128::from(*at_ns) - least - slack_ns as i128);
            }
        }
        // And all of it in the time it takes, with no other wait.
        let (first_ns, last_ns) = (MS, rig.now_ns);
        let wished_ns: u64 = submissions.iter().map(|submission| submission.after_ns).sum();
        let slowest_ns = u128::from(wished_ns) + all_ns[0].max(all_ns[1]);
        // Where both limits hold, each may be the tighter one at a time.
        let both_ns = if iops > 0 && bytes_per_s > 0 { all_ns[0].min(all_ns[1]) } else { 0 };
        prop_assert!(
            u128::from(last_ns - first_ns) <= slowest_ns + both_ns + slack_ns + bios as u128 * 2 + u128::from(8 * MS),
            "{} ns, and should take {slowest_ns}", last_ns - first_ns
        );
    }
}
