//! The request, as a driver gets it: a part of a bio that fits the device, one whole bio, or several adjacent ones.
//!
//! Requests are in a table made at start, each in the slot that its tag names. The table belongs to its hardware queue;
//! drivers see it through [`Batch`](crate::Batch) and [`Done`](crate::Done).

use blkyard_mem::Segment;

use crate::bio::Wait;
use crate::limits::{Cursor, Pieces, Shape};
use crate::{Bio, BioFlags, ErrorCode, Op, QueueLimits, SECTOR_SHIFT};

/// Where a request is in its life. Everything before the driver is idle, wherever it is listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum RequestState {
    /// Free, or waiting for the driver.
    #[default]
    Idle,
    /// At the driver, or completed by it and not reaped.
    InFlight,
    /// Completed by the driver; its bios are not returned yet. Seen only by scans and snapshots.
    Complete,
}

bitflags::bitflags! {
    /// Marks of requests that need the slow path.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Marks: u16 {
        /// Counted as slow already.
        const SLOW = 1;
        /// The driver was told that it has timed out.
        const LATE = 2;
        /// More bios than the first are in the chain.
        const CHAINED = 4;
        /// A part of a bio in `splits`.
        const PART = 8;
        /// A flush for all bios that wait for one.
        const FLUSH = 16;
        /// Its bio is in the middle of a flush sequence.
        const SEQUENCE = 32;
        /// Not worth another attempt to merge.
        const NO_MERGE = 64;
        /// Its namespace has neighbours, or a scheduler that is told of its end.
        const SHARED = 128;
        /// Its bios have waited, or it waited for the driver: they know since when.
        const HELD = 256;
        /// The driver gave it back without an answer: the device may still execute it.
        const UNANSWERED = 512;
        /// The driver gave it back.
        const REQUEUED = 1024;
    }
}

/// Operation, flags, state and marks of a request, in one word.
///
/// It is read and written whole: a read of a word after separate writes to its parts stalls, and at depth 1 the word is
/// read as soon as it is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Look(u32);

impl Look {
    const STATE_SHIFT: u32 = 8;
    const MARKS_SHIFT: u32 = 16;

    /// A request that is idle.
    #[inline]
    pub(crate) fn idle(op: Op, marks: Marks) -> Look {
        Look(op as u32 | u32::from(marks.bits()) << Look::MARKS_SHIFT)
    }

    #[inline]
    pub(crate) fn op(self) -> Op {
        match self.0 as u8 {
            0 => Op::Read,
            1 => Op::Write,
            2 => Op::Flush,
            3 => Op::Discard,
            _ => Op::WriteZeroes,
        }
    }

    #[inline]
    pub(crate) fn state(self) -> RequestState {
        match (self.0 >> Look::STATE_SHIFT) as u8 {
            0 => RequestState::Idle,
            1 => RequestState::InFlight,
            _ => RequestState::Complete,
        }
    }

    #[inline]
    pub(crate) fn marks(self) -> Marks {
        Marks::from_bits_retain((self.0 >> Look::MARKS_SHIFT) as u16)
    }

    #[inline]
    pub(crate) fn set_state(&mut self, state: RequestState) {
        self.0 = self.0 & !(0xff << Look::STATE_SHIFT) | (state as u32) << Look::STATE_SHIFT;
    }

    #[inline]
    pub(crate) fn set_marks(&mut self, marks: Marks) {
        self.0 = self.0 & !(0xffff << Look::MARKS_SHIFT) | u32::from(marks.bits()) << Look::MARKS_SHIFT;
    }

    /// Whether it is in flight with these marks, for any operation.
    #[inline]
    pub(crate) fn is_in_flight(self, marks: Marks) -> bool {
        let mut look = Look::idle(Op::Read, marks);
        look.set_state(RequestState::InFlight);
        self.0 >> Look::STATE_SHIFT == look.0 >> Look::STATE_SHIFT
    }
}

