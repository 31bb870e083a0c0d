//! The page cache of the copies, and its writeback.
//!
//! Data used by a [`Reader`](super::reader::Reader) becomes dirty. Above a background limit a flusher writes, file by
//! file, large parts at a time; above the other limit the reader waits. When all is read the rest is written and
//! flushed, as by `sync`. After Linux (`mm/page-writeback.c`, `fs/fs-writeback.c`), with its usual limits on a machine
//! of 4 GB.

use std::cell::RefCell;
use std::rc::Rc;

use blkyard_mq::Op;

use super::reader::{FileExtent, StreamNumbers};
use super::rig::{Hands, MS, TimesliceRequest, TimesliceSubmitter};

/// Dirty sectors from which on they are written back: a tenth of 4 GB.
const BACKGROUND_SECTORS: u64 = 400_000_000 / 512;
/// Dirty sectors at which readers wait: a fifth of the memory.
const LIMIT_SECTORS: u64 = 800_000_000 / 512;
/// Amount written of one file before the other: half a second of the disk's work.
const CHUNK_SECTORS: u64 = 48 << 11;
/// A bio of the flusher, sectors.
const BIO_SECTORS: u64 = 1024;
/// Its bios in flight: as many as the disk has tags, then a thread that needs one more sleeps.
const OUT_MAX: usize = 31;
/// Interval at which a waiting side checks again.
pub(super) const LOOK_NS: u64 = 10 * MS;

/// State of two copies in memory.
#[derive(Debug, Default)]
pub(super) struct CopyCache {
    /// By copy: sectors made dirty, and on the disk again.
    dirtied: [u64; 2],
    cleaned: [u64; 2],
    /// Whether a copy has read all.
    read: [bool; 2],
}

/// One copy's part of it.
#[derive(Clone, Debug)]
pub(super) struct CopyShare {
    cache: Rc<RefCell<CopyCache>>,
    number: usize,
}

impl CopyCache {
    fn dirty(&self) -> u64 {
        self.dirtied.iter().sum::<u64>() - self.cleaned.iter().sum::<u64>()
    }

    fn is_read(&self) -> bool {
        self.read == [true; 2]
    }
}

impl CopyShare {
    /// The parts of two copies.
    pub(super) fn two() -> [CopyShare; 2] {
        let cache = Rc::<RefCell<CopyCache>>::default();
        [0, 1].map(|number| CopyShare { cache: Rc::clone(&cache), number })
    }

    /// Whether no more may be made dirty now.
    pub(super) fn is_full(&self) -> bool {
        self.cache.borrow().dirty() >= LIMIT_SECTORS
    }

    /// So much of the copy is dirty, or was.
    pub(super) fn dirtied(&self, sectors: u64, all: bool) {
        let mut cache = self.cache.borrow_mut();
        cache.dirtied[self.number] = sectors;
        cache.read[self.number] = all;
    }
}

/// The flusher.
#[derive(Debug)]
pub(super) struct Flusher {
    cache: Rc<RefCell<CopyCache>>,
    stream: StreamNumbers,
    /// Where the copies go.
    files: [FileExtent; 2],
    /// By file: sectors asked to be written.
    asked: [u64; 2],
    /// The file that is written, and how much more of it before the other.
    turn: usize,
    left: u64,
    out: usize,
    asleep: bool,
    flushing: bool,
    over_ns: Option<u64>,
}

impl Flusher {
    pub(super) fn new(share: &CopyShare, stream: StreamNumbers, files: [FileExtent; 2]) -> Flusher {
        let cache = Rc::clone(&share.cache);
        Flusher {
            cache,
            stream,
            files,
            asked: [0; 2],
            turn: 0,
            left: CHUNK_SECTORS,
            out: 0,
            asleep: false,
            flushing: false,
            over_ns: None,
        }
    }

    /// When all was on the disk.
    pub(super) fn over_ns(&self) -> Option<u64> {
        self.over_ns
    }

    /// The file that is written next, if any is.
    fn choose(&mut self) -> Option<usize> {
        let cache = self.cache.borrow();
        if !cache.is_read() && cache.dirty() <= BACKGROUND_SECTORS {
            return None;
        }
        let has = |file: usize| self.asked[file] < cache.dirtied[file];
        if self.left == 0 || !has(self.turn) {
            let other = 1 - self.turn;
            if has(other) {
                self.turn = other;
            }
            self.left = CHUNK_SECTORS;
        }
        has(self.turn).then_some(self.turn)
    }

    fn go_on(&mut self, hands: &mut Hands<'_>) {
        while self.out < OUT_MAX {
            let Some(file) = self.choose() else { break };
            let most = self.cache.borrow().dirtied[file] - self.asked[file];
            let place = self.files[file].place(self.asked[file], most.min(BIO_SECTORS));
            let sectors = place.end - place.start;
            self.asked[file] += sectors;
            self.left = self.left.saturating_sub(sectors);
            self.out += 1;
            let stream = self.stream.next(hands);
            hands.submit(TimesliceRequest {
                op: Op::Write,
                sector: place.start,
                sectors: sectors as u32,
                stream,
                word: file as u64,
                ..TimesliceRequest::default()
            });
        }
        let is_read = self.cache.borrow().is_read();
        if is_read && self.out == 0 && !self.flushing {
            self.flushing = true;
            let stream = self.stream.next(hands);
            hands.submit(TimesliceRequest { op: Op::Flush, stream, ..TimesliceRequest::default() });
        }
        if self.out == 0 && !self.flushing && !self.asleep {
            self.asleep = true;
            hands.wake_after(LOOK_NS, 1);
        }
    }
}

impl TimesliceSubmitter for Flusher {
    fn wake(&mut self, _: u64, hands: &mut Hands<'_>) {
        self.asleep = false;
        self.go_on(hands);
    }

    fn ended(&mut self, request: &TimesliceRequest, hands: &mut Hands<'_>) {
        if request.op == Op::Flush {
            self.over_ns = Some(hands.now_ns);
            return;
        }
        self.out -= 1;
        self.cache.borrow_mut().cleaned[request.word as usize] += u64::from(request.sectors);
        self.go_on(hands);
    }

    fn is_over(&self) -> bool {
        self.over_ns.is_some()
    }
}
