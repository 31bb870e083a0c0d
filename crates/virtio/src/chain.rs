//! One chain of descriptors, as segments.
//!
//! A chain is walked once, when it is fetched; every descriptor is copied before it is looked at, and what the guest
//! writes to it later makes no difference. A chain can be wrong in itself although its ring is sound: then it says so
//! in [`Chain::fault`], and still tells, where that is certain, which byte a status belongs into. Reused from fetch
//! to fetch; its lists never grow. What the bytes mean is not known here.

use blkyard_mem::{Segment, Span, View};

use crate::counters::reasons;
use crate::{GuestMemory, TranslateError};

/// Bytes of a descriptor: address, length, flags, next. [2.7.5]
pub(crate) const DESC_BYTES: usize = 16;

/// Longest table an indirect descriptor may point to: as many descriptors as the largest ring has.
pub const INDIRECT_BYTES_MAX: u32 = 32768 * DESC_BYTES as u32;

reasons! {
    /// What is wrong with a chain.
    ChainFault {
        /// More descriptors than the table has: it runs in a circle. [2.7.5.2]
        Loop = "descriptor loop",
        /// The next descriptor lies outside the table.
        NextOutOfRange = "next descriptor outside the table",
        /// More segments than there is room for.
        TooManySegments = "too many segments",
        /// More than 2^32 bytes in all. [2.7.5.2]
        TooLong = "chain longer than 4 GiB",
        /// A descriptor without bytes. No driver has a use for one, and it would make work without end.
        ZeroLength = "descriptor without bytes",
        /// Some of the bytes are not in guest memory.
        NotMapped = "buffer outside guest memory",
        /// A readable descriptor after a writable one. [2.7.4.2]
        ReadableAfterWritable = "readable buffer after a writable one",
        /// An indirect descriptor, though that was not negotiated. [2.7.5.3.1]
        IndirectNotNegotiated = "indirect descriptor not negotiated",
        /// An indirect descriptor in an indirect table. [2.7.5.3.1]
        IndirectNested = "indirect descriptor in an indirect table",
        /// An indirect descriptor with a next one. [2.7.5.3.1]
        IndirectWithNext = "indirect descriptor with a next one",
        /// The table's length is zero, not made of descriptors, or too long.
        IndirectLength = "indirect table of impossible length",
        /// The table is not in guest memory.
        IndirectNotMapped = "indirect table outside guest memory",
    }
}

