//! Possible content of a device's sectors, from the writes to them and their results. Requests are unknown here.

use blkyard_mq::{Bio, BioFlags, DeviceInfo, Op};
use blkyard_sim::ChaosDevice;

/// Something that a sector may hold.
#[derive(Clone, Copy, Debug)]
struct Version {
    /// Each of its words.
    word: u64,
    /// When it was known to be written, in entries of the log.
    since: usize,
    /// Whether it was, or only may have been.
    certain: bool,
}

/// The versions of one sector that may still turn up, the oldest first.
#[derive(Clone, Debug)]
struct Sector {
    versions: Vec<Version>,
    /// Those from here on may turn up after a power failure.
    stable: usize,
}

impl Sector {
    fn wrote(&mut self, word: u64, now: usize, stable: bool) {
        self.versions.push(Version { word, since: now, certain: true });
        if stable {
            self.stable = self.versions.len() - 1;
        }
    }

    /// Writes certain at `then` have been flushed since.
    fn flushed(&mut self, then: usize) {
        let covered = self.versions.iter().rposition(|version| version.certain && version.since <= then);
        self.stable = self.stable.max(covered.unwrap_or(0));
        self.versions.drain(..std::mem::take(&mut self.stable));
    }

    fn may_read(&self, word: u64) -> bool {
        let newest = self.versions.iter().rposition(|version| version.certain).unwrap_or(0);
        self.versions[newest..].iter().any(|version| version.word == word)
    }

    fn may_survive(&self, word: u64) -> bool {
        self.versions[self.stable..].iter().any(|version| version.word == word)
    }
}

/// All sectors of all namespaces.
pub struct Content {
    namespaces: Vec<Vec<Sector>>,
    volatile: bool,
}

/// Word that a bio writes into each word of a sector; different for all bios, and never zero.
pub fn word(id: u64, sector: u64) -> u64 {
    (id + 1) << 16 | sector
}

/// The one word that a sector is made of.
fn word_of(sector: &[u8]) -> u64 {
    let words = sector.as_chunks::<8>().0;
    assert!(words.iter().all(|word| *word == words[0]), "a sector holds parts of two");
    u64::from_le_bytes(words[0])
}

impl Content {
    pub fn new(namespaces: usize, info: &DeviceInfo) -> Content {
        let blank = Sector { versions: vec![Version { word: 0, since: 0, certain: true }], stable: 0 };
        let sectors = vec![blank; info.capacity_sectors as usize];
        Content { namespaces: vec![sectors; namespaces], volatile: info.volatile_cache }
    }

    /// A bio is submitted: its data may appear from now on.
    pub fn submitted(&mut self, bio: &Bio) {
        let Some(sectors) = self.namespaces.get_mut(usize::from(bio.namespace)) else { return };
        if bio.op.is_write() {
            for sector in bio.sector..bio.sector + u64::from(bio.sectors) {
                let word = if bio.op == Op::Write { word(bio.cookie, sector) } else { 0 };
                let version = Version { word, since: 0, certain: false };
                sectors[sector as usize].versions.push(version);
            }
        }
    }

    /// A bio has ended. `data` is what it read, `submitted` and `now` are entries of the log.
    pub fn ended(&mut self, bio: &Bio, data: &[u8], submitted: usize, now: usize) {
        if !bio.status.is_ok() {
            return;
        }
        let sectors = &mut self.namespaces[usize::from(bio.namespace)];
        if self.volatile && (bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH)) {
            sectors.iter_mut().for_each(|sector| sector.flushed(submitted));
        }
        let stable = !self.volatile || bio.flags.contains(BioFlags::FUA);
        for (at, sector) in (bio.sector..bio.sector + u64::from(bio.sectors)).enumerate() {
            let known = &mut sectors[sector as usize];
            match bio.op {
                Op::Write => known.wrote(word(bio.cookie, sector), now, stable),
                Op::WriteZeroes => known.wrote(0, now, stable),
                Op::Read => {
                    let word = word_of(&data[at * 512..(at + 1) * 512]);
                    assert!(known.may_read(word), "bio {} read {word:#x} at {sector}: {known:?}", bio.cookie);
                }
                // A device may keep discarded data.
                Op::Discard | Op::Flush => {}
            }
        }
    }

    /// Whether the device would keep all durable data if the power failed now.
    pub fn check_stable(&self, device: &ChaosDevice) {
        let mut bytes = [0; 512];
        for (namespace, sectors) in self.namespaces.iter().enumerate() {
            for (at, sector) in sectors.iter().enumerate() {
                device.read_stable(namespace as u16, at as u64, &mut bytes);
                let word = word_of(&bytes);
                assert!(sector.may_survive(word), "sector {at} of {namespace} would be {word:#x}: {sector:?}");
            }
        }
    }
}
