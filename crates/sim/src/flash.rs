//! Flash: channels of dies, pages that are programmed and blocks that are erased, a write cache, and pauses for garbage
//! collection.
//!
//! Owned by its runner (see [`Model`](crate::Model)). All figures are data ([`FlashModel`]), with sources in
//! `docs/models.md`. Nothing is random. All dies work in parallel, each on one operation at a time, in order:
//!
//! ```text
//!   read  ─▶ command ─▶ die of its page: read ─▶ channel of the die ─▶ done
//!   write ─▶ command ─▶ cache, when it has room ─▶ done          ┌─ now and then: move pages, erase a block
//!                         └─ a page full, or a flush ─▶ next die: program
//! ```
//!
//! So a read of a busy die waits for its program or erase, which makes the tail latency. When a block is full another
//! must be free: the model's number of valid pages is moved, and the block is erased.
//!
//! Not modelled: the map of pages (the position of a read determines its die), wear, suspended programs, and the effect
//! of discard.

use std::collections::VecDeque;

use blkyard_mq::Op;

use crate::Events;
use crate::model::{Access, ModelEvent, SECTOR_BYTES};

/// Parameters of a flash device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashModel {
    /// Channels, each with its own wires.
    pub channels: usize,
    /// Dies on each.
    pub dies: usize,
    /// Sectors that are read or programmed at one time.
    pub page_sectors: u64,
    /// Pages erased at one time.
    pub block_pages: u64,
    /// Time to read a page.
    pub read_ns: u64,
    /// Time to program a page.
    pub program_ns: u64,
    /// Time to erase a block.
    pub erase_ns: u64,
    /// Bytes per second of a channel.
    pub channel_bytes_per_s: u64,
    /// Of each block that is collected, how many pages in a thousand are still wanted and moved.
    pub valid_permille: u64,
    /// Time to decode a command, and to answer it.
    pub command_ns: u64,
    /// Bytes per second between host and device.
    pub interface_bytes_per_s: u64,
    /// Sectors that may wait to be programmed; zero for a device without a write cache.
    pub write_cache_sectors: u64,
    /// Commands that the device takes at one time.
    pub depth: usize,
}

impl FlashModel {
    /// An NVMe device of 8 channels with 8 dies each. Each figure with its source: `docs/models.md`.
    pub const NVME_2018: FlashModel = FlashModel {
        channels: 8,
        dies: 8,
        page_sectors: 32,
        block_pages: 256,
        read_ns: 40_000,
        program_ns: 200_000,
        erase_ns: 2_000_000,
        channel_bytes_per_s: 800_000_000,
        valid_permille: 250,
        command_ns: 10_000,
        interface_bytes_per_s: 3_200_000_000,
        write_cache_sectors: 64 << 10,
        depth: 1023,
    };
}

#[derive(Clone, Copy, Debug)]
enum FlashEvent {
    Done(u64),
    OnMedium { sector: u64, sectors: u64 },
}

/// The device.
#[derive(Debug)]
pub struct Flash {
    model: FlashModel,
    events: Events<FlashEvent>,
    out: usize,
    /// By die: when it is free, and the pages of its block that are programmed.
    dies: Box<[(u64, u64)]>,
    /// By channel: when it is free.
    channels: Box<[u64]>,
    interface_free_ns: u64,
    /// The die that programs next.
    next_die: usize,
    /// Data in the cache for a partial page: data, and number of sectors.
    open: Vec<(u64, u64)>,
    open_sectors: u64,
    /// Pages being programmed: earliest end, and number of sectors.
    programming: VecDeque<(u64, u64)>,
    programming_sectors: u64,
    /// When all that was ever to be programmed is.
    programmed_ns: u64,
    happened: Vec<ModelEvent>,
}

impl Flash {
    /// An idle device with an empty cache.
    pub fn new(model: FlashModel) -> Flash {
        Flash {
            events: Events::default(),
            out: 0,
            dies: vec![(0, 0); model.channels * model.dies].into(),
            channels: vec![0; model.channels].into(),
            interface_free_ns: 0,
            next_die: 0,
            open: Vec::with_capacity(model.page_sectors as usize),
            open_sectors: 0,
            programming: VecDeque::with_capacity(model.channels * model.dies),
            programming_sectors: 0,
            programmed_ns: 0,
            happened: Vec::with_capacity(4 * model.depth),
            model,
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.model.depth - self.out
    }

    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.events.next_ns()
    }

    pub(crate) fn run(&mut self, now_ns: u64) -> &mut Vec<ModelEvent> {
        while self.next_ns().is_some_and(|next_ns| next_ns <= now_ns) {
            let Some(event) = self.events.advance() else { break };
            self.happened.push(match event {
                FlashEvent::Done(id) => {
                    self.out -= 1;
                    ModelEvent::Done { id, at_ns: self.events.now_ns() }
                }
                FlashEvent::OnMedium { sector, sectors } => ModelEvent::OnMedium { sector, sectors },
            });
        }
        &mut self.happened
    }

