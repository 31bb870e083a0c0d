//! A rotating disk: seek, rotation, zones, a track cache with read-ahead, a write cache with destaging, and native
//! queueing.
//!
//! Owned by its runner (see [`Model`](crate::Model)). All figures are data ([`DiskModel`]), with sources in
//! `docs/models.md`. Its parts:
//!
//! ```text
//!                 decoded      ┌─ cached ──────────────▶ interface ─▶ done
//!   command ─────────────────▶ ┤                            ▲
//!   (at most 31)               └─ waits for the arm ─┐      │ write cache ─┐
//!                                                    ▼      │              ▼
//!            shortest access first, less by age      arm ◀──┴──────── destaged: half full, idle, or flush
//!                                                    └─ reads ahead while no command waits
//! ```
//!
//! One arm, one operation at a time. A sequential stream is read for a stretch while others wait, and not longer.
//! Writes complete when they are in the cache, if it has room, and leave it in order of position; a flush waits for
//! earlier writes.
//!
//! Not modelled: bad sectors, spare tracks, thermal recalibration, standby, and reads that a dirty range answers in
//! part. Only the initial positions of platter and arm are random.

mod dirty;
mod layout;
mod segments;

use std::collections::VecDeque;

use blkyard_mq::Op;

use self::dirty::{Dirty, Extent};
use self::layout::Layout;
use self::segments::CacheSegments;
use crate::Rng;
use crate::model::{Access, ModelEvent, SECTOR_BYTES};

/// Parameters of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskModel {
    /// Size of the platters, sectors of 512 bytes; a user of the outer part opens less.
    pub sectors: u64,
    /// Surfaces.
    pub heads: u64,
    /// Zones, each with as many sectors on every track.
    pub zones: u64,
    /// Time of a turn.
    pub turn_ns: u64,
    /// Bytes per second of a long read on the outermost tracks, switches of tracks included.
    pub outer_bytes_per_s: u64,
    /// The same on the innermost.
    pub inner_bytes_per_s: u64,
    /// Time to go to the next track of a cylinder; also its skew.
    pub head_switch_ns: u64,
    /// Time to go to the first track of the next cylinder; also its skew.
    pub cylinder_switch_ns: u64,
    /// Shortest seek, and so the settling in each.
    pub seek_min_ns: u64,
    /// Added for the square root of the distance, as a share of the full stroke, up to a quarter of the stroke.
    pub seek_root_ns: u64,
    /// Added for the rest of the distance, as such a share.
    pub seek_linear_ns: u64,
    /// How much longer a write settles.
    pub write_settle_ns: u64,
    /// Time to decode a command.
    pub command_ns: u64,
    /// More for a command that needs the arm.
    pub miss_ns: u64,
    /// More for a write into the cache.
    pub cached_write_ns: u64,
    /// Bytes per second between host and cache.
    pub interface_bytes_per_s: u64,
    /// Runs of sectors that the track cache knows.
    pub segments: usize,
    /// Longest of them, sectors.
    pub segment_sectors: u64,
    /// Sectors read ahead while no command waits.
    pub read_ahead_sectors: u64,
    /// Sectors of one stream that are read in one go while others wait: no less, for the disk reads ahead, and no more.
    pub stretch_sectors: u64,
    /// Sectors that may be dirty; zero for a disk without a write cache.
    pub write_cache_sectors: u64,
    /// Ranges that may be.
    pub dirty_extents: usize,
    /// Dirty sectors above which they are destaged beside other work.
    pub destage_above_sectors: u64,
    /// Time without a command after which they are destaged anyhow.
    pub destage_idle_ns: u64,
    /// Sectors destaged in one go.
    pub destage_sectors: u64,
    /// Commands that the disk takes at one time.
    pub depth: usize,
    /// Reduction of a command's access time by its age, in thousandths of the age.
    pub aging_permille: u64,
}

