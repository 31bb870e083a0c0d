//! One chain of descriptors, as segments.
//!
//! A chain is walked once, when it is fetched. Every descriptor is copied before it is examined, and later writes by
//! the guest have no effect. A chain can be malformed although its ring is sound: then [`Chain::fault`] says so, and
//! the byte for the status is still known where that is certain. Reused from fetch to fetch; its lists never grow. The
//! meaning of the bytes is not known here.

use blkyard_mem::{Segment, Span};

use crate::counters::reasons;
use crate::descriptor::{DESC_BYTES, Desc, DescriptorTable, FilledSlots, read_torn, read_words};
use crate::{GuestMemory, GuestRange, TranslateError};

/// Rows of a request as nearly all are: header, data, status.
const REQUEST_ROWS: u32 = 3;

/// Bytes of all buffers of a chain, at most. [2.7.5.2]
const BYTES_MAX: u64 = 1 << 32;

reasons! {
    /// Fault of a chain.
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

/// A chain of buffers: those that the device reads, then those that it writes.
#[derive(Debug)]
pub struct Chain {
    readable: Box<[Segment]>,
    writable: Box<[Segment]>,
    tally: WalkTotals,
    fault: Option<ChainFault>,
    hints: Hints,
}

/// The ranges of guest memory that were hit last, kept from chain to chain: requests and their data are often in two
/// ranges.
#[derive(Clone, Copy, Debug, Default)]
struct Hints {
    last: usize,
    before: usize,
}

impl Hints {
    /// The one segment that holds these bytes, if they lie in one range, which is known not to be the last; from now on
    /// it is.
    #[inline(never)]
    fn elsewhere(&mut self, memory: &GuestMemory, addr: u64, len: u32) -> Option<Segment> {
        let last = self.last;
        let segment = if let Some(segment) = memory.range(self.before).segment(addr, len) {
            self.last = self.before;
            segment
        } else {
            memory.segment_elsewhere(addr, len, &mut self.last)?
        };
        self.before = last;
        Some(segment)
    }
}

/// Where a buffer is, if it has bytes and they lie in one of these ranges.
#[inline(always)]
fn find(near: &GuestRange, far: &GuestRange, desc: Desc) -> Option<Segment> {
    let near = near.segment(desc.addr, desc.len);
    (if near.is_some() { near } else { far.segment(desc.addr, desc.len) }).filter(|_| desc.len > 0)
}

/// How far a walk has come.
#[derive(Clone, Copy, Debug, Default)]
struct WalkTotals {
    /// Places taken in the list.
    readable: usize,
    writable: usize,
    /// Bytes of all buffers, mapped or not.
    readable_bytes: u64,
    writable_bytes: u64,
    /// Whether the latest descriptor is writable and mapped. After the walk that is the last one, whose last byte is
    /// the status.
    ends_writable: bool,
}

/// Cause that interrupts a walk.
enum WalkEnd {
    /// The chain ends here.
    End,
    /// The rest of it is in another table.
    Indirect(Desc),
    /// A buffer that needs the slow path; it is not taken yet.
    Odd,
    /// A fault of the chain as a whole.
    Fault(ChainFault),
}

/// Where descriptors come from, one after the other.
trait DescriptorSource: Copy {
    /// The descriptor read last, not taken yet.
    fn desc(&self) -> Desc;

    /// Goes on to the descriptor after this one, if there is one.
    fn step(&mut self) -> Result<(), WalkEnd>;
}

/// Descriptors that name their next, as in a split ring and its indirect tables.
#[derive(Clone, Copy)]
struct Linked<R> {
    /// Descriptors in the table.
    size: u32,
    /// How many may still be read before it must be a circle.
    left: u32,
    desc: Desc,
    read: R,
}

impl<R: Fn(u32) -> Option<Desc>> Linked<R> {
    #[inline]
    fn new(size: u32, first: Desc, read: R) -> Linked<R> {
        Linked { size, left: size - 1, desc: first, read }
    }
}

impl<R: Fn(u32) -> Option<Desc> + Copy> DescriptorSource for Linked<R> {
    #[inline]
    fn desc(&self) -> Desc {
        self.desc
    }

    #[inline]
    fn step(&mut self) -> Result<(), WalkEnd> {
        if !self.desc.is(Desc::NEXT) {
            return Err(WalkEnd::End);
        }
        let next = u32::from(self.desc.next());
        if next >= self.size {
            return Err(WalkEnd::Fault(ChainFault::NextOutOfRange));
        }
        self.left = self.left.checked_sub(1).ok_or(WalkEnd::Fault(ChainFault::Loop))?;
        self.desc = (self.read)(next).ok_or(WalkEnd::Fault(ChainFault::IndirectNotMapped))?;
        Ok(())
    }
}

/// Descriptors that follow each other, as in a packed ring and its indirect tables.
#[derive(Clone, Copy)]
struct DescriptorRun<R> {
    /// How many there may be.
    size: u32,
    /// How many were read.
    len: u32,
    desc: Desc,
    read: R,
}

impl<R: Fn(u32) -> Option<Desc> + Copy> DescriptorSource for DescriptorRun<R> {
    #[inline]
    fn desc(&self) -> Desc {
        self.desc
    }

    #[inline]
    fn step(&mut self) -> Result<(), WalkEnd> {
        if !self.desc.is(Desc::NEXT) {
            return Err(WalkEnd::End);
        }
        if self.len == self.size {
            return Err(WalkEnd::Fault(ChainFault::Loop));
        }
        self.desc = (self.read)(self.len).ok_or(WalkEnd::Fault(ChainFault::IndirectNotMapped))?;
        self.len += 1;
        Ok(())
    }
}

impl Chain {
    /// An empty chain with room for this many readable and as many writable segments. A chain that has more is a
    /// fault, so this is the most segments a driver may send, header and status included.
    pub fn new(segments_max: u16) -> Chain {
        let list = || vec![Segment::default(); usize::from(segments_max.max(1))].into();
        Chain { readable: list(), writable: list(), tally: WalkTotals::default(), fault: None, hints: Hints::default() }
    }

    /// Readable buffers, in order. Undefined after a fault.
    #[inline]
    pub fn readable(&self) -> &[Segment] {
        &self.readable[..self.tally.readable]
    }

    /// Writable buffers, in order. Undefined after a fault.
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

    /// The chain's first fault.
    #[inline]
    pub fn fault(&self) -> Option<ChainFault> {
        self.fault
    }

    /// The last writable byte. `None` if the chain does not end in a writable descriptor, or if a fault makes its end
    /// uncertain.
    #[inline]
    pub fn status_at(&self) -> Option<Segment> {
        let last = self.writable().last().filter(|_| self.tally.ends_writable)?;
        Some(Segment { region: last.region, offset: last.offset + u64::from(last.len - 1), len: 1 })
    }

    /// Has the lines at these addresses fetched, with which chains begin that come next: a table, or a header.
    /// Addresses are not believed: those outside the ranges hit last are passed over.
    #[inline]
    pub(crate) fn warm(&self, memory: &GuestMemory, addrs: impl Iterator<Item = u64>) {
        let [near, other] = [self.hints.last, self.hints.before].map(|hint| memory.bytes_of(hint));
        for addr in addrs {
            let into = addr.wrapping_sub(near.0);
            if into < near.1.len() as u64 {
                near.1.warm(into as usize);
            } else {
                other.1.warm(addr.wrapping_sub(other.0) as usize);
            }
        }
    }

    /// Walks the chain that begins at `head`, which lies in the table of a split ring.
    #[inline(always)]
    pub(crate) fn walk(&mut self, memory: &GuestMemory, table: DescriptorTable<'_>, head: u16) {
        let first = table.read(head);
        let indirect = if !first.is(Desc::INDIRECT) {
            self.begin();
            self.walk_ring(memory, table, first)
        } else if table.indirect
            && !first.is(Desc::NEXT)
            && first.rows().is_some_and(|rows| rows >= REQUEST_ROWS)
            && let Some(three) = self.three(memory, first, Desc::from_words)
            && Desc::are_in_a_row(three)
            && self.take_request(memory, three)
        {
            None
        } else {
            self.begin();
            Some(first)
        };
        if let Some(desc) = indirect {
            self.walk_indirect(memory, desc, table.indirect);
        }
    }

    /// Walks the rest of a split ring's chain, which is in the table that this descriptor points to.
    #[inline(never)]
    fn walk_indirect(&mut self, memory: &GuestMemory, desc: Desc, negotiated: bool) {
        let Some(size) = self.indirect_size(desc, negotiated) else { return };
        // Nearly always the table lies in one range.
        let nested = match self.span(memory, desc.addr, desc.len) {
            Some(span) => self.walk_linked(memory, size, span),
            None => self.walk_torn(memory, size, desc.addr),
        };
        if nested.is_some() {
            self.spoil(ChainFault::IndirectNested);
        }
    }

    /// Resets the chain.
    #[inline]
    fn begin(&mut self) {
        self.fault = None;
        self.tally = WalkTotals::default();
    }

    /// Walks the part of a chain that lies in the table of a split ring.
    #[inline(never)]
    fn walk_ring(&mut self, memory: &GuestMemory, table: DescriptorTable<'_>, first: Desc) -> Option<Desc> {
        let mut steps = Linked::new(u32::from(table.size), first, |index| Some(table.read(index as u16)));
        self.walk_table(memory, memory.range(self.hints.last), &mut steps)
    }

    /// Walks the indirect table of a split ring's chain.
    #[inline(never)]
    fn walk_linked(&mut self, memory: &GuestMemory, size: u32, span: Span<'_>) -> Option<Desc> {
        let read = move |index| Desc::from_words(read_words(&span, index));
        let mut steps = Linked::new(size, read(0), move |index| Some(read(index)));
        self.walk_table(memory, memory.range(self.hints.last), &mut steps)
    }

    /// The bytes of a table, if they lie in one range, which is that of the hint from then on.
    #[inline(always)]
    fn span<'a>(&mut self, memory: &'a GuestMemory, addr: u64, len: u32) -> Option<Span<'a>> {
        let hit = memory.span(self.hints.last, addr, len);
        if hit.is_some() {
            return hit;
        }
        self.hints.elsewhere(memory, addr, len)?;
        memory.span(self.hints.last, addr, len)
    }

    /// The first three rows of a table, if it lies in one range.
    #[inline(always)]
    fn three(&mut self, memory: &GuestMemory, desc: Desc, read: impl Fn([u64; 2]) -> Desc) -> Option<[Desc; 3]> {
        let span = self.span(memory, desc.addr, REQUEST_ROWS * DESC_BYTES as u32)?;
        Some([0, 1, 2].map(|index| read(read_words(&span, index))))
    }

    /// Takes the common case: a header to read, data, a status to write, each in one of the ranges hit last. False
    /// otherwise; then the chain is walked like any other, from new copies.
    #[inline(always)]
    fn take_request(&mut self, memory: &GuestMemory, [header, data, status]: [Desc; 3]) -> bool {
        let (near, far) = (memory.range(self.hints.last), memory.range(self.hints.before));
        let Some(header) = find(near, far, header) else { return false };
        let Some(data_at) = find(near, far, data) else { return false };
        let Some(status) = find(near, far, status) else { return false };
        let ([read, read_too, ..], [write, write_too, ..]) = (&mut self.readable[..], &mut self.writable[..]) else {
            return false;
        };
        let [header_bytes, data_bytes, status_bytes] = [header, data_at, status].map(|segment| u64::from(segment.len));
        if header_bytes + data_bytes + status_bytes > BYTES_MAX {
            return false;
        }
        self.fault = None;
        *read = header;
        self.tally = if data.is(Desc::WRITE) {
            (*write, *write_too) = (data_at, status);
            let writable_bytes = data_bytes + status_bytes;
            WalkTotals { readable: 1, writable: 2, readable_bytes: header_bytes, writable_bytes, ends_writable: true }
        } else {
            (*read_too, *write) = (data_at, status);
            let readable_bytes = header_bytes + data_bytes;
            WalkTotals { readable: 2, writable: 1, readable_bytes, writable_bytes: status_bytes, ends_writable: true }
        };
        true
    }

    /// The table lies across ranges.
    #[cold]
    #[inline(never)]
    fn walk_torn(&mut self, memory: &GuestMemory, size: u32, table: u64) -> Option<Desc> {
        let read = |index| read_torn(memory, table, index).map(Desc::from_words);
        let Some(first) = read(0) else {
            self.spoil(ChainFault::IndirectNotMapped);
            return None;
        };
        self.walk_table(memory, memory.range(self.hints.last), &mut Linked::new(size, first, read))
    }

    /// Walks the chain of a packed ring whose first descriptor has these words, if it is one descriptor that points to
    /// a table, the common case with indirect descriptors. Returns its id; `None` for other chains.
    #[inline(always)]
    pub(crate) fn walk_packed(&mut self, memory: &GuestMemory, first: [u64; 2], negotiated: bool) -> Option<u16> {
        let desc = Desc::from_packed_words(first);
        if !desc.is(Desc::INDIRECT) || desc.is(Desc::NEXT) {
            return None;
        }
        if negotiated
            && desc.rows() == Some(REQUEST_ROWS)
            && let Some(three @ [header, _, status]) = self.three(memory, desc, Desc::from_packed_words)
            && !header.is(Desc::WRITE)
            && status.is(Desc::WRITE)
            && self.take_request(memory, three)
        {
            return Some(desc.next());
        }
        self.walk_packed_table(memory, desc, negotiated);
        Some(desc.next())
    }

    /// Walks the chain at this position of a packed ring, where these words were read. Returns the chain's id and
    /// length in slots; `None` if it does not end within the ring's free part.
    #[inline(never)]
    pub(crate) fn walk_slots(
        &mut self,
        memory: &GuestMemory,
        slots: FilledSlots<'_>,
        first: [u64; 2],
    ) -> Option<(u16, u16)> {
        self.begin();
        let desc = Desc::from_packed_words(first);
        let mut steps =
            DescriptorRun { size: u32::from(slots.free), len: 1, desc, read: |ahead| Some(slots.read(ahead)) };
        if self.walk_table(memory, memory.range(self.hints.last), &mut steps).is_some() {
            // A table in a chain of several. [2.8.19]
            self.spoil(ChainFault::IndirectWithNext);
        }
        // After any fault of this chain, the next one begins behind its end.
        loop {
            match steps.step() {
                Ok(()) => {}
                Err(WalkEnd::End) => return Some((steps.desc.next(), steps.len as u16)),
                Err(_) => return None,
            }
        }
    }

    /// Walks the indirect table of a packed chain: its descriptors follow each other to the table's end. [2.8.7]
    #[inline(never)]
    fn walk_packed_table(&mut self, memory: &GuestMemory, desc: Desc, negotiated: bool) {
        self.begin();
        let Some(size) = self.indirect_size(desc, negotiated) else { return };
        match self.span(memory, desc.addr, desc.len) {
            Some(span) => self.walk_row(memory, size, span),
            None => self.walk_packed_torn(memory, size, desc.addr),
        }
    }

    /// Walks the table of a packed chain.
    #[inline(never)]
    fn walk_row(&mut self, memory: &GuestMemory, size: u32, span: Span<'_>) {
        let read = move |index| Desc::from_packed_table(read_words(&span, index), index + 1 < size);
        let mut steps = DescriptorRun { size, len: 1, desc: read(0), read: move |index| Some(read(index)) };
        self.walk_table(memory, memory.range(self.hints.last), &mut steps);
    }

    /// The table lies across ranges.
    #[cold]
    #[inline(never)]
    fn walk_packed_torn(&mut self, memory: &GuestMemory, size: u32, table: u64) {
        let read = |index| {
            let words = read_torn(memory, table, index)?;
            Some(Desc::from_packed_table(words, index + 1 < size))
        };
        match read(0) {
            Some(first) => {
                let range = memory.range(self.hints.last);
                self.walk_table(memory, range, &mut DescriptorRun { size, len: 1, desc: first, read });
            }
            None => self.spoil(ChainFault::IndirectNotMapped),
        }
    }

    /// Descriptors in the table that an indirect descriptor points to, if it may. The device ignores the descriptor's
    /// write flag. [2.7.5.3.2, 2.8.7]
    #[inline]
    fn indirect_size(&mut self, desc: Desc, negotiated: bool) -> Option<u32> {
        let fault = if !negotiated {
            ChainFault::IndirectNotNegotiated
        } else if desc.is(Desc::NEXT) {
            ChainFault::IndirectWithNext
        } else if let Some(rows) = desc.rows() {
            return Some(rows);
        } else {
            ChainFault::IndirectLength
        };
        self.spoil(fault);
        None
    }

    /// Walks one table to its end, or to an indirect descriptor, which is returned. `range` is that of the hint.
    #[inline]
    fn walk_table<S: DescriptorSource>(
        &mut self,
        memory: &GuestMemory,
        range: &GuestRange,
        steps: &mut S,
    ) -> Option<Desc> {
        let mut stop = self.walk_plain(memory, range, steps);
        if let WalkEnd::Odd = stop {
            (stop, *steps) = self.walk_odd(memory, *steps);
        }
        let fault = match stop {
            WalkEnd::Indirect(desc) => return Some(desc),
            WalkEnd::Fault(fault) => Some(fault),
            WalkEnd::End | WalkEnd::Odd => None,
        };
        if let Some(fault) = fault {
            self.spoil(fault);
        } else if self.tally.readable_bytes + self.tally.writable_bytes > BYTES_MAX {
            self.note(ChainFault::TooLong);
        }
        None
    }

    /// Continues the walk from an odd buffer. The position is passed by value, so none of it need be in memory before.
    #[cold]
    #[inline(never)]
    fn walk_odd<S: DescriptorSource>(&mut self, memory: &GuestMemory, mut steps: S) -> (WalkEnd, S) {
        while self.fault.is_none() {
            self.take(memory, steps.desc());
            let stop = match steps.step() {
                Ok(()) => self.walk_plain(memory, memory.range(self.hints.last), &mut steps),
                Err(stop) => stop,
            };
            if !matches!(stop, WalkEnd::Odd) {
                return (stop, steps);
            }
        }
        (self.walk_faulty(memory, &mut steps), steps)
    }

    /// Continues the walk after a fault. Only the last buffer is translated: the status byte may be in it. A table may
    /// have thousands of others.
    fn walk_faulty(&mut self, memory: &GuestMemory, steps: &mut impl DescriptorSource) -> WalkEnd {
        loop {
            let desc = steps.desc();
            if desc.is(Desc::INDIRECT) {
                return WalkEnd::Indirect(desc);
            }
            if let Err(stop) = steps.step() {
                self.take(memory, desc);
                return stop;
            }
            self.count(desc);
        }
    }

    /// Continues the walk as long as buffers are in one range each, in order, and valid. Counts are local variables,
    /// which stay in registers. `range` is that of the hint. A buffer in the range hit before does not change the
    /// hints: header and status are often in one, and data in the other.
    // Always inlined, into callers that know the source of descriptors.
    #[inline(always)]
    fn walk_plain<'a>(
        &mut self,
        memory: &'a GuestMemory,
        mut range: &'a GuestRange,
        steps: &mut impl DescriptorSource,
    ) -> WalkEnd {
        if self.fault.is_some() {
            let desc = steps.desc();
            return if desc.is(Desc::INDIRECT) { WalkEnd::Indirect(desc) } else { WalkEnd::Odd };
        }
        let (mut readable, mut writable) = (self.tally.readable, self.tally.writable);
        let (mut readable_bytes, mut writable_bytes) = (self.tally.readable_bytes, self.tally.writable_bytes);
        let stop = loop {
            let desc = steps.desc();
            if desc.is(Desc::INDIRECT) {
                break WalkEnd::Indirect(desc);
            }
            if desc.len == 0 {
                break WalkEnd::Odd;
            }
            let segment = if let Some(segment) = range.segment(desc.addr, desc.len) {
                segment
            } else if let Some(segment) = memory.range(self.hints.before).segment(desc.addr, desc.len) {
                segment
            } else if let Some(segment) = self.hints.elsewhere(memory, desc.addr, desc.len) {
                range = memory.range(self.hints.last);
                segment
            } else {
                break WalkEnd::Odd;
            };
            // Two branches rather than a choice of one of two lists: the processor guesses a branch, but waits for
            // the outcome of a choice.
            if desc.is(Desc::WRITE) {
                let Some(place) = self.writable.get_mut(writable) else { break WalkEnd::Odd };
                *place = segment;
                writable += 1;
                writable_bytes += u64::from(desc.len);
            } else {
                let Some(place) = self.readable.get_mut(readable).filter(|_| writable == 0) else { break WalkEnd::Odd };
                *place = segment;
                readable += 1;
                readable_bytes += u64::from(desc.len);
            }
            if let Err(stop) = steps.step() {
                break stop;
            }
        };
        self.tally = WalkTotals { readable, writable, readable_bytes, writable_bytes, ends_writable: writable > 0 };
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
        self.count(desc);
        if desc.len == 0 {
            return self.spoil(ChainFault::ZeroLength);
        }
        let tally = &mut self.tally;
        let (list, len) = if writable {
            (&mut self.writable, &mut tally.writable)
        } else {
            (&mut self.readable, &mut tally.readable)
        };
        if self.fault.is_some() {
            *len = 0;
        }
        let mut translate = |from| memory.translate_into(desc.addr, desc.len, &mut self.hints.last, &mut list[from..]);
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

    /// Counts the bytes of a buffer.
    fn count(&mut self, desc: Desc) {
        let WalkTotals { readable_bytes, writable_bytes, .. } = &mut self.tally;
        *(if desc.is(Desc::WRITE) { writable_bytes } else { readable_bytes }) += u64::from(desc.len);
    }

    /// Records a fault; an earlier one is kept.
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