/// One request to the device, in the slot that its tag names.
// In this order, so that fields used together share a cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Request {
    pub(crate) look: Look,
    pub(crate) sectors: u32,
    pub(crate) sector: u64,
    /// When it was handed to the driver.
    pub(crate) start_ns: u64,
    /// The bio, or the first of several; `None` for a part or a flush.
    pub(crate) bio: Option<Box<Bio>>,
    /// Serial number: a requeued request goes ahead of later ones.
    pub(crate) order: u32,
    /// Segments, as [`QueueLimits`] counts them: at least as many as a walk finds.
    pub(crate) segments: u16,
    pub(crate) namespace: u16,
    /// Milliseconds that the driver has been given beyond the queue's timeout; zero without the mark.
    pub(crate) grace_ms: u32,
    /// The driver has taken it back, or will: it is not asked again.
    pub(crate) taken_back: bool,
    pub(crate) flags: BioFlags,
    /// Slot of the split bio of which it is a part, or the first link of its chain.
    pub(crate) more: u16,
    /// The last link of its chain.
    pub(crate) last: u16,
    /// Where in its bio a part begins; of no meaning for others.
    pub(crate) from: Cursor,
}

const _: () = assert!(size_of::<Request>() == 64, "a request is one line of cache");

impl Request {
    /// Operation.
    #[inline]
    pub fn op(&self) -> Op {
        self.look.op()
    }

    /// When it was handed to the driver, nanoseconds of the caller's clock.
    #[inline]
    pub fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Where it is in its life.
    #[inline]
    pub(crate) fn state(&self) -> RequestState {
        self.look.state()
    }

    #[inline]
    pub(crate) fn has(&self, marks: Marks) -> bool {
        self.look.marks().intersects(marks)
    }

    pub(crate) fn mark(&mut self, marks: Marks) {
        self.look.set_marks(self.look.marks() | marks);
    }

    pub(crate) fn unmark(&mut self, marks: Marks) {
        self.look.set_marks(self.look.marks() - marks);
    }

    /// Whether a driver had it before and gave it back.
    #[inline]
    pub fn was_requeued(&self) -> bool {
        self.has(Marks::REQUEUED)
    }

    /// Whether it was given back [without an answer](crate::Done::requeue): the device may still execute it.
    #[inline]
    pub fn is_unanswered(&self) -> bool {
        self.has(Marks::UNANSWERED)
    }

    /// Its memory, if that is one segment of one bio and fits the device.
    #[inline]
    fn one_piece(&self) -> Option<Segment> {
        let bio = self.bio.as_ref().filter(|_| self.segments == 1 && !self.has(Marks::CHAINED))?;
        if let [segment] = bio.segments[..] { Some(segment) } else { None }
    }

    /// How.
    #[inline]
    pub fn flags(&self) -> BioFlags {
        self.flags
    }

    /// Which namespace of the hardware queue it is for.
    #[inline]
    pub fn namespace(&self) -> u16 {
        self.namespace
    }

    /// First sector.
    #[inline]
    pub fn sector(&self) -> u64 {
        self.sector
    }

    /// Length in sectors of 512 bytes; zero for a flush.
    #[inline]
    pub fn sectors(&self) -> u32 {
        self.sectors
    }

    /// The most segments that a walk of its data finds, counted as it was formed.
    #[inline]
    pub fn segments(&self) -> u16 {
        self.segments
    }

    /// First byte on the device.
    #[inline]
    pub fn offset_bytes(&self) -> u64 {
        self.sector << SECTOR_SHIFT
    }

    /// Back from the driver, to wait again: its timeout marks are cleared.
    pub(crate) fn set_idle(&mut self) {
        self.look.set_state(RequestState::Idle);
        self.unmark(Marks::LATE);
        self.taken_back = false;
        self.grace_ms = 0;
    }

    /// Whether it was made after the one of this order.
    pub(crate) fn is_later_than(&self, order: u32) -> bool {
        // Orders go round; requests that exist at one time are close together.
        (self.order.wrapping_sub(order) as i32) > 0
    }

    /// Length in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        u64::from(self.sectors) << SECTOR_SHIFT
    }
}

/// Bounds of a piece without limits.
const ANY: Pieces = Pieces { bytes_max: u32::MAX, boundary_mask: u32::MAX };

/// No link.
const NONE: u16 = u16::MAX;

/// Bios that were merged into requests, behind the first of each.
#[derive(Debug)]
pub(crate) struct MergedBios {
    links: Box<[BioLink]>,
    free: u16,
}

