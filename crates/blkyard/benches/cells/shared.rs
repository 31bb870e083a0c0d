//! Cells of a hardware queue that threads share: what the way through rings and baton costs over the null device, for a
//! thread alone and for two.
//!
//! Threads poll and never sleep: waking is the system's price, and `core-*` have none of it either.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_mq::{Bed, Bio, BlockDevice, HwQueue, HwQueueConfig, NullConfig, NullDevice, NullQueue, SwQueue, Wake};
use blkyard_os::{cpu_places, now_ns};

use crate::core::{Places, bios, fill, info, load_alone};
use crate::report::{self, Figure, Report};
use crate::windows::{Plan, Round, Variant, measure, variant};

const BATCH: usize = 32;

/// For those who never sleep.
struct Restless;

impl Wake for Restless {
    fn wake(&self) {}
}

impl Bed for Restless {
    fn sleep(&self) {
        std::thread::yield_now();
    }

    fn watch(&self, _deadline_ns: u64) {
        std::thread::yield_now();
    }
}

/// One thread's load at its end of a shared queue.
struct Load {
    queue: SwQueue<NullQueue, ()>,
    free: Vec<Box<Bio>>,
    places: Places,
}

impl Load {
    /// As many as share one queue.
    fn sharing(threads: usize) -> Vec<Load> {
        let device = NullDevice::new(info(), NullConfig::default());
        let depth = BATCH * threads;
        let config = HwQueueConfig { depth, bios_max: depth, ..HwQueueConfig::default() };
        let hw = HwQueue::new(device.queue(depth), Arc::new(info()), config);
        let beds = (0..threads).map(|_| Arc::new(Restless) as Arc<dyn Bed>).collect();
        let load = |queue| Load { queue, free: bios(BATCH), places: Places::new() };
        SwQueue::share(hw, (), BATCH, beds).into_iter().map(load).collect()
    }
}

impl Round for Load {
    #[inline]
    fn round(&mut self) -> u64 {
        let Load { queue, free, places } = self;
        let ended = queue.poll(&now_ns, &mut |bio| free.push(bio));
        if !free.is_empty() {
            while let Some(mut bio) = free.pop() {
                let slot = bio.cookie;
                fill(&mut bio, slot, places.next());
                queue.submit(bio);
            }
            queue.ring(&now_ns);
        }
        ended as u64
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        while self.queue.in_flight() > 0 {
            self.queue.poll(&now_ns, &mut |_| ());
        }
    }
}

/// What two threads tell each other.
#[derive(Default)]
struct Partner {
    on: AtomicBool,
    over: AtomicBool,
    done: AtomicU64,
}

/// The load of one thread while another does the same from another CPU; both count.
fn together(mut ours: Load, partner: Arc<Partner>) -> Variant<'static> {
    Box::new(move |window: Duration| {
        let before = partner.done.load(Relaxed);
        partner.on.store(true, Relaxed);
        let start = Instant::now();
        let mut done = 0;
        while start.elapsed() < window {
            (0..64).for_each(|_| done += ours.round());
        }
        let passed = start.elapsed();
        partner.on.store(false, Relaxed);
        done += partner.done.load(Relaxed) - before;
        passed.as_nanos() as f64 / done.max(1) as f64
    })
}

/// `shared-null-*`.
pub fn null_cells(plan: Plan, report: &mut Report) {
    let (one, two) = ("shared-null-b32", "shared-null-b32-threads2");
    if report.wants(one)
        && let Some(load) = Load::sharing(1).pop()
    {
        let [shared, alone] = measure(plan, [variant(load), load_alone(BATCH)]);
        report.add(Figure::cost(one.into(), &shared).against(Some(alone.cost()), None));
    }
    if !report.wants(two) {
        return;
    }
    let here = cpu_places();
    let Some(elsewhere) = crate::unpinned().iter().copied().find(|cpu| here.iter().all(|place| place.cpu != *cpu))
    else {
        report::skip(two, "two threads want two CPUs, and this process has one");
        return;
    };
    let mut loads = Load::sharing(2);
    let (Some(ours), Some(mut theirs)) = (loads.pop(), loads.pop()) else { return };
    let partner = Arc::new(Partner::default());
    let thread = std::thread::spawn({
        let partner = Arc::clone(&partner);
        move || {
            crate::pin_to(elsewhere);
            while !partner.over.load(Relaxed) {
                if partner.on.load(Relaxed) {
                    let mut done = 0;
                    (0..16).for_each(|_| done += theirs.round());
                    partner.done.store(partner.done.load(Relaxed) + done, Relaxed);
                } else {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        }
    });
    let [shared] = measure(plan, [together(ours, Arc::clone(&partner))]);
    partner.over.store(true, Relaxed);
    if thread.join().is_err() {
        report::skip(two, "the second thread panicked");
        return;
    }
    report.add(Figure::cost(two.into(), &shared));
}
