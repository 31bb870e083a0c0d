//! A virtqueue of any kind, split or packed, in a guest's shared memory; each request has a separate slot there.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use blkyard_mem::View;
use blkyard_virtio::driver_model::{ModelBuffer, RingDriver, blk_header};
use blkyard_virtio::{Features, RingLayout, packed_ring_bytes, ring_bytes};

use super::raw::{Request, addresses, state};
use super::{Data, Front, PATIENCE, Ram, event, readable, ring, rung};

/// Bytes one virtqueue takes with all its requests, of up to 1024.
pub const LINE_BYTES: u64 = 8 << 20;
/// Bytes of a request's data, at most.
pub const PAGE: u64 = 4096;
const HEADERS: u64 = 0x8000;
const HEADER: u64 = 32;
const TABLES: u64 = 0x1_0000;
const TABLE: u64 = 48;
const DATA: u64 = 0x2_0000;

/// The driver's side of one virtqueue. Request number `slot` has its slot for any descriptors.
pub struct Line {
    pub ram: Arc<Ram>,
    pub size: u16,
    pub features: Features,
    driver: RingDriver,
    at: u64,
    places: [u64; 3],
    slots: HashMap<u32, u16>,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
}

/// All kinds of rings: packed, with event indexes, in order, each or not.
pub fn kinds() -> Vec<Features> {
    let bits = [Features::RING_PACKED, Features::EVENT_IDX, Features::IN_ORDER];
    let kind =
        |kind: usize| (0..3).filter(|bit| kind >> bit & 1 == 1).fold(Features::empty(), |all, bit| all | bits[bit]);
    (0..8).map(kind).collect()
}

impl Line {
    /// The `number`-th virtqueue in this memory, which is zero there.
    pub fn new(ram: &Arc<Ram>, number: u64, size: u16, features: Features) -> Line {
        let at = number * LINE_BYTES;
        let places = [at, at + 0x4000, at + 0x5000];
        let bytes = if features.contains(Features::RING_PACKED) { packed_ring_bytes(size) } else { ring_bytes(size) };
        let view =
            |part: usize| View::new(Arc::clone(&ram.region), places[part], bytes[part].0, bytes[part].1).unwrap();
        let layout = RingLayout { desc: view(0), avail: view(1), used: view(2) };
        Line {
            driver: RingDriver::new(layout, size, features),
            ram: Arc::clone(ram),
            size,
            features,
            at,
            places,
            slots: HashMap::new(),
            kick: event(),
            call: event(),
            err: event(),
        }
    }

    /// Guest addresses of the ring's parts.
    pub fn guest_addrs(&self) -> [u64; 3] {
        self.places.map(|place| self.ram.guest_addr + place)
    }

    pub fn status_at(&self, slot: u16) -> u64 {
        self.at + HEADERS + u64::from(slot) * HEADER + 16
    }

    pub fn data_at(&self, slot: u16) -> u64 {
        self.at + DATA + u64::from(slot) * PAGE
    }

    /// Builds a request, of descriptors in the ring or in an indirect table, and offers it. False if the ring is full.
    pub fn put(&mut self, slot: u16, kind: u32, sector: u64, data: Data<'_>, indirect: bool) -> bool {
        let header = self.status_at(slot) - 16;
        self.ram.write(header, &blk_header(kind, sector));
        self.ram.write(header + 16, &[0xff]);
        let guest = |at: u64| self.ram.guest_addr + at;
        let mut buffers = vec![ModelBuffer { addr: guest(header), len: 16, writable: false }];
        let at = self.data_at(slot);
        match data {
            Data::None => {}
            Data::Out(bytes) => {
                self.ram.write(at, bytes);
                buffers.push(ModelBuffer { addr: guest(at), len: bytes.len() as u32, writable: false });
            }
            Data::In(len) => buffers.push(ModelBuffer { addr: guest(at), len, writable: true }),
        }
        buffers.push(ModelBuffer { addr: guest(header + 16), len: 1, writable: true });
        let chain = if indirect {
            let table = self.at + TABLES + u64::from(slot) * TABLE;
            self.ram.write(table, &self.driver.table(&buffers));
            self.driver.chain_indirect(guest(table), &buffers)
        } else {
            self.driver.chain(&buffers)
        };
        let Some(head) = chain else { return false };
        self.driver.offer(head);
        self.slots.insert(head.into(), slot);
        true
    }

