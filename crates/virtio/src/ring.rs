//! The device side of a virtqueue, in either of the two formats.
//!
//! Shared parts of both formats: the layout of a ring, its position, the faults that break it, and the head that names
//! a chain in flight. The contents of a ring are known to [`SplitRing`] and [`PackedRing`] alone. One branch at each
//! call selects the format; neither knows of the other.

use blkyard_mem::View;

use crate::counters::reasons;
use crate::packed::{PackedRing, packed_ring_bytes};
use crate::split::{SplitRing, ring_bytes};
use crate::{Chain, Features, GuestMemory, Inflight, InflightFault};

/// The largest ring of either format. [2.7, 2.8.10.1]
pub const RING_SIZE_MAX: u16 = 32768;

/// Upper bound of chains in a run, on either side: their lines are prefetched together, and a processor has hardly more
/// outstanding loads.
pub(crate) const RUN_MAX: u16 = 16;

/// The three parts of a ring, as [`ring_bytes`] or [`packed_ring_bytes`] wants them.
#[derive(Clone, Debug)]
pub struct RingLayout {
    /// The descriptors. The device only reads them in a split ring; in a packed one it writes used elements over
    /// them.
    pub desc: View,
    /// Split: the available ring. Packed: which calls the driver wants. The device only reads it.
    pub avail: View,
    /// Split: the used ring. Packed: which kicks the device wants. The device writes it, and of a split ring reads
    /// the index once, at the start.
    pub used: View,
}

impl RingLayout {
    /// Finds the parts of a ring of `size` at these addresses of the front-end's process: descriptors, available ring
    /// or driver's area, used ring or device's area.
    ///
    /// # Errors
    /// The size is invalid for this format; or a part is not in shared memory, or not aligned.
    pub fn locate(
        memory: &GuestMemory,
        features: Features,
        size: u16,
        user_addrs: [u64; 3],
    ) -> Result<RingLayout, RingSetupError> {
        check_size(features, size)?;
        let (bytes, names) = if features.contains(Features::RING_PACKED) {
            (packed_ring_bytes(size), ["descriptor ring", "driver's event area", "device's event area"])
        } else {
            (ring_bytes(size), ["descriptor table", "available ring", "used ring"])
        };
        let view = |part: usize| {
            let (len, align) = bytes[part];
            let (what, addr) = (names[part], user_addrs[part]);
            memory.view_user(addr, len, align).ok_or(RingSetupError::Unreachable { what, addr, len, align })
        };
        Ok(RingLayout { desc: view(0)?, avail: view(1)?, used: view(2)? })
    }
}

/// Why a ring cannot be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingSetupError {
    /// Index arithmetic of split rings needs a power of two. [2.7]
    #[error("a ring of {0} entries: the size must be a power of two, from 1 to {RING_SIZE_MAX}")]
    Size(u16),
    /// A packed ring may have any size up to the largest. [2.8.10.1]
    #[error("a packed ring of {0} entries: the size must be from 1 to {RING_SIZE_MAX}")]
    PackedSize(u16),
    /// A part of the ring does not lie in one region, or is not aligned.
    #[error("the {what}, {len} bytes at {addr:#x}, does not lie in one shared region at a multiple of {align}")]
    Unreachable {
        /// Which part.
        what: &'static str,
        /// Where it should be, in the front-end's process.
        addr: u64,
        /// Its length, bytes.
        len: usize,
        /// Required alignment.
        align: usize,
    },
    /// The base is outside the ring.
    #[error("a ring's base of {base:#x}: the ring has only {size} entries")]
    Base {
        /// As the front-end said it.
        base: u32,
        /// Entries.
        size: u16,
    },
}

/// Whether a ring may have this size.
pub(crate) fn check_size(features: Features, size: u16) -> Result<(), RingSetupError> {
    if features.contains(Features::RING_PACKED) {
        if (1..=RING_SIZE_MAX).contains(&size) { Ok(()) } else { Err(RingSetupError::PackedSize(size)) }
    } else {
        // A power of two that fits 16 bits is at most 32768.
        if size.is_power_of_two() { Ok(()) } else { Err(RingSetupError::Size(size)) }
    }
}

