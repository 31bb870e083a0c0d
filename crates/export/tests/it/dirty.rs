//! The log of pages we write, for a front-end that moves its guest elsewhere while it runs.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use blkyard_mem::{Region, View};
use blkyard_mq::HwQueueConfig;
use blkyard_virtio::driver_model::Descriptor;
use blkyard_virtio::{Features, LOG_PAGE_BYTES};
use rustix::fs::MemfdFlags;

use crate::common::{
    AnyDevice, Data, Ends, Front, Hand, LINE_BYTES, Line, PAGE, PATIENCE, PLAIN, Ram, Request, World, addresses,
    disk_info, event, kind, kinds, readable, rung, words64,
};

const LOG_ALL: u64 = 1 << 26;

/// The log, as the front-end has it.
struct Log {
    file: OwnedFd,
    region: Arc<Region>,
}

impl Log {
    /// For guest memory up to this address. It begins somewhere in its file.
    fn new(end: u64) -> Log {
        let len = end.div_ceil(LOG_PAGE_BYTES * 8);
        let file = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGE + len).unwrap();
        let region = Region::map_file(file.as_fd(), PAGE, len).unwrap();
        Log { file, region }
    }

    fn set_base(&self, front: &Front) -> bool {
        let words = [self.region.len() as u64, PAGE];
        front.raw.ask(Request::SetLogBase, &words64(&words), &[self.file.as_fd()]).is_some()
    }

    /// Clears all bits; returns their pages.
    fn take(&self) -> Vec<u64> {
        let view = View::new(Arc::clone(&self.region), 0, self.region.len(), 1).unwrap();
        let bytes = (0..self.region.len()).map(|at| (at as u64, view.take_bits(at)));
        bytes
            .flat_map(|(at, bits)| (0..8).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| at * 8 + bit))
            .collect()
    }
}

/// Connects with one queue of this kind running, and all of it logged or not.
fn connect(world: &World, ram: &Arc<Ram>, features: Features, size: u16) -> (Front, Line) {
    let mut front = Front::dial(&world.exports[0].path);
    front.negotiate(PLAIN | features.bits());
    front.share(&[ram]).unwrap();
    let line = Line::new(ram, 0, size, features);
    line.start(&front, 0, false);
    (front, line)
}

/// Begins or ends the logging of everything but rings.
fn set_logging(front: &Front, on: bool) {
    let features = front.features | if on { LOG_ALL } else { 0 };
    assert!(front.raw.accepts(Request::SetFeatures, &words64(&[features]), &[]));
}

/// One request from offering to its end.
fn run(line: &mut Line, slot: u16, kind: u32, sector: u64, data: Data<'_>) {
    assert!(line.put(slot, kind, sector, data, true));
    line.publish();
    assert_eq!(line.wait_used().0, slot);
}

/// Pages logged up to the end of the latest completing round: those of the ring are logged after the guest can see the
/// completion. An answer of the queue's owner comes from a later round.
fn noted(world: &World, log: &Log) -> Vec<u64> {
    world.exports[0].watch(0).look().unwrap().recv_timeout(PATIENCE).unwrap();
    log.take()
}

