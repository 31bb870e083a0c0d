//! The null device: completes every request without effect, to measure all other layers.
//!
//! Its parameters are those of Linux's null_blk that apply here: size, block size, latency, throughput ceiling,
//! discard. Reads do not change the memory.

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mem::RegionTable;

use crate::driver::{Batch, BlockDevice, DeviceInfo, Done, Driver};
use crate::pace::Pace;
use crate::{Status, Tag};

/// Parameters of a null or RAM device.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullConfig {
    /// Time from submission to completion; zero completes on the spot.
    pub latency_ns: u64,
    /// Throughput ceiling of the whole device, bytes per second; 0 for none.
    pub bytes_per_s: u64,
}

/// The null device.
#[derive(Debug)]
pub struct NullDevice {
    info: DeviceInfo,
    pace: Arc<Pace>,
}

impl NullDevice {
    /// A null device as `info` describes it.
    pub fn new(info: DeviceInfo, config: NullConfig) -> NullDevice {
        NullDevice { info, pace: Arc::new(Pace::new(config.latency_ns, config.bytes_per_s)) }
    }
}

impl BlockDevice for NullDevice {
    type Queue = NullQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn queue(&self, depth: usize) -> NullQueue {
        NullQueue { timed: Timed::new(Arc::clone(&self.pace), depth) }
    }
}

/// One queue of a null device.
#[derive(Debug)]
pub struct NullQueue {
    timed: Timed,
}

impl<Cx: ?Sized> Driver<Cx> for NullQueue {
    // Always inlined: a call would cost more than the work for one request.
    #[inline(always)]
    fn queue_rqs(&mut self, _cx: &mut Cx, _memory: &RegionTable, batch: &mut Batch<'_>) {
        if self.timed.pace.is_instant() {
            while let Some((tag, _, _)) = batch.take() {
                batch.complete(tag, Status::Ok);
            }
        } else {
            self.timed.take(batch);
        }
    }

    #[inline]
    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.timed.poll(done, now_ns);
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.timed.deadline_ns()
    }
}

/// Requests that will be done at a known time, in order.
#[derive(Debug)]
pub(crate) struct Timed {
    pub(crate) pace: Arc<Pace>,
    due: VecDeque<(u64, Tag, Status)>,
}

impl Timed {
    pub(crate) fn new(pace: Arc<Pace>, depth: usize) -> Timed {
        Timed { pace, due: VecDeque::with_capacity(depth) }
    }

    /// Takes a whole batch, to be completed after the latency.
    // Inlined, so that the batch of a device that completes on the spot has no address.
    #[inline(always)]
    fn take(&mut self, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        while let Some((tag, request, _)) = batch.take() {
            let bytes = if request.op().has_data() { request.bytes() } else { 0 };
            self.push(now_ns, bytes, tag, Status::Ok);
        }
    }

    #[inline]
    pub(crate) fn push(&mut self, now_ns: u64, bytes: u64, tag: Tag, status: Status) {
        // Latency is the same for all, so due times never go back.
        self.due.push_back((self.pace.due_ns(now_ns, bytes), tag, status));
    }

    #[inline]
    pub(crate) fn poll(&mut self, done: &mut Done<'_>, now_ns: u64) {
        while self.due.front().is_some_and(|(due, _, _)| *due <= now_ns) {
            if let Some((_, tag, status)) = self.due.pop_front() {
                done.complete(tag, status);
            }
        }
    }

    #[inline]
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        self.due.front().map(|(due, _, _)| *due)
    }
}
