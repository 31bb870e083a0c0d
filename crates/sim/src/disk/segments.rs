//! The track cache: the last few runs of sectors that were read, and read ahead.
//!
//! Owned by the disk. It holds no data.

/// A run of sectors that were read.
#[derive(Clone, Copy, Debug)]
struct CacheSegment {
    start: u64,
    end: u64,
    /// When it was last used, in uses.
    used: u64,
}

#[derive(Debug)]
pub(super) struct CacheSegments {
    runs: Vec<CacheSegment>,
    count_max: usize,
    sectors_max: u64,
    uses: u64,
}

impl CacheSegments {
    pub(super) fn new(count_max: usize, sectors_max: u64) -> CacheSegments {
        CacheSegments { runs: Vec::with_capacity(count_max), count_max, sectors_max, uses: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.runs.clear();
    }

    /// The segment that has this sector, or ends where it begins.
    pub(super) fn find(&self, sector: u64) -> Option<usize> {
        // If two meet there, the one that has it.
        let has = |segment: &CacheSegment| segment.start <= sector && sector < segment.end;
        let reaches = |segment: &CacheSegment| segment.end == sector;
        self.runs.iter().position(has).or_else(|| self.runs.iter().position(reaches))
    }

    /// First sector of a range that is not cached: its end if all is.
    pub(super) fn missing_from(&self, start: u64, end: u64) -> u64 {
        let has = |segment: &&CacheSegment| segment.start <= start && start < segment.end;
        self.runs.iter().find(has).map_or(start, |segment| segment.end.min(end))
    }

    /// Where a segment ends.
    pub(super) fn end(&self, index: usize) -> u64 {
        self.runs[index].end
    }

    /// A segment was of use.
    pub(super) fn used(&mut self, index: usize) {
        self.uses += 1;
        self.runs[index].used = self.uses;
    }

    /// A segment was read on, up to here. Its oldest part makes room.
    pub(super) fn extend(&mut self, index: usize, end: u64) {
        let segment = &mut self.runs[index];
        segment.end = segment.end.max(end);
        segment.start = segment.start.max(segment.end.saturating_sub(self.sectors_max));
    }

    /// A range is being read: into the segment that it continues, or into a new one, which replaces the least recently
    /// used. Returns its index.
    pub(super) fn begin(&mut self, start: u64) -> usize {
        let index = self.find(start).unwrap_or_else(|| {
            if self.runs.len() < self.count_max {
                self.runs.push(CacheSegment { start, end: start, used: 0 });
                return self.runs.len() - 1;
            }
            let oldest = (0..self.runs.len()).min_by_key(|index| self.runs[*index].used).unwrap_or(0);
            self.runs[oldest] = CacheSegment { start, end: start, used: 0 };
            oldest
        });
        self.used(index);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_grows_with_its_stream_and_forgets_what_is_long_past() {
        let mut segments = CacheSegments::new(2, 100);
        let first = segments.begin(1000);
        segments.extend(first, 1080);
        assert_eq!(segments.missing_from(1010, 1100), 1080);
        assert_eq!(segments.begin(1080), first, "goes on");
        segments.extend(first, 1150);
        assert_eq!((segments.missing_from(1049, 1100), segments.missing_from(1050, 1100)), (1049, 1100));
    }

    #[test]
    fn the_segment_not_used_for_longest_makes_room() {
        let mut segments = CacheSegments::new(2, 100);
        for start in [0, 1000] {
            let index = segments.begin(start);
            segments.extend(index, start + 10);
        }
        segments.begin(5);
        segments.begin(2000);
        assert_eq!((segments.missing_from(0, 10), segments.missing_from(1000, 1010)), (10, 1000));
    }
}