impl DiskModel {
    /// A desktop disk of 7200 turns a minute and 1 TB, of about 2012. Each figure with its source: `docs/models.md`.
    pub const DESKTOP_2012: DiskModel = DiskModel {
        sectors: 1_953_525_168,
        heads: 4,
        zones: 18,
        turn_ns: 8_333_333,
        outer_bytes_per_s: 105_000_000,
        inner_bytes_per_s: 52_000_000,
        head_switch_ns: 1_400_000,
        cylinder_switch_ns: 1_800_000,
        seek_min_ns: 800_000,
        seek_root_ns: 15_475_000,
        seek_linear_ns: 8_217_000,
        write_settle_ns: 1_000_000,
        command_ns: 80_000,
        miss_ns: 70_000,
        cached_write_ns: 70_000,
        interface_bytes_per_s: 280_000_000,
        segments: 16,
        segment_sectors: 4096,
        read_ahead_sectors: 4096,
        stretch_sectors: 1536,
        write_cache_sectors: 32 << 10,
        dirty_extents: 4096,
        destage_above_sectors: 16 << 10,
        destage_idle_ns: 50_000_000,
        destage_sectors: 2048,
        depth: 31,
        aging_permille: 20,
    };
}

/// Activity of the arm.
#[derive(Clone, Copy, Debug)]
enum Arm {
    /// Idle.
    Still,
    /// This, until then.
    At(Work, u64),
    /// Read-ahead.
    Ahead(Ahead),
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Read { access: Access, segment: usize },
    Write(Access),
    Destage(Extent),
}

#[derive(Clone, Copy, Debug)]
struct Ahead {
    segment: usize,
    /// First sector, which began to pass at `since_ns`.
    from: u64,
    since_ns: u64,
    /// Where it ends.
    limit: u64,
}

/// A command that waits for the arm.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    access: Access,
    decoded_ns: u64,
}

/// The disk.
#[derive(Debug)]
pub struct RotaryDisk {
    model: DiskModel,
    layout: Layout,
    /// Where the platter was at time zero.
    phase_ns: u64,
    now_ns: u64,
    /// Commands taken that are not over.
    commands: usize,
    /// Commands being decoded, each with the time it is done.
    arriving: VecDeque<(u64, Access)>,
    waiting: Vec<Waiting>,
    /// Writes for which the cache has no room.
    stalled: VecDeque<Access>,
    /// Flushes that wait, each with its epoch.
    flushes: VecDeque<(u64, u64)>,
    /// Flushes so far.
    epoch: u64,
    /// Transfers on the interface, each with the time it is done.
    answers: VecDeque<(u64, u64)>,
    interface_free_ns: u64,
    segments: CacheSegments,
    dirty: Dirty,
    arm: Arm,
    /// The sector that follows the last one read or written, and its track.
    head: u64,
    track: u64,
    /// Where the present run of one stream began.
    run_from: u64,
    /// Whether it is sequential: it began where an earlier read ended.
    is_stream: bool,
    /// Whether destaging is next, when others wait as well.
    destage_turn: bool,
    /// When the host last wanted something.
    wanted_ns: u64,
    happened: Vec<ModelEvent>,
}

impl RotaryDisk {
    /// An idle disk with empty caches.
    pub fn new(model: DiskModel, seed: u64) -> RotaryDisk {
        let layout = Layout::new(&model);
        let mut rng = Rng::new(seed);
        let (phase_ns, head) = (rng.below(model.turn_ns), rng.below(model.sectors));
        RotaryDisk {
            phase_ns,
            now_ns: 0,
            commands: 0,
            arriving: VecDeque::with_capacity(model.depth),
            waiting: Vec::with_capacity(model.depth),
            stalled: VecDeque::with_capacity(model.depth),
            flushes: VecDeque::with_capacity(model.depth),
            epoch: 0,
            answers: VecDeque::with_capacity(model.depth),
            interface_free_ns: 0,
            segments: CacheSegments::new(model.segments, model.segment_sectors),
            dirty: Dirty::new(model.dirty_extents, model.write_cache_sectors),
            arm: Arm::Still,
            head,
            track: layout.track(head),
            run_from: head,
            is_stream: false,
            destage_turn: false,
            wanted_ns: 0,
            happened: Vec::with_capacity(4 * model.depth),
            layout,
            model,
        }
    }

