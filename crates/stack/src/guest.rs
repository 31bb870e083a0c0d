//! The client: a guest's driver, which writes real virtio rings in its memory and judges what comes back.
//!
//! Its memory outlives daemons: rings, data, and the record of requests in flight that the front-end keeps.

use std::sync::Arc;

use blkyard_export::VirtqueueSetup;
use blkyard_mem::Region;
use blkyard_sim::Rng;
use blkyard_virtio::driver_model::{ModelBuffer, ModelGuest, blk_header};
use blkyard_virtio::{Features, Inflight, inflight_bytes};

use crate::medium::SECTOR;
use crate::network::fold;
use crate::oracle::{DataOracle, FlushCover, ReadBounds, fill};

/// Requests of a ring in flight, at most.
const SLOTS: usize = 8;
/// Entries of a ring: three descriptors for each request.
const RING_SIZE: u16 = 32;
/// Sectors of a block, and blocks of the longest request.
pub(crate) const BLOCK: usize = 8;
const BLOCKS_MAX: u64 = 4;
const BUFFER_BYTES: u32 = BLOCKS_MAX as u32 * (BLOCK * SECTOR) as u32;

/// Requests submitted at one time, at most.
const BURST_MAX: u64 = 6;

/// Kinds of requests of virtio-blk. [5.2.6]
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;

#[derive(Debug)]
enum Judgement {
    Read(ReadBounds),
    Write(u64),
    Flush(FlushCover),
}

#[derive(Debug)]
struct Submitted {
    head: u16,
    sector: usize,
    sectors: usize,
    judgement: Judgement,
    at_ns: u64,
}

#[derive(Debug)]
struct GuestSlot {
    header: u64,
    data: u64,
    status: u64,
    io: Option<Submitted>,
}

#[derive(Debug)]
struct GuestRing {
    guest: ModelGuest,
    record: Inflight,
    slots: Vec<GuestSlot>,
}

/// The guest.
#[derive(Debug)]
pub(crate) struct WorldGuest {
    rng: Rng,
    features: Features,
    rings: Vec<GuestRing>,
    pub(crate) oracle: DataOracle,
    blocks: u64,
    blocks_max: u64,
    pub(crate) is_write_through: bool,
    /// Time of the next submission; unset once there is none.
    pub(crate) next_ns: Option<u64>,
    /// Mean time between two submissions, ns.
    pause_ns: u64,
    pub(crate) submitted: u64,
    pub(crate) ended: u64,
    pub(crate) failed: u64,
    pub(crate) longest_ns: u64,
    trace: u64,
}

impl WorldGuest {
    pub(crate) fn new(mut rng: Rng, rings: usize, blocks: u64, blocks_max: u64, is_write_through: bool) -> WorldGuest {
        let mut features = Features::VERSION_1 | Features::FLUSH;
        features.set(Features::RING_PACKED, rng.below(2) == 0);
        features.set(Features::EVENT_IDX, rng.below(2) == 0);
        let bytes = inflight_bytes(features, RING_SIZE);
        let ring = |_| {
            let mut guest = ModelGuest::with(features, RING_SIZE, SLOTS * (BUFFER_BYTES as usize + 8192));
            let slot = |_| GuestSlot {
                header: guest.alloc(16, 16),
                data: guest.alloc(BUFFER_BYTES, 4096),
                status: guest.alloc(1, 1),
                io: None,
            };
            let slots = (0..SLOTS).map(slot).collect();
            let region = Region::anonymous(bytes).expect("memory for a record");
            let record = Inflight::new(region, 0, bytes).expect("a region has room for its record");
            GuestRing { guest, record, slots }
        };
        WorldGuest {
            features,
            rings: (0..rings).map(ring).collect(),
            oracle: DataOracle::new(blocks as usize * BLOCK, is_write_through),
            blocks,
            blocks_max: blocks_max.min(BLOCKS_MAX),
            is_write_through,
            next_ns: Some(0),
            pause_ns: 1,
            submitted: 0,
            ended: 0,
            failed: 0,
            longest_ns: 0,
            trace: 0,
            rng,
        }
    }

    pub(crate) fn trace(&self) -> u64 {
        self.trace
    }

    /// Sets the mean time for one request, ns: they come in bursts.
    pub(crate) fn set_pause(&mut self, each_ns: u64) {
        self.pause_ns = 1 + each_ns * (1 + BURST_MAX) / 2;
    }

    pub(crate) fn rings(&self) -> usize {
        self.rings.len()
    }

    /// Set-up of a ring, for a daemon.
    pub(crate) fn setup(&self, ring: usize) -> VirtqueueSetup {
        let GuestRing { guest, record, .. } = &self.rings[ring];
        let (memory, layout) = (guest.memory(), (guest.layout(), RING_SIZE));
        VirtqueueSetup::of_ring("ring", memory, layout, self.features, Some(record.clone()), !self.is_write_through)
            .expect("descriptors for a ring")
    }

