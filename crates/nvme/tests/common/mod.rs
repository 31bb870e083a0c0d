//! Both sides of one queue pair over memory of the test.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use blkyard_mem::{Region, View};
use blkyard_nvme::registers::{cq_doorbell, sq_doorbell};
use blkyard_nvme::{
    CQE_BYTES, ControllerQueuePair, ControllerRings, Cqe, CqeFaults, Doorbells, HostQueuePair, QueueRings, SQE_BYTES,
    ShadowDoorbells, Sqe,
};

pub const QID: u16 = 3;
/// Large enough for the doorbells of [`QID`].
const PAGE: usize = 4096;

pub struct Memory {
    pub rings: QueueRings,
    /// Registers from the first doorbell on.
    pub registers: View,
    pub doorbells: Doorbells,
    shadow: Option<ShadowDoorbells>,
    stride: u8,
}

impl Memory {
    pub fn new(entries: u16, stride: u8, is_shadowed: bool) -> Memory {
        let page = || View::new(Region::anonymous(PAGE).unwrap(), 0, PAGE, PAGE).unwrap();
        let [sq, cq] = QueueRings::bytes(entries).map(|bytes| {
            let region = Region::anonymous(bytes).unwrap();
            View::new(region, 0, bytes, PAGE).unwrap()
        });
        let registers = page();
        let shadow = is_shadowed.then(|| ShadowDoorbells { doorbells: page(), events: page() });
        let doorbells = Doorbells::new(registers.clone(), stride, shadow.clone());
        Memory { rings: QueueRings { sq, cq, entries }, registers, doorbells, shadow, stride }
    }

    pub fn host(&self) -> HostQueuePair {
        HostQueuePair::new(QID, self.rings.clone(), &self.doorbells, Arc::new(CqeFaults::default()))
    }

    pub fn controller(&self) -> ControllerQueuePair {
        let QueueRings { sq, cq, entries } = self.rings.clone();
        let rings = ControllerRings { sq, sq_entries: entries, cq, cq_entries: entries };
        ControllerQueuePair::new(QID, rings, &self.doorbells)
    }

    /// Moves the tail of the submission queue to any value.
    pub fn ring_tail(&self, tail: u32) {
        self.words().store_u32(sq_doorbell(QID, self.stride), tail, Release);
    }

    /// Moves the head of the completion queue to any value.
    pub fn ring_head(&self, head: u32) {
        self.words().store_u32(cq_doorbell(QID, self.stride), head, Release);
    }

    fn words(&self) -> &View {
        self.shadow.as_ref().map_or(&self.registers, |shadow| &shadow.doorbells)
    }

    /// Writes any command.
    pub fn put_sqe(&self, index: u16, sqe: Sqe) {
        self.rings.sq.store_u64s(usize::from(index) * SQE_BYTES, sqe.0, Relaxed);
    }

    /// Writes any completion.
    pub fn put_cqe(&self, index: u16, cqe: Cqe) {
        self.rings.cq.store_u64s(usize::from(index) * CQE_BYTES, cqe.0, Release);
    }
}
