//! Detection of a device with seeks: whether it costs time to go from one position to another.
//!
//! Measured while the queue runs: the time from one completion to the next while the device was busy, separately for
//! reads near the previous one and far from it, and by size, since a large one takes longer at any position. A far read
//! that takes clearly longer than a near one of the same size or more shows seeks; one that takes as long as a near one
//! of the same size or less shows none. Writes are ignored, since a cache accepts them at any position. So is a read
//! that ends after one, or beside other queues: it may have waited for those.
//!
//! A disk with a deep queue sorts far reads and takes 2 ms for one. So on a disk only what goes on where a read ended
//! is near, bios that ended together were one request, and a far read shows no seeks only if it is small.
//!
//! A disk reads ahead: a stream in a row that comes back finds its next reads in the disk's cache, and only then does
//! the arm move. So a quick far read of such a stream shows no seeks only once the stream has gone on as quickly for
//! more than a disk reads ahead.
//!
//! A single read may have waited for another cause: garbage collection of flash, or a disk's destaging. So near reads
//! count with about the time of the quicker ones, and of the far ones six of eight must agree.

/// A read this far from the end of the one before is near, sectors: 1 MiB, which a disk's arm need not move for. All
/// others are far.
const NEAR_SECTORS: u64 = 2048;
/// Size classes, each twice as large as the one before: up to 4 KiB, and so on; the last one has all above 1 MiB.
const SIZES: usize = 10;
/// Upper bound of the first one, sectors.
const SIZE_SECTORS: u32 = 8;
/// Near reads of a size before anything is compared with them.
const SAMPLES_MIN: u32 = 8;
/// Of the last 8 far reads this many must have taken longer, or no longer.
const AGREE_MIN: u32 = 6;
/// Difference of a far read on a device with seeks: half a revolution takes 4 ms, and the arm takes 1 ms at least.
const SEEK_NS: u64 = 2_000_000;
/// Upper bound for a device without seeks.
const NO_SEEK_NS: u64 = 500_000;
/// Largest read that shows no seeks, sectors: 128 KiB. A larger one takes as long as a seek of a sorted queue, and what
/// a disk has read ahead of large ones is transferred for as long as the arm moves.
const SMALL_SECTORS: u32 = 256;
/// More than a disk reads ahead for a stream, sectors: 4 MiB.
const READ_AHEAD_SECTORS: u32 = 8192;

/// Time of the quicker reads of a class.
#[derive(Clone, Copy, Debug, Default)]
struct Quick {
    ns: u64,
    samples: u32,
}

impl Quick {
    /// Follows downwards at once, and upwards slowly.
    fn add(&mut self, ns: u64) {
        if self.samples == 0 {
            self.ns = ns;
        } else if ns < self.ns {
            self.ns -= (self.ns - ns) / 2;
        } else {
            self.ns += (ns - self.ns).min(self.ns) / 16;
        }
        self.samples = (self.samples + 1).min(SAMPLES_MIN);
    }

    fn get(self) -> Option<u64> {
        (self.samples >= SAMPLES_MIN).then_some(self.ns)
    }
}

/// Class of a read of this size.
fn size_class(sectors: u32) -> usize {
    let times = (sectors.max(1) - 1) / SIZE_SECTORS;
    ((u32::BITS - times.leading_zeros()) as usize).min(SIZES - 1)
}

/// A read that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceRead {
    pub(super) sector: u64,
    pub(super) sectors: u32,
    /// When the device got it, and when it ended.
    pub(super) start_ns: u64,
    pub(super) now_ns: u64,
    /// Whether other queues used the device at the time.
    pub(super) company: bool,
    /// Whether its stream reads in a row.
    pub(super) in_a_row: bool,
}

/// See the head of the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceEstimate {
    seeks: bool,
    near: [Quick; SIZES],
    /// A bit for each of the last comparable far reads: whether it contradicts the estimate.
    wrong: [u8; SIZES],
    /// Sectors that a stream in a row has read quickly since a far read; zero if there is none to judge.
    row_sectors: u32,
    /// Size and time of the near request that ended last; zero sectors if there is none.
    request_sectors: u32,
    request_ns: u64,
    /// When and behind which sector the last one ended; the end of time if it says nothing about the next one.
    last_ns: u64,
    last_end: u64,
}

impl DeviceEstimate {
    /// For a device reported with or without seeks.
    pub(super) fn new(seeks: bool) -> DeviceEstimate {
        DeviceEstimate {
            seeks,
            near: [Quick::default(); SIZES],
            wrong: [0; SIZES],
            row_sectors: 0,
            request_sectors: 0,
            request_ns: 0,
            last_ns: u64::MAX,
            last_end: 0,
        }
    }

    /// Whether there are seeks, as far as is known.
    #[inline]
    pub(super) fn seeks(&self) -> bool {
        self.seeks
    }

    /// Something else may have had the device since the last read.
    #[inline]
    pub(super) fn disturb(&mut self) {
        self.last_ns = u64::MAX;
    }

