//! Limits of one thread and its kernel: copies, the clock, a locked instruction, system calls, a wake-up.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use blkyard_mem::Region;
use blkyard_os::{Clock, NopRing, cache_bytes, now_ns};
use blkyard_sys::BlockingEventFd;

use super::cpus::{partner_cpu, pin_to};
use super::windows::{Variant, for_a_window, variant};
use super::{IO_BYTES, RandomOffsets};

/// Source of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum From {
    L2,
    L3,
    Dram,
}

/// Beyond any last-level cache, so that the copy comes from memory, as it would on a disk's worth of data.
pub const STORE_BYTES: u64 = 1 << 30;
/// Default cache sizes where the system does not report them.
const L2_BYTES: u64 = 1 << 20;
const L3_BYTES: u64 = 16 << 20;
/// Buffers that are copied into, in turn.
const BUFFERS: u64 = 16;

impl From {
    /// A part of the cache, since others use it too; for the third level still several times the second.
    fn bytes(self) -> u64 {
        let l2 = cache_bytes(2).unwrap_or(L2_BYTES);
        match self {
            From::L2 => l2 / 4,
            From::L3 => (cache_bytes(3).unwrap_or(L3_BYTES) / 4).max(l2 * 4),
            From::Dram => STORE_BYTES,
        }
    }
}

/// When the next source is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyOrder {
    /// When it is its turn, as with one request at a time.
    Unknown,
    /// One copy before, as with many: it is fetched meanwhile.
    Known,
}

/// Copies 4 KiB from a random position into one of a few buffers, like a read from memory.
pub(super) fn copy(from: From, known: CopyOrder) -> Result<Variant<'static>, String> {
    let store = touched(from.bytes())?;
    let buffers = touched(BUFFERS * u64::from(IO_BYTES))?;
    let blocks = (store.len() / IO_BYTES as usize) as u32;
    let mut places = RandomOffsets::new();
    let mut next = places.next(blocks);
    Ok(variant(move || {
        for buffer in 0..BUFFERS {
            let place = std::mem::replace(&mut next, places.next(blocks));
            let block = |place| store.span(place * u64::from(IO_BYTES), IO_BYTES as usize);
            let next = block(next).filter(|_| known == CopyOrder::Known).unwrap_or_default();
            let to = buffers.span(buffer * u64::from(IO_BYTES), IO_BYTES as usize);
            if let (Some(from), Some(to)) = (block(place), to) {
                to.copy_from_and_fetch(&from, &next);
            }
        }
        BUFFERS
    }))
}

/// Memory with every page written, so that none is the shared page of zeroes; in huge pages, if available.
///
/// # Errors
/// It cannot be mapped.
pub fn touched(bytes: u64) -> Result<Arc<Region>, String> {
    let region = Region::anonymous(bytes as usize)
        .map_err(|error| format!("{bytes} bytes of memory cannot be mapped: {error}"))?;
    region.prefer_huge_pages();
    if let Some(all) = region.span(0, region.len()) {
        all.fill(0xa5);
    }
    Ok(region)
}

/// One reading of the clock that everything here is timed by.
pub(super) fn clock() -> Variant<'static> {
    readings(now_ns)
}

/// One reading of the clock that a lane has.
pub(super) fn lane_clock() -> Variant<'static> {
    let clock = Clock::new();
    readings(move || clock.now_ns())
}

fn readings(clock: impl Fn() -> u64 + 'static) -> Variant<'static> {
    variant(move || {
        (0..32).for_each(|_| {
            black_box(clock());
        });
        32
    })
}

/// One locked addition to a word without other users.
pub(super) fn locked_add() -> Variant<'static> {
    let word = AtomicU64::new(0);
    variant(move || {
        (0..32).for_each(|_| {
            black_box(word.fetch_add(1, Relaxed));
        });
        32
    })
}

/// One no-op entry of an io_uring, in calls of `batch`.
pub(super) fn nops(batch: usize) -> Result<Variant<'static>, String> {
    let mut ring = NopRing::new(batch as u32).map_err(|error| error.to_string())?;
    if ring.round(batch) != batch {
        return Err("io_uring does not complete operations that do nothing".into());
    }
    Ok(variant(move || ring.round(batch) as u64))
}

/// From signalling the eventfd of a sleeping thread to its being awake: half of there and back, between two CPUs.
pub(super) fn wake_up() -> Result<Variant<'static>, String> {
    let cpu = partner_cpu()?;
    let eventfd = || BlockingEventFd::new().map_err(|error| format!("no event descriptor: {error}"));
    let (there, back) = (eventfd()?, eventfd()?);
    Ok(Box::new(move |window_ns| {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let partner = scope.spawn(|| {
                pin_to(cpu);
                while there.wait() && !over.load(Relaxed) {
                    back.signal();
                }
            });
            let cost = for_a_window(window_ns, || 2 * u64::from(there.signal() && back.wait()));
            // Heard by the partner in its last round, and not answered: both descriptors are at zero again.
            over.store(true, Relaxed);
            let rang = there.signal();
            if rang && partner.join().is_ok() { cost } else { f64::NAN }
        })
    }))
}