    pub(crate) fn cut_power(&mut self, now_ns: u64) {
        self.run(now_ns);
        self.events.clear();
        self.happened.clear();
        self.open.clear();
        self.programming.clear();
        (self.out, self.open_sectors, self.programming_sectors) = (0, 0, 0);
        (self.interface_free_ns, self.programmed_ns) = (now_ns, now_ns);
        self.dies.iter_mut().for_each(|(free_ns, _)| *free_ns = now_ns);
        self.channels.fill(now_ns);
    }

    pub(crate) fn take(&mut self, now_ns: u64, access: Access) {
        let now_ns = now_ns.max(self.events.now_ns()) + self.model.command_ns;
        self.out += 1;
        match access.op {
            Op::Read => {
                let read_ns = self.read(now_ns, &access);
                let done_ns = self.cross(now_ns, read_ns, access.sectors);
                self.events.at(done_ns, FlashEvent::Done(access.id));
            }
            Op::Write | Op::WriteZeroes => self.write(now_ns, &access),
            Op::Flush => {
                self.close(now_ns);
                self.events.at(self.programmed_ns.max(now_ns), FlashEvent::Done(access.id));
            }
            Op::Discard => self.events.at(now_ns, FlashEvent::Done(access.id)),
        }
    }

    /// When so many sectors have crossed the interface that are ready at a time.
    fn cross(&mut self, now_ns: u64, ready_ns: u64, sectors: u32) -> u64 {
        let bytes = u64::from(sectors) * SECTOR_BYTES;
        pass(&mut self.interface_free_ns, self.model.interface_bytes_per_s, bytes, now_ns, ready_ns)
    }

    /// When the pages of a read have all come over their channels.
    fn read(&mut self, now_ns: u64, access: &Access) -> u64 {
        let mut ready_ns = now_ns;
        let (mut sector, page_sectors) = (access.sector, self.model.page_sectors);
        while sector < access.end() {
            let page = sector / page_sectors;
            let end = access.end().min((page + 1) * page_sectors);
            let die = (page % self.dies.len() as u64) as usize;
            let read_ns = self.dies[die].0.max(now_ns) + self.model.read_ns;
            self.dies[die].0 = read_ns;
            let channel = &mut self.channels[die % self.model.channels];
            let bytes = (end - sector) * SECTOR_BYTES;
            ready_ns = ready_ns.max(pass(channel, self.model.channel_bytes_per_s, bytes, now_ns, read_ns));
            sector = end;
        }
        ready_ns
    }

    fn write(&mut self, now_ns: u64, access: &Access) {
        let sectors = u64::from(access.sectors);
        let room_ns = self.room_ns(now_ns, sectors);
        let cached_ns = self.cross(now_ns, room_ns, access.sectors);
        let mut sector = access.sector;
        while sector < access.end() {
            let part = (self.model.page_sectors - self.open_sectors).min(access.end() - sector);
            self.open.push((sector, part));
            self.open_sectors += part;
            sector += part;
            if self.open_sectors == self.model.page_sectors {
                self.close(cached_ns);
            }
        }
        let through = access.fua || self.model.write_cache_sectors == 0;
        if through {
            self.close(cached_ns);
        }
        let done_ns = if through { self.programmed_ns.max(cached_ns) } else { cached_ns };
        self.events.at(done_ns, FlashEvent::Done(access.id));
    }

    /// When the cache has room for so many sectors more.
    fn room_ns(&mut self, now_ns: u64, sectors: u64) -> u64 {
        let mut room_ns = now_ns;
        while let Some(&(programmed_ns, programmed)) = self.programming.front() {
            let fits = self.programming_sectors + self.open_sectors + sectors <= self.model.write_cache_sectors;
            if programmed_ns > room_ns && (fits || self.model.write_cache_sectors == 0) {
                break;
            }
            room_ns = room_ns.max(programmed_ns);
            self.programming.pop_front();
            self.programming_sectors -= programmed;
        }
        room_ns
    }

    /// Programs the cached data of a page, full or not.
    fn close(&mut self, now_ns: u64) {
        if self.open.is_empty() {
            return;
        }
        let FlashModel { block_pages, read_ns, program_ns, erase_ns, valid_permille, .. } = self.model;
        let (free_ns, pages) = &mut self.dies[self.next_die];
        self.next_die = (self.next_die + 1) % (self.model.channels * self.model.dies);
        let mut begins_ns = (*free_ns).max(now_ns);
        *pages += 1;
        if *pages > block_pages * (1000 - valid_permille) / 1000 {
            *pages = 1;
            begins_ns += block_pages * valid_permille / 1000 * (read_ns + program_ns) + erase_ns;
        }
        *free_ns = begins_ns + program_ns;
        let programmed_ns = *free_ns;
        for (sector, sectors) in self.open.drain(..) {
            self.events.at(programmed_ns, FlashEvent::OnMedium { sector, sectors });
        }
        // Room is made in the order of the pages.
        let in_order_ns = self.programming.back().map_or(0, |(last_ns, _)| *last_ns).max(programmed_ns);
        self.programming.push_back((in_order_ns, self.open_sectors));
        self.programming_sectors += std::mem::take(&mut self.open_sectors);
        self.programmed_ns = self.programmed_ns.max(programmed_ns);
    }
}