    /// Exchanges two requests in the record of a split ring, so that a daemon submits them in another order.
    pub(crate) fn disorder(&mut self) {
        if self.features.contains(Features::RING_PACKED) {
            return;
        }
        for ring in &self.rings {
            let region: &Arc<Region> = ring.record.region();
            let mut counters: Vec<(u64, u64)> = Vec::new();
            for entry in 0..u64::from(RING_SIZE) {
                let mut bytes = [0; 16];
                let Some(span) = region.span(16 + entry * 16, 16) else { return };
                span.copy_to_slice(&mut bytes);
                if bytes[0] == 1 {
                    counters.push((u64::from_le_bytes(std::array::from_fn(|at| bytes[8 + at])), entry));
                }
            }
            counters.sort_unstable();
            let reversed: Vec<u64> = counters.iter().rev().map(|(counter, _)| *counter).collect();
            for ((_, entry), counter) in counters.iter().zip(reversed) {
                if let Some(span) = region.span(16 + entry * 16 + 8, 8) {
                    span.copy_from_slice(&counter.to_le_bytes());
                }
            }
        }
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.rings.iter().flat_map(|ring| &ring.slots).filter(|slot| slot.io.is_some()).count()
    }

    /// When the oldest request in flight was submitted, ns.
    pub(crate) fn oldest_ns(&self) -> Option<u64> {
        let all = self.rings.iter().flat_map(|ring| &ring.slots).filter_map(|slot| slot.io.as_ref());
        all.map(|io| io.at_ns).min()
    }

    /// Submits what is due. Returns whether anything was.
    pub(crate) fn submit(&mut self, now_ns: u64) -> bool {
        let Some(next_ns) = self.next_ns.filter(|next_ns| *next_ns <= now_ns) else { return false };
        let burst = 1 + self.rng.below(BURST_MAX);
        self.next_ns = Some(next_ns.max(now_ns) + 1 + self.rng.below(2 * self.pause_ns));
        for _ in 0..burst {
            let ring = self.rng.below(self.rings.len() as u64) as usize;
            let blocks = 1 + self.rng.below(self.blocks_max);
            let first = self.rng.below(self.blocks - blocks + 1) as usize * BLOCK;
            let kind = match self.rng.below(8) {
                0 => FLUSH,
                1..4 => IN,
                _ => OUT,
            };
            self.submit_one(ring, kind, first, blocks as usize * BLOCK, now_ns);
        }
        true
    }

    /// Reads a block. False without a free slot.
    pub(crate) fn read_block(&mut self, block: u64, now_ns: u64) -> bool {
        self.submit_one(0, IN, block as usize * BLOCK, BLOCK, now_ns)
    }

    fn submit_one(&mut self, ring: usize, kind: u32, first: usize, sectors: usize, now_ns: u64) -> bool {
        let WorldGuest { rings, oracle, .. } = self;
        let GuestRing { guest, slots, .. } = &mut rings[ring];
        let Some(slot) = slots.iter_mut().find(|slot| slot.io.is_none()) else { return false };
        let len = (sectors * SECTOR) as u32;
        let header = ModelBuffer { addr: slot.header, len: 16, writable: false };
        let data = ModelBuffer { addr: slot.data, len, writable: kind == IN };
        let status = ModelBuffer { addr: slot.status, len: 1, writable: true };
        guest.write(slot.header, &blk_header(kind, first as u64));
        guest.write(slot.status, &[0xff]);
        let (buffers, judgement) = match kind {
            FLUSH => (vec![header, status], Judgement::Flush(oracle.flush())),
            IN => {
                guest.write(slot.data, &vec![0xee; len as usize]);
                (vec![header, data, status], Judgement::Read(oracle.read(first, sectors)))
            }
            _ => {
                if !oracle.may_write(first, sectors) {
                    return false;
                }
                let version = oracle.write(first, sectors);
                let mut bytes = vec![0; len as usize];
                for (at, bytes) in bytes.chunks_exact_mut(SECTOR).enumerate() {
                    fill(bytes, (first + at) as u64, version);
                }
                guest.write(slot.data, &bytes);
                (vec![header, data, status], Judgement::Write(version))
            }
        };
        let head = guest.chain(&buffers).expect("each slot has descriptors");
        guest.offer(head);
        let _ = guest.publish();
        slot.io = Some(Submitted { head, sector: first, sectors, judgement, at_ns: now_ns });
        self.submitted += 1;
        self.trace = fold(self.trace, [now_ns, u64::from(kind), first as u64, sectors as u64]);
        true
    }

    /// Takes what has come back, and judges it. Returns whether anything has.
    pub(crate) fn reap(&mut self, now_ns: u64) -> bool {
        let WorldGuest { rings, oracle, trace, ended, failed, longest_ns, .. } = self;
        let mut is_busy = false;
        for GuestRing { guest, slots, .. } in rings {
            while let Some((head, _)) = guest.poll() {
                is_busy = true;
                let its = |slot: &&mut GuestSlot| slot.io.as_ref().is_some_and(|io| u32::from(io.head) == head);
                let slot = slots.iter_mut().find(its).expect("what comes back was submitted, and comes once");
                let Some(io) = slot.io.take() else { unreachable!("found with it") };
                let status = guest.read(slot.status, 1)[0];
                *trace = fold(*trace, [now_ns, u64::from(head), u64::from(status)]);
                *ended += 1;
                *longest_ns = (*longest_ns).max(now_ns - io.at_ns);
                let is_ok = status == 0;
                *failed += u64::from(!is_ok);
                assert!(status <= 1, "a request ended with status {status}");
                match &io.judgement {
                    Judgement::Write(version) => oracle.written(io.sector, io.sectors, *version, is_ok),
                    Judgement::Read(bounds) if is_ok => {
                        oracle.check(io.sector, &guest.read(slot.data, io.sectors * SECTOR), bounds);
                    }
                    Judgement::Flush(cover) if is_ok => oracle.flushed(cover),
                    Judgement::Read(_) | Judgement::Flush(_) => {}
                }
            }
        }
        is_busy
    }
}