    /// A read that the device had since `start_ns` has ended. True if it shows that we were wrong.
    #[inline]
    pub(super) fn read(&mut self, read: DeviceRead) -> bool {
        let DeviceRead { sector, sectors, start_ns, now_ns, company, in_a_row } = read;
        let took_ns = now_ns.saturating_sub(start_ns.max(self.last_ns));
        let last_end = std::mem::replace(&mut self.last_end, sector.saturating_add(u64::from(sectors)));
        let last_ns = std::mem::replace(&mut self.last_ns, now_ns);
        if took_ns == 0 {
            if self.request_sectors > 0 && sector == last_end && now_ns == last_ns {
                self.request_sectors = self.request_sectors.saturating_add(sectors);
            }
            return false;
        }
        let distance = sector.abs_diff(last_end);
        if self.request_sectors > 0 {
            self.near[size_class(self.request_sectors)].add(self.request_ns);
            self.request_sectors = 0;
        }
        // A queue that takes the device for a disk has it alone, for tenures.
        if company && !self.seeks {
            return false;
        }
        let size = size_class(sectors);
        if distance <= NEAR_SECTORS {
            if self.seeks && !in_a_row && distance > 0 {
                return false;
            }
            (self.request_sectors, self.request_ns) = (sectors, took_ns);
            return self.row_sectors > 0 && self.went_on(size, sectors, took_ns);
        }
        self.row_sectors = 0;
        if self.seeks && sectors > SMALL_SECTORS {
            return false;
        }
        let says_so = if self.seeks {
            self.is_quick(size, took_ns)
        } else {
            let mut near = self.near[size..].iter().filter_map(|quick| quick.get());
            near.any(|near_ns| took_ns > near_ns + near_ns / 2 + SEEK_NS)
        };
        if self.seeks && says_so && in_a_row {
            self.row_sectors = sectors;
            return false;
        }
        self.judge(size, says_so)
    }

    /// Whether a read took no longer than near ones.
    fn is_quick(&self, size: usize, took_ns: u64) -> bool {
        let mut near = self.near[..=size].iter().filter_map(|quick| quick.get());
        near.any(|near_ns| took_ns < near_ns + near_ns / 4 + NO_SEEK_NS)
    }

    /// A stream in a row has gone on after a quick far read.
    #[inline(never)]
    fn went_on(&mut self, size: usize, sectors: u32, took_ns: u64) -> bool {
        let quick = self.is_quick(size, took_ns);
        self.row_sectors = self.row_sectors.saturating_add(sectors);
        if quick && self.row_sectors < READ_AHEAD_SECTORS {
            return false;
        }
        self.row_sectors = 0;
        self.judge(size, quick)
    }