    /// Its parameters.
    pub fn model(&self) -> &DiskModel {
        &self.model
    }

    /// Sectors that are in the write cache only.
    pub fn dirty_sectors(&self) -> u64 {
        self.dirty.sectors()
    }

    pub(crate) fn room(&self) -> usize {
        self.model.depth - self.commands
    }

    pub(crate) fn take(&mut self, now_ns: u64, access: Access) {
        self.run(now_ns);
        self.commands += 1;
        self.arriving.push_back((self.now_ns + self.model.command_ns, access));
    }

    pub(crate) fn next_ns(&self) -> Option<u64> {
        let arm_ns = match self.arm {
            Arm::At(_, until_ns) => Some(until_ns),
            Arm::Ahead(ahead) => {
                let somebody_waits = !self.waiting.is_empty() || self.must_destage();
                let end = if somebody_waits { self.stretch_end().clamp(ahead.from, ahead.limit) } else { ahead.limit };
                Some(self.layout.passed_ns(ahead.from, ahead.since_ns, end))
            }
            Arm::Still if !self.dirty.is_empty() => Some(self.wanted_ns + self.model.destage_idle_ns),
            Arm::Still => None,
        };
        let answer_ns = self.answers.front().map(|(due_ns, _)| *due_ns);
        let decoded_ns = self.arriving.front().map(|(due_ns, _)| *due_ns);
        [arm_ns, answer_ns, decoded_ns].into_iter().flatten().min()
    }

    pub(crate) fn run(&mut self, now_ns: u64) -> &mut Vec<ModelEvent> {
        while let Some(next_ns) = self.next_ns().filter(|next_ns| *next_ns <= now_ns) {
            self.now_ns = self.now_ns.max(next_ns);
            self.step();
        }
        self.now_ns = self.now_ns.max(now_ns);
        &mut self.happened
    }

    pub(crate) fn cut_power(&mut self, now_ns: u64) {
        self.run(now_ns);
        self.commands = 0;
        self.arriving.clear();
        self.waiting.clear();
        self.stalled.clear();
        self.flushes.clear();
        self.answers.clear();
        self.segments.clear();
        self.dirty.clear();
        self.happened.clear();
        self.arm = Arm::Still;
        self.is_stream = false;
        self.interface_free_ns = self.now_ns;
    }

    /// All that is due now.
    fn step(&mut self) {
        while let Some((_, id)) = self.answers.pop_front_if(|(due_ns, _)| *due_ns <= self.now_ns) {
            self.end(id);
        }
        if let Arm::At(work, until_ns) = self.arm
            && until_ns <= self.now_ns
        {
            self.finish(work);
        }
        self.read_on();
        while let Some((_, access)) = self.arriving.pop_front_if(|(due_ns, _)| *due_ns <= self.now_ns) {
            self.decode(access);
        }
        if !matches!(self.arm, Arm::At(..)) {
            self.choose();
        }
    }

    /// Completes a command.
    fn end(&mut self, id: u64) {
        self.commands -= 1;
        self.wanted_ns = self.now_ns;
        self.happened.push(ModelEvent::Done { id, at_ns: self.now_ns });
    }

    fn on_medium(&mut self, start: u64, end: u64) {
        self.happened.push(ModelEvent::OnMedium { sector: start, sectors: end - start });
    }

    /// Answers a command through the interface.
    fn answer(&mut self, id: u64, more_ns: u64, sectors: u32) {
        let passes_ns = u64::from(sectors) * SECTOR_BYTES * 1_000_000_000 / self.model.interface_bytes_per_s;
        self.interface_free_ns = self.interface_free_ns.max(self.now_ns) + more_ns + passes_ns;
        self.answers.push_back((self.interface_free_ns, id));
    }

