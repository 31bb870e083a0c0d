//! A back-end with random behaviour: requests in flight end, and the next good one serves.
//!
//! `ANY_CASES=N` in the environment sets the number of cases.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached};
use blkyard_mem::Region;
use blkyard_mq::{Op, QueueKind, Status};
use blkyard_virtio::{BlkConfig, Features};

use crate::common::{
    Backend, User, blk_config, config, disk, disk_info, is_ready, message, place, read, send_account, until,
};

/// Numbers that seem to be of no order (xorshift, Marsaglia 2003).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Once in so many times.
    fn once_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }
}

/// Serves one front-end after the other, each in its own way, until it is stopped.
fn serve_wildly(path: &Path, disk: &BlkConfig, chance: &mut Chance, stop: &AtomicBool) {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    while !stop.load(Relaxed) {
        if is_ready(&listener, 5) {
            session(&listener.accept().unwrap().0, disk, chance, stop);
        }
    }
}

/// One front-end, mostly answered as it should be.
fn session(stream: &UnixStream, disk: &BlkConfig, chance: &mut Chance, stop: &AtomicBool) -> Option<()> {
    let (mut regions, mut eventfds): (Vec<Arc<Region>>, Vec<OwnedFd>) = (Vec::new(), Vec::new());
    let mut account = None;
    while !stop.load(Relaxed) {
        if !is_ready(stream, 1) {
            do_anything(regions.first(), &eventfds, chance);
            if chance.once_in(8) {
                do_anything(account.as_ref(), &[], chance);
            }
            if chance.once_in(40) {
                return None;
            }
            continue;
        }
        let (request, flags, payload, fds) = read(stream)?;
        let mut answer = match request {
            1 => Some((disk.features() | Features::PROTOCOL_FEATURES).bits().to_ne_bytes().to_vec()),
            11 => Some(payload.clone()),
            // Queues, acknowledgements, the configuration, memory slots, and mostly an in-flight record.
            15 => {
                let account = if chance.once_in(4) { 0 } else { 1_u64 << 12 };
                Some((1_u64 | 1 << 3 | 1 << 9 | 1 << 15 | account).to_ne_bytes().to_vec())
            }
            17 => Some(2_u64.to_ne_bytes().to_vec()),
            24 => Some([&payload[..12], &disk.read(0, 60).unwrap()].concat()),
            31 => {
                account = Some(send_account(stream, &payload, false));
                None
            }
            36 => Some(8_u64.to_ne_bytes().to_vec()),
            _ => (flags & 8 != 0).then(|| vec![0; 8]),
        };
        match (request, fds.into_iter().next()) {
            (37, Some(file)) => {
                let word = |at: usize| u64::from_ne_bytes(payload[at..at + 8].try_into().unwrap());
                regions.push(Region::map_file(file.as_fd(), word(32), word(16)).unwrap());
            }
            (12..=14, Some(file)) => eventfds.push(file),
            _ => {}
        }
        if chance.once_in(50) {
            answer = Some((0..chance.next() % 100).map(|_| chance.next() as u8).collect());
        }
        if chance.once_in(100) {
            return None;
        }
        if let Some(answer) = answer {
            (&*stream).write_all(&message(request, &answer)).ok()?;
        }
    }
    None
}

/// Writes into a region, the first of which holds the rings, and signals eventfds.
fn do_anything(region: Option<&Arc<Region>>, eventfds: &[OwnedFd], chance: &mut Chance) {
    if let Some(region) = region {
        for _ in 0..chance.next() % 8 {
            let words = [chance.next(), chance.next() & 0xffff_ffff, chance.next() & 0xff, 1, 0];
            let (word, bytes) = (words[chance.next() as usize % 5], [1, 2, 4, 8][chance.next() as usize % 4]);
            let at = chance.next() % (region.len() as u64 - 8);
            region.span(at / 2 * 2, bytes).unwrap().copy_from_slice(&word.to_le_bytes()[..bytes]);
        }
    }
    for eventfd in eventfds {
        match chance.next() % 12 {
            0 => drop(rustix::io::write(eventfd, &1_u64.to_ne_bytes())),
            1 => drop(rustix::io::read(eventfd, &mut [0; 8])),
            _ => {}
        }
    }
}

#[test]
fn whatever_a_back_end_does_requests_end_and_the_next_one_serves() {
    let rounds = std::env::var("ANY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    for round in 1..=rounds {
        for packed in [false, true] {
            let mut chance = Chance(round * 2 + u64::from(packed) + 0x9e37_79b9_7f4a_7c15);
            let (_folder, path) = place();
            let device = disk();
            let good = Backend::start(&path, &device, 2);
            let limits = AttachConfig {
                reply_max: Duration::from_secs(5),
                // A request that the account has lost is never answered.
                io_max: Duration::from_millis(500),
                gone_max: Duration::from_millis(50),
                packed,
                ..config(&path)
            };
            let attached = Attached::open(limits).unwrap();
            let mut user = User::new(&attached, QueueKind::Default);
            assert_eq!(user.one(Op::Read, 0, 0), Status::Ok);
            good.stop();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| serve_wildly(&path, &blk_config(&disk_info(), 2), &mut chance, &stop));
                let begin = Instant::now();
                while begin.elapsed() < Duration::from_millis(150) {
                    if user.hw.is_idle() {
                        for slot in 0..8 {
                            user.submit([Op::Write, Op::Read, Op::Flush][slot as usize % 3], slot, slot);
                        }
                    }
                    user.turn();
                    std::thread::yield_now();
                }
                stop.store(true, Relaxed);
            });
            let _ = std::fs::remove_file(&path);
            let good = Backend::start(&path, &device, 2);
            user.drain();
            user.ended.clear();
            until("the good one serves", || user.one(Op::Read, 0, 0) == Status::Ok);
            drop((user, attached));
            good.stop();
        }
    }
}