    /// Counts a far read that says that we are wrong, or right.
    fn judge(&mut self, size: usize, says_so: bool) -> bool {
        self.wrong[size] = self.wrong[size] << 1 | u8::from(says_so);
        let wrong = self.wrong[size].count_ones() >= AGREE_MIN;
        if wrong {
            *self =
                DeviceEstimate { last_ns: self.last_ns, last_end: self.last_end, ..DeviceEstimate::new(!self.seeks) };
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A read of a stream that goes anywhere, without company.
    fn read(device: &mut DeviceEstimate, sector: u64, sectors: u32, start_ns: u64, now_ns: u64) -> bool {
        device.read(DeviceRead { sector, sectors, start_ns, now_ns, company: false, in_a_row: false })
    }

    /// Runs near and far reads in turn, each as soon as the previous one ends; returns whether the estimate has
    /// changed.
    fn look(seeks: bool, sectors: [u32; 2], near_ns: u64, far_ns: u64) -> bool {
        let (mut device, mut now_ns, mut sector) = (DeviceEstimate::new(seeks), 0, 0);
        for at in 0..200 {
            let far = at % 2;
            sector += [0, 10_000_000][far];
            let start_ns = now_ns;
            now_ns += [near_ns, far_ns][far];
            if read(&mut device, sector, sectors[far], start_ns, now_ns) {
                assert_eq!(device.seeks(), !seeks);
                return true;
            }
            sector += u64::from(sectors[far]);
        }
        false
    }

    #[test]
    fn a_device_shows_whether_it_has_seeks() {
        let (ms, us) = (1_000_000, 1000);
        // Sizes near and far, times near and far: a disk is found out, and stays one.
        for (sectors, near_ns, far_ns) in [([1024, 1024], 5 * ms, 15 * ms), ([8, 8], 100 * us, 9 * ms)] {
            assert!(look(false, sectors, near_ns, far_ns), "{sectors:?}");
            assert!(!look(true, sectors, near_ns, far_ns), "{sectors:?}");
        }
        // Flash, one that is slow, and one that is far away over a network.
        for (near_ns, far_ns) in [(80 * us, 90 * us), (400 * us, 600 * us), (5 * ms, 5 * ms), (50 * ms, 55 * ms)] {
            assert!(!look(false, [8, 8], near_ns, far_ns), "{near_ns}");
            assert!(look(true, [8, 8], near_ns, far_ns), "{near_ns}");
        }
    }

    #[test]
    fn what_happens_now_and_then_is_no_seek() {
        let (mut device, mut now_ns) = (DeviceEstimate::new(false), 0);
        for at in 0..10_000_u64 {
            // One in five waits for 17 ms, wherever it is.
            let start_ns = now_ns;
            now_ns += if at % 5 == 0 { 17_000_000 } else { 60_000 };
            assert!(!read(&mut device, at / 2 % 2 * 10_000_000 + at * 8, 8, start_ns, now_ns), "{at}");
        }
    }

    #[test]
    fn reads_that_wait_for_writes_show_no_seeks() {
        let (mut device, mut now_ns) = (DeviceEstimate::new(false), 0);
        for at in 0..10_000_u64 {
            // The far ones behind many large writes, as it happens.
            let far = u64::from(at % 8 == 7);
            if far > 0 {
                device.disturb();
            }
            let start_ns = now_ns;
            now_ns += 60_000 + far * 20_000_000;
            assert!(!read(&mut device, far * 10_000_000 + at * 8, 8, start_ns, now_ns), "{at}");
        }
    }

    #[test]
    fn a_disk_whose_near_reads_often_wait_stays_one() {
        let (mut device, mut now_ns) = (DeviceEstimate::new(true), 0);
        for at in 0..10_000_u64 {
            let far = at / 2 % 2;
            let start_ns = now_ns;
            now_ns += if at % 3 == 0 { 20_000_000 } else { 1_000_000 + far * 8_000_000 };
            assert!(!read(&mut device, far * 10_000_000 + at * 8, 8, start_ns, now_ns), "{at}");
        }
    }

    #[test]
    fn a_small_read_far_away_is_not_compared_with_a_larger_one_to_its_favour() {
        // 4 KiB at 8 ms beside 512 KiB in a row at 5 ms: longer than something larger, but not by enough to show a
        // seek.
        assert!(!look(true, [1024, 8], 5_000_000, 8_000_000));
        assert!(look(false, [1024, 8], 5_000_000, 10_000_000));
        // 512 KiB far away at 5 ms beside 4 KiB at 1 ms: that may be its size.
        assert!(!look(false, [8, 1024], 1_000_000, 5_000_000));
    }

    /// Readers in a row of `sectors` each, so many joined to a request, and then readers anywhere of the same size,
    /// whose queue the device sorts so that one takes `far_ns`.
    fn look_at_deep_queues(sectors: u32, joined: u64, request_ns: u64, far_ns: u64) -> bool {
        let (mut device, mut now_ns) = (DeviceEstimate::new(true), 0);
        let mut read = |sector: u64, took_ns: u64, in_a_row: bool| {
            let start_ns = now_ns;
            now_ns += took_ns;
            device.read(DeviceRead { sector, sectors, start_ns, now_ns, company: false, in_a_row })
        };
        let size = u64::from(sectors);
        (0..200).any(|turn| {
            let is_wrong = (0..320).any(|at| {
                let first = at % joined == 0;
                // Each turn begins with a seek.
                let took_ns = if at == 0 { 10_000_000 } else { request_ns } * u64::from(first);
                read((turn * 320 + at) * size, took_ns, true)
            });
            // Some of the sorted reads are near, too.
            let far = |at: u64| 1_000_000_000 + at % 7 * 10_000_000 + at / 8 * 100_000 + at % 8 / 7 * 1000;
            is_wrong || (0..40).any(|at| read(far(at), far_ns, false))
        })
    }

    #[test]
    fn a_deep_queue_of_a_disk_does_not_hide_its_seeks() {
        assert!(!look_at_deep_queues(8, 16, 600_000, 1_300_000));
        assert!(!look_at_deep_queues(128, 16, 10_000_000, 2_200_000));
        assert!(!look_at_deep_queues(1024, 16, 80_000_000, 6_000_000));
        assert!(look_at_deep_queues(8, 1, 600_000, 600_000), "a device without seeks is still found out");
    }

    /// Two streams in a row have turns of 80 reads of 128 KiB; the first reads of each come from the cache, then one
    /// takes `seek_ns` longer.
    fn look_at_rows(seek_ns: u64) -> bool {
        let (mut device, mut now_ns) = (DeviceEstimate::new(true), 0);
        for at in 0..3200_u64 {
            let (stream, place) = (at / 80 % 2, at % 80);
            let sector = stream * 10_000_000 + (at / 160 * 80 + place) * 256;
            let start_ns = now_ns;
            now_ns += match place {
                0..6 => 550_000,
                6 => 1_200_000 + seek_ns,
                _ => 1_200_000,
            };
            let read = DeviceRead { sector, sectors: 256, start_ns, now_ns, company: false, in_a_row: true };
            if device.read(read) {
                return true;
            }
        }
        false
    }

    #[test]
    fn reads_from_the_cache_of_a_disk_do_not_hide_its_seeks() {
        assert!(!look_at_rows(9_000_000));
        assert!(look_at_rows(0), "a device without seeks is found out by streams in a row, too");
    }
}