#[derive(Debug)]
struct BioLink {
    bio: Option<Box<Bio>>,
    next: u16,
}

impl MergedBios {
    fn new(bios: usize) -> MergedBios {
        let count = bios.min(usize::from(NONE)) as u16;
        let links =
            (0..count).map(|at| BioLink { bio: None, next: if at + 1 < count { at + 1 } else { NONE } }).collect();
        MergedBios { links, free: if count == 0 { NONE } else { 0 } }
    }

    fn get(&self, at: u16) -> Option<&BioLink> {
        self.links.get(usize::from(at))
    }
}

/// Bios that were split into several requests, by slot.
#[derive(Debug, Default)]
pub(crate) struct Split {
    pub(crate) bio: Option<Box<Bio>>,
    pub(crate) parts_in_flight: u32,
    /// When the first of its parts that have ended was handed to the driver.
    pub(crate) start_ns: u64,
    pub(crate) unsplit: bool,
    /// Parts that wait for the driver. Counted only while bios are taken out.
    pub(crate) parts_waiting: u32,
    /// Whether one of those is [unanswered](Marks::UNANSWERED).
    pub(crate) unanswered: bool,
}

/// The requests of one hardware queue, and the bios they are made of.
#[derive(Debug)]
pub(crate) struct RequestTable {
    pub(crate) requests: Box<[Request]>,
    pub(crate) bios: OpenBios,
    /// Error numbers by slot of the failed request.
    pub(crate) codes: Vec<(u16, ErrorCode)>,
}

/// Bios that are not simply one request each.
#[derive(Debug)]
pub(crate) struct OpenBios {
    pub(crate) splits: Box<[Split]>,
    chain: MergedBios,
    /// By slot of the request: its shape for merging, with several bios.
    shapes: Box<[Shape]>,
    /// By namespace: how far a piece of memory may reach.
    pieces: Box<[Pieces]>,
}

impl RequestTable {
    pub(crate) fn new(depth: usize, bios_max: usize, namespaces: usize) -> RequestTable {
        let bios = OpenBios {
            // At most one bio of each namespace is split in part; every other split bio has a part in flight.
            splits: (0..depth + namespaces).map(|_| Split::default()).collect(),
            chain: MergedBios::new(bios_max),
            shapes: (0..depth).map(|_| Shape::default()).collect(),
            pieces: (0..namespaces).map(|_| ANY).collect(),
        };
        let requests = (0..depth).map(|_| Request::default()).collect();
        RequestTable { requests, bios, codes: Vec::with_capacity(depth) }
    }

    /// Number of bios in requests for which this is true.
    pub(crate) fn count_bios(&self, mut is: impl FnMut(&Bio) -> bool) -> usize {
        let whole = self.requests.iter().filter_map(|request| request.bio.as_deref());
        let split = self.bios.splits.iter().filter_map(|split| split.bio.as_deref());
        let chained = self.bios.chain.links.iter().filter_map(|link| link.bio.as_deref());
        whole.chain(split).chain(chained).filter(|bio| is(bio)).count()
    }

    /// Error number of a failed request.
    pub(crate) fn take_code(&mut self, number: u16) -> Option<ErrorCode> {
        let noted = self.codes.iter().position(|(of, _)| *of == number)?;
        Some(self.codes.swap_remove(noted).1)
    }

    /// The submitter of a bio that was split.
    pub(crate) fn split_submitter(&self, place: u16) -> u16 {
        self.bios.splits[usize::from(place)].bio.as_ref().map_or(0, |bio| bio.submitter)
    }

    /// The limits of a namespace are these from now on.
    pub(crate) fn set_limits(&mut self, namespace: usize, limits: &QueueLimits) {
        self.bios.pieces[namespace] = limits.pieces();
    }

    /// A free slot for a split bio.
    pub(crate) fn free_split(&self) -> u16 {
        let free = self.bios.splits.iter().position(|split| split.bio.is_none());
        let Some(place) = free else { unreachable!("there are more places than requests") };
        place as u16
    }