/// Position of a ring, as in vhost-user's SET_VRING_BASE and GET_VRING_BASE.
///
/// ```text
///  split    0 .. 15  index of the next chain to fetch      (the used ring has the position of used elements)
///  packed   0 .. 14  index of the next descriptor to fetch    15  its wrap counter
///          16 .. 30  index of the next used element           31  its wrap counter
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingBase(u32);

impl RingBase {
    /// Where a split ring begins.
    pub const SPLIT_START: RingBase = RingBase(0);
    /// Start of a packed ring: both positions zero, both wrap counters one. [2.8.1]
    pub const PACKED_START: RingBase = RingBase(0x8000_8000);

    /// Where a ring of this format begins.
    pub fn start(features: Features) -> RingBase {
        if features.contains(Features::RING_PACKED) { RingBase::PACKED_START } else { RingBase::SPLIT_START }
    }

    /// From a message; any number may be in one.
    pub fn from_bits(bits: u32) -> RingBase {
        RingBase(bits)
    }

    /// For a message.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// The lower half: position of the next fetch. For a packed ring, index and wrap counter.
    pub fn next_avail(self) -> u16 {
        self.0 as u16
    }

    /// The upper half: position of used elements in a packed ring, index and wrap counter. Zero for a split ring.
    pub fn next_used(self) -> u16 {
        (self.0 >> 16) as u16
    }

    pub(crate) fn split(next_avail: u16) -> RingBase {
        RingBase(u32::from(next_avail))
    }

    pub(crate) fn packed(next_avail: u16, next_used: u16) -> RingBase {
        RingBase(u32::from(next_avail) | u32::from(next_used) << 16)
    }
}

reasons! {
    /// Fault of a ring. It is not used any more until the driver sets it up again.
    RingFault {
        /// The available index is ahead by more than the ring's size, or a packed ring offers slots that are in flight.
        AvailJumped = "available index advanced by more than the ring size",
        /// A head lies outside the descriptor table.
        HeadOutOfRange = "head outside the descriptor table",
        /// A head was offered that has not come back yet.
        HeadTwice = "head offered again before it was used",
        /// A chain of a packed ring does not end within the free slots, so the position of the next one is unknown.
        ChainOverrun = "chain longer than the free part of a packed ring",
    }
}

/// A chain that was fetched and has not been completed. It can be redeemed once, at its own ring.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a head that is not completed is lost to the guest"]
pub struct ChainHead {
    /// Split: index of the first descriptor. Packed: the buffer's id.
    pub(crate) id: u16,
    /// Descriptors it takes in a packed ring; 1 in a split one.
    pub(crate) slots: u16,
    /// Its slot in the in-order list; otherwise undefined.
    pub(crate) place: u16,
    /// Its in-flight record in a packed ring; otherwise undefined.
    pub(crate) record: u16,
}

impl ChainHead {
    /// The guest's word for the request.
    #[inline]
    pub fn id(&self) -> u16 {
        self.id
    }
}

/// A ring, seen from the device.
#[derive(Debug)]
pub enum DeviceRing {
    /// Three tables. [2.7]
    Split(SplitRing),
    /// One ring of descriptors that are written by both sides. [2.8]
    Packed(PackedRing),
}

impl DeviceRing {
    /// A ring of `size` entries that continues from `base`. The parts are those that [`RingLayout::locate`] finds for
    /// the same features and size; the features select the format and its options.
    ///
    /// # Errors
    /// The size is invalid for this format, or the base is outside the ring.
    pub fn new(
        layout: RingLayout,
        size: u16,
        features: Features,
        base: RingBase,
    ) -> Result<DeviceRing, RingSetupError> {
        if features.contains(Features::RING_PACKED) {
            PackedRing::new(layout, size, features, base).map(DeviceRing::Packed)
        } else {
            SplitRing::new(layout, size, features, base.next_avail()).map(DeviceRing::Split)
        }
    }

