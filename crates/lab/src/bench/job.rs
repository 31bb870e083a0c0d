//! A job: one stream of I/O, its next requests and its results.
//!
//! The job owns its bios, its buffers and its counters, and is owned by one thread. It decides the next request and
//! accounts for completions; the caller moves bios to the device and back, through a private queue ([`super::own`]) or
//! a shared one ([`super::shared`]). It reads no clock and allocates only the text of a violation after start.
//!
//! ```text
//!   waiting ──gate opens──▶ working ──all done or time is up──▶ over
//!                              └──wrote, and verifies──▶ checking ──▶ over
//! ```
//!
//! A phase ends when no I/O of it is in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use blkyard_mq::{
    Bio, BioFlags, BufferAccess, Op, Region, RegionTable, RegisterError, RegisteredBuffer, SECTOR_SHIFT, Segment,
    Status,
};

use super::args::{BenchPlan, Pattern};
use super::places::{BlockOrder, FastRng, Mix, stir};
use super::tally::{LiveCounters, Summary, Tallies};
use super::verify;

/// Flags for all jobs: start and stop.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    pub(crate) open: AtomicBool,
    pub(crate) stop: AtomicBool,
    /// Set after `stop`: report without waiting for I/O in flight.
    pub(crate) abandon: AtomicBool,
}

/// Final report of a job.
#[derive(Debug)]
pub(crate) struct JobResult {
    /// The job's number.
    pub(crate) job: usize,
    /// I/Os submitted and not finished.
    pub(crate) outstanding: u64,
    pub(crate) summary: Summary,
    /// Mismatching blocks, of those read back.
    pub(crate) mismatches: u64,
    pub(crate) checked: u64,
    /// Words about the first few things that went wrong.
    pub(crate) violations: Vec<String>,
}

/// Violations that a job words; the rest are counted.
const VIOLATIONS_MAX: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobPhase {
    Waiting,
    Working,
    Checking,
    Over,
}

/// One job.
#[derive(Debug)]
pub(crate) struct BenchJob {
    plan: Arc<BenchPlan>,
    number: usize,
    gate: Arc<Gate>,
    live: Arc<LiveCounters>,
    report: Sender<JobResult>,
    memory: Arc<RegionTable>,
    /// First byte of its buffers in their region.
    first_byte: u64,
    /// First block of its slice, and how many.
    first: u64,
    blocks: u64,
    order: BlockOrder,
    mix: Mix,
    phase: JobPhase,
    /// Blocks to do in this phase.
    left: u64,
    until_ns: u64,
    /// Blocks written, in the order of `order`: those that can be checked.
    written: u64,
    unflushed: u64,
    free: Vec<Box<Bio>>,
    /// When each bio in flight was submitted, by its cookie.
    stamps: Box<[u64]>,
    in_flight: usize,
    tallies: Tallies,
    block: Box<[u8]>,
    scratch: Box<[u8]>,
    mismatches: u64,
    checked: u64,
    violations: Vec<String>,
}