    /// Puts a bio behind the others of a request. Gives it back if there is no link.
    pub(crate) fn chain_back(&mut self, number: u16, bio: Box<Bio>) -> Result<(), Box<Bio>> {
        let at = self.link(bio, NONE)?;
        let request = &mut self.requests[usize::from(number)];
        if request.has(Marks::CHAINED) {
            self.bios.chain.links[usize::from(request.last)].next = at;
        } else {
            request.mark(Marks::CHAINED);
            request.more = at;
        }
        request.last = at;
        Ok(())
    }

    /// Puts a bio before the others of a request. Gives it back if there is no link.
    pub(crate) fn chain_front(&mut self, number: u16, bio: Box<Bio>) -> Result<(), Box<Bio>> {
        if self.bios.chain.free == NONE {
            return Err(bio);
        }
        let request = &mut self.requests[usize::from(number)];
        let Some(mut first) = request.bio.replace(bio) else { unreachable!("only requests of whole bios merge") };
        if !request.has(Marks::HELD) {
            // It arrived in this round; the field may be of an earlier use.
            first.wait = Wait::default();
        }
        let chained = request.has(Marks::CHAINED);
        let next = if chained { request.more } else { NONE };
        let Ok(at) = self.link(first, next) else { unreachable!("looked at above") };
        let request = &mut self.requests[usize::from(number)];
        request.more = at;
        if !chained {
            request.mark(Marks::CHAINED);
            request.last = at;
        }
        Ok(())
    }

    fn link(&mut self, bio: Box<Bio>, next: u16) -> Result<u16, Box<Bio>> {
        let chain = &mut self.bios.chain;
        let at = chain.free;
        let Some(link) = chain.links.get_mut(usize::from(at)) else { return Err(bio) };
        chain.free = std::mem::replace(&mut link.next, next);
        link.bio = Some(bio);
        Ok(at)
    }

    /// Takes the bio at a link out of its chain; also returns the next link.
    pub(crate) fn unlink(&mut self, at: u16) -> Option<(Box<Bio>, u16)> {
        let chain = &mut self.bios.chain;
        let link = chain.links.get_mut(usize::from(at))?;
        let next = std::mem::replace(&mut link.next, chain.free);
        chain.free = at;
        link.bio.take().map(|bio| (bio, next))
    }

    /// Each bio of a request but the first: those behind it in its chain, or the one that it is a part of.
    pub(crate) fn each_behind(&mut self, number: u16, mut each: impl FnMut(&mut Bio)) {
        let request = &self.requests[usize::from(number)];
        if request.has(Marks::PART) {
            let split = &mut self.bios.splits[usize::from(request.more)];
            split.bio.iter_mut().for_each(|bio| each(bio));
        }
        let mut at = if request.has(Marks::CHAINED) { request.more } else { NONE };
        while let Some(link) = self.bios.chain.links.get_mut(usize::from(at)) {
            link.bio.iter_mut().for_each(|bio| each(bio));
            at = link.next;
        }
    }

    /// Shape of a request for merging; `None` if its kind does not merge, or if it is a write that the device may still
    /// execute: a bio that the device has never had does not wait for the end of that doubt.
    pub(crate) fn shape(&self, number: u16) -> Option<Shape> {
        let request = &self.requests[usize::from(number)];
        let is_in_doubt = request.is_unanswered() && request.op().is_write();
        if is_in_doubt || request.has(Marks::PART | Marks::FLUSH | Marks::SEQUENCE | Marks::NO_MERGE) {
            None
        } else if request.has(Marks::CHAINED) {
            Some(self.bios.shapes[usize::from(number)])
        } else {
            request.bio.as_ref().map(|bio| Shape::of(bio, request.segments))
        }
    }

    /// A bio was chained to a request, which has this shape now.
    pub(crate) fn set_shape(&mut self, number: u16, shape: Shape) {
        let request = &mut self.requests[usize::from(number)];
        request.sector = shape.sector;
        request.sectors = shape.sectors;
        request.segments = shape.segments;
        self.bios.shapes[usize::from(number)] = shape;
    }
}

impl OpenBios {
    /// The segments of a request, split to the limits of its namespace.
    #[inline(always)]
    pub(crate) fn segments<'a>(&'a self, request: &'a Request) -> Segments<'a> {
        Segments(request.one_piece().map_or(RequestForm::Whole(self, request), RequestForm::One))
    }

    /// The first piece of a request that may have many.
    #[cold]
    #[inline(never)]
    fn first(&self, request: &Request) -> Option<Segment> {
        self.walk(request).next()
    }

