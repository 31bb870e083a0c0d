//! The data of one command: its segments, and how far it was transferred.

use blkyard_mem::{RegionTable, Segment};

/// Segments of a command with a cursor. The list is allocated once.
#[derive(Debug)]
pub(super) struct CommandData {
    segments: Vec<Segment>,
    bytes: u32,
    done: u32,
    /// The cursor: a segment, and the bytes of it that are done.
    index: usize,
    within: u32,
}

impl CommandData {
    /// No data; at most so many segments later.
    pub(super) fn with_capacity(segments_max: usize) -> CommandData {
        CommandData { segments: Vec::with_capacity(segments_max), bytes: 0, done: 0, index: 0, within: 0 }
    }

    /// At most so many segments from now on.
    pub(super) fn reserve(&mut self, segments_max: usize) {
        self.segments.reserve(segments_max.saturating_sub(self.segments.len()));
    }

    /// Takes the segments of a new command. False if they are too many, too long, or outside the memory.
    pub(super) fn set(&mut self, memory: &RegionTable, segments: impl Iterator<Item = Segment>) -> bool {
        self.clear();
        for segment in segments.filter(|segment| segment.len > 0) {
            let bytes = self.bytes.checked_add(segment.len);
            let is_known = memory.resolve(segment).is_some();
            let Some(bytes) = bytes.filter(|_| is_known && self.segments.len() < self.segments.capacity()) else {
                self.clear();
                return false;
            };
            self.segments.push(segment);
            self.bytes = bytes;
        }
        true
    }

    /// The bytes after the cursor go to `waste` instead, which is at least as long as all.
    pub(super) fn divert(&mut self, waste: Segment) {
        (self.index, self.within) = (0, self.done);
        self.segments.clear();
        self.segments.push(Segment { len: self.bytes, ..waste });
    }

    pub(super) fn clear(&mut self) {
        self.segments.clear();
        (self.bytes, self.done, self.index, self.within) = (0, 0, 0, 0);
    }

    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Bytes before the cursor.
    pub(super) fn done(&self) -> u32 {
        self.done
    }

    /// Bytes after the cursor.
    pub(super) fn left(&self) -> u32 {
        self.bytes - self.done
    }

    /// The contiguous bytes at the cursor, at most `max`; empty at the end.
    pub(super) fn next(&self, max: u32) -> Segment {
        let Some(segment) = self.segments.get(self.index) else { return Segment::default() };
        let len = (segment.len - self.within).min(max);
        Segment { offset: segment.offset + u64::from(self.within), len, ..*segment }
    }

    /// Moves the cursor within the bytes of [`CommandData::next`].
    pub(super) fn advance(&mut self, bytes: u32) {
        let Some(segment) = self.segments.get(self.index) else { return };
        self.within += bytes;
        self.done += bytes;
        if self.within == segment.len {
            (self.index, self.within) = (self.index + 1, 0);
        }
    }

    /// Contiguous pieces from the cursor on, `bytes` in all.
    pub(super) fn pieces(&self, bytes: u32) -> impl Iterator<Item = Segment> {
        let mut left = bytes.min(self.left());
        let mut within = self.within;
        self.segments[self.index..].iter().map_while(move |segment| {
            let start = std::mem::take(&mut within);
            let len = (segment.len - start).min(left);
            left -= len;
            (len > 0).then_some(Segment { offset: segment.offset + u64::from(start), len, ..*segment })
        })
    }

    /// Bytes from the cursor on, at most `max`, that have at most `pieces` contiguous pieces. If that is less than
    /// `max`, a multiple of four from the start of the data.
    pub(super) fn bytes_in(&self, max: u32, pieces: usize) -> u32 {
        let bytes: u32 = self.pieces(max).take(pieces).map(|piece| piece.len).sum();
        if bytes == max.min(self.left()) { bytes } else { bytes - (self.done + bytes) % 4 }
    }

    /// The segments before the cursor.
    pub(super) fn received(&self) -> impl Iterator<Item = Segment> {
        let whole = self.segments[..self.index].iter().copied();
        let part = self.segments.get(self.index).filter(|_| self.within > 0);
        whole.chain(part.map(|segment| Segment { len: self.within, ..*segment }))
    }

    /// Moves the cursor by `bytes`.
    pub(super) fn skip(&mut self, mut bytes: u32) {
        while bytes > 0 {
            let len = self.next(bytes).len;
            self.advance(len);
            bytes -= len;
        }
    }
}