    /// A command is understood.
    fn decode(&mut self, access: Access) {
        self.wanted_ns = self.now_ns;
        match access.op {
            Op::Read => self.decode_read(access),
            Op::Flush => {
                if self.owes(self.epoch) {
                    self.flushes.push_back((self.epoch, access.id));
                } else {
                    self.answer(access.id, 0, 0);
                }
                self.epoch += 1;
            }
            Op::Write | Op::WriteZeroes if access.fua || self.model.write_cache_sectors == 0 => self.wait(access),
            Op::Write | Op::WriteZeroes => {
                self.stalled.push_back(access);
                self.fill_cache();
            }
            // Not supported: sectors have fixed positions.
            Op::Discard => self.answer(access.id, 0, 0),
        }
    }

    fn decode_read(&mut self, access: Access) {
        let (start, end) = (access.sector, access.end());
        if self.dirty.covers(start, end) {
            return self.answer(access.id, 0, access.sectors);
        }
        if self.segments.missing_from(start, end) < end {
            return self.wait(access);
        }
        self.answer(access.id, 0, access.sectors);
        let Some(segment) = self.segments.find(start) else { return };
        self.segments.used(segment);
        // Its stream will read what follows: continue reading, or begin to.
        let limit = (end + self.model.read_ahead_sectors).min(self.model.sectors);
        let read_to = self.segments.end(segment);
        let is_still = matches!(self.arm, Arm::Still) && self.waiting.is_empty() && !self.must_destage();
        if let Arm::Ahead(ahead) = &mut self.arm
            && ahead.segment == segment
        {
            ahead.limit = ahead.limit.max(limit);
        } else if is_still && read_to + self.model.read_ahead_sectors / 2 < limit {
            let since_ns = self.reach_ns(self.now_ns, read_to, false);
            self.arm = Arm::Ahead(Ahead { segment, from: read_to, since_ns, limit });
            self.go_to(read_to);
            self.run_from = read_to;
            self.is_stream = true;
        }
    }

    fn wait(&mut self, access: Access) {
        self.waiting.push(Waiting { access, decoded_ns: self.now_ns });
    }

    /// Takes writes into the cache while there is room.
    fn fill_cache(&mut self) {
        let fits = |dirty: &Dirty, access: &Access| dirty.has_room(u64::from(access.sectors));
        while let Some(access) = self.stalled.pop_front_if(|access| fits(&self.dirty, access)) {
            self.dirty.insert(access.sector, access.end(), self.epoch);
            let sectors = if access.op == Op::Write { access.sectors } else { 0 };
            self.answer(access.id, self.model.cached_write_ns, sectors);
        }
    }

    /// Whether something that a flush of this epoch covers is not on the platters.
    fn owes(&self, epoch: u64) -> bool {
        let writing = matches!(self.arm, Arm::At(Work::Destage(extent), _) if extent.epoch <= epoch);
        writing || self.dirty.owes(epoch)
    }

    fn must_destage(&self) -> bool {
        !self.flushes.is_empty() || !self.stalled.is_empty() || self.dirty.sectors() > self.model.destage_above_sectors
    }

    /// The arm has completed its operation.
    fn finish(&mut self, work: Work) {
        self.arm = Arm::Still;
        match work {
            Work::Read { access, segment } => {
                let end = access.end();
                self.end(access.id);
                self.segments.extend(segment, end);
                let limit = (end + self.model.read_ahead_sectors).min(self.model.sectors);
                self.arm = Arm::Ahead(Ahead { segment, from: end, since_ns: self.now_ns, limit });
                self.go_to(end);
            }
            Work::Write(access) => {
                self.end(access.id);
                self.on_medium(access.sector, access.end());
                self.go_to(access.end());
            }
            Work::Destage(extent) => {
                self.on_medium(extent.start, extent.end);
                self.go_to(extent.end);
                while let Some(&(epoch, id)) = self.flushes.front() {
                    if self.owes(epoch) {
                        break;
                    }
                    self.flushes.pop_front();
                    self.answer(id, 0, 0);
                }
                self.fill_cache();
            }
        }
    }

