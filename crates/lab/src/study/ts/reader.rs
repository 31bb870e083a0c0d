//! A sequential reader of a file through an operating system's page cache.
//!
//! Read-ahead as in spec D.7: windows, of which the next is requested as soon as half of the previous one is used; so
//! one is in flight while one is used. Data is used at the rate of a CPU's copy.

use std::ops::Range;

use super::cache::{CopyShare, LOOK_NS};
use super::rig::{Hands, TimesliceRequest, TimesliceSubmitter};

/// Longest extent of a file, sectors: 128 MiB, as ext4 has it.
const EXTENT_SECTORS: u64 = 128 << 11;
/// Most that lies between two of them.
const GAP_SECTORS: u64 = 16 << 11;

/// CPUs of the post's machine, about which nothing is published, and the rate of moves: one in so many bios of 512 KiB,
/// some four times a second. Inferred.
const CPUS: u64 = 4;
const MOVES_ONE_IN: u64 = 32;

/// Where a file lies.
#[derive(Clone, Debug)]
pub(super) struct FileExtent {
    /// In the order of the file.
    extents: Vec<Range<u64>>,
}

impl FileExtent {
    /// A file of so many sectors that begins here: in extents of 128 MiB, each not far behind the one before.
    pub(super) fn new(first: u64, sectors: u64, gap: &mut impl FnMut(u64) -> u64) -> FileExtent {
        let (mut extents, mut left, mut at) = (Vec::new(), sectors, first);
        while left > 0 {
            let len = left.min(EXTENT_SECTORS);
            extents.push(at..at + len);
            at += len + gap(GAP_SECTORS / 8) * 8;
            left -= len;
        }
        FileExtent { extents }
    }

    pub(super) fn sectors(&self) -> u64 {
        self.extents.iter().map(|extent| extent.end - extent.start).sum()
    }

    /// Where sectors of the file are: those that lie together with the first.
    pub(super) fn place(&self, from: u64, sectors: u64) -> Range<u64> {
        let mut from = from;
        for extent in &self.extents {
            let len = extent.end - extent.start;
            if from < len {
                return extent.start + from..extent.end.min(extent.start + from + sectors);
            }
            from -= len;
        }
        panic!("a file of {} sectors has no more", self.sectors())
    }
}

/// How a reader reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadAhead {
    /// A window, sectors.
    pub(super) window_sectors: u64,
    /// Rate at which arrived data is used, bytes per second.
    pub(super) copy_bytes_per_s: u64,
    /// Additional time of a window.
    pub(super) think_ns: u64,
}

impl ReadAhead {
    /// Spec D.7: 512 KiB, 800 MB/s, 0.05 ms.
    pub(super) const USUAL: ReadAhead =
        ReadAhead { window_sectors: 1024, copy_bytes_per_s: 800_000_000, think_ns: 50_000 };

    /// How long half of a window is used.
    fn half_ns(&self) -> u64 {
        u64::midpoint(self.window_sectors * 512 * 1_000_000_000 / self.copy_bytes_per_s, self.think_ns)
    }
}

/// Stream of a submitter's bios.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamNumbers {
    stream: u32,
    /// The stream is the CPU that it runs on, and that changes.
    moves: bool,
    asked: u64,
}

impl StreamNumbers {
    /// Always this one.
    pub(super) fn fixed(stream: u32) -> StreamNumbers {
        StreamNumbers { stream, moves: false, asked: 0 }
    }

    /// The CPU on which it runs at the time.
    pub(super) fn moving() -> StreamNumbers {
        StreamNumbers { moves: true, ..StreamNumbers::fixed(0) }
    }

    /// Of the next bio.
    pub(super) fn next(&mut self, hands: &mut Hands<'_>) -> u32 {
        if self.moves && (self.asked == 0 || hands.rng.below(MOVES_ONE_IN) == 0) {
            self.stream = hands.rng.below(CPUS) as u32;
        }
        self.asked += 1;
        self.stream
    }
}

