//! The device of a target: a disk with a volatile cache that executes requests late and in any order, and loses at a
//! power failure what was not flushed.
//!
//! It outlives its target: requests that it has are executed also when the process that gave them is dead.

use std::cell::RefCell;
use std::rc::Rc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Batch, BioFlags, Done, Driver, Op, Shortage, Status, Tag};
use blkyard_sim::Rng;

use crate::network::fold;
use crate::oracle::version_of;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Requests of one queue at the device, at most.
const RING: usize = 16;
/// Least time of a request, and what chance adds; one of [`SLOW_EVERY`] takes up to so much longer, ns.
const EXECUTION_NS: u64 = 20_000;
const JITTER_NS: u64 = 200_000;
const SLOW_EVERY: u64 = 40;
const SLOW_NS: u64 = 400_000_000;

/// A request at the device.
#[derive(Debug)]
struct Command {
    number: u64,
    due_ns: u64,
    op: Op,
    sector: usize,
    sectors: usize,
    data: Vec<u8>,
    fua: bool,
    /// Writes executed before a flush was given.
    clock: u64,
}

/// The disk.
#[derive(Debug)]
pub(crate) struct Medium {
    rng: Rng,
    now: Vec<u8>,
    /// What a power failure leaves.
    stable: Vec<u8>,
    /// By sector: number of the write whose data is not stable; zero if it is.
    dirty: Vec<u64>,
    clock: u64,
    commands: Vec<Command>,
    next: u64,
    /// Executed, with the data of a read: not fetched yet.
    ended: Vec<(u64, Vec<u8>)>,
    /// Until then nothing is executed.
    hung_ns: u64,
    ignores_flush: bool,
    trace: u64,
    pub(crate) executed: u64,
}

impl Medium {
    pub(crate) fn new(rng: Rng, sectors: usize, ignores_flush: bool) -> Medium {
        Medium {
            rng,
            now: vec![0; sectors * SECTOR],
            stable: vec![0; sectors * SECTOR],
            dirty: vec![0; sectors],
            clock: 0,
            commands: Vec::new(),
            next: 1,
            ended: Vec::new(),
            hung_ns: 0,
            ignores_flush,
            trace: 0,
            executed: 0,
        }
    }

    pub(crate) fn trace(&self) -> u64 {
        self.trace
    }

    /// Whether it has no request.
    pub(crate) fn is_idle(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether it has a request other than a flush.
    pub(crate) fn has_data(&self) -> bool {
        self.commands.iter().any(|command| command.op != Op::Flush)
    }

    /// Executes nothing until then, and what it has by then in any order.
    pub(crate) fn hang(&mut self, until_ns: u64) {
        self.hung_ns = self.hung_ns.max(until_ns);
        for command in &mut self.commands {
            command.due_ns = command.due_ns.max(self.hung_ns) + self.rng.below(SLOW_NS);
        }
    }

    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.commands.iter().map(|command| command.due_ns.max(self.hung_ns)).min()
    }

    /// Executes what is due. Returns whether anything was.
    pub(crate) fn run(&mut self, now_ns: u64) -> bool {
        if now_ns < self.hung_ns {
            return false;
        }
        let mut is_busy = false;
        while let Some(at) = self.due(now_ns) {
            let command = self.commands.swap_remove(at);
            self.execute(command, now_ns);
            is_busy = true;
        }
        is_busy
    }

    fn due(&self, now_ns: u64) -> Option<usize> {
        let due = self.commands.iter().enumerate().filter(|(_, command)| command.due_ns <= now_ns);
        due.min_by_key(|(_, command)| (command.due_ns, command.number)).map(|(at, _)| at)
    }

    fn execute(&mut self, command: Command, now_ns: u64) {
        let Command { number, op, sector, sectors, data, fua, clock, .. } = command;
        self.executed += 1;
        self.trace = fold(self.trace, [now_ns, number, op as u64, sector as u64]);
        let mut read = Vec::new();
        match op {
            Op::Read => read.extend_from_slice(&self.now[sector * SECTOR..(sector + sectors) * SECTOR]),
            Op::Flush => self.flush(clock),
            _ => {
                self.clock += 1;
                for at in sector..sector + sectors {
                    let bytes = at * SECTOR..(at + 1) * SECTOR;
                    if self.dirty[at] > 0 {
                        // The cache has one version of each sector.
                        self.stable[bytes.clone()].copy_from_slice(&self.now[bytes.clone()]);
                    }
                    if data.is_empty() {
                        self.now[bytes.clone()].fill(0);
                    } else {
                        self.now[bytes.clone()].copy_from_slice(&data[(at - sector) * SECTOR..][..SECTOR]);
                    }
                    self.dirty[at] = self.clock;
                    if fua {
                        self.stable[bytes.clone()].copy_from_slice(&self.now[bytes]);
                        self.dirty[at] = 0;
                    }
                }
            }
        }
        self.ended.push((number, read));
    }