    /// The head is before this sector.
    fn go_to(&mut self, sector: u64) {
        self.head = sector;
        self.track = self.layout.track(sector.min(self.model.sectors - 1));
    }

    /// Notes how far the arm has read on.
    fn read_on(&mut self) {
        let Arm::Ahead(ahead) = self.arm else { return };
        let reached = self.layout.reached(ahead.from, ahead.since_ns, ahead.limit, self.now_ns);
        self.segments.extend(ahead.segment, reached);
        self.go_to(reached);
        if reached == ahead.limit {
            self.arm = Arm::Still;
        }
    }

    /// Where the present stretch of a stream ends.
    fn stretch_end(&self) -> u64 {
        if self.is_stream { self.run_from + self.model.stretch_sectors } else { self.run_from }
    }

    /// First sector of an access that is not in the cache.
    fn missing_from(&self, access: &Access) -> u64 {
        if access.op == Op::Read { self.segments.missing_from(access.sector, access.end()) } else { access.sector }
    }

    /// Finds the arm something to do.
    fn choose(&mut self) {
        while let Some(at) =
            self.waiting.iter().position(|waiting| self.missing_from(&waiting.access) == waiting.access.end())
        {
            let access = self.waiting.remove(at).access;
            self.answer(access.id, 0, access.sectors);
        }
        let destage = self.must_destage();
        let reads_on = matches!(self.arm, Arm::Ahead(_));
        let held = reads_on && self.head < self.stretch_end();
        // A stream that has had its stretch comes last: the sectors next under the head belong to it.
        let near = self.head..self.stream_reaches();
        let had_its_turn = |waiting: &Waiting| {
            reads_on && self.is_stream && !held && near.contains(&self.missing_from(&waiting.access))
        };
        if held {
            let goes_on =
                |waiting: &Waiting| waiting.access.op == Op::Read && self.missing_from(&waiting.access) == self.head;
            if let Some(next) = self.waiting.iter().position(goes_on) {
                self.start(next);
            }
            return;
        }
        let others = self.waiting.iter().any(|waiting| !had_its_turn(waiting));
        let may_be = |waiting: &&Waiting| !(others && had_its_turn(waiting));
        // An access that begins where another ends comes after it, even if it would pass sooner.
        let comes_later = |waiting: &Waiting| {
            let from = self.missing_from(&waiting.access);
            let ends_there = |other: &Waiting| other.access.end() == from && other.access.op == waiting.access.op;
            self.waiting.iter().filter(may_be).any(ends_there)
        };
        let may_be_now = |index: &usize| {
            let waiting = &self.waiting[*index];
            may_be(&waiting) && !comes_later(waiting)
        };
        let candidates = (0..self.waiting.len()).filter(may_be_now);
        let nearest = candidates.min_by_key(|index| self.cost_ns(&self.waiting[*index]));
        if destage && (self.destage_turn || !others) && self.start_destage() {
            return;
        }
        if let Some(nearest) = nearest {
            return self.start(nearest);
        }
        let idle = matches!(self.arm, Arm::Still) && self.now_ns >= self.wanted_ns + self.model.destage_idle_ns;
        if destage || idle {
            self.start_destage();
        }
    }

    /// End of the range that the current stream may have requested: one segment, and its sequential successors.
    fn stream_reaches(&self) -> u64 {
        let mut reach = self.head + self.model.segment_sectors;
        let goes_on = |reach, access: &Access| (self.head..=reach).contains(&access.sector) && access.end() > reach;
        while let Some(next) = self.waiting.iter().find(|waiting| goes_on(reach, &waiting.access)) {
            reach = next.access.end();
        }
        reach
    }

    /// Cost of a command: the time until its first sector passes, less the bonus for waiting.
    fn cost_ns(&self, waiting: &Waiting) -> i64 {
        let begins_ns = self.begins_ns(waiting) - self.now_ns;
        let age_ns = self.now_ns - waiting.decoded_ns;
        begins_ns as i64 - (age_ns * self.model.aging_permille / 1000) as i64
    }