/// The word of a reader that is half through a window.
const HALF: u64 = 1;
/// The word of a reader that is through.
const WHOLE: u64 = 2;

/// See the head of the module.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    stream: StreamNumbers,
    file: FileExtent,
    /// Cache in which its data becomes dirty, if it copies.
    copies: Option<CopyShare>,
    how: ReadAhead,
    /// Not before this.
    starts_ns: u64,
    /// Requested sectors and windows, of which the last few may be in flight.
    asked: u64,
    windows: u64,
    /// Bios of the two windows that may be in flight.
    out: [u32; 2],
    /// Windows used, and whether one is being used.
    used: u64,
    using: bool,
    /// When all was used.
    over_ns: Option<u64>,
}

impl Reader {
    pub(super) fn new(stream: u32, file: FileExtent, how: ReadAhead, starts_ns: u64) -> Reader {
        Reader {
            stream: StreamNumbers::fixed(stream),
            file,
            copies: None,
            how,
            starts_ns,
            asked: 0,
            windows: 0,
            out: [0; 2],
            used: 0,
            using: false,
            over_ns: None,
        }
    }

    /// A reader that moves between CPUs, which are its streams.
    pub(super) fn on(self, stream: StreamNumbers) -> Reader {
        Reader { stream, ..self }
    }

    /// A reader that copies into a cache.
    pub(super) fn into(self, share: CopyShare) -> Reader {
        Reader { copies: Some(share), ..self }
    }

    /// When all was used.
    pub(super) fn over_ns(&self) -> Option<u64> {
        self.over_ns
    }

    /// Sectors that have been used.
    pub(super) fn used_sectors(&self) -> u64 {
        (self.used * self.how.window_sectors).min(self.file.sectors())
    }

    /// Asks for the next window, if the file has more.
    fn ask(&mut self, hands: &mut Hands<'_>) {
        let stream = self.stream.next(hands);
        let end = (self.asked + self.how.window_sectors).min(self.file.sectors());
        while self.asked < end {
            let place = self.file.place(self.asked, end - self.asked);
            self.asked += place.end - place.start;
            self.out[(self.windows % 2) as usize] += 1;
            hands.submit(TimesliceRequest {
                sector: place.start,
                sectors: (place.end - place.start) as u32,
                stream,
                word: self.windows,
                ..TimesliceRequest::default()
            });
        }
        self.windows += 1;
    }

    /// Begins to use the next window, if it has arrived.
    fn go_on(&mut self, hands: &mut Hands<'_>) {
        let has_next = self.used < self.windows && self.out[(self.used % 2) as usize] == 0;
        if !self.using && has_next {
            self.using = true;
            let half_ns = hands.about(self.how.half_ns());
            hands.wake_after(half_ns, HALF);
        }
    }
}

impl TimesliceSubmitter for Reader {
    fn wake(&mut self, word: u64, hands: &mut Hands<'_>) {
        match word {
            HALF => {
                if self.asked < self.file.sectors() {
                    self.ask(hands);
                }
                let half_ns = hands.about(self.how.half_ns());
                hands.wake_after(half_ns, WHOLE);
            }
            WHOLE if self.copies.as_ref().is_some_and(CopyShare::is_full) => hands.wake_after(LOOK_NS, WHOLE),
            WHOLE => {
                (self.used, self.using) = (self.used + 1, false);
                if self.used_sectors() == self.file.sectors() {
                    self.over_ns = Some(hands.now_ns);
                }
                if let Some(share) = &self.copies {
                    share.dirtied(self.used_sectors(), self.over_ns.is_some());
                }
                self.go_on(hands);
            }
            _ if hands.now_ns < self.starts_ns => hands.wake_after(self.starts_ns - hands.now_ns, 0),
            _ => self.ask(hands),
        }
    }

    fn ended(&mut self, request: &TimesliceRequest, hands: &mut Hands<'_>) {
        self.out[(request.word % 2) as usize] -= 1;
        self.go_on(hands);
    }

    fn is_over(&self) -> bool {
        self.over_ns.is_some()
    }
}
