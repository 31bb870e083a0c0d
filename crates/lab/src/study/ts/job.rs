//! A submitter with a constant depth, like a job of fio: sequential or random in a range, with or without a think time.

use blkyard_mq::Op;

use super::rig::{Hands, TimesliceRequest, TimesliceSubmitter};

/// A job, as data.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimesliceJob {
    pub(super) op: Op,
    /// Of each of its requests; at most [`REQUEST_SECTORS_MAX`](super::rig::REQUEST_SECTORS_MAX).
    pub(super) sectors: u32,
    /// I/Os in flight.
    pub(super) depth: usize,
    /// Its range: first sector and how many. It begins again at the end.
    pub(super) first: u64,
    pub(super) range_sectors: u64,
    /// Anywhere in its range, instead of in a row.
    pub(super) random: bool,
    /// Between the end of one and the next, a fifth less or more.
    pub(super) think_ns: u64,
    pub(super) stream: u32,
    /// Which hardware queue it submits to.
    pub(super) queue: usize,
    /// How much it wants in all, bytes; the largest number for no end.
    pub(super) bytes_max: u64,
    pub(super) progress: JobProgress,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobProgress {
    asked: u64,
    ended: u64,
}

impl TimesliceJob {
    /// Reads of so many sectors in a row from here on, as long as the run lasts.
    pub(super) fn in_a_row(stream: u32, first: u64, sectors: u32, depth: usize) -> TimesliceJob {
        TimesliceJob {
            op: Op::Read,
            sectors,
            depth,
            first,
            range_sectors: 1 << 28,
            random: false,
            think_ns: 0,
            stream,
            queue: 0,
            bytes_max: u64::MAX,
            progress: JobProgress::default(),
        }
    }

    /// Reads of 4 KiB anywhere in a range.
    pub(super) fn anywhere(stream: u32, first: u64, range_sectors: u64, depth: usize) -> TimesliceJob {
        TimesliceJob { random: true, range_sectors, ..TimesliceJob::in_a_row(stream, first, 8, depth) }
    }

    fn submit(&mut self, hands: &mut Hands<'_>) {
        if self.progress.asked * self.bytes() >= self.bytes_max {
            return;
        }
        let places = (self.range_sectors / u64::from(self.sectors)).max(1);
        let place = if self.random { hands.rng.below(places) } else { self.progress.asked % places };
        self.progress.asked += 1;
        hands.submit(TimesliceRequest {
            op: self.op,
            sector: self.first + place * u64::from(self.sectors),
            sectors: self.sectors,
            queue: self.queue,
            stream: self.stream,
            ..TimesliceRequest::default()
        });
    }

    fn bytes(&self) -> u64 {
        u64::from(self.sectors) * 512
    }
}

impl TimesliceSubmitter for TimesliceJob {
    fn wake(&mut self, word: u64, hands: &mut Hands<'_>) {
        let wanted = if word == 0 { self.depth } else { 1 };
        (0..wanted).for_each(|_| self.submit(hands));
    }

    fn ended(&mut self, _: &TimesliceRequest, hands: &mut Hands<'_>) {
        self.progress.ended += 1;
        if self.think_ns == 0 {
            self.submit(hands);
        } else {
            let think_ns = hands.about(self.think_ns);
            hands.wake_after(think_ns, 1);
        }
    }

    fn is_over(&self) -> bool {
        self.bytes_max < u64::MAX && self.progress.ended * self.bytes() >= self.bytes_max
    }
}