#[test]
fn every_page_we_write_is_noted_and_no_other() {
    let world = World::new(vec![AnyDevice::ram(0)], 1, 1);
    for features in kinds() {
        let ram = Ram::new(LINE_BYTES);
        let (front, mut line) = connect(&world, &ram, features, 64);
        let log = Log::new(ram.guest_addr + ram.len);
        assert!(log.set_base(&front));
        let page = |at: u64| (ram.guest_addr + at) / LOG_PAGE_BYTES;
        let status = page(line.status_at(0));
        let packed = features.contains(Features::RING_PACKED);
        let [desc, _, used] = line.guest_addrs().map(|addr| addr / LOG_PAGE_BYTES);
        let mut ring = if packed { vec![desc, used] } else { vec![used] };
        ring.sort_unstable();
        // Not before it is asked for.
        run(&mut line, 0, kind::IN, 0, Data::In(4096));
        assert!(noted(&world, &log).is_empty());
        for (name, logged) in [("data and status", false), ("rings too", true)] {
            set_logging(&front, true);
            line.set_addresses(&front, 0, logged);
            log.take();
            let expect = |what: &str, pages: &[u64]| {
                let mut expected = pages.to_vec();
                expected.extend(if logged { &ring[..] } else { &[] });
                expected.sort_unstable();
                assert_eq!(noted(&world, &log), expected, "{features:?}, {name}: {what}");
            };
            run(&mut line, 0, kind::IN, 0, Data::In(4096));
            expect("a read", &[status, page(line.data_at(0))]);
            run(&mut line, 0, kind::OUT, 0, Data::Out(&[1; 4096]));
            expect("a write", &[status]);
            run(&mut line, 0, kind::FLUSH, 0, Data::None);
            expect("a flush", &[status]);
            run(&mut line, 3, kind::IN, 8, Data::In(3 * 4096));
            let data = page(line.data_at(3));
            expect("a long read", &[status, data, data + 1, data + 2]);
            run(&mut line, 0, kind::GET_ID, 0, Data::In(20));
            expect("the serial number", &[status, page(line.data_at(0))]);
            run(&mut line, 3, kind::GET_ID, 0, Data::In(3 * 4096));
            expect("the serial number in more room than it needs", &[status, data]);
            run(&mut line, 0, kind::IN, u64::MAX / 2, Data::In(512));
            expect("a read that is refused", &[status, page(line.data_at(0))]);
            run(&mut line, 0, 77, 0, Data::In(512));
            expect("a request nobody knows", &[status]);
        }
        set_logging(&front, false);
        log.take();
        run(&mut line, 0, kind::IN, 0, Data::In(4096));
        assert!(noted(&world, &log).is_empty(), "not after that");
        line.stop(&front, 0);
        front.leave(&world.exports[0]);
    }
    world.stop();
}

#[test]
fn a_guest_that_is_copied_while_it_reads_is_whole_at_the_end() {
    for features in [Features::empty(), Features::RING_PACKED | Features::IN_ORDER] {
        let world = World::new(vec![AnyDevice::ram(5_000)], 1, 1);
        let ram = Ram::new(LINE_BYTES);
        let (front, mut line) = connect(&world, &ram, features, 256);
        // Blocks that differ, so that a page that was not copied shows.
        for block in 0..64 {
            line.ram.write(line.data_at(0), &[0; 4096]);
            let bytes = (block + 1_u64).to_le_bytes().repeat(512);
            run(&mut line, 0, kind::OUT, block * 8, Data::Out(&bytes));
        }
        let log = Log::new(ram.guest_addr + ram.len);
        let over = AtomicBool::new(false);
        let (first, end) = (line.data_at(0), line.data_at(64));
        let copy = std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let guest = scope.spawn(|| {
                let mut reads = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    // Any block into any page; by their numbers alone, so that a failure comes again.
                    for slot in 0..64 {
                        let block = (reads * 7 + u64::from(slot) * 13) % 64;
                        assert!(line.put(slot, kind::IN, block * 8, Data::In(4096), slot % 2 == 0));
                        reads += 1;
                    }
                    line.publish();
                    (0..64).for_each(|_| assert_eq!(line.wait_used().1, 4097));
                }
                (line, reads)
            });
            assert!(log.set_base(&front));
            set_logging(&front, true);
            let mut copy = ram.read(0, ram.len as usize);
            let mut copied = 0;
            let mut sync = || {
                for page in log.take() {
                    let at = page * LOG_PAGE_BYTES - ram.guest_addr;
                    copy[at as usize..][..4096].copy_from_slice(&ram.read(at, 4096));
                    copied += 1;
                }
                copied
            };
            let start = Instant::now();
            while sync() < 5000 {
                assert!(start.elapsed() < PATIENCE, "the guest does not read");
            }
            over.store(true, Ordering::Relaxed);
            let (line, reads) = guest.join().unwrap();
            assert!(reads > 1000);
            line.stop(&front, 0);
            sync();
            copy
        });
        let now = ram.read(first, (end - first) as usize);
        for (page, (now, copy)) in now.chunks(4096).zip(copy[first as usize..end as usize].chunks(4096)).enumerate() {
            assert!(now == copy, "{features:?}: page {page} was written and not copied");
        }
        front.leave(&world.exports[0]);
        world.stop();
    }
}