    #[inline]
    fn walk<'a>(&'a self, request: &'a Request) -> SegmentWalk<'a> {
        let (bio, from) = match &request.bio {
            Some(bio) => (Some(bio), Cursor::default()),
            None => (self.splits.get(usize::from(request.more)).and_then(|split| split.bio.as_ref()), request.from),
        };
        let all = bio.map_or(&[][..], |bio| &bio.segments);
        let sectors = if request.op().has_data() { request.sectors } else { 0 };
        SegmentWalk {
            rest: all.get(usize::from(from.segment)..).unwrap_or_default().iter(),
            skip: from.offset,
            run: Segment::default(),
            bytes_left: u64::from(sectors) << SECTOR_SHIFT,
            pieces: self.pieces.get(usize::from(request.namespace)).copied().unwrap_or(ANY),
            chain: &self.chain,
            next: if request.has(Marks::CHAINED) { request.more } else { NONE },
        }
    }

    /// The ranges of a discard: first sector and length of each bio in it.
    pub(crate) fn ranges(&self, request: &Request) -> Ranges<'_> {
        let first = (request.sector, request.sectors);
        match &request.bio {
            Some(bio) if request.has(Marks::CHAINED) => {
                // The request counts the sectors of all.
                Ranges { first: Some((bio.sector, bio.sectors)), chain: &self.chain, next: request.more }
            }
            _ => Ranges { first: Some(first), chain: &self.chain, next: NONE },
        }
    }
}

/// The ranges of one discard, each a first sector and a length in sectors. They need not touch; bios that do, one after
/// the other, are one range, so that a device that takes one is never given two.
#[derive(Clone, Debug)]
pub struct Ranges<'a> {
    /// Where the next range begins.
    first: Option<(u64, u32)>,
    chain: &'a MergedBios,
    next: u16,
}

impl Ranges<'_> {
    fn next_link(&mut self) -> Option<(u64, u32)> {
        let link = self.chain.get(self.next)?;
        self.next = link.next;
        link.bio.as_ref().map(|bio| (bio.sector, bio.sectors))
    }
}

impl Iterator for Ranges<'_> {
    type Item = (u64, u32);

    fn next(&mut self) -> Option<(u64, u32)> {
        let (sector, mut sectors) = self.first.take()?;
        while let Some(next) = self.next_link() {
            if sector + u64::from(sectors) != next.0 {
                self.first = Some(next);
                break;
            }
            sectors += next.1;
        }
        Some((sector, sectors))
    }
}

/// The pieces of memory of one request, in order, split to the limits of the device. Contiguous memory across two bios
/// is one piece; `limits/merge.rs` counts the same way.
#[derive(Clone, Debug)]
pub struct Segments<'a>(RequestForm<'a>);

#[derive(Clone, Debug)]
enum RequestForm<'a> {
    /// One piece, as nearly always.
    One(Segment),
    /// Any number, before the first step: an unused walk needs no stack slot.
    Whole(&'a OpenBios, &'a Request),
    Many(SegmentWalk<'a>),
    Over,
}

impl Segments<'_> {
    /// The first piece of the rest, for a caller that needs no other.
    #[inline(always)]
    pub fn first(self) -> Option<Segment> {
        match self.0 {
            RequestForm::One(piece) => Some(piece),
            RequestForm::Whole(bios, request) => bios.first(request),
            RequestForm::Many(mut walk) => walk.next(),
            RequestForm::Over => None,
        }
    }

    /// The segment of a request that has exactly one; `None` if it may have more. Undefined once the walk has begun.
    #[inline(always)]
    pub fn only(&self) -> Option<Segment> {
        if let RequestForm::One(piece) = self.0 { Some(piece) } else { None }
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        match &mut self.0 {
            RequestForm::One(piece) => {
                let piece = *piece;
                self.0 = RequestForm::Over;
                Some(piece)
            }
            RequestForm::Many(walk) => walk.next(),
            RequestForm::Whole(bios, request) => {
                let mut walk = bios.walk(request);
                let first = walk.next();
                self.0 = RequestForm::Many(walk);
                first
            }
            RequestForm::Over => None,
        }
    }
}

