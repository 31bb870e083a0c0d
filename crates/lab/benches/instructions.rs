//! Work to count instructions of, for `cargo xtask test instructions`, which runs it under valgrind.
//!
//! `instructions CASE ROUNDS` runs so many rounds of a case and ends, printing the number of I/Os. The same arguments
//! always do the same: time is simulated, one microsecond a round. Only this thread's instructions in
//! [`counted_rounds`] count: set-up takes as many turns as it has to wait for other threads. The cost of a round is the
//! difference between two runs of different length, so that the first rounds do not count either.
//!
//! Measures nothing itself.

#[path = "cells/lines.rs"]
mod lines;
#[path = "cells/load.rs"]
mod load;
#[path = "cells/nvme.rs"]
mod nvme;
#[path = "cells/registered.rs"]
mod registered;
#[path = "cells/ring.rs"]
mod ring;
#[path = "cells/sched.rs"]
mod sched;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use blkyard::Device;
use blkyard_lab::floor::{RandomOffsets, Round};
use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, BlockDevice, HwQueue, HwQueueConfig, NullConfig, NullDevice, QueueKind};
use blkyard_nvme::LoopbackBuffers;
use blkyard_os::{Ring, RingConfig};
use blkyard_virtio::driver_model::{ModelBuffer, ModelGuest, blk_header};
use blkyard_virtio::{Chain, DeviceRing, Features, ParseContext, Parsed, VirtioStatus, parse, write_status, written};

use lines::one_core;
use load::{Load, bios, buffers, fill, info, load_only, null};
use nvme::pair;
use registered::sized;
use ring::ring;
use sched::{Queued, deadline, fair, guest, kyber, slices};

/// Each case, by the name of its cell or path.
const CASES: &[(&str, fn() -> Box<dyn Round>)] = &[
    ("core-null-b1", || Box::new(null(1, true, clock()))),
    ("core-null-b8", || Box::new(null(8, true, clock()))),
    ("core-null-b32", || Box::new(null(32, true, clock()))),
    ("core-null-b32-namespaces", || Box::new(null_namespaces(32, clock()))),
    ("core-null-b32-nostats", || Box::new(null(32, false, clock()))),
    ("core-null-b32-timeslice", || Box::new(null(32, true, clock()).scheduled(slices()))),
    ("device-null-b1", || Box::new(device(NULL, 1))),
    ("device-null-b32", || Box::new(device(NULL, 32))),
    ("multipath-adaptive-b1", || Box::new(device(&paths("adaptive"), 1))),
    ("multipath-adaptive-b32", || Box::new(device(&paths("adaptive"), 32))),
    ("multipath-hedged-b32", || Box::new(device(&paths("adaptive&hedged_reads=on"), 32))),
    ("multipath-round-robin-b32", || Box::new(device(&paths("round-robin"), 32))),
    ("sched-deadline-64", || Box::new(deadline(64))),
    ("sched-fair-64", || Box::new(fair(64))),
    ("sched-fair-4096", || Box::new(fair(4096))),
    ("sched-fair-guest-64", || Box::new(guest(64))),
    ("sched-fair-guest-random", || Box::new(guest(0))),
    ("sched-kyber-64", || Box::new(kyber(64))),
    ("sched-timeslice-64", || Box::new(Queued::new(slices(), 64))),
    ("sched-timeslice-4096", || Box::new(Queued::new(slices(), 4096))),
    ("load-only-b32", || Box::new(load_only(32, clock()))),
    ("virtio-walk-indirect-b32", || Box::new(RingCost::new(true, false))),
    ("virtio-walk-direct-b32", || Box::new(RingCost::new(false, false))),
    ("virtio-request-indirect-b32", || Box::new(RingCost::new(true, true))),
    ("virtio-ring-split-b1", || Box::new(ring(false, 1, clock()))),
    ("virtio-ring-split-b32", || Box::new(ring(false, 32, clock()))),
    ("virtio-ring-packed-b32", || Box::new(ring(true, 32, clock()))),
    ("nvme-pair-b1", || Box::new(pair(1, clock()))),
    ("nvme-pair-b32", || Box::new(pair(32, clock()))),
    ("nvme-plain-512", || Box::new(sized(512, None))),
    ("nvme-plain-128k", || Box::new(sized(128 << 10, None))),
    ("nvme-registered-512", || Box::new(sized(512, Some(LoopbackBuffers::Contiguous)))),
    ("nvme-registered-128k", || Box::new(sized(128 << 10, Some(LoopbackBuffers::Contiguous)))),
    ("nvme-scattered-512", || Box::new(sized(512, Some(LoopbackBuffers::Scattered(4096))))),
    ("nvme-scattered-128k", || Box::new(sized(128 << 10, Some(LoopbackBuffers::Scattered(4096))))),
    ("vhost-one-core-split-b32", || Box::new(together(1, 32, false))),
    ("vhost-one-core-packed-b32", || Box::new(together(1, 32, true))),
    ("vhost-one-core-2q-b16", || Box::new(together(2, 16, false))),
];

fn main() -> ExitCode {
    // Cargo says `--bench` to every bench it runs.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let [case, rounds] = words.as_slice() else {
        CASES.iter().for_each(|(name, _)| println!("{name}"));
        return ExitCode::SUCCESS;
    };
    let case = CASES.iter().find(|(name, _)| name == case);
    let (Some((_, make)), Ok(rounds)) = (case, rounds.parse::<u64>()) else {
        eprintln!("give one of the cases and a number of rounds; without either the cases are listed");
        return ExitCode::FAILURE;
    };
    let mut case = make();
    println!("{}", counted_rounds(&mut *case, rounds));
    ExitCode::SUCCESS
}

