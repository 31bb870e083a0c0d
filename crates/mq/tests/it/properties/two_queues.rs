//! Flushes over two hardware queues of one device: property 10, where a flush covers writes of both queues.
//!
//! Each queue has a separate flush machine, and knows no completion of the other. It need not: writes that completed
//! anywhere before the submission of a flush to either queue are durable when that flush completes. The device here
//! destages only what it must, and reports the effect of a power failure.

use std::sync::Arc;

use blkyard_mq::{Bio, BioFlags, BlockDevice, DeviceInfo, HwQueue, Op, Region, RegionTable, Segment};
use blkyard_sim::{ChaosDevice, ChaosQueue};
use proptest::prelude::*;

use super::content::{Content, word};
use super::world::{Plan, SECTORS, Step, any_plan};

/// Memory that each bio has to itself.
const SLOT_BYTES: u64 = SECTORS * 512;
/// Rounds after which a queue that is not idle never will be.
const TURNS_MAX: usize = 200_000;

/// Where a bio that is out lies, and when it was submitted.
#[derive(Clone, Copy)]
struct Out {
    sector: u64,
    sectors: u64,
    submitted: usize,
    slot: u64,
}

/// Two queues, their device, and its expected content.
struct Pair {
    device: ChaosDevice,
    queues: [HwQueue<ChaosQueue>; 2],
    region: Arc<Region>,
    content: Content,
    /// By cookie.
    out: Vec<Option<Out>>,
    free_slots: Vec<u64>,
    /// Things that have happened so far.
    clock: usize,
    now_ns: u64,
}

impl Pair {
    fn new(plan: &Plan) -> Pair {
        let info = Arc::new(DeviceInfo {
            name: "chaos".into(),
            capacity_sectors: SECTORS,
            limits: plan.limits,
            read_only: false,
            volatile_cache: true,
            fua: plan.fua,
            ..DeviceInfo::default()
        });
        let device = ChaosDevice::new(vec![Arc::clone(&info)], plan.chaos).unwrap();
        let slots = 2 * plan.config.bios_max as u64;
        let region = Region::anonymous((slots * SLOT_BYTES) as usize).unwrap();
        let queue = || {
            let mut queue = HwQueue::new(device.queue(plan.config.depth), Arc::clone(&info), plan.config);
            queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
            queue
        };
        let (queues, content) = ([queue(), queue()], Content::new(1, &info));
        let free_slots = (0..slots).collect();
        Pair { device, queues, region, content, out: Vec::new(), free_slots, clock: 0, now_ns: 0 }
    }

    /// Submits a bio to one of the queues, unless there is no room or its sectors are another's just now.
    fn submit(&mut self, queue: usize, op: Op, flags: BioFlags, sector: u64, sectors: u64) {
        let block = u64::from(self.queues[0].info().limits.logical_block_bytes >> 9);
        let sector = sector / block * block;
        let sectors = if op == Op::Flush { 0 } else { sectors.next_multiple_of(block).min(SECTORS - sector) };
        let meets = |out: &Out| out.sector < sector + sectors && sector < out.sector + out.sectors;
        if self.queues[queue].room() == 0 || self.out.iter().flatten().any(meets) {
            return;
        }
        let (id, slot) = (self.out.len() as u64, self.free_slots.pop().unwrap());
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags, bio.sector, bio.sectors, bio.cookie) = (op, flags, sector, sectors as u32, id);
        if op.has_data() {
            let data: Vec<u8> = (0..sectors * 64).flat_map(|at| word(id, sector + at / 64).to_le_bytes()).collect();
            let segment = Segment { region: 0, offset: slot * SLOT_BYTES, len: data.len() as u32 };
            self.region.span(segment.offset, data.len()).unwrap().copy_from_slice(&data);
            bio.segments.push(segment);
        }
        self.clock += 1;
        self.out.push(Some(Out { sector, sectors, submitted: self.clock, slot }));
        self.content.submitted(&bio);
        self.queues[queue].submit(bio);
    }

    /// A round of one of the queues, independent of the other.
    fn turn(&mut self, queue: usize) {
        self.now_ns += 1000;
        let mut ended = Vec::new();
        self.queues[queue].reap(&mut (), self.now_ns, &mut |bio| ended.push(bio));
        for bio in ended {
            self.end(&bio);
        }
        self.queues[queue].issue(&mut (), self.now_ns);
    }

    fn end(&mut self, bio: &Bio) {
        let out = self.out[bio.cookie as usize].take().unwrap();
        let mut data = vec![0; (out.sectors * 512) as usize];
        if bio.op == Op::Read {
            self.region.span(out.slot * SLOT_BYTES, data.len()).unwrap().copy_to_slice(&mut data);
        }
        self.free_slots.push(out.slot);
        self.clock += 1;
        self.content.ended(bio, &data, out.submitted, self.clock);
        if bio.status.is_ok() && (bio.op == Op::Flush || bio.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH)) {
            self.content.check_stable(&self.device);
        }
    }

    /// Lets one queue run until it is idle.
    fn settle(&mut self, queue: usize) {
        for _ in 0..TURNS_MAX {
            self.turn(queue);
            if self.queues[queue].is_idle() {
                return;
            }
            if !self.queues[queue].has_work() {
                let due_ns = self.queues[queue].deadline_ns::<()>().expect("the queue sleeps for ever with bios in it");
                self.now_ns = self.now_ns.max(due_ns);
            }
        }
        panic!("the queue turns for ever: {:?}", self.queues[queue].snapshot(self.now_ns));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    // 10
    #[test]
    fn a_flush_on_one_queue_covers_what_completed_on_the_other(plan in any_plan(), turns: u64, often in 2_u64..6) {
        let mut pair = Pair::new(&plan);
        for (number, step) in (0_u64..).zip(&plan.steps) {
            match *step {
                Step::Submit { op, flags, sector, sectors, tear, .. } => {
                    // Mostly dirty writes, and flushes of all three kinds.
                    let (op, flags) = match tear % (3 * often) {
                        0 => (Op::Flush, BioFlags::empty()),
                        1 => (Op::Write, flags | BioFlags::PREFLUSH),
                        2 => (Op::Write, flags | BioFlags::FUA),
                        at if at < 2 * often => (Op::Write, BioFlags::empty()),
                        _ => (op, BioFlags::empty()),
                    };
                    pair.submit((tear >> 32) as usize % 2, op, flags, sector, sectors);
                }
                Step::Turn => pair.turn((turns >> (number % 64)) as usize % 2),
                Step::Pass(ns) => pair.now_ns += ns,
                _ => {}
            }
        }
        // Regardless of the one queue's state, a flush on the other covers all earlier completions.
        pair.settle(0);
        pair.submit(1, Op::Flush, BioFlags::empty(), 0, 0);
        pair.settle(1);
        pair.content.check_stable(&pair.device);
    }
}
