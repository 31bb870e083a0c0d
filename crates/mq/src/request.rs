//! The request: a share of a bio that fits the device, in a table made at start.

use blkyard_mem::Segment;

use crate::limits::Cursor;
use crate::{Bio, BioFlags, Op, SECTOR_SHIFT};

/// One wish to the device, at the place its tag names.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Request {
    pub(crate) op: Op,
    pub(crate) flags: BioFlags,
    pub(crate) sectors: u32,
    pub(crate) sector: u64,
    /// When it was handed to the driver.
    pub(crate) start_ns: u64,
    /// Where in its bio a part begins; of no meaning for a whole.
    pub(crate) from: Cursor,
    pub(crate) in_flight: bool,
    /// Counted as slow already.
    pub(crate) slow: bool,
    /// The bio, if the request is the whole of it.
    pub(crate) whole: Option<Box<Bio>>,
    /// Otherwise the place of the split bio it is a part of.
    pub(crate) part_of: u16,
}

impl Request {
    /// What is wanted.
    #[inline]
    pub fn op(&self) -> Op {
        self.op
    }

    /// How.
    #[inline]
    pub fn flags(&self) -> BioFlags {
        self.flags
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

    /// First byte on the device.
    #[inline]
    pub fn offset_bytes(&self) -> u64 {
        self.sector << SECTOR_SHIFT
    }

    /// Length in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        u64::from(self.sectors) << SECTOR_SHIFT
    }
}

/// The segments of one request, in order, cut to the limits of the device.
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    rest: std::slice::Iter<'a, Segment>,
    /// Bytes of the next segment that belong to an earlier request or piece.
    skip: u32,
    bytes_left: u64,
    segment_bytes_max: u32,
}

/// The pieces of `segments` that a request of `sectors` from `from` covers.
#[inline]
pub(crate) fn pieces(segments: &[Segment], from: Cursor, sectors: u32, segment_bytes_max: u32) -> Segments<'_> {
    let rest = segments.get(usize::from(from.segment)..).unwrap_or_default().iter();
    Segments { rest, skip: from.offset, bytes_left: u64::from(sectors) << SECTOR_SHIFT, segment_bytes_max }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        loop {
            if self.bytes_left == 0 {
                return None;
            }
            let segment = self.rest.as_slice().first()?;
            let left = segment.len - self.skip;
            if left == 0 {
                self.rest.next();
                self.skip = 0;
                continue;
            }
            let len = u64::from(left.min(self.segment_bytes_max)).min(self.bytes_left) as u32;
            let piece = Segment { offset: segment.offset + u64::from(self.skip), len, region: segment.region };
            self.bytes_left -= u64::from(len);
            self.skip += len;
            return Some(piece);
        }
    }
}