#[test]
fn one_round_answers_sixteen_requests_and_no_more_while_what_it_writes_is_noted() {
    for (logged, expected) in [(false, [64, 0, 0, 0, 0]), (true, [16, 16, 16, 16, 0])] {
        let mut hand = Hand::new(0);
        let (front, mut vq) = hand.connect();
        let log = Log::new(vq.ram.guest_addr + vq.ram.len);
        if logged {
            begin_log(&mut hand, &front, &log);
        }
        hand.learn_that_it_takes_turns(&mut vq);
        // Unknown requests, which complete at once: each is there four times.
        let heads: Vec<_> = (0..16).map(|slot| vq.build(slot, 77, 0, Data::None, &vq.ram)).collect();
        (0..4).flat_map(|_| &heads).for_each(|head| vq.offer(*head));
        vq.publish_silently();
        let rounds = [(); 5].map(|()| {
            let before = hand.refused();
            hand.turn();
            hand.refused() - before
        });
        assert_eq!(rounds, expected, "logged: {logged}");
        hand.stop();
        drop(front);
    }
}

#[test]
fn a_round_takes_one_large_read_of_all_queues_while_it_is_logged() {
    let mut hand = Hand::with_queues(&disk_info(), 0, HwQueueConfig::default(), 2);
    let (front, mut vqs) = hand.connect_all(32 << 20);
    let ram = Arc::clone(&vqs[0].ram);
    let log = Log::new(ram.guest_addr + ram.len);
    begin_log(&mut hand, &front, &log);
    for vq in &mut vqs {
        for slot in 0..8 {
            // Beyond the end of the disk.
            vq.put(slot, kind::IN, 1 << 40, Data::In(512));
            let (flags, next) = (Descriptor::NEXT | Descriptor::WRITE, 3 * slot + 2);
            let data = Descriptor { addr: ram.guest_addr + (16 << 20), len: 8 << 20, flags, next };
            vq.descriptor(3 * slot + 1, data);
        }
        vq.publish_silently();
    }
    let ended = [(); 40].map(|()| {
        hand.turn();
        vqs.iter_mut().map(|vq| std::iter::from_fn(|| vq.poll()).count()).sum::<usize>()
    });
    assert!(ended.iter().all(|ended| *ended <= 1), "a neighbour waits for the log of several: {ended:?}");
    assert_eq!(ended.iter().sum::<usize>(), 16);
    hand.stop();
    drop(front);
}

/// Begins the logging of everything but rings.
fn begin_log(hand: &mut Hand, front: &Front, log: &Log) {
    std::thread::scope(|scope| {
        let begin = scope.spawn(|| {
            assert!(log.set_base(front));
            set_logging(front, true);
        });
        while !begin.is_finished() {
            hand.turn();
        }
    });
}

#[test]
fn a_log_that_is_shorter_than_memory_or_than_it_says_does_no_harm() {
    let world = World::new(vec![AnyDevice::ram(0)], 1, 1);
    let ram = Ram::new(LINE_BYTES);
    let (front, mut line) = connect(&world, &ram, Features::empty(), 64);
    let log = Log::new(ram.guest_addr / 2);
    assert!(log.set_base(&front));
    set_logging(&front, true);
    run(&mut line, 0, kind::IN, 0, Data::In(4096));
    assert!(noted(&world, &log).is_empty());
    // Nor does a ring that is to be noted where there is no log, or no memory at all.
    let user_addrs = line.guest_addrs().map(|addr| addr - ram.guest_addr + ram.user_addr);
    for log_at in [u64::MAX, u64::MAX - 300, u64::MAX / 2, 1 << 52] {
        let mut payload = addresses(0, user_addrs);
        payload[4] = 1;
        payload[32..].copy_from_slice(&u64::to_ne_bytes(log_at));
        assert!(front.raw.accepts(Request::SetVringAddr, &payload, &[]));
        run(&mut line, 0, kind::IN, 0, Data::In(4096));
        assert!(noted(&world, &log).is_empty(), "{log_at:#x}");
    }
    // One that ends beyond its file is refused, and the session with it.
    let payload = words64(&[1 << 30, 0]);
    assert!(front.raw.ask(Request::SetLogBase, &payload, &[log.file.as_fd()]).is_none());
    drop(front);
    world.stop();
}