    /// Whether this is the sector that the arm, which reads on, is about to read.
    fn goes_on(&self, sector: u64) -> bool {
        matches!(self.arm, Arm::Ahead(_)) && sector == self.head
    }

    /// When the first sector that a command needs passes, if the arm turns to it now.
    fn begins_ns(&self, waiting: &Waiting) -> u64 {
        let from = self.missing_from(&waiting.access);
        // A continuation of the current read is never late: it is read before the command is decoded.
        let understood_ns = if self.goes_on(from) { 0 } else { waiting.decoded_ns + self.model.miss_ns };
        self.reach_ns(self.now_ns.max(understood_ns), from, waiting.access.op != Op::Read)
    }

    /// The arm turns to a command that waits.
    fn start(&mut self, index: usize) {
        let waiting = self.waiting.remove(index);
        let (access, begun_ns) = (waiting.access, self.begins_ns(&waiting));
        self.destage_turn = true;
        let from = self.missing_from(&access);
        if !self.goes_on(from) {
            self.run_from = from;
        }
        let until_ns = self.layout.passed_ns(from, begun_ns, access.end());
        let work = if access.op == Op::Read {
            self.is_stream = self.segments.find(access.sector).is_some();
            Work::Read { access, segment: self.segments.begin(access.sector) }
        } else {
            self.is_stream = false;
            Work::Write(access)
        };
        self.arm = Arm::At(work, until_ns);
    }

    /// The arm begins to destage dirty data, if any. Data that a flush waits for comes first.
    fn start_destage(&mut self) -> bool {
        let epoch = self.flushes.front().map_or(u64::MAX, |(epoch, _)| *epoch);
        let Some(extent) = self.dirty.take(self.head, epoch, self.model.destage_sectors) else { return false };
        self.destage_turn = false;
        self.is_stream = false;
        let begun_ns = self.reach_ns(self.now_ns, extent.start, true);
        self.arm = Arm::At(Work::Destage(extent), self.layout.passed_ns(extent.start, begun_ns, extent.end));
        true
    }

    /// Time at which a sector begins to pass under the head, if the arm starts at `from_ns`.
    fn reach_ns(&self, from_ns: u64, sector: u64, write: bool) -> u64 {
        let there_ns = from_ns + self.seek_ns(self.layout.track(sector), write);
        let (turn_ns, angle_ns) = (self.model.turn_ns, self.layout.angle_ns(sector));
        there_ns + (angle_ns + turn_ns - (there_ns + self.phase_ns) % turn_ns) % turn_ns
    }

    /// How long the arm takes to another track.
    fn seek_ns(&self, to: u64, write: bool) -> u64 {
        let [here, there] = [self.track, to].map(|track| self.layout.cylinder(track));
        match here.abs_diff(there) {
            _ if self.track == to => 0,
            0 => self.model.head_switch_ns,
            distance => {
                let settle_ns = if write { self.model.write_settle_ns } else { 0 };
                let seek_ns = self.model.seek_ns(distance, self.layout.cylinders()) + settle_ns;
                // The next cylinder is near enough to be followed on to.
                if distance == 1 { seek_ns.min(self.model.cylinder_switch_ns) } else { seek_ns }
            }
        }
    }
}

impl DiskModel {
    /// How long a seek over so many of all cylinders takes, for a read.
    fn seek_ns(&self, distance: u64, cylinders: u64) -> u64 {
        const ONE: u64 = 1 << 32;
        let share = (distance << 32) / (cylinders - 1).max(1);
        let scaled = |ns: u64, share: u64| ((u128::from(ns) * u128::from(share)) >> 32) as u64;
        let root = (share.min(ONE / 4) << 32).isqrt();
        self.seek_min_ns + scaled(self.seek_root_ns, root) + scaled(self.seek_linear_ns, share.saturating_sub(ONE / 4))
    }
}

#[cfg(test)]
mod tests;