    /// Records chains in flight from now on. Chains in flight in an existing record are fetched first, and the ring
    /// continues after them, whatever its base. To be called before the first fetch.
    ///
    /// # Errors
    /// The record is inconsistent; neither it nor the ring was changed.
    pub fn track(&mut self, record: Inflight) -> Result<(), InflightFault> {
        match self {
            DeviceRing::Split(ring) => ring.track(record),
            DeviceRing::Packed(ring) => ring.track(record),
        }
    }

    /// Chains that were in flight before the set-up and have not been fetched again.
    #[inline]
    pub fn left(&self) -> usize {
        match self {
            DeviceRing::Split(ring) => ring.left(),
            DeviceRing::Packed(ring) => ring.left(),
        }
    }

    /// Number of chains known to be available and not fetched yet, at most a run. For a packed ring a guess, and 0
    /// while the driver is near.
    #[inline]
    pub fn in_sight(&self) -> usize {
        match self {
            DeviceRing::Split(ring) => ring.in_sight(),
            DeviceRing::Packed(ring) => ring.in_sight(),
        }
    }

    /// Sets whether the driver shares our CPU and alternates with us: then its writes are near, and there is no
    /// prefetch.
    #[inline]
    pub fn set_near(&mut self, is_near: bool) {
        match self {
            DeviceRing::Split(ring) => ring.set_near(is_near),
            DeviceRing::Packed(ring) => ring.set_near(is_near),
        }
    }

    /// How far the driver has offered by now, to be compared with how far it had a while ago. A guess: the driver may
    /// write anything there.
    pub fn front(&self) -> u16 {
        match self {
            DeviceRing::Split(ring) => ring.front(),
            DeviceRing::Packed(ring) => ring.front(),
        }
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        match self {
            DeviceRing::Split(ring) => ring.size(),
            DeviceRing::Packed(ring) => ring.size(),
        }
    }

    /// Takes the next chain, if one is offered. A chain that is wrong in itself is returned like any other, with
    /// its [`Chain::fault`].
    ///
    /// # Errors
    /// The ring is broken. It stays so, and every further fetch says the same.
    #[inline]
    pub fn fetch(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        match self {
            DeviceRing::Split(ring) => ring.fetch(memory, chain),
            DeviceRing::Packed(ring) => ring.fetch(memory, chain),
        }
    }

    /// Gives a chain back. `written` are the bytes that were written from the first writable byte on, without a gap.
    /// [2.7.8.2] The driver learns of it with the next [`DeviceRing::publish`].
    ///
    /// # Panics
    /// If the head is not out: it belongs to another ring.
    #[inline]
    pub fn complete(&mut self, head: ChainHead, written: u32) {
        match self {
            DeviceRing::Split(ring) => ring.complete(head, written),
            DeviceRing::Packed(ring) => ring.complete(head, written),
        }
    }

    /// Publishes all chains completed since the last call. Returns whether the driver wants a call for them.
    #[inline]
    #[must_use = "a driver that is not called when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        match self {
            DeviceRing::Split(ring) => ring.publish(),
            DeviceRing::Packed(ring) => ring.publish(),
        }
    }

    /// Asks the driver for a notification of the next chain it offers. True if one is available already: then there may
    /// be no notification.
    pub fn enable_notify(&mut self) -> bool {
        match self {
            DeviceRing::Split(ring) => ring.enable_notify(),
            DeviceRing::Packed(ring) => ring.enable_notify(),
        }
    }

    /// Tells the driver that we poll. A hint: notifications may come nevertheless.
    pub fn disable_notify(&mut self) {
        match self {
            DeviceRing::Split(ring) => ring.disable_notify(),
            DeviceRing::Packed(ring) => ring.disable_notify(),
        }
    }

    /// Position of the ring, at which another device could continue once no chain is in flight.
    pub fn base(&self) -> RingBase {
        match self {
            DeviceRing::Split(ring) => ring.base(),
            DeviceRing::Packed(ring) => ring.base(),
        }
    }

    /// Chains fetched and not given back.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        match self {
            DeviceRing::Split(ring) => ring.in_flight(),
            DeviceRing::Packed(ring) => ring.in_flight(),
        }
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<RingFault> {
        match self {
            DeviceRing::Split(ring) => ring.fault(),
            DeviceRing::Packed(ring) => ring.fault(),
        }
    }
}
