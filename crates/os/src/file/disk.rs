//! The disk below a file, and how many requests it has room for.
//!
//! The kernel is asked not to wait, and does so all the same where a file system submits to a disk whose room for
//! requests is used up: in the calling thread, which is the lane, until an earlier request ends ([ADR 82]). So a lane
//! uses a part of the room, and leaves what is more to threads of the kernel.
//!
//! Known from sysfs, once, when a file is opened.
//!
//! [ADR 82]: ../../../../docs/adr/0082-a-lane-does-not-wait-for-room-on-a-disk.md

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Requests of a hardware queue that is not known: nearly all disks have as many.
const REQUESTS_UNKNOWN: u32 = 64;
/// Bytes of the longest I/O that takes one request, unless a file system or memory are in small pieces.
const REQUEST_BYTES: u64 = 256 << 10;
/// Part of the room that lanes use: the rest is for other programs, and for I/O that takes more requests than it looks.
const PART: u32 = 2;
/// Disks on top of others that are followed.
const LEVELS_MAX: u32 = 8;

/// A disk of the kernel.
#[derive(Debug)]
pub(crate) struct DiskRoom {
    number: u64,
    /// Requests that one lane may have there, and all lanes together.
    each: u32,
    all: u32,
    /// Lanes with a queue of a file there.
    lanes: AtomicU32,
}

impl DiskRoom {
    /// The disk with this device number, major and minor.
    pub(super) fn of(number: u64) -> Arc<DiskRoom> {
        static KNOWN: Mutex<Vec<Weak<DiskRoom>>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|room| room.strong_count() > 0);
        if let Some(room) = known.iter().filter_map(Weak::upgrade).find(|room| room.number == number) {
            return room;
        }
        let folder = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let room = Arc::new(DiskRoom::new(number, queues(Path::new(&folder), LEVELS_MAX)));
        known.push(Arc::downgrade(&room));
        room
    }

    fn new(number: u64, (requests, queues): (u32, u32)) -> DiskRoom {
        let each = (requests / PART).max(1);
        DiskRoom { number, each, all: each.saturating_mul(queues), lanes: AtomicU32::new(0) }
    }

    /// Requests that one of its lanes may have there now.
    fn share(&self) -> u32 {
        (self.all / self.lanes.load(Relaxed).max(1)).clamp(1, self.each)
    }
}

/// Requests of a hardware queue of a disk, and number of its hardware queues: the least of the disks below it.
fn queues(folder: &Path, levels: u32) -> (u32, u32) {
    // A partition has no folders of its own for these.
    let disk = if folder.join("partition").exists() { folder.join("..") } else { folder.into() };
    let below = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let least = below(&disk.join("slaves")).filter(|_| levels > 0).map(|disk| queues(&disk, levels - 1)).min();
    least.unwrap_or_else(|| {
        let requests = fs::read_to_string(disk.join("queue/nr_requests")).ok();
        let requests = requests.and_then(|number| number.trim().parse().ok()).unwrap_or(REQUESTS_UNKNOWN);
        (requests, (below(&disk.join("mq")).count() as u32).max(1))
    })
}

/// What one lane has in flight on a disk, in requests. Written by that lane's thread only.
#[derive(Debug)]
pub(crate) struct DiskUse {
    room: Arc<DiskRoom>,
    used: AtomicU32,
}

impl DiskUse {
    pub(crate) fn new(room: Arc<DiskRoom>) -> DiskUse {
        room.lanes.fetch_add(1, Relaxed);
        DiskUse { room, used: AtomicU32::new(0) }
    }

    /// Whether it is of this disk.
    pub(crate) fn is_of(&self, room: &Arc<DiskRoom>) -> bool {
        Arc::ptr_eq(&self.room, room)
    }

    /// Requests of an I/O of so many bytes.
    pub(super) fn requests(bytes: u64) -> u32 {
        bytes.div_ceil(REQUEST_BYTES).max(1) as u32
    }

    /// An I/O of so many requests begins. Returns whether all that the lane has there is within its share. Those that a
    /// thread submits count as well: they take room from those of the lane.
    #[inline]
    pub(super) fn begin(&self, requests: u32) -> bool {
        let used = self.used.load(Relaxed) + requests;
        self.used.store(used, Relaxed);
        // A single one that is longer than the share is within it.
        used == requests || used <= self.room.share()
    }

    /// An I/O of so many requests has ended.
    #[inline]
    pub(super) fn end(&self, requests: u32) {
        self.used.store(self.used.load(Relaxed) - requests, Relaxed);
    }
}

impl Drop for DiskUse {
    fn drop(&mut self) {
        self.room.lanes.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_share_half_the_room_of_a_disk() {
        let disk = Arc::new(DiskRoom::new(1, (128, 1)));
        let one = DiskUse::new(Arc::clone(&disk));
        let begin = |lane: &DiskUse, bytes| lane.begin(DiskUse::requests(bytes));
        assert_eq!((0..100).filter(|_| begin(&one, 4096)).count(), 64);
        let two = DiskUse::new(Arc::clone(&disk));
        assert_eq!((0..10).filter(|_| begin(&two, 1 << 20)).count(), 8);
        // All that is in flight counts.
        one.end(68);
        assert!(!begin(&one, 4096));
        one.end(2);
        assert!(begin(&one, 4096));
        assert!(!begin(&one, 4096));
        drop(two);
        assert!(begin(&one, 128 << 10));
        // A hardware queue has not more than its own.
        let disk = DiskUse::new(Arc::new(DiskRoom::new(1, (8, 16))));
        assert_eq!((0..10).filter(|_| begin(&disk, 4096)).count(), 4);
    }

    #[test]
    fn one_io_is_never_too_long() {
        let disk = DiskUse::new(Arc::new(DiskRoom::new(1, (1, 1))));
        assert!(disk.begin(DiskUse::requests(1 << 30)));
        assert!(!disk.begin(DiskUse::requests(512)));
    }

    #[test]
    fn room_is_that_of_the_smallest_disk_below() {
        let folder = tempfile::tempdir().unwrap();
        let disk = |name: &str, requests: &str, queues: u32| {
            let folder = folder.path().join(name);
            fs::create_dir_all(folder.join("queue")).unwrap();
            fs::write(folder.join("queue/nr_requests"), requests).unwrap();
            (0..queues).for_each(|queue| fs::create_dir_all(folder.join("mq").join(queue.to_string())).unwrap());
            folder
        };
        let (fast, slow) = (disk("fast", "1023\n", 4), disk("slow", "64\n", 1));
        assert_eq!(queues(&fast, 1), (1023, 4));
        fs::create_dir(fast.join("part")).unwrap();
        fs::write(fast.join("part/partition"), "1\n").unwrap();
        assert_eq!(queues(&fast.join("part"), 1), (1023, 4));
        let both = disk("both", "128\n", 0);
        for below in [&fast.join("part"), &slow] {
            fs::create_dir_all(both.join("slaves")).unwrap();
            std::os::unix::fs::symlink(below, both.join("slaves").join(below.file_name().unwrap())).unwrap();
        }
        assert_eq!(queues(&both, 1), (64, 1));
        assert_eq!(queues(Path::new("/nonexistent"), 1), (REQUESTS_UNKNOWN, 1));
    }
}
