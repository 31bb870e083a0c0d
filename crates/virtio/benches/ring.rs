//! Cost of the device's side of a ring per request: 4 KiB reads, in batches.
//!
//! One thread, all data in its cache: the floor, without the cache-line transfers of a second core. The driver prepares
//! its chains once; within the measurement it only moves its index. The 10th percentile of many short windows is shown,
//! since a shared machine only adds time.
//!
//! `walk` is fetch, complete and publish; `request` also parses the header and writes the status.

use std::hint::black_box;
use std::time::{Duration, Instant};

use blkyard_mq::Bio;
use blkyard_virtio::driver_model::{ModelBuffer, ModelGuest, blk_header};
use blkyard_virtio::{Chain, Features, ParseContext, Parsed, VirtioStatus, parse, write_status, written};

const SIZE: u16 = 128;
/// Requests in one window.
const WINDOW: u32 = 4096;
const RUN: Duration = Duration::from_millis(400);

fn main() {
    println!("four dependent multiplications and additions take {:.1} ns here", multiply());
    println!("{:<10} {:<9} {:>6} {:>12} {:>12}", "chain", "event idx", "batch", "walk ns", "request ns");
    for indirect in [true, false] {
        for event_idx in [true, false] {
            for batch in [1, 8, 32] {
                let walk = measure(indirect, event_idx, batch, false);
                let request = measure(indirect, event_idx, batch, true);
                let chain = if indirect { "indirect" } else { "direct 3" };
                println!("{chain:<10} {event_idx:<9} {batch:>6} {walk:>12.1} {request:>12.1}");
            }
        }
    }
}

/// How fast the machine is just now: 16 cycles on most.
fn multiply() -> f64 {
    let mut windows = Vec::new();
    let mut x = black_box(3_u64);
    for _ in 0..1000 {
        let start = Instant::now();
        for _ in 0..4096 {
            x = black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1));
        }
        windows.push(start.elapsed().as_nanos() as f64 / 1024.0);
    }
    black_box(x);
    windows.sort_by(f64::total_cmp);
    windows[windows.len() / 10]
}

fn measure(indirect: bool, event_idx: bool, batch: u16, requests: bool) -> f64 {
    let mut guest = ModelGuest::new(SIZE, 1 << 21, event_idx);
    // As many chains as the ring has descriptors for, with their heads in the available ring, repeatedly.
    let chains = if indirect { SIZE } else { 32 };
    let heads: Vec<u16> = (0..chains).map(|sector| read_4k(&mut guest, indirect, u64::from(sector))).collect();
    let mut ring = guest.device(true);
    for index in 0..SIZE {
        guest.offer(heads[usize::from(index % chains)]);
    }
    let memory = guest.memory().clone();
    let avail = guest.layout().avail.clone();
    let mut chain = Chain::new(130);
    let mut bio = Bio::with_capacity(130);
    let context = ParseContext { features: Features::all(), write_back: true };
    let mut published = 0_u16;
    let mut calls = 0_u64;
    let mut windows = Vec::new();
    let end = Instant::now() + RUN;
    while Instant::now() < end {
        let start = Instant::now();
        for _ in 0..WINDOW / u32::from(batch) {
            published = published.wrapping_add(batch);
            avail.store_u16(2, published, std::sync::atomic::Ordering::Release);
            while let Some(head) = ring.fetch(&memory, &mut chain).unwrap() {
                if requests {
                    let Parsed::Io { status_at } = parse(&chain, &memory, &context, &mut bio) else { unreachable!() };
                    black_box(&mut bio);
                    write_status(&memory, status_at, VirtioStatus::Ok);
                    ring.complete(head, written(bio.bytes(), VirtioStatus::Ok));
                } else {
                    black_box(&mut chain);
                    ring.complete(head, 4097);
                }
            }
            calls += u64::from(ring.publish());
        }
        windows.push(start.elapsed().as_nanos() as f64 / f64::from(WINDOW));
    }
    black_box(calls);
    windows.sort_by(f64::total_cmp);
    windows[windows.len() / 10]
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
    head.expect("there are descriptors for it")
}
