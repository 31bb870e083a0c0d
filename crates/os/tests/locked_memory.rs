//! Where memory may not be locked, I/O goes on without and says why. Its own process: the limit is.

mod common;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use blkyard_mq::{Crank, Op, Region, RegionTable, Station, Status, Wake};
use blkyard_os::{Attachment, FileConfig, FixedBuffers, LaneConfig, Lanes, Ring};
use common::{Bench, bio, folders, image, pattern};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

#[test]
fn beyond_the_limit_on_locked_memory_io_goes_on_and_says_why() {
    let folder = &folders()[0];
    let path = image(folder, 1 << 20);
    std::fs::write(&path, pattern(1 << 20, 8)).unwrap();
    // No more than we may have: not everybody may raise what a machine allows.
    let most = getrlimit(Resource::Memlock).maximum;
    let limit = most.map_or(8 << 20, |most| most.min(8 << 20));
    setrlimit(Resource::Memlock, Rlimit { current: Some(limit), maximum: most }).unwrap();
    // The limit is for all of a user's processes together, so it leaves room for what others lock meanwhile; the ring
    // and the eight mebibytes of the queue are more. Of this thread only: the superuser's memory is not counted.
    let mut own = capabilities(None).unwrap();
    own.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, own).unwrap();

    let mut bench = Bench::new(FileConfig::new(&path), 4);
    match bench.ring.buffers() {
        FixedBuffers::Plain { reason } => {
            assert!(reason.contains(&format!("{} KiB", limit >> 10)) && reason.contains("ulimit -l"), "{reason}");
        }
        registered @ FixedBuffers::Registered { .. } => panic!("{registered:?}"),
    }
    assert_eq!(bench.one(bio(Op::Read, 0, &[(0, 65_536)])), Status::Ok);
    assert_eq!(bench.one(bio(Op::Read, 8, &[(1 << 20, 4096), (0, 512)])), Status::Ok);
    assert!(bench.bytes(1 << 20, 4096) == pattern(1 << 20, 8)[4096..8192]);

    // Less memory fits, once the other is gone.
    let small = Region::anonymous(32_768).unwrap();
    let table = RegionTable::new(vec![small]);
    bench.queue.set_memory(&mut bench.ring, Arc::new(table));
    assert_eq!(bench.ring.buffers(), FixedBuffers::Registered { bytes: 32_768 });
    assert_eq!(bench.one(bio(Op::Read, 0, &[(0, 16_384)])), Status::Ok);

    drop(bench);
    memory_that_moves_is_locked_where_it_comes_to(limit);
}

/// A station that has memory and no work.
struct Idler {
    memory: Arc<RegionTable>,
    held: Vec<Arc<Attachment>>,
    over: Arc<AtomicBool>,
}

impl Station<Ring> for Idler {
    fn enter(&mut self, ring: &mut Ring, _waker: &Arc<dyn Wake>) {
        self.held = self.memory.iter().map(|(_, region)| ring.attach(region)).collect();
    }

    fn leave(&mut self, ring: &mut Ring) -> bool {
        self.held.clear();
        ring.sweep();
        true
    }

    fn memory(&self) -> Option<&Arc<RegionTable>> {
        Some(&self.memory)
    }

    fn crank(&mut self, _ring: &mut Ring, _now_ns: u64) -> Crank {
        Crank::Idle
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }
}

/// On its way it is locked twice, which is more than may be.
fn memory_that_moves_is_locked_where_it_comes_to(limit: u64) {
    let region = Region::anonymous(limit as usize / 4096 * 5 / 8 * 4096).unwrap();
    let locked = FixedBuffers::Registered { bytes: region.len() as u64 };
    let memory = Arc::new(RegionTable::new(vec![region]));
    let over = Arc::new(AtomicBool::new(false));
    let mut lanes = Lanes::start(2, |n| LaneConfig { name: format!("lane{n}"), ..LaneConfig::default() }).unwrap();
    let station = Idler { memory, held: Vec::new(), over: Arc::clone(&over) };
    lanes.admit(0, move || station).unwrap();
    for lane in [0, 1, 0, 1] {
        lanes.deal(2, |_| lane).unwrap();
        assert_eq!(lanes.threads()[lane].buffers(), locked);
        assert_eq!(lanes.threads()[1 - lane].buffers(), FixedBuffers::default());
    }
    over.store(true, SeqCst);
    lanes.threads().iter().for_each(|lane| lane.waker().wake());
    lanes.join().unwrap();
}