/// The counted part; `cargo xtask` finds it by its name.
#[inline(never)]
fn counted_rounds(case: &mut dyn Round, rounds: u64) -> u64 {
    (0..rounds).map(|_| case.round()).sum()
}

const NULL: &str = "null:1G";

/// The core alone with two devices behind its queue, each with every second bio.
fn null_namespaces(depth: usize, mut clock: impl FnMut() -> u64) -> impl Round {
    let config = HwQueueConfig { depth, bios_max: depth, ..HwQueueConfig::default() };
    let driver = NullDevice::new(info(), NullConfig::default()).queue(depth);
    let mut queue = HwQueue::with_namespaces(driver, [0, 1].map(|_| Arc::new(info())).into(), config);
    queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![buffers(depth)])));
    let (mut free, mut places) = (bios(depth), RandomOffsets::new());
    move || {
        let now_ns = clock();
        let ended = queue.reap(&mut (), now_ns, &mut |bio| free.push(bio));
        for mut bio in free.drain(..) {
            fill(&mut bio, &mut places);
            bio.namespace = (bio.cookie % 2) as u16;
            queue.submit(bio);
        }
        queue.issue(&mut (), now_ns);
        ended as u64
    }
}

/// Two null devices as paths to one disk.
fn paths(policy: &str) -> String {
    format!("multipath:{NULL},{NULL}?unidentified=on&policy={policy}")
}

/// A device as users have it: opened by its name, its queues like those of any other kind.
fn device(name: &str, depth: usize) -> impl Round + use<> {
    let device = Device::open(name).unwrap_or_else(|error| panic!("{error}"));
    let driver = device.queue(QueueKind::Default, depth.max(2)).unwrap_or_else(|error| panic!("{error}"));
    let ring = Ring::new(RingConfig::default()).unwrap_or_else(|error| panic!("{error}"));
    Load::on(ring, driver, device.info(), buffers(depth), depth, true, clock())
}

/// Driver and server on one thread, over a socket.
fn together(queues: usize, depth: usize, packed: bool) -> impl Round {
    one_core(queues, depth, packed, clock).unwrap_or_else(|why| panic!("a session with ourselves: {why}"))
}

/// A clock that advances by a microsecond with each read.
fn clock() -> impl FnMut() -> u64 {
    let mut now_ns = 0;
    move || {
        now_ns += 1000;
        now_ns
    }
}

const BATCH: u16 = 32;
const RING_SIZE: u16 = 128;

/// The device's side of a virtqueue of 4 KiB reads: fetch, complete and publish; with requests also the parsing of the
/// header and the writing of the status. The driver only moves its index.
struct RingCost {
    guest: ModelGuest,
    device: DeviceRing,
    chain: Chain,
    bio: Box<Bio>,
    offered: u16,
    requests: bool,
}

impl RingCost {
    fn new(indirect: bool, requests: bool) -> RingCost {
        let mut guest = ModelGuest::new(RING_SIZE, 1 << 21, true);
        // As many chains as the ring has descriptors for, with their heads in the available ring, repeatedly.
        let chains = if indirect { RING_SIZE } else { BATCH };
        let heads: Vec<u16> = (0..chains).map(|sector| read_4k(&mut guest, indirect, u64::from(sector))).collect();
        let device = guest.device(true);
        (0..RING_SIZE).for_each(|index| guest.offer(heads[usize::from(index % chains)]));
        RingCost { guest, device, chain: Chain::new(130), bio: Bio::with_capacity(130), offered: 0, requests }
    }
}

impl Round for RingCost {
    fn round(&mut self) -> u64 {
        let RingCost { guest, device, chain, bio, offered, requests } = self;
        let context = ParseContext { features: Features::all(), write_back: true };
        *offered = offered.wrapping_add(BATCH);
        guest.layout().avail.store_u16(2, *offered, Release);
        let mut ios = 0;
        while let Ok(Some(head)) = device.fetch(guest.memory(), chain) {
            if *requests {
                let Parsed::Io { status_at } = parse(chain, guest.memory(), &context, bio) else { break };
                black_box(&mut *bio);
                write_status(guest.memory(), status_at, VirtioStatus::Ok);
                device.complete(head, written(bio.bytes(), VirtioStatus::Ok));
            } else {
                black_box(&mut *chain);
                device.complete(head, 4097);
            }
            ios += 1;
        }
        black_box(device.publish());
        ios
    }
}

fn read_4k(guest: &mut ModelGuest, indirect: bool, sector: u64) -> u16 {
    // Header and status share a line, as in Linux's driver.
    let request = guest.alloc(64, 64);
    guest.write(request, &blk_header(0, sector));
    let buffers = [
        ModelBuffer { addr: request, len: 16, writable: false },
        ModelBuffer { addr: guest.alloc(4096, 4096), len: 4096, writable: true },
        ModelBuffer { addr: request + 16, len: 1, writable: true },
    ];
    let head = if indirect {
        let table = guest.alloc(48, 16);
        guest.chain_indirect(table, &buffers)
    } else {
        guest.chain(&buffers)
    };
    let Some(head) = head else { panic!("the ring has no descriptors for {sector} requests") };
    head
}
