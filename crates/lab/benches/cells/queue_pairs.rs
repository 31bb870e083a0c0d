//! `nvme-*`: an NVMe driver and its controller over a queue pair in memory, without a transport between them.
//!
//! Depth 32 and 128 are reads of 4 KiB of a null device: no data moves. Both sides poll.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use blkyard_lab::floor::{HAND_OFF, MachineLimit, Round, Variant, WindowPlan, led, variant};
use blkyard_mem::{Region, RegionTable, Segment, View};
use blkyard_mq::{Batch, Bio, Done, Driver, Status, TimedOut};
use blkyard_nvme::{
    CQE_BYTES, Cqe, Doorbells, HostQueuePair, IdentifyController, IoQueue, ListPool, LoopbackBuffers, LoopbackQueue,
    NvmLimits, NvmeNamespace, NvmeStatus, QueueRings, RetryDelays, SQE_BYTES,
};

use crate::core::clock;
use crate::limits::measure_beside;
use crate::load::{Load, buffers};
use crate::nvme::{config, loopback, namespace, pair};
use crate::report::{self, CellReport, Figure};

/// Entries of each ring: room for the largest depth.
const ENTRIES: u16 = 129;
/// Pages for long lists; none is needed here.
const LIST_PAGES: u16 = 5;
const QID: u16 = 1;

/// `nvme-null-driver-*`, `nvme-null-one-core-*` and `nvme-null-*`.
pub fn queue_pair_cells(plan: WindowPlan, report: &mut CellReport) {
    for depth in [1, 32, 128] {
        let [alone, one_core, two_cores] = ["driver-", "one-core-", ""].map(|who| format!("nvme-null-{who}qd{depth}"));
        if report.wants(&alone) || report.wants(&one_core) {
            let driver = NullController::new().unwrap_or_else(|error| panic!("a queue pair of {ENTRIES}: {error}"));
            let driver = Load::on((), driver, &loopback(false).info, buffers(depth), depth, true, clock());
            let variants = [variant(driver), variant(pair(depth, clock()))];
            let ([driver, both], _) = measure_beside(plan, &[], variants);
            report.add(Figure::cost(&alone, &driver));
            report.add(Figure::cost(&one_core, &both));
        }
        if report.wants(&two_cores)
            && let Err(why) = across(plan, depth, &two_cores, report)
        {
            report::skip(&two_cores, &why);
        }
    }
}

/// The driver here and the controller on another CPU.
fn across(plan: WindowPlan, depth: usize, cell: &str, report: &mut CellReport) -> Result<(), String> {
    let plan = WindowPlan { windows: plan.windows / 2, ..plan };
    let memory = buffers(depth);
    let null = |_: &Bio, _: &RegionTable| Status::Ok;
    let table = RegionTable::new(vec![Arc::clone(&memory)]);
    let opened = LoopbackQueue::open(&config(false, LoopbackBuffers::default()), &table, null);
    let (queue, mut controller, info) = opened.map_err(|error| error.to_string())?;
    let mut load = Load::on((), queue.into_driver(), &info, memory, depth, true, clock());
    let hand_off = MachineLimit::of(HAND_OFF).ok_or("no such limit")?.variant()?;
    let across: Variant<'_> = led(|| load.round(), || controller.turn())?;
    let ([ours, hand_off], floors) = measure_beside(plan, &[cell], [across, hand_off]);
    // The load ends only once all is answered.
    while !load.drains() {
        controller.turn();
    }
    report.add(Figure::cost(cell, &ours).over(&floors).across(&hand_off));
    Ok(())
}

/// A driver, and a controller that answers each command without reading more than its identifier: what is measured is
/// the driver.
struct NullController {
    io: IoQueue,
    sq: View,
    cq: View,
    doorbells: View,
    sq_head: u16,
    cq_tail: u16,
    phase: bool,
}

impl NullController {
    fn new() -> std::io::Result<NullController> {
        let page = 4096;
        let [sq_bytes, cq_bytes] = QueueRings::bytes(ENTRIES).map(|bytes| bytes.next_multiple_of(page));
        let view = |bytes: usize| {
            let region = Region::anonymous(bytes)?;
            View::new(region, 0, bytes, page).ok_or_else(|| std::io::Error::other("memory of the queue"))
        };
        let (sq, cq, doorbells) = (view(sq_bytes)?, view(cq_bytes)?, view(page)?);
        let rings = QueueRings { sq: sq.clone(), cq: cq.clone(), entries: ENTRIES };
        let host = HostQueuePair::new(QID, rings, &Doorbells::new(doorbells.clone(), 0, None), Arc::default());
        let lists = view(ListPool::bytes(host.depth(), LIST_PAGES).next_multiple_of(page))?;
        let lists = ListPool::new(lists, 0, host.depth(), LIST_PAGES);
        let controller = IdentifyController::default();
        let namespace = NvmeNamespace::new(1, &controller, &namespace(), &NvmLimits::default());
        let (namespace, _) = namespace.ok_or_else(|| std::io::Error::other("the namespace cannot be used"))?;
        let io = IoQueue::new(host, lists, [namespace].into(), RetryDelays::new(&controller));
        Ok(NullController { io, sq, cq, doorbells, sq_head: 0, cq_tail: 0, phase: true })
    }

    #[inline]
    fn answer(&mut self) {
        // The tail doorbell of queue 1 follows both doorbells of the admin queue.
        let tail = self.doorbells.load_u32(8, Acquire) as u16;
        while self.sq_head != tail {
            let cid = (self.sq.load_u64(usize::from(self.sq_head) * SQE_BYTES, Relaxed) >> 16) as u16;
            self.sq_head = if self.sq_head + 1 == ENTRIES { 0 } else { self.sq_head + 1 };
            let cqe = Cqe::new(cid, QID, self.sq_head, NvmeStatus::SUCCESS, 0, self.phase);
            self.cq.store_u64s(usize::from(self.cq_tail) * CQE_BYTES, cqe.0, Release);
            self.cq_tail += 1;
            if self.cq_tail == ENTRIES {
                (self.cq_tail, self.phase) = (0, !self.phase);
            }
        }
    }
}

impl Driver<()> for NullController {
    #[inline]
    fn queue_rqs(&mut self, _cx: &mut (), _memory: &RegionTable, batch: &mut Batch<'_>) {
        let _ = self.io.queue(batch, |Segment { offset, .. }| Some(offset));
    }

    #[inline]
    fn poll(&mut self, _cx: &mut (), _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.answer();
        let _ = self.io.poll(done, now_ns);
    }

    fn timed_out(
        &mut self,
        _cx: &mut (),
        _memory: &RegionTable,
        place: usize,
        _done: &mut Done<'_>,
        _now_ns: u64,
    ) -> TimedOut {
        self.io.timed_out(place as u16)
    }
}
