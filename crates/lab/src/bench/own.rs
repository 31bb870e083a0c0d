//! A job with a private hardware queue, run to completion on a lane: no lock, no hand-off, nothing shared per I/O.
//!
//! Each round takes completions, submits the next requests, and issues them; one timestamp ends one batch and begins
//! the next.

use std::os::fd::BorrowedFd;

use blkyard_mq::{BufferId, Driver, HwQueue, Poller, PollerState};

use super::job::BenchJob;

/// The poller of one job.
#[derive(Debug)]
pub(crate) struct Own<D> {
    hw: HwQueue<D>,
    job: BenchJob,
    /// Region that its segments name.
    region: u32,
    deadline_ns: Option<u64>,
}

impl<D> Own<D> {
    /// A job on a queue whose memory is the job's, as region zero and as this registered buffer.
    pub(crate) fn new(hw: HwQueue<D>, job: BenchJob, buffer: Option<BufferId>) -> Own<D> {
        Own { hw, job, region: buffer.map_or(0, BufferId::number), deadline_ns: None }
    }
}

impl<D: Driver<Cx>, Cx: ?Sized> Poller<Cx> for Own<D> {
    fn set_turn_bytes(&mut self, bytes: u64) {
        self.hw.set_turn_bytes(bytes);
    }

    #[inline]
    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState {
        let Own { hw, job, region, .. } = self;
        let mut moved = hw.reap(cx, now_ns, &mut |bio| job.ended(bio, now_ns));
        job.advance(now_ns);
        if job.is_ready() {
            // There is room for all bios of the job.
            while let Some(bio) = job.request(*region, now_ns) {
                hw.submit(bio);
                moved += 1;
            }
        }
        moved += hw.issue(cx, now_ns);
        job.publish(now_ns);
        if moved > 0 || hw.has_work() || job.is_ready() {
            return PollerState::Busy;
        }
        self.deadline_ns = hw.deadline_ns::<Cx>();
        if job.in_flight() > 0 { PollerState::Waiting } else { PollerState::Idle }
    }

    fn arm(&mut self) -> bool {
        self.hw.arm::<Cx>() || self.hw.has_work() || self.job.is_ready()
    }

    fn disarm(&mut self) {
        self.hw.disarm::<Cx>();
    }

    /// The gate is the job's only external event, and its opener calls the lane.
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.hw.eventfd::<Cx>()
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.deadline_ns
    }

    fn tick(&mut self, now_ns: u64) {
        self.hw.mark_slow(now_ns);
    }

    fn is_over(&self) -> bool {
        self.job.is_over() && self.hw.is_idle()
    }
}