    /// Writes executed before this clock become stable, and no others.
    fn flush(&mut self, clock: u64) {
        if self.ignores_flush {
            return;
        }
        for at in 0..self.dirty.len() {
            if self.dirty[at] > 0 && self.dirty[at] <= clock {
                let bytes = at * SECTOR..(at + 1) * SECTOR;
                self.stable[bytes.clone()].copy_from_slice(&self.now[bytes]);
                self.dirty[at] = 0;
            }
        }
    }

    /// The power fails: requests are lost or executed in part, and each sector of the cache is stable or lost.
    pub(crate) fn cut_power(&mut self) {
        for command in std::mem::take(&mut self.commands) {
            let is_write = command.op == Op::Write;
            for at in (0..command.sectors).filter(|_| is_write) {
                if self.rng.below(2) == 0 {
                    let to = (command.sector + at) * SECTOR;
                    self.now[to..to + SECTOR].copy_from_slice(&command.data[at * SECTOR..][..SECTOR]);
                    self.dirty[command.sector + at] = self.clock.max(1);
                }
            }
        }
        for at in 0..self.dirty.len() {
            let bytes = at * SECTOR..(at + 1) * SECTOR;
            if std::mem::take(&mut self.dirty[at]) > 0 && self.rng.below(2) == 0 {
                self.stable[bytes.clone()].copy_from_slice(&self.now[bytes]);
            }
        }
        self.now.copy_from_slice(&self.stable);
        self.ended.clear();
        self.hung_ns = 0;
    }

    /// A sector as it reads now.
    pub(crate) fn sector(&self, sector: usize) -> &[u8] {
        &self.now[sector * SECTOR..][..SECTOR]
    }
}

/// A queue of the device.
#[derive(Debug)]
pub(crate) struct MediumQueue {
    medium: Rc<RefCell<Medium>>,
    in_flight: Vec<(u64, Tag)>,
    /// Version of the last write of its connection; unset if writes may come in any order.
    last_version: Option<u64>,
}

impl MediumQueue {
    /// A queue. Whether `judges_order`, the writes of each connection must come in the order of their versions.
    pub(crate) fn new(medium: &Rc<RefCell<Medium>>, judges_order: bool) -> MediumQueue {
        MediumQueue { medium: Rc::clone(medium), in_flight: Vec::new(), last_version: judges_order.then_some(0) }
    }

    /// A write begins with this sector.
    fn judge(&mut self, sector: &[u8]) {
        if let Some(last_version) = &mut self.last_version {
            let version = version_of(sector).1;
            let last = std::mem::replace(last_version, version);
            assert!(last < version, "write {version} came behind write {last} on one queue");
        }
    }
}

impl Driver<()> for MediumQueue {
    fn queue_rqs(&mut self, (): &mut (), memory: &RegionTable, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        while !batch.is_empty() {
            if self.in_flight.len() >= RING {
                return batch.short_of(Shortage::Device);
            }
            let Some((tag, request, segments)) = batch.take() else { return };
            let (op, sector, sectors) = (request.op(), request.sector() as usize, request.sectors() as usize);
            let fua = request.flags().contains(BioFlags::FUA);
            let mut data = Vec::new();
            for segment in segments.filter(|_| op == Op::Write) {
                let start = data.len();
                data.resize(start + segment.len as usize, 0);
                if let Some(span) = memory.resolve(segment) {
                    span.copy_to_slice(&mut data[start..]);
                }
            }
            if op == Op::Write {
                self.judge(&data[..SECTOR]);
            }
            let mut medium = self.medium.borrow_mut();
            let mut due_ns = now_ns + EXECUTION_NS + medium.rng.below(JITTER_NS);
            if medium.rng.below(SLOW_EVERY) == 0 {
                due_ns += medium.rng.below(SLOW_NS);
            }
            let (number, clock) = (medium.next, medium.clock);
            medium.next += 1;
            medium.commands.push(Command { number, due_ns, op, sector, sectors, data, fua, clock });
            self.in_flight.push((number, tag));
        }
    }

    /// Each connection begins with it.
    fn set_memory(&mut self, (): &mut (), _memory: &RegionTable) {
        self.last_version = self.last_version.map(|_| 0);
    }

    fn poll(&mut self, (): &mut (), memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        let mut medium = self.medium.borrow_mut();
        let mut at = 0;
        while at < self.in_flight.len() {
            let number = self.in_flight[at].0;
            let Some(ended) = medium.ended.iter().position(|(ended, _)| *ended == number) else {
                at += 1;
                continue;
            };
            let (_, data) = medium.ended.swap_remove(ended);
            let (_, tag) = self.in_flight.remove(at);
            let (request, segments) = done.request(&tag);
            if request.op() == Op::Read {
                let mut from = 0;
                for segment in segments {
                    if let Some(span) = memory.resolve(segment) {
                        span.copy_from_slice(&data[from..from + span.len()]);
                    }
                    from += segment.len as usize;
                }
            }
            done.complete(tag, Status::Ok);
        }
    }
}

/// The target may die with requests at the device, which executes them nevertheless.
impl Drop for MediumQueue {
    fn drop(&mut self) {
        self.in_flight.drain(..).for_each(|(_, tag)| std::mem::forget(tag));
    }
}