/// A descriptor, copied.
#[derive(Clone, Copy)]
pub(crate) struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Desc {
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;

    #[inline]
    fn from_words(addr: u64, rest: u64) -> Desc {
        Desc { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    /// Reads a descriptor once, as two words.
    #[inline]
    fn from_span(span: &Span<'_>) -> Desc {
        let word = |at| {
            let mut bytes = [0; 8];
            span.part(at, 8).copy_to_slice(&mut bytes);
            u64::from_le_bytes(bytes)
        };
        Desc::from_words(word(0), word(8))
    }

    #[inline]
    fn is(self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The descriptor table of a ring.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a> {
    pub(crate) view: &'a View,
    /// Descriptors in it.
    pub(crate) size: u16,
    /// Whether indirect descriptors were negotiated.
    pub(crate) indirect: bool,
}

impl Table<'_> {
    /// Reads a descriptor once, as two words.
    #[inline]
    fn read(self, index: u16) -> Desc {
        use std::sync::atomic::Ordering::Relaxed;
        let at = usize::from(index) * DESC_BYTES;
        Desc::from_words(self.view.load_u64(at, Relaxed), self.view.load_u64(at + 8, Relaxed))
    }
}

/// A chain of buffers: what the device may read, then what it may write.
#[derive(Debug)]
pub struct Chain {
    readable: Box<[Segment]>,
    writable: Box<[Segment]>,
    tally: Tally,
    fault: Option<ChainFault>,
    /// The range of guest memory hit last, kept from chain to chain.
    hint: usize,
}

/// How far a walk has come.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    /// Places taken in the list.
    readable: usize,
    writable: usize,
    /// Bytes of all buffers, mapped or not.
    readable_bytes: u64,
    writable_bytes: u64,
    /// The descriptor looked at last is writable and mapped. After the walk that is the last one, whose last byte is
    /// where a status goes.
    ends_writable: bool,
}

/// A place in a table of descriptors, whichever table it is.
struct Cursor {
    /// Descriptors in the table.
    size: u32,
    /// How many may still be read before it must be a circle.
    left: u32,
    /// The descriptor read last, not taken yet.
    desc: Desc,
}

/// Why a walk does not simply go on.
enum Stop {
    /// The chain ends here.
    End,
    /// The rest of it is in another table.
    Indirect(Desc),
    /// A buffer that wants a closer look; it is not taken yet.
    Odd,
    /// What can be told only of the chain as a whole.
    Fault(ChainFault),
}

impl Cursor {
    fn new(size: u32, first: Desc) -> Cursor {
        Cursor { size, left: size - 1, desc: first }
    }

    /// Goes on to the descriptor after this one, if there is one.
    #[inline]
    fn step(&mut self, read: impl FnOnce(u32) -> Option<Desc>) -> Result<(), Stop> {
        if !self.desc.is(Desc::NEXT) {
            return Err(Stop::End);
        }
        let next = u32::from(self.desc.next);
        if next >= self.size {
            return Err(Stop::Fault(ChainFault::NextOutOfRange));
        }
        self.left = self.left.checked_sub(1).ok_or(Stop::Fault(ChainFault::Loop))?;
        self.desc = read(next).ok_or(Stop::Fault(ChainFault::IndirectNotMapped))?;
        Ok(())
    }
}

impl Chain {
    /// An empty chain with room for this many readable and as many writable segments. A chain that has more is a
    /// fault, so this is the most segments a driver may send, header and status included.
    pub fn new(segments_max: u16) -> Chain {
        let list = || vec![Segment::default(); usize::from(segments_max.max(1))].into();
        Chain { readable: list(), writable: list(), tally: Tally::default(), fault: None, hint: 0 }
    }

    /// What the device may read, in order. Means nothing if there is a fault.
    #[inline]
    pub fn readable(&self) -> &[Segment] {
        &self.readable[..self.tally.readable]
    }

    /// What the device may write, in order. Means nothing if there is a fault.
    #[inline]
    pub fn writable(&self) -> &[Segment] {
        &self.writable[..self.tally.writable]
    }

    /// Bytes the device may read.
    #[inline]
    pub fn readable_bytes(&self) -> u64 {
        self.tally.readable_bytes
    }

    /// Bytes the device may write.
    #[inline]
    pub fn writable_bytes(&self) -> u64 {
        self.tally.writable_bytes
    }

    /// What is wrong with the chain, the first thing found.
    #[inline]
    pub fn fault(&self) -> Option<ChainFault> {
        self.fault
    }

    /// The last writable byte. There is none if the chain does not end in a writable descriptor, or if a fault
    /// leaves in doubt where it ends.
    #[inline]
    pub fn status_at(&self) -> Option<Segment> {
        let last = self.writable().last().filter(|_| self.tally.ends_writable)?;
        Some(Segment { region: last.region, offset: last.offset + u64::from(last.len - 1), len: 1 })
    }

    /// Walks the chain that begins at `head`, which lies in the table.
    #[inline]
    pub(crate) fn walk(&mut self, memory: &GuestMemory, table: Table<'_>, head: u16) {
        self.fault = None;
        self.tally = Tally::default();
        let mut desc = table.read(head);
        if !desc.is(Desc::INDIRECT) {
            let cursor = Cursor::new(u32::from(table.size), desc);
            match self.walk_table(memory, cursor, |index| Some(table.read(index as u16))) {
                Some(indirect) => desc = indirect,
                None => return,
            }
        }
        if table.indirect {
            self.walk_indirect(memory, desc);
        } else {
            self.spoil(ChainFault::IndirectNotNegotiated);
        }
    }

    /// The rest of the chain is in a table of its own. The device ignores the descriptor's write flag. [2.7.5.3.2]
    #[inline]
    fn walk_indirect(&mut self, memory: &GuestMemory, desc: Desc) {
        if desc.is(Desc::NEXT) {
            return self.spoil(ChainFault::IndirectWithNext);
        }
        if desc.len == 0 || !desc.len.is_multiple_of(DESC_BYTES as u32) || desc.len > INDIRECT_BYTES_MAX {
            return self.spoil(ChainFault::IndirectLength);
        }
        let size = desc.len / DESC_BYTES as u32;
        // Nearly always the table lies in one range.
        let nested = if let Some(span) = memory.span(desc.addr, desc.len, &mut self.hint) {
            let read = |index| Desc::from_span(&span.part(index as usize * DESC_BYTES, DESC_BYTES));
            self.walk_table(memory, Cursor::new(size, read(0)), |index| Some(read(index)))
        } else {
            self.walk_torn(memory, size, desc.addr)
        };
        if nested.is_some() {
            self.spoil(ChainFault::IndirectNested);
        }
    }

    /// The table lies across ranges: each descriptor is gathered by itself.
    #[cold]
    fn walk_torn(&mut self, memory: &GuestMemory, size: u32, addr: u64) -> Option<Desc> {
        let read = |index| {
            let mut bytes = [0; DESC_BYTES];
            let at = addr.checked_add(u64::from(index) * DESC_BYTES as u64)?;
            let there = memory.read(at, &mut bytes);
            let words = u128::from_le_bytes(bytes);
            there.then(|| Desc::from_words(words as u64, (words >> 64) as u64))
        };
        let Some(first) = read(0) else {
            self.spoil(ChainFault::IndirectNotMapped);
            return None;
        };
        self.walk_table(memory, Cursor::new(size, first), read)
    }

    /// Walks one table to its end, or to an indirect descriptor, which is returned.
    #[inline]
    fn walk_table(
        &mut self,
        memory: &GuestMemory,
        mut cursor: Cursor,
        read: impl Fn(u32) -> Option<Desc>,
    ) -> Option<Desc> {
        loop {
            let mut stop = self.walk_plain(memory, &mut cursor, &read);
            if let Stop::Odd = stop {
                self.take(memory, cursor.desc);
                match cursor.step(&read) {
                    Ok(()) => continue,
                    Err(next) => stop = next,
                }
            }
            let found = match stop {
                Stop::Indirect(desc) => return Some(desc),
                Stop::Fault(fault) => Some(fault),
                Stop::End | Stop::Odd => None,
            };
            if let Some(fault) = found {
                self.spoil(fault);
            } else if self.tally.readable_bytes + self.tally.writable_bytes > 1 << 32 {
                self.note(ChainFault::TooLong);
            }
            return None;
        }
    }

    /// Walks on as long as buffers are in one range each, in order, and nothing is wrong. What is counted is kept in
    /// plain variables, which stay in registers.
    #[inline]
    fn walk_plain(&mut self, memory: &GuestMemory, cursor: &mut Cursor, read: &impl Fn(u32) -> Option<Desc>) -> Stop {
        if self.fault.is_some() {
            return if cursor.desc.is(Desc::INDIRECT) { Stop::Indirect(cursor.desc) } else { Stop::Odd };
        }
        let (mut readable, mut writable) = (self.tally.readable, self.tally.writable);
        let (mut readable_bytes, mut writable_bytes) = (self.tally.readable_bytes, self.tally.writable_bytes);
        let mut range = memory.range(self.hint);
        let stop = loop {
            let desc = cursor.desc;
            if desc.is(Desc::INDIRECT) {
                break Stop::Indirect(desc);
            }
            if desc.len == 0 {
                break Stop::Odd;
            }
            let segment = if let Some(segment) = range.segment(desc.addr, desc.len) {
                segment
            } else if let Some(segment) = memory.segment_elsewhere(desc.addr, desc.len, &mut self.hint) {
                range = memory.range(self.hint);
                segment
            } else {
                break Stop::Odd;
            };
            // Two branches rather than a choice of one of two lists: the processor guesses a branch, but waits for
            // the outcome of a choice.
            if desc.is(Desc::WRITE) {
                let Some(place) = self.writable.get_mut(writable) else { break Stop::Odd };
                *place = segment;
                writable += 1;
                writable_bytes += u64::from(desc.len);
            } else {
                let Some(place) = self.readable.get_mut(readable).filter(|_| writable == 0) else { break Stop::Odd };
                *place = segment;
                readable += 1;
                readable_bytes += u64::from(desc.len);
            }
            if let Err(stop) = cursor.step(read) {
                break stop;
            }
        };
        self.tally = Tally { readable, writable, readable_bytes, writable_bytes, ends_writable: writable > 0 };
        stop
    }

    /// Adds any buffer. After a fault only the last one is kept: the status byte may be in it.
    #[cold]
    #[inline(never)]
    fn take(&mut self, memory: &GuestMemory, desc: Desc) {
        let writable = desc.is(Desc::WRITE);
        let tally = &mut self.tally;
        if !writable && tally.writable > 0 {
            self.fault = self.fault.or(Some(ChainFault::ReadableAfterWritable));
        }
        tally.ends_writable = writable;
        let (list, len, bytes) = if writable {
            (&mut self.writable, &mut tally.writable, &mut tally.writable_bytes)
        } else {
            (&mut self.readable, &mut tally.readable, &mut tally.readable_bytes)
        };
        *bytes += u64::from(desc.len);
        if desc.len == 0 {
            return self.spoil(ChainFault::ZeroLength);
        }
        if self.fault.is_some() {
            *len = 0;
        }
        let mut translate = |from| memory.translate_into(desc.addr, desc.len, &mut self.hint, &mut list[from..]);
        match translate(*len) {
            Ok(parts) => *len += parts,
            Err(TranslateError::NotMapped) => self.spoil(ChainFault::NotMapped),
            Err(TranslateError::Full) => {
                // With the others gone there may be room for this one.
                let alone = translate(0);
                *len = alone.unwrap_or(0);
                tally.ends_writable &= alone.is_ok();
                self.note(ChainFault::TooManySegments);
            }
        }
    }

    /// Records a fault; an earlier one stands.
    #[cold]
    fn note(&mut self, fault: ChainFault) {
        self.fault = self.fault.or(Some(fault));
    }

    /// Records a fault after which it is not known where a status would go.
    #[cold]
    fn spoil(&mut self, fault: ChainFault) {
        self.note(fault);
        self.tally.ends_writable = false;
    }
}