/// From piece to piece.
#[derive(Clone, Debug)]
struct SegmentWalk<'a> {
    /// Segments after `run`, of the same bio.
    rest: std::slice::Iter<'a, Segment>,
    /// Bytes of the first segment that belong to an earlier request.
    skip: u32,
    /// Rest of the current segment, with those of later bios that continue it.
    run: Segment,
    bytes_left: u64,
    pieces: Pieces,
    chain: &'a MergedBios,
    next: u16,
}

// Always inlined: a walk passed to a function lives in memory, and so does the single piece in it. That would be
// written in words and read at once in something wider, which stalls: a tenth of the cost of an I/O.
impl<'a> SegmentWalk<'a> {
    /// The segments of the next bio.
    #[inline(always)]
    fn next_bio(&mut self) -> Option<std::slice::Iter<'a, Segment>> {
        let link = self.chain.get(self.next)?;
        self.next = link.next;
        link.bio.as_ref().map(|bio| bio.segments.iter())
    }

    /// Begins the next run.
    #[inline(always)]
    fn load(&mut self) -> Option<()> {
        while self.run.len == 0 {
            let Some(segment) = self.rest.next() else {
                self.rest = self.next_bio()?;
                continue;
            };
            let skip = std::mem::take(&mut self.skip);
            // A segment is not trusted: the driver refuses one beyond its region.
            let offset = segment.offset.wrapping_add(u64::from(skip));
            self.run = Segment { offset, len: segment.len - skip, ..*segment };
        }
        while self.rest.len() == 0 {
            let Some(rest) = self.next_bio() else { break };
            self.rest = rest;
            match self.rest.as_slice().first() {
                Some(first) if self.pieces.joins(self.run, *first) => {
                    self.run.len += first.len;
                    self.rest.next();
                }
                Some(_) => break,
                None => {}
            }
        }
        Some(())
    }
}

impl SegmentWalk<'_> {
    #[inline(always)]
    fn next(&mut self) -> Option<Segment> {
        if self.bytes_left == 0 {
            return None;
        }
        if self.run.len == 0 {
            self.load()?;
        }
        let most = self.pieces.first_len(self.run.offset, u64::from(self.run.len));
        let len = u64::from(most).min(self.bytes_left) as u32;
        let piece = Segment { len, ..self.run };
        self.run.offset = self.run.offset.wrapping_add(u64::from(len));
        self.run.len -= len;
        self.bytes_left -= u64::from(len);
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_says_what_was_put_into_it() {
        use RequestState::{Complete, Idle, InFlight};
        for op in [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes] {
            assert_eq!((Look::idle(op, Marks::PART).op(), Look::idle(op, Marks::PART).state()), (op, Idle));
            for marks in [Marks::empty(), Marks::SHARED, Marks::SLOW | Marks::LATE, Marks::all()] {
                let mut look = Look::idle(op, Marks::FLUSH);
                for state in [InFlight, Complete, Idle] {
                    look.set_marks(marks);
                    look.set_state(state);
                    assert_eq!((look.op(), look.state(), look.marks()), (op, state, marks));
                    assert_eq!(look.is_in_flight(marks), state == InFlight);
                    assert!(!look.is_in_flight(Marks::CHAINED));
                }
            }
        }
    }

    #[test]
    fn the_first_piece_is_that_of_the_walk() {
        let segment = |offset| Segment { region: 0, offset, len: 4096 };
        let mut table = RequestTable::new(1, 2, 1);
        for segments in [vec![], vec![segment(0)], vec![segment(0), segment(8192)]] {
            let sectors = 8 * segments.len() as u32;
            let pieces = segments.clone();
            table.requests[0].sectors = sectors;
            table.requests[0].segments = segments.len() as u16;
            table.requests[0].bio = Some(Box::new(Bio { sectors, segments, ..Bio::default() }));
            let mut walk = table.bios.segments(&table.requests[0]);
            assert_eq!(walk.clone().first(), pieces.first().copied());
            assert_eq!(walk.only(), pieces.first().copied().filter(|_| pieces.len() == 1));
            assert_eq!(walk.by_ref().collect::<Vec<_>>(), pieces);
            assert_eq!((walk.next(), walk.only(), walk.first()), (None, None, None));
        }
    }
}