    /// Publishes offered chains, and kicks the device if it wants that.
    pub fn publish(&mut self) {
        if self.driver.publish() {
            ring(&self.kick);
        }
    }

    /// The next request that has come back, if there is one: slot and bytes.
    pub fn poll(&mut self) -> Option<(u16, u32)> {
        let (head, written) = self.driver.poll()?;
        Some((self.slots.remove(&head).expect("it was offered"), written))
    }

    /// Sleeps until a request comes back, as a driver does: by the call descriptor alone.
    pub fn wait_used(&mut self) -> (u16, u32) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(request) = self.poll() {
                return request;
            }
            if !self.driver.enable_calls() {
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(readable(&self.call, left), "the guest was not called within {PATIENCE:?}");
                rung(&self.call);
            }
        }
    }

    /// Runs this number of requests of one kind, of one sector each from `sector` on, as many at a time as the ring
    /// takes. `seed` makes the data unique.
    pub fn all(&mut self, requests: u16, sector: u64, kind: u32, seed: u64) {
        let (mut next, mut out) = (0, 0);
        let bytes = |slot: u16| (seed << 16 | u64::from(slot)).to_le_bytes().repeat(64);
        while next < requests || out > 0 {
            // Direct and indirect in turn, while there is room for three.
            while next < requests {
                let written = bytes(next);
                let data = if kind == super::kind::IN { Data::In(512) } else { Data::Out(&written) };
                let direct = next.is_multiple_of(2) && self.size >= 3;
                if !self.put(next, kind, sector + u64::from(next), data, !direct) {
                    break;
                }
                next += 1;
                out += 1;
            }
            self.publish();
            let (slot, _) = self.wait_used();
            out -= 1;
            assert_eq!(self.ram.read(self.status_at(slot), 1), [0], "request {slot}");
            if kind == super::kind::IN {
                assert_eq!(self.ram.read(self.data_at(slot), 512), bytes(slot), "sector {slot} of {sector} on");
            }
        }
    }

    /// Sets the ring up at its current position, with the log's flag or not, and starts it.
    pub fn start(&self, front: &Front, index: u32, logged: bool) {
        let raw = &front.raw;
        assert!(raw.accepts(Request::SetVringNum, &state(index, self.size.into()), &[]));
        assert!(raw.accepts(Request::SetVringBase, &state(index, self.driver.base().bits()), &[]));
        self.set_addresses(front, index, logged);
        for (request, fd) in [
            (Request::SetVringCall, &self.call),
            (Request::SetVringErr, &self.err),
            (Request::SetVringKick, &self.kick),
        ] {
            assert!(front.set_event(request, index as usize, Some(fd)));
        }
        assert!(raw.accepts(Request::SetVringEnable, &state(index, 1), &[]));
    }

    /// Sends the ring's addresses, and whether writes to it are to be logged.
    pub fn set_addresses(&self, front: &Front, index: u32, logged: bool) {
        let mut payload = addresses(index, self.places.map(|place| self.ram.user_addr + place));
        payload[4] = u8::from(logged);
        payload[32..].copy_from_slice(&self.guest_addrs()[2].to_ne_bytes());
        assert!(front.raw.accepts(Request::SetVringAddr, &payload, &[]));
    }

    /// Stops the ring, and checks that the reported position is the driver's.
    pub fn stop(&self, front: &Front, index: u32) {
        let answer = front.raw.ask(Request::GetVringBase, &state(index, 0), &[]).unwrap();
        let base = u32::from_ne_bytes(answer[4..].try_into().unwrap());
        assert_eq!(base, self.driver.base().bits(), "the ring stands somewhere else");
    }
}
