//! Possible content of a device's sectors, from the writes to them, their times and results. Requests are unknown here.
//!
//! Concurrent writes to one sector may end in any order. A read may see a write unless another one completed without
//! error before the read began, and had begun after the first completed. Data after a power failure is judged the same
//! way, where only durable writes count as completed.

use std::collections::BTreeSet;

use blkyard_mq::{Bio, BioFlags, Op, Status};

/// Something that a sector may hold.
#[derive(Clone, Copy, Debug)]
struct Version {
    /// Each of its words.
    word: u64,
    /// Its bio.
    bio: u64,
    /// Event numbers of submission and completion.
    begun: u64,
    ended: u64,
    /// It was written, and not only perhaps.
    certain: bool,
    /// It survives a power failure, or a later write to the sector does.
    durable: bool,
}

/// Not over.
const NEVER: u64 = u64::MAX;

/// Possible content, by sector.
#[derive(Debug)]
pub(super) struct Oracle {
    sectors: Vec<Vec<Version>>,
    volatile: bool,
    /// Events so far.
    now: u64,
    /// When each bio was submitted that is under way.
    under_way: BTreeSet<u64>,
}

/// Word that a bio writes into each word of a sector; different for all bios, and never zero.
pub(super) fn word(bio: u64, sector: u64) -> u64 {
    (bio + 1) << 16 | sector
}

/// The one word that a sector is made of.
pub(super) fn word_of(sector: &[u8]) -> u64 {
    let (words, _) = sector.as_chunks::<8>();
    assert!(words.iter().all(|word| *word == words[0]), "a sector holds parts of two");
    u64::from_le_bytes(words[0])
}

impl Oracle {
    pub(super) fn new(sectors: u64, volatile: bool) -> Oracle {
        let blank = Version { word: 0, bio: NEVER, begun: 0, ended: 0, certain: true, durable: true };
        Oracle { sectors: vec![vec![blank]; sectors as usize], volatile, now: 0, under_way: BTreeSet::new() }
    }

    /// A bio is submitted: its data may appear from now on. Returns the current event number.
    pub(super) fn submitted(&mut self, bio: &Bio) -> u64 {
        self.now += 1;
        self.under_way.insert(self.now);
        if bio.op.is_write() {
            for sector in bio.sector..bio.sector + u64::from(bio.sectors) {
                let word = if bio.op == Op::Write { word(bio.cookie, sector) } else { 0 };
                let version =
                    Version { word, bio: bio.cookie, begun: self.now, ended: NEVER, certain: false, durable: false };
                self.sectors[sector as usize].push(version);
            }
        }
        self.now
    }

    /// A bio that was submitted at `begun` has completed; `data` is what it read.
    pub(super) fn ended(&mut self, bio: &Bio, begun: u64, data: &[u8]) {
        self.now += 1;
        let (now, well) = (self.now, bio.status.is_ok());
        let flushes = bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH);
        if well && flushes && self.volatile {
            self.flushed(begun);
        }
        self.under_way.remove(&begun);
        let oldest = self.oldest();
        let durable = !self.volatile || bio.flags.contains(BioFlags::FUA);
        for sector in bio.sector..bio.sector + u64::from(bio.sectors) {
            let versions = &mut self.sectors[sector as usize];
            if bio.op.is_write() && bio.status == Status::Again {
                // It would have had to wait, and was not executed.
                versions.retain(|version| version.bio != bio.cookie);
            } else if bio.op.is_write() {
                let ours = versions.iter_mut().filter(|version| version.bio == bio.cookie && version.ended == NEVER);
                for version in ours {
                    version.ended = now;
                    // A device may keep discarded data.
                    version.certain = well && bio.op != Op::Discard;
                    version.durable = version.certain && durable;
                }
                forget(versions, oldest);
            } else if bio.op == Op::Read && well {
                let at = (sector - bio.sector) as usize * 512;
                let word = word_of(&data[at..at + 512]);
                let past = |other: &Version| other.certain && other.ended < begun;
                assert!(
                    may_be(versions, word, past),
                    "bio {} read {word:#x} at {sector}, since {begun}: {versions:?}",
                    bio.cookie
                );
            }
        }
    }

    /// All writes completed before `begun` are durable.
    fn flushed(&mut self, begun: u64) {
        let oldest = self.oldest();
        for versions in &mut self.sectors {
            for version in versions.iter_mut().filter(|version| version.certain && version.ended < begun) {
                version.durable = true;
            }
            forget(versions, oldest);
        }
    }

    /// Submission of the oldest bio in flight; now, if none is.
    fn oldest(&self) -> u64 {
        self.under_way.first().copied().unwrap_or(self.now)
    }

    /// Checks the data after a power failure, which counts from now on as written at this time.
    pub(super) fn power_failed(&mut self, mut read: impl FnMut(u64) -> u64) {
        self.now += 1;
        let oldest = self.oldest();
        for (sector, versions) in self.sectors.iter_mut().enumerate() {
            let word = read(sector as u64);
            let kept = may_be(versions, word, |other| other.durable);
            assert!(kept, "sector {sector} is {word:#x} after a power failure: {versions:?}");
            // Writes in flight may still appear, and a read in flight may have seen earlier data in part.
            let (begun, ended) = (self.now, self.now);
            versions.push(Version { word, bio: NEVER, begun, ended, certain: true, durable: true });
            forget(versions, oldest);
        }
    }
}