/// Whether an eventfd for the log is taken.
fn set_eventfd(front: &Front, eventfd: &OwnedFd) -> bool {
    front.raw.accepts(Request::SetLogFd, &[], &[eventfd.as_fd()])
}

#[test]
fn a_front_end_that_wants_to_be_told_is_told_when_something_is_noted() {
    for features in kinds() {
        let devices = [AnyDevice::ram(0)];
        let world = World::new(devices.to_vec(), 1, 1);
        let ram = Ram::new(LINE_BYTES);
        let (front, mut line) = connect(&world, &ram, features, 64);
        let log = Log::new(ram.guest_addr + ram.len);
        let (first, second) = (event(), event());
        // Under a ring that runs, before there is a log.
        assert!(set_eventfd(&front, &first));
        assert!(log.set_base(&front));
        run(&mut line, 0, kind::IN, 0, Data::In(512));
        assert_eq!(rung(&first), 0, "{features:?}: nothing was noted");
        set_logging(&front, true);
        for _ in 0..5 {
            run(&mut line, 0, kind::IN, 0, Data::In(512));
            assert!(readable(&first, PATIENCE), "{features:?}: nobody was told");
            assert!(!log.take().is_empty());
            rung(&first);
        }
        // Another log replaces it, also after a takeover.
        line.set_addresses(&front, 0, true);
        assert!(set_eventfd(&front, &second));
        rung(&first);
        let world = world.hand_over(&devices, 1, 1).0;
        rung(&second);
        run(&mut line, 0, kind::OUT, 0, Data::Out(&[1; 512]));
        assert!(readable(&second, PATIENCE), "{features:?}: nobody was told by the other eventfd");
        // Writes during the drain are announced before its end.
        rung(&second);
        log.take();
        line.stop(&front, 0);
        assert!(!log.take().is_empty() && rung(&second) > 0, "{features:?}: the end was not told");
        assert_eq!(rung(&first), 0, "{features:?}: an eventfd that was replaced was rung");
        front.leave(&world.exports[0]);
        world.stop();
    }
}

#[test]
fn an_eventfd_of_the_log_that_blocks_and_is_full_holds_up_nobody() {
    let world = World::new(vec![AnyDevice::ram(0)], 1, 1);
    let ram = Ram::new(LINE_BYTES);
    let (front, mut line) = connect(&world, &ram, Features::empty(), 64);
    let (log, eventfd) = (Log::new(ram.guest_addr + ram.len), event());
    assert!(set_eventfd(&front, &eventfd) && log.set_base(&front));
    // The flags belong to the description that both sides share.
    rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&eventfd, rustix::fs::OFlags::empty()).unwrap();
    set_logging(&front, true);
    for sector in 0..50 {
        run(&mut line, 0, kind::IN, sector, Data::In(512));
    }
    line.stop(&front, 0);
    front.leave(&world.exports[0]);
    world.stop();
}

#[test]
fn rings_of_every_kind_and_their_log_go_along_when_an_export_changes_hands() {
    let devices = [AnyDevice::ram(0)];
    let mut world = World::new(devices.to_vec(), 1, 1);
    for features in kinds() {
        let ram = Ram::new(LINE_BYTES);
        let (front, mut line) = connect(&world, &ram, features, 64);
        let log = Log::new(ram.guest_addr + ram.len);
        assert!(log.set_base(&front));
        set_logging(&front, true);
        line.set_addresses(&front, 0, true);
        let page = |at: u64| (ram.guest_addr + at) / LOG_PAGE_BYTES;
        let ring = line.guest_addrs().map(|addr| addr / LOG_PAGE_BYTES)[2];
        for round in 0..5 {
            // Rings are anywhere in their round.
            (0..=round * 13).for_each(|_| run(&mut line, 0, kind::OUT, 8, Data::Out(&[round; 4096])));
            world = world.hand_over(&devices, 1, 1).0;
            log.take();
            run(&mut line, 0, kind::IN, 8, Data::In(4096));
            assert!(ram.read(line.data_at(0), 4096) == [round; 4096], "{features:?}: the disk has something else");
            let pages = noted(&world, &log);
            for page in [ring, page(line.status_at(0)), page(line.data_at(0))] {
                assert!(pages.contains(&page), "{features:?}: page {page} is not among {pages:?}");
            }
        }
        front.leave(&world.exports[0]);
    }
    world.stop();
}