/// Time at which so many bytes have passed shared wires, if they are ready at `ready_ns`. Late data does not block
/// others: the wires count as used from the time of the command.
fn pass(free_ns: &mut u64, bytes_per_s: u64, bytes: u64, now_ns: u64, ready_ns: u64) -> u64 {
    let passes_ns = bytes * 1_000_000_000 / bytes_per_s;
    *free_ns = (*free_ns).max(now_ns) + passes_ns;
    (ready_ns + passes_ns).max(*free_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Rng};

    const MODEL: FlashModel = FlashModel::NVME_2018;

    /// Keeps `depth` accesses of `next` in flight until `count` have completed. Returns accesses per second, and their
    /// sorted durations.
    fn keep(
        model: FlashModel,
        depth: usize,
        count: usize,
        mut next: impl FnMut() -> (Op, u64, u32),
    ) -> (f64, Vec<u64>) {
        let (mut flash, mut now_ns, mut asked) = (Model::Flash(Box::new(Flash::new(model))), 0, 0_u64);
        let (mut since, mut took) = (std::collections::HashMap::new(), Vec::new());
        while took.len() < count {
            while since.len() < depth {
                let (op, sector, sectors) = next();
                since.insert(asked, now_ns);
                flash.take(now_ns, Access { id: asked, op, fua: false, sector, sectors });
                asked += 1;
            }
            now_ns = flash.next_ns().expect("something is out").max(now_ns);
            flash.run(now_ns, |event| {
                if let ModelEvent::Done { id, at_ns } = event {
                    took.push(at_ns - since.remove(&id).expect("over once"));
                }
            });
        }
        let rate = took.len() as f64 * 1e9 / now_ns as f64;
        took.sort_unstable();
        (rate, took)
    }

    fn anywhere(op: Op) -> impl FnMut() -> (Op, u64, u32) {
        let mut rng = Rng::new(1);
        move || (op, rng.below(1 << 24) * 8, 8)
    }

    #[test]
    fn a_read_alone_takes_the_sum_and_many_keep_all_dies_busy() {
        let (_, took) = keep(MODEL, 1, 1000, anywhere(Op::Read));
        // 10 us for the command, 40 for the page, 5 for the channel, 1.3 for the interface.
        assert!(took.iter().all(|took_ns| (55_000..58_000).contains(took_ns)), "{:?}", took.last());
        let (iops, _) = keep(MODEL, 512, 100_000, anywhere(Op::Read));
        // The interface alone would do 781 thousand, 64 dies 1.6 million.
        assert!((600e3..782e3).contains(&iops), "{iops}");
    }

    #[test]
    fn writes_are_over_in_the_cache_until_it_is_full_and_then_at_the_rate_of_programming() {
        let (_, took) = keep(MODEL, 1, 1000, anywhere(Op::Write));
        assert!(took.iter().all(|took_ns| *took_ns < 13_000), "{:?}", took.last());
        let mut sector = 0;
        // With an interface that is no bottleneck.
        let wide = FlashModel { interface_bytes_per_s: 32_000_000_000, ..MODEL };
        let (rate, took) = keep(wide, 32, 40_000, || {
            sector += 256;
            (Op::Write, sector - 256, 256)
        });
        // A block of 256 pages takes 192 of ours and 64 that are moved: 192 x 16 KiB in 192 x 0.2 + 64 x 0.24 + 2 ms,
        // times 64 dies.
        let published = 64.0 * 192.0 * 16384.0 / (192.0 * 0.2e-3 + 64.0 * 0.24e-3 + 2e-3);
        let bytes = rate * 131_072.0;
        assert!((bytes / published - 1.0).abs() < 0.05, "{bytes} {published}");
        assert!(took[took.len() - 1] > 10_000_000, "garbage is collected");
    }

    #[test]
    fn a_read_beside_writes_waits_for_dies_that_program_and_erase() {
        let mut turn = 0_u64;
        let (mut read, mut write) = (anywhere(Op::Read), anywhere(Op::Write));
        let (_, took) = keep(MODEL, 8, 200_000, || {
            turn += 1;
            if turn.is_multiple_of(2) { read() } else { write() }
        });
        assert!(took[took.len() / 2] < 100_000 && took[took.len() - 10] > 200_000, "{:?}", took.last());
    }

    #[test]
    fn a_flush_ends_when_all_before_it_is_on_the_medium() {
        let mut flash = Model::Flash(Box::new(Flash::new(MODEL)));
        for id in 0..5 {
            flash.take(0, Access { id, op: Op::Write, fua: false, sector: id * 1000, sectors: 8 });
        }
        flash.take(1000, Access { id: 5, op: Op::Flush, ..Access::default() });
        let mut happened = Vec::new();
        flash.run(10_000_000, |event| happened.push(event));
        let on_medium = happened.iter().filter(|event| matches!(event, ModelEvent::OnMedium { .. })).count();
        assert!(on_medium == 5 && matches!(happened[10], ModelEvent::Done { id: 5, .. }), "{happened:?}");
    }
}