/// Whether a sector may hold a word, where `counts` says which writes are known to have been made by then.
fn may_be(versions: &[Version], word: u64, counts: impl Fn(&Version) -> bool) -> bool {
    let newest = versions.iter().filter(|version| counts(version)).map(|version| version.begun).max().unwrap_or(0);
    versions.iter().any(|version| version.word == word && version.ended >= newest)
}

/// Drops versions that cannot appear any more, not even after a power failure, nor for a read in flight since `oldest`.
fn forget(versions: &mut Vec<Version>, oldest: u64) {
    let past = versions.iter().filter(|version| version.durable && version.ended < oldest);
    let newest = past.map(|version| version.begun).max().unwrap_or(0);
    versions.retain(|version| version.ended >= newest);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(cookie: u64, flags: BioFlags) -> Box<Bio> {
        let mut bio = Bio::with_capacity(0);
        (bio.op, bio.flags, bio.sector, bio.sectors, bio.cookie) = (Op::Write, flags, 3, 1, cookie);
        bio
    }

    /// Reads the sector after `begun`; whether this word may be there.
    fn may_read(oracle: &Oracle, word: u64, begun: u64) -> bool {
        may_be(&oracle.sectors[3], word, |other| other.certain && other.ended < begun)
    }

    #[test]
    fn of_two_writes_at_one_time_either_may_stay_and_of_two_in_turn_the_later() {
        let mut oracle = Oracle::new(8, true);
        let [first, second, third] = [1, 2, 3].map(|cookie| write(cookie, BioFlags::empty()));
        let begun = [&first, &second].map(|bio| oracle.submitted(bio));
        oracle.ended(&first, begun[0], &[]);
        oracle.ended(&second, begun[1], &[]);
        let words = [1, 2, 3].map(|bio| word(bio, 3));
        assert_eq!([0, words[0], words[1]].map(|word| may_read(&oracle, word, 100)), [false, true, true]);
        let third_begun = oracle.submitted(&third);
        assert!(words.iter().all(|word| may_read(&oracle, *word, 100)), "under way");
        oracle.ended(&third, third_begun, &[]);
        assert_eq!(words.map(|word| may_read(&oracle, word, 100)), [false, false, true]);
        // One that began while the third was under way may see any.
        assert_eq!(words.map(|word| may_read(&oracle, word, third_begun)), [true; 3]);
    }

    #[test]
    fn the_power_leaves_what_was_flushed_or_anything_since() {
        let run = |flush: bool, flags, left: u64| {
            let mut oracle = Oracle::new(8, true);
            for cookie in [1, 2] {
                let bio = write(cookie, if cookie == 2 { flags } else { BioFlags::empty() });
                let begun = oracle.submitted(&bio);
                oracle.ended(&bio, begun, &[]);
                if flush && cookie == 1 {
                    let mut bio = Bio::with_capacity(0);
                    bio.op = Op::Flush;
                    let begun = oracle.submitted(&bio);
                    oracle.ended(&bio, begun, &[]);
                }
            }
            let words = [0, word(1, 3), word(2, 3)];
            std::panic::catch_unwind(move || {
                oracle.power_failed(|sector| if sector == 3 { words[left as usize] } else { 0 });
            })
            .is_ok()
        };
        let none = BioFlags::empty();
        assert_eq!([0, 1, 2].map(|left| run(false, none, left)), [true, true, true]);
        assert_eq!([0, 1, 2].map(|left| run(true, none, left)), [false, true, true]);
        assert_eq!([0, 1, 2].map(|left| run(false, BioFlags::FUA, left)), [false, false, true]);
    }
}
