//! A guest in its shared memory: a file, and virtqueues with requests in fixed slots.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::Instant;

use blkyard_mem::{Region, View};
use blkyard_virtio::driver_model::{Descriptor, blk_header};
use blkyard_virtio::ring_bytes;
use rustix::fs::MemfdFlags;

use super::{PATIENCE, event, readable, ring, rung};

/// Request types.
pub mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Memory shared with an export.
pub struct Ram {
    pub file: OwnedFd,
    pub region: Arc<Region>,
    /// As the guest and the front-end see it.
    pub guest_addr: u64,
    pub user_addr: u64,
    pub len: u64,
}

impl Ram {
    /// At the address of a guest's first memory.
    pub fn new(len: u64) -> Arc<Ram> {
        Ram::at(0x10_0000, len)
    }

    pub fn at(guest_addr: u64, len: u64) -> Arc<Ram> {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        let region = Region::map_file(file.as_fd(), 0, len).unwrap();
        Arc::new(Ram { file, region, guest_addr, user_addr: guest_addr + 0x7f00_0000_0000, len })
    }

    pub fn truncate(&self, len: u64) {
        rustix::fs::ftruncate(&self.file, len).unwrap();
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.region.span(at, bytes.len()).unwrap().copy_from_slice(bytes);
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.span(at, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    /// As the messages have it: guest address, size, user address, offset in the file.
    pub fn words(&self) -> [u64; 4] {
        [self.guest_addr, self.len, self.user_addr, 0]
    }
}

/// Data of a request.
#[derive(Clone, Copy)]
pub enum Data<'a> {
    None,
    Out(&'a [u8]),
    In(u32),
}

/// Bytes of a request's data, at most.
pub const DATA_MAX: u64 = 8192;
/// Bytes one virtqueue takes, with all its requests.
pub const VQ_BYTES: u64 = 1 << 20;
const DATA: u64 = 128 << 10;
const HEADERS: u64 = 64 << 10;
const HEADER: u64 = 32;

/// The driver's side of one virtqueue. Request number `slot` uses descriptors 3·slot and the two after it.
pub struct Vq {
    pub ram: Arc<Ram>,
    at: u64,
    pub size: u16,
    pub desc: View,
    pub avail: View,
    pub used: View,
    pub event_idx: bool,
    pub next_avail: u16,
    pub used_seen: u16,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub err: OwnedFd,
    places: [u64; 3],
}

impl Vq {
    /// A virtqueue of 64 entries, the `number`-th in this memory.
    pub fn new(ram: &Arc<Ram>, number: u64) -> Vq {
        Vq::sized(ram, number, 64)
    }

    pub fn sized(ram: &Arc<Ram>, number: u64, size: u16) -> Vq {
        let at = number * VQ_BYTES;
        let bytes = ring_bytes(size);
        let places = [at, at + 24 * 1024, at + 32 * 1024];
        let view =
            |part: usize| View::new(Arc::clone(&ram.region), places[part], bytes[part].0, bytes[part].1).unwrap();
        Vq {
            at,
            size,
            desc: view(0),
            avail: view(1),
            used: view(2),
            event_idx: false,
            next_avail: 0,
            used_seen: 0,
            kick: event(),
            call: event(),
            err: event(),
            places,
            ram: Arc::clone(ram),
        }
    }

    /// Front-end addresses of descriptors, available and used ring.
    pub fn user_addrs(&self) -> [u64; 3] {
        self.places.map(|place| self.ram.user_addr + place)
    }

    /// Requests that fit at one time.
    pub fn slots(&self) -> u16 {
        self.size / 3
    }

    /// Where a request's header, status and data are in the memory.
    pub fn header_at(&self, slot: u16) -> u64 {
        self.at + HEADERS + u64::from(slot) * HEADER
    }

    pub fn status_at(&self, slot: u16) -> u64 {
        self.header_at(slot) + 16
    }

    pub fn data_at(&self, slot: u16) -> u64 {
        self.at + DATA + u64::from(slot) * DATA_MAX
    }

    pub fn descriptor(&self, index: u16, descriptor: Descriptor) {
        self.ram.write(self.places[0] + u64::from(index) * 16, &descriptor.to_bytes());
    }

    /// Builds a request with its data in other memory than the ring; returns its head.
    pub fn build(&self, slot: u16, kind: u32, sector: u64, data: Data<'_>, data_ram: &Ram) -> u16 {
        let head = slot * 3;
        self.ram.write(self.header_at(slot), &blk_header(kind, sector));
        self.ram.write(self.status_at(slot), &[0xff]);
        let guest = |at: u64| self.ram.guest_addr + at;
        let (len, flags) = match data {
            Data::None => (0, 0),
            Data::Out(bytes) => {
                data_ram.write(self.data_at(slot), bytes);
                (bytes.len() as u32, 0)
            }
            Data::In(len) => (len, Descriptor::WRITE),
        };
        let next = if len == 0 { head + 2 } else { head + 1 };
        let link = Descriptor::NEXT;
        self.descriptor(head, Descriptor { addr: guest(self.header_at(slot)), len: 16, flags: link, next });
        let addr = data_ram.guest_addr + self.data_at(slot);
        self.descriptor(head + 1, Descriptor { addr, len, flags: flags | link, next: head + 2 });
        let status = Descriptor { addr: guest(self.status_at(slot)), len: 1, flags: Descriptor::WRITE, next: 0 };
        self.descriptor(head + 2, status);
        head
    }

    /// Builds a request and puts it into the available ring.
    pub fn put(&mut self, slot: u16, kind: u32, sector: u64, data: Data<'_>) {
        let head = self.build(slot, kind, sector, data, &Arc::clone(&self.ram));
        self.offer(head);
    }

    /// Puts any head into the available ring.
    pub fn offer(&mut self, head: u16) {
        self.avail.store_u16(4 + 2 * usize::from(self.next_avail & (self.size - 1)), head, Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Publishes offered chains, and kicks the device if it wants that.
    pub fn publish(&self) -> bool {
        let wanted = self.publish_silently();
        if wanted {
            ring(&self.kick);
        }
        wanted
    }

    /// Publishes offered chains; returns whether the device wants a kick.
    pub fn publish_silently(&self) -> bool {
        let old = self.avail.load_u16(2, Relaxed);
        self.avail.store_u16(2, self.next_avail, SeqCst);
        if self.event_idx {
            let event = self.used.load_u16(4 + 8 * usize::from(self.size), SeqCst);
            self.next_avail.wrapping_sub(event).wrapping_sub(1) < self.next_avail.wrapping_sub(old)
        } else {
            self.used.load_u16(0, SeqCst) & 1 == 0
        }
    }

    /// Whether the device asks for a kick with the next chain.
    pub fn wants_kick(&self) -> bool {
        if self.event_idx {
            self.used.load_u16(4 + 8 * usize::from(self.size), SeqCst) == self.next_avail
        } else {
            self.used.load_u16(0, SeqCst) & 1 == 0
        }
    }

    /// The next used element, if there is one: head and bytes.
    pub fn poll(&mut self) -> Option<(u32, u32)> {
        if self.used.load_u16(2, Acquire) == self.used_seen {
            return None;
        }
        let place = 4 + 8 * usize::from(self.used_seen & (self.size - 1));
        self.used_seen = self.used_seen.wrapping_add(1);
        Some((self.used.load_u32(place, Relaxed), self.used.load_u32(place + 4, Relaxed)))
    }

    /// Asks for a call with the next used element; says whether there is one already.
    pub fn enable_calls(&self) -> bool {
        if self.event_idx {
            self.avail.store_u16(4 + 2 * usize::from(self.size), self.used_seen, SeqCst);
        } else {
            self.avail.store_u16(0, 0, SeqCst);
        }
        self.used.load_u16(2, SeqCst) != self.used_seen
    }

    /// Sleeps until there is a used element, as a driver does: by the call descriptor alone.
    pub fn wait_used(&mut self) -> (u32, u32) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(element) = self.poll() {
                return element;
            }
            if !self.enable_calls() {
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(readable(&self.call, left), "the guest was not called within {PATIENCE:?}");
                rung(&self.call);
            }
        }
    }

    pub fn status(&self, slot: u16) -> u8 {
        self.ram.read(self.status_at(slot), 1)[0]
    }

    /// One request from offering to status; the bytes that were written according to the used element.
    pub fn run(&mut self, kind: u32, sector: u64, data: Data<'_>) -> (u8, u32) {
        self.put(0, kind, sector, data);
        self.publish();
        let (head, written) = self.wait_used();
        assert_eq!(head, 0, "another request was answered");
        (self.status(0), written)
    }

    pub fn write(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        self.run(kind::OUT, sector, Data::Out(bytes)).0
    }

    /// Reads sectors; panics if that fails.
    pub fn read(&mut self, sector: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.run(kind::IN, sector, Data::In(len)), (0, len + 1));
        self.ram.read(self.data_at(0), len as usize)
    }
}

/// The range of a discard or write zeroes.
pub fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}
