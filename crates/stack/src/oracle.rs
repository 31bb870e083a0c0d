//! What a sector may read as, and when an I/O must have ended.
//!
//! Every write has a version, higher than that of all before it, and at most one write of a sector is in flight. So a
//! sector reads as no version older than the last acknowledged one, and none that was not written. After a power
//! failure the versions from the last durable one on are allowed: those that a flush, or a write that goes through the
//! cache, was acknowledged for.
//!
//! A failed write may be executed at any time: its sectors are not judged any more.

use std::collections::BTreeMap;

use crate::medium::SECTOR;

/// Marks a sector that was written.
const MAGIC: u64 = 0x626c_6b79_6172_6421;

/// Fills a sector for a version of it.
pub(crate) fn fill(bytes: &mut [u8], sector: u64, version: u64) {
    let mut word = MAGIC ^ sector.rotate_left(32) ^ version;
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..16].copy_from_slice(&version.to_le_bytes());
    for chunk in bytes[16..].chunks_exact_mut(8) {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

/// Sector and version in the bytes of a sector.
///
/// # Panics
/// If no single write has left them.
pub(crate) fn version_of(bytes: &[u8]) -> (u64, u64) {
    if bytes.iter().all(|byte| *byte == 0) {
        return (u64::MAX, 0);
    }
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
    let (sector, version) = (word(0), word(8));
    let mut whole = [0; SECTOR];
    fill(&mut whole, sector, version);
    assert!(bytes == whole, "a sector holds parts of several writes: sector {sector}, version {version}");
    (sector, version)
}

#[derive(Clone, Debug, Default)]
struct Sector {
    /// No older version is read.
    floor: u64,
    /// Last version acknowledged, unless the power has failed since it was submitted.
    acknowledged: u64,
    /// No power failure leaves an older version.
    durable: u64,
    /// Versions that were submitted: the last one, if it is not acknowledged.
    pending: Option<u64>,
    is_unknown: bool,
}

/// What a read must not be older than, by sector.
#[derive(Clone, Debug)]
pub(crate) struct ReadBounds {
    floors: Vec<u64>,
    epoch: u64,
}

/// What a flush makes durable.
#[derive(Clone, Debug)]
pub(crate) struct FlushCover {
    acknowledged: Vec<u64>,
    epoch: u64,
}

/// The oracle of a world.
#[derive(Debug)]
pub(crate) struct DataOracle {
    sectors: Vec<Sector>,
    /// Power failures so far.
    epoch: u64,
    /// By power failure: the version of each sector that it left at least.
    left: Vec<Vec<u64>>,
    version: u64,
    /// Epoch in which each pending write was submitted, by version.
    submitted: BTreeMap<u64, u64>,
    /// Whether completed writes are durable at once.
    is_write_through: bool,
}

impl DataOracle {
    pub(crate) fn new(sectors: usize, is_write_through: bool) -> DataOracle {
        let sectors = vec![Sector::default(); sectors];
        DataOracle { sectors, epoch: 0, left: Vec::new(), version: 0, submitted: BTreeMap::new(), is_write_through }
    }

    /// Whether a write may be submitted: no other one of these sectors is in flight, and all are judged.
    pub(crate) fn may_write(&self, first: usize, sectors: usize) -> bool {
        self.sectors[first..first + sectors].iter().all(|sector| sector.pending.is_none() && !sector.is_unknown)
    }

    /// A write is submitted. Returns its version.
    pub(crate) fn write(&mut self, first: usize, sectors: usize) -> u64 {
        self.version += 1;
        self.submitted.insert(self.version, self.epoch);
        for sector in &mut self.sectors[first..first + sectors] {
            sector.pending = Some(self.version);
        }
        self.version
    }

    /// A write has ended.
    pub(crate) fn written(&mut self, first: usize, sectors: usize, version: u64, is_ok: bool) {
        let is_current = self.submitted.remove(&version) == Some(self.epoch);
        for sector in &mut self.sectors[first..first + sectors] {
            sector.pending = None;
            sector.is_unknown |= !is_ok;
            if is_ok && is_current {
                (sector.floor, sector.acknowledged) = (version, version);
            }
            if is_ok && self.is_write_through {
                (sector.floor, sector.durable, sector.acknowledged) = (version, version, version);
            }
        }
    }

    /// A read is submitted.
    pub(crate) fn read(&self, first: usize, sectors: usize) -> ReadBounds {
        let floors = self.sectors[first..first + sectors].iter().map(|sector| sector.floor).collect();
        ReadBounds { floors, epoch: self.epoch }
    }

    /// A read has ended with these bytes.
    ///
    /// # Panics
    /// If they cannot be.
    pub(crate) fn check(&mut self, first: usize, bytes: &[u8], bounds: &ReadBounds) {
        for (at, bytes) in bytes.chunks_exact(SECTOR).enumerate() {
            let (number, version) = version_of(bytes);
            let (place, last) = (first + at, self.version);
            let sector = &mut self.sectors[place];
            assert!(version == 0 || number == place as u64, "sector {place} holds data of sector {number}");
            if sector.is_unknown {
                continue;
            }
            assert!(version <= last, "sector {place} holds version {version}, which was never written");
            let is_current = bounds.epoch == self.epoch;
            // It may have been executed right after the first power failure since it was submitted.
            let left = self.left.get(bounds.epoch as usize).map_or(u64::MAX, |left| left[place]);
            let floor = bounds.floors[at].min(left);
            assert!(
                version >= floor,
                "sector {place} reads as version {version} after version {floor} was acknowledged or read: \
                 a write is lost, or an older one was executed again"
            );
            if is_current {
                sector.floor = sector.floor.max(version);
            }
        }
    }

    /// A flush is submitted.
    pub(crate) fn flush(&self) -> FlushCover {
        FlushCover { acknowledged: self.sectors.iter().map(|sector| sector.acknowledged).collect(), epoch: self.epoch }
    }

    /// A flush has succeeded. One over a power failure makes nothing durable: the cache was lost before.
    pub(crate) fn flushed(&mut self, cover: &FlushCover) {
        for (sector, acknowledged) in self.sectors.iter_mut().zip(&cover.acknowledged) {
            if cover.epoch == self.epoch {
                sector.durable = sector.durable.max(*acknowledged);
            }
        }
    }

    /// The power of the target fails.
    pub(crate) fn power_fails(&mut self) {
        self.epoch += 1;
        self.left.push(self.sectors.iter().map(|sector| sector.durable).collect());
        for sector in &mut self.sectors {
            (sector.floor, sector.acknowledged) = (sector.durable, sector.durable);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(version: u64) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR];
        fill(&mut bytes, 0, version);
        bytes
    }

    fn is_refused(oracle: &mut DataOracle, bytes: &[u8]) -> bool {
        let bounds = oracle.read(0, 1);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| oracle.check(0, bytes, &bounds))).is_err()
    }

    #[test]
    fn a_read_whose_answer_was_held_up_may_be_as_old_as_what_a_power_failure_left() {
        let mut oracle = DataOracle::new(1, false);
        for version in 1..=3 {
            assert_eq!(oracle.write(0, 1), version);
            oracle.written(0, 1, version, true);
            if version == 1 {
                let cover = oracle.flush();
                oracle.flushed(&cover);
            }
        }
        let bounds = oracle.read(0, 1);
        // The cache is lost; the read is executed after that, and before the next write is durable.
        oracle.power_fails();
        let version = oracle.write(0, 1);
        oracle.written(0, 1, version, true);
        let cover = oracle.flush();
        oracle.flushed(&cover);
        oracle.check(0, &sector(1), &bounds);
        let is_ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| oracle.check(0, &sector(0), &bounds)));
        assert!(is_ok.is_err(), "older than what was durable");
        assert!(is_refused(&mut oracle, &sector(1)), "a read since then is not as old");
    }

    #[test]
    fn an_acknowledged_version_is_the_oldest_that_is_read() {
        let mut oracle = DataOracle::new(1, false);
        for _ in 0..2 {
            let version = oracle.write(0, 1);
            assert!(!oracle.may_write(0, 1));
            oracle.written(0, 1, version, true);
        }
        assert!(is_refused(&mut oracle, &sector(1)) && is_refused(&mut oracle, &sector(3)));
        assert!(!is_refused(&mut oracle, &sector(2)));
        let mut torn = sector(2);
        torn[300] ^= 1;
        assert!(is_refused(&mut oracle, &torn));
    }

    #[test]
    fn a_power_failure_leaves_what_was_flushed_or_newer() {
        let mut oracle = DataOracle::new(1, false);
        for flushes in [false, true, false] {
            let version = oracle.write(0, 1);
            oracle.written(0, 1, version, true);
            if flushes {
                let cover = oracle.flush();
                oracle.flushed(&cover);
            }
        }
        oracle.power_fails();
        assert!(is_refused(&mut oracle, &sector(1)));
        assert!(!is_refused(&mut oracle, &sector(2)) && !is_refused(&mut oracle, &sector(3)));
        // What was read once stays.
        assert!(is_refused(&mut oracle, &sector(2)));
    }
}