impl BenchJob {
    /// Makes a job, ready to wait for the gate. Its buffers are `iodepth` blocks of a region, from a byte on.
    pub(crate) fn new(
        plan: &Arc<BenchPlan>,
        number: usize,
        gate: &Arc<Gate>,
        live: &Arc<LiveCounters>,
        report: Sender<JobResult>,
        (region, first_byte): (Arc<Region>, u64),
    ) -> BenchJob {
        let block_bytes = plan.block_bytes as usize;
        scribble(&region, first_byte, block_bytes * plan.iodepth, plan.seed ^ number as u64);
        let (first, blocks) = plan.slice(number);
        let scratch = || vec![0; if plan.verify { block_bytes } else { 0 }].into_boxed_slice();
        let free = (0..plan.iodepth).rev().map(|slot| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = slot as u64;
            bio.stream = number as u32 + 1;
            bio
        });
        let mut job = BenchJob {
            number,
            gate: Arc::clone(gate),
            live: Arc::clone(live),
            report,
            memory: Arc::new(RegionTable::new(vec![region])),
            first_byte,
            first,
            blocks,
            order: BlockOrder::Sequential { next: 0 },
            mix: Mix::new(job_seed(plan.seed, number), plan.read_percent),
            phase: JobPhase::Waiting,
            left: if plan.verify || plan.runtime_ns.is_none() { plan.share(number) } else { u64::MAX },
            until_ns: u64::MAX,
            written: 0,
            unflushed: 0,
            free: free.collect(),
            stamps: vec![0; plan.iodepth].into(),
            in_flight: 0,
            tallies: Tallies::new(plan.block_bytes),
            block: scratch(),
            scratch: scratch(),
            mismatches: 0,
            checked: 0,
            violations: Vec::with_capacity(VIOLATIONS_MAX),
            plan: Arc::clone(plan),
        };
        job.order = job.order_anew();
        job
    }

    /// The table of its buffers, for the queue that it uses alone.
    pub(crate) fn memory(&self) -> &Arc<RegionTable> {
        &self.memory
    }

    /// Its buffers, registered: for queues that have its memory.
    pub(crate) fn register(&self) -> Result<Option<Arc<RegisteredBuffer>>, RegisterError> {
        let region = self.memory.region(0).filter(|_| self.plan.is_registered);
        let bytes = u64::from(self.plan.block_bytes) * self.plan.iodepth as u64;
        region.map(|region| RegisteredBuffer::new(region, self.first_byte, bytes, BufferAccess::ReadWrite)).transpose()
    }

    fn order_anew(&self) -> BlockOrder {
        BlockOrder::new(
            self.plan.pattern.is_random(),
            self.plan.verify,
            job_seed(self.plan.seed, self.number),
            self.blocks,
        )
    }

    /// Whether it will never want anything again.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == JobPhase::Over
    }

    /// How many of its bios are out.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether to submit now: enough slots are free for a batch, or no I/O is in flight.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        self.left > 0
            && matches!(self.phase, JobPhase::Working | JobPhase::Checking)
            && (self.free.len() >= self.plan.batch || self.in_flight == 0)
    }

    /// The next request, if there is one and a slot is free. Segments name `region`: a number of the queue's table, or
    /// the id of the registered buffers.
    #[inline]
    pub(crate) fn request(&mut self, region: u32, now_ns: u64) -> Option<Box<Bio>> {
        if self.left == 0 {
            return None;
        }
        let mut bio = self.free.pop()?;
        let slot = bio.cookie as usize;
        bio.reset();
        bio.op = self.op();
        if bio.op != Op::Flush {
            self.left -= 1;
            let bytes = self.plan.block_bytes;
            let block = self.first + self.order.next(self.blocks);
            bio.sectors = bytes >> SECTOR_SHIFT;
            bio.sector = block * u64::from(bio.sectors);
            if bio.op.has_data() {
                bio.flags.set(BioFlags::POLLED, self.plan.polled);
                let offset = self.first_byte + slot as u64 * u64::from(bytes);
                bio.segments.push(Segment { region, offset, len: bytes });
            }
            if bio.op == Op::Write {
                self.unflushed += 1;
                if self.plan.verify {
                    self.prepare(slot, bio.sector);
                }
            }
        }
        self.stamps[slot] = now_ns;
        self.in_flight += 1;
        self.tallies.submitted(bio.op, self.in_flight, now_ns);
        Some(bio)
    }

    #[inline]
    fn op(&mut self) -> Op {
        if self.plan.fsync > 0 && self.unflushed >= self.plan.fsync {
            self.unflushed = 0;
            return Op::Flush;
        }
        if self.phase == JobPhase::Checking {
            return Op::Read;
        }
        match self.plan.pattern {
            Pattern::Read | Pattern::RandRead => Op::Read,
            Pattern::Write | Pattern::RandWrite => Op::Write,
            Pattern::Trim | Pattern::RandTrim => Op::Discard,
            Pattern::Rw | Pattern::RandRw => {
                if self.mix.next_is_read() {
                    Op::Read
                } else {
                    Op::Write
                }
            }
        }
    }

    /// A bio came back.
    #[inline]
    pub(crate) fn ended(&mut self, bio: Box<Bio>, now_ns: u64) {
        self.in_flight -= 1;
        let slot = bio.cookie as usize;
        if bio.status == Status::Ok {
            self.tallies.ended(bio.op, now_ns.saturating_sub(self.stamps[slot]));
            if self.plan.verify {
                match bio.op {
                    Op::Read => self.check(slot, bio.sector),
                    Op::Write => self.written += 1,
                    _ => {}
                }
            }
        } else {
            self.fail(&bio);
        }
        self.free.push(bio);
    }

    /// Changes the phase if it is time: after the ended bios of a round and before its new ones, so that nothing is
    /// submitted after the time of the run.
    #[inline]
    pub(crate) fn advance(&mut self, now_ns: u64) {
        if self.phase == JobPhase::Waiting {
            // Pairs with the store that opens it: the set-up before it is visible.
            if self.gate.open.load(Ordering::Acquire) {
                self.phase = JobPhase::Working;
                self.until_ns = self.plan.runtime_ns.map_or(u64::MAX, |runtime_ns| now_ns + runtime_ns);
            }
            return;
        }
        if now_ns >= self.until_ns && self.phase == JobPhase::Working || self.gate.stop.load(Ordering::Relaxed) {
            self.left = 0;
        }
        if self.left == 0 && self.phase != JobPhase::Over && (self.in_flight == 0 || self.is_abandoned()) {
            // Its last bios are in the report.
            self.publish(now_ns);
            self.end_phase();
        }
    }

    /// Publishes the counters, at the end of a round.
    #[inline]
    pub(crate) fn publish(&mut self, now_ns: u64) {
        self.tallies.publish(&self.live, now_ns);
        self.live.set_in_flight(self.in_flight);
    }

    #[cold]
    fn is_abandoned(&self) -> bool {
        self.gate.abandon.load(Ordering::Relaxed)
    }

    fn end_phase(&mut self) {
        let stopped = self.gate.stop.load(Ordering::Relaxed) || !self.violations.is_empty();
        if self.phase == JobPhase::Working && self.plan.verify && self.written > 0 && !stopped {
            self.phase = JobPhase::Checking;
            self.left = self.written;
            self.unflushed = 0;
            self.order = self.order_anew();
            return;
        }
        self.phase = JobPhase::Over;
        // The receiver is waiting; if it has ended, the report is not needed.
        let _ = self.report.send(JobResult {
            job: self.number,
            outstanding: self.in_flight as u64,
            summary: self.tallies.summary(),
            mismatches: self.mismatches,
            checked: self.checked,
            violations: std::mem::take(&mut self.violations),
        });
    }

    fn span(&self, slot: usize) -> Option<blkyard_mq::Span<'_>> {
        let len = self.plan.block_bytes;
        self.memory.resolve(Segment { region: 0, offset: self.first_byte + slot as u64 * u64::from(len), len })
    }

    /// Fills a buffer with the content for its position.
    fn prepare(&mut self, slot: usize, sector: u64) {
        verify::fill(&mut self.block, sector, self.plan.seed);
        if let Some(span) = self.span(slot) {
            span.copy_from_slice(&self.block);
        }
    }

    fn check(&mut self, slot: usize, sector: u64) {
        let mut block = std::mem::take(&mut self.block);
        if let Some(span) = self.span(slot) {
            span.copy_to_slice(&mut block);
        }
        self.checked += 1;
        if let Err(what) = verify::check(&block, sector, &mut self.scratch) {
            self.mismatches += 1;
            self.complain(|| format!("verify: block at sector {sector}: {what}"));
        }
        self.block = block;
    }

    /// As with fio, the first failure ends the job.
    #[cold]
    fn fail(&mut self, bio: &Bio) {
        self.left = 0;
        self.tallies.failed(bio.op);
        let Bio { op, sector, sectors, status, .. } = *bio;
        self.complain(|| format!("{op:?} of {sectors} sectors at sector {sector}: {status}"));
    }

    fn complain(&mut self, words: impl FnOnce() -> String) {
        if self.violations.len() < VIOLATIONS_MAX {
            let job = self.number;
            self.violations.push(format!("job {job}: {}", words()));
        }
    }
}

/// Separate seed for each job.
fn job_seed(seed: u64, number: usize) -> u64 {
    stir(seed.wrapping_add(number as u64))
}

/// Writes incompressible bytes to every page, so that no first access happens during the measurement.
fn scribble(region: &Region, first_byte: u64, bytes: usize, seed: u64) {
    let mut rng = FastRng::new(seed);
    let mut page = vec![0; blkyard_mem::PAGE_BYTES];
    for offset in (0..bytes).step_by(page.len()) {
        let len = page.len().min(bytes - offset);
        page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next().to_le_bytes()));
        if let Some(span) = region.span(first_byte + offset as u64, len) {
            span.copy_from_slice(&page[..len]);
        }
    }
}
