//! The necessary work of a queue core, and no other: the floor for `core-null`.
//!
//! Takes a slot, fills a request, passes its number to a null device, collects it, looks the request up, counts it,
//! frees the slot. No limits, no splitting, no owner to return the I/O to, no error. Private memory of one thread.

use blkyard_os::Clock;

use super::windows::Round;
use super::{IO_BYTES, RandomOffsets};

/// When the mock reads the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stamps {
    /// Never, without counters.
    None,
    /// Once for each batch.
    Batch,
    /// Twice for each I/O: at its begin and end.
    Io,
}

#[derive(Clone, Copy, Default)]
struct MockRequest {
    sector: u64,
    start_ns: u64,
    offset: u64,
    len: u32,
    op: u8,
    in_flight: bool,
}

/// Requests of the mock are reads from a device of this many blocks, 1 GiB.
const BLOCKS: u32 = (1 << 30) / IO_BYTES;
/// Slots, and the largest batch. A power of two, so that a mask replaces the bounds check.
const PLACES: usize = 32;
const MASK: usize = PLACES - 1;
const SUB_BITS: u32 = 5;

/// See the head of this module.
pub struct Mock {
    batch: usize,
    stamps: Stamps,
    clock: Clock,
    /// Free slots, as a stack.
    free: [u8; PLACES],
    /// Requests passed to the device, and returned.
    ring: [u8; PLACES],
    done: usize,
    requests: [MockRequest; PLACES],
    places: RandomOffsets,
    /// Reads of the device, so that the writes are not optimised away.
    seen: u64,
    ios: u64,
    bytes: u64,
    sum_ns: u64,
    latency: Box<[u64]>,
}

impl Mock {
    /// One that goes round in batches, of 32 at most.
    pub fn new(batch: u16, stamps: Stamps) -> Mock {
        Mock {
            batch: usize::from(batch).min(PLACES),
            stamps,
            clock: Clock::new(),
            free: std::array::from_fn(|place| place as u8),
            ring: [0; PLACES],
            done: 0,
            requests: [MockRequest::default(); PLACES],
            places: RandomOffsets::new(),
            seen: 0,
            ios: 0,
            bytes: 0,
            sum_ns: 0,
            latency: vec![0; (64 - SUB_BITS as usize + 1) << SUB_BITS].into(),
        }
    }

    #[inline]
    fn count(&mut self, latency_ns: u64, ios: u64, bytes: u64) {
        self.ios += ios;
        self.bytes += bytes;
        self.sum_ns += latency_ns * ios;
        let shift = (latency_ns | 1).ilog2().saturating_sub(SUB_BITS);
        self.latency[((shift as usize) << SUB_BITS) + (latency_ns >> shift) as usize] += ios;
    }

    /// Looks up completed requests and frees their slots.
    #[inline]
    fn reap(&mut self, now_ns: u64) {
        let (mut run_ns, mut ios, mut bytes) = (0, 0, 0);
        let free = self.batch - self.done;
        for index in 0..self.done {
            let place = self.ring[index & MASK];
            let request = &mut self.requests[usize::from(place) & MASK];
            assert!(request.in_flight, "a place was given back twice");
            request.in_flight = false;
            let (start_ns, len) = (request.start_ns, u64::from(request.len));
            self.free[(free + index) & MASK] = place;
            match self.stamps {
                Stamps::None => {}
                Stamps::Batch if run_ns == start_ns => (ios, bytes) = (ios + 1, bytes + len),
                Stamps::Batch => {
                    if ios > 0 {
                        self.count(now_ns - run_ns, ios, bytes);
                    }
                    (run_ns, ios, bytes) = (start_ns, 1, len);
                }
                Stamps::Io => self.count(self.clock.now_ns().saturating_sub(start_ns), 1, len),
            }
        }
        if ios > 0 {
            self.count(now_ns - run_ns, ios, bytes);
        }
    }

    /// Fills a request for each slot.
    #[inline]
    fn submit(&mut self, now_ns: u64) {
        for index in 0..self.batch {
            let place = self.free[(self.batch - 1 - index) & MASK];
            let start_ns = if self.stamps == Stamps::Io { self.clock.now_ns() } else { now_ns };
            let offset = u64::from(place) * u64::from(IO_BYTES);
            let sector = self.places.next(BLOCKS) * u64::from(IO_BYTES / 512);
            self.requests[usize::from(place) & MASK] =
                MockRequest { sector, start_ns, offset, len: IO_BYTES, op: 0, in_flight: true };
            self.ring[index & MASK] = place;
        }
    }

    /// Reads its requests.
    #[inline]
    fn device(&mut self) {
        for index in 0..self.batch {
            let request = &self.requests[usize::from(self.ring[index & MASK]) & MASK];
            self.seen ^= request.sector ^ request.offset ^ u64::from(request.op);
        }
        self.done = self.batch;
    }
}

impl Round for Mock {
    #[inline]
    fn round(&mut self) -> u64 {
        let now_ns = if self.stamps == Stamps::Batch { self.clock.now_ns() } else { 0 };
        let ended = self.done as u64;
        self.reap(now_ns);
        self.submit(now_ns);
        self.device();
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mock_counts_every_io_once() {
        for stamps in [Stamps::Batch, Stamps::Io] {
            let mut mock = Mock::new(8, stamps);
            let ended: u64 = (0..11).map(|_| mock.round()).sum();
            assert_eq!((ended, mock.ios, mock.bytes), (80, 80, 80 * u64::from(IO_BYTES)), "{stamps:?}");
            assert_eq!(mock.latency.iter().sum::<u64>(), 80);
        }
        let mut mock = Mock::new(8, Stamps::None);
        assert_eq!((0..11).map(|_| mock.round()).sum::<u64>(), 80);
        assert_eq!(mock.ios, 0);
    }
}
