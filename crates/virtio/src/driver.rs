//! The driver's side: a ring over shared memory, and the virtio-blk driver on it.
//!
//! [`DriverRing`] offers chains of buffers to a device and takes back used ones. Owned by one thread. It does no I/O
//! and sends no kick: it says when the device wants one. A chain is known by its *token*, a small number of the owner's
//! choice: the slot of its request. Either all chains of a ring have an indirect table each, at an address given by the
//! token ([`Tables`]), or none has.
//!
//! The device is not trusted. Its writes are read once; a write that no honest device makes breaks the ring for good
//! ([`DeviceFault`]), since later writes cannot be trusted either. The owner of the ring then ends the session, and
//! may reuse the buffers only after that.

mod blk;
mod disk;
mod loopback;
mod packed;
mod place;
mod split;

use blkyard_mem::View;

use crate::counters::reasons;
use crate::descriptor::DESC_BYTES;
use crate::{Features, RingBase, RingLayout, RingSetupError};

pub use blk::{BlkRing, SharedMemory, Violation};
pub use disk::{BlkDisk, ConfigCause, ConfigError, DRIVER_FEATURES, SEGMENTS_MAX};
pub use loopback::{Loopback, LoopbackConfig, LoopbackDevice};
pub use packed::PackedDriver;
pub use place::BlkLayout;
pub use split::SplitDriver;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// First byte, as the device sees it (guest physical).
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device may write it.
    pub writable: bool,
}

/// A chain that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedChain {
    /// The token it was offered with, which may be used again.
    pub token: u16,
    /// How many bytes the device says it has written, from the first writable one on; no more than there are.
    pub written: u32,
}

/// The ring has not enough free descriptors for a chain: some must come back first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

reasons! {
    /// A write that no conforming device makes. The ring is not used any more.
    DeviceFault {
        /// More chains came back than are in flight.
        UsedJumped = "used index advanced by more than the chains in flight",
        /// An id that no chain can have.
        IdOutOfRange = "used id outside the ring",
        /// An id that was not given, or has come back already.
        IdNotInFlight = "used id that is not in flight",
        /// More bytes written than the chain has room for.
        LengthTooLong = "used length beyond the writable bytes",
        /// Flags that neither side writes. [2.8.1]
        FlagsNonsense = "used descriptor with invalid flags",
    }
}

/// Tables of descriptors, one for each token, each at a fixed address. [2.7.5.3, 2.8.7]
#[derive(Clone, Debug)]
pub struct Tables {
    view: View,
    addr: u64,
    stride: usize,
    rows: u16,
}

impl Tables {
    /// Tables of `rows` descriptors, `stride` bytes apart. `view` begins with the first of them, which the device
    /// knows at `addr`.
    ///
    /// # Panics If a table has no rows or overlaps the next one, or not all are aligned: the layout is made by this
    /// crate.
    pub fn new(view: View, addr: u64, stride: usize, rows: u16) -> Tables {
        let bytes = usize::from(rows) * DESC_BYTES;
        assert!(
            rows > 0 && bytes <= stride && stride.is_multiple_of(DESC_BYTES) && addr.is_multiple_of(DESC_BYTES as u64),
            "tables of {rows} rows, {stride} bytes apart from {addr:#x}"
        );
        Tables { view, addr, stride, rows }
    }

    /// Whether all tokens below `tokens` have a table.
    fn reach(&self, tokens: u16) -> bool {
        let last = usize::from(tokens.saturating_sub(1)) * self.stride;
        last + usize::from(self.rows) * DESC_BYTES <= self.view.len()
    }

    /// Where the device finds the table of a token.
    #[inline]
    fn addr(&self, token: u16) -> u64 {
        self.addr + u64::from(token) * self.stride as u64
    }

    /// Writes a row of a token's table.
    ///
    /// # Panics
    /// If there is no such row.
    fn write(&self, token: u16, row: u16, words: [u64; 2]) {
        assert!(row < self.rows, "a chain longer than a table of {} rows", self.rows);
        let at = usize::from(token) * self.stride + usize::from(row) * DESC_BYTES;
        write_desc(&self.view, at, words);
    }
}

/// Writes a descriptor that the device does not read yet, as the two words that a device reads.
#[inline]
fn write_desc(view: &View, at: usize, words: [u64; 2]) {
    view.store_u64s(at, words, std::sync::atomic::Ordering::Relaxed);
}

/// Bytes of a chain that the device may write, as far as a used length can say.
#[inline]
fn writable_bytes(buffers: &[Buffer]) -> u32 {
    let bytes: u64 = buffers.iter().filter(|buffer| buffer.writable).map(|buffer| u64::from(buffer.len)).sum();
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Why there is no row to write, and no table to add.
const NO_TABLES: &str = "a ring without tables";

/// Requirements for a chain, for any ring.
///
/// # Panics
/// If it is empty, has an empty buffer, or a readable buffer after a writable one: chains are made by this crate.
#[inline]
fn check_chain(buffers: &[Buffer]) {
    let in_order = buffers.is_sorted_by_key(|buffer| buffer.writable);
    assert!(!buffers.is_empty() && in_order, "a chain is readable buffers, then writable ones");
    debug_assert!(buffers.iter().all(|buffer| buffer.len > 0), "a buffer without bytes");
}

/// The driver's side of a ring of either format.
#[derive(Debug)]
pub enum DriverRing {
    /// Descriptor table, available ring, used ring. [2.7]
    Split(SplitDriver),
    /// One ring of descriptors that both sides write. [2.8]
    Packed(PackedDriver),
}

macro_rules! either {
    ($ring:expr, $name:ident => $call:expr) => {
        match $ring {
            DriverRing::Split($name) => $call,
            DriverRing::Packed($name) => $call,
        }
    };
}

impl DriverRing {
    /// An empty ring of `size` entries that begins at `base`. The features select the format and its options; the parts
    /// are as that format needs them. The device must not access the memory yet.
    ///
    /// # Errors
    /// The size is invalid for this format, or the base is outside the ring.
    ///
    /// # Panics
    /// If there are tables, but not for each entry.
    pub fn new(
        layout: RingLayout,
        size: u16,
        features: Features,
        tables: Option<Tables>,
        base: RingBase,
    ) -> Result<DriverRing, RingSetupError> {
        if features.contains(Features::RING_PACKED) {
            PackedDriver::new(layout, size, features, tables, base).map(DriverRing::Packed)
        } else {
            SplitDriver::new(layout, size, features, tables, base).map(DriverRing::Split)
        }
    }

    /// Adds a chain: readable buffers, then writable ones. The device sees it with the next [`DriverRing::publish`].
    ///
    /// # Errors
    /// There are not enough free descriptors; nothing has changed. Cannot happen with tables.
    ///
    /// # Panics
    /// If the token is in flight or not below the ring's size, or the chain is longer than its table or the ring, or
    /// out of order.
    #[inline]
    pub fn add(&mut self, token: u16, buffers: &[Buffer]) -> Result<(), NoRoom> {
        either!(self, ring => ring.add(token, buffers))
    }

    /// A row of a table in the device's format; `more` says whether the chain continues with the next row.
    #[inline(always)]
    pub(crate) fn row(&self, row: u16, buffer: Buffer, more: bool) -> [u64; 2] {
        match self {
            DriverRing::Split(_) => split::table_row(row, buffer, more),
            DriverRing::Packed(_) => packed::table_row(buffer),
        }
    }

    /// Adds the chain in the first rows of a token's table: readable buffers, then writable ones with this total
    /// length. Rows stay as they are until they are written again, from chain to chain. The device sees it with the
    /// next [`DriverRing::publish`].
    ///
    /// # Panics
    /// If there are no tables, or the token is in flight or not below the ring's size.
    #[inline(always)]
    pub fn add_table(&mut self, token: u16, rows: u16, writable_bytes: u32) {
        either!(self, ring => ring.add_table(token, rows, writable_bytes));
    }

    /// The token of the chain that will be taken `ahead` chains later, if the device is known to have used it.
    /// Unchecked input of the device: only for guesses, such as prefetches.
    #[inline]
    pub fn coming(&self, after: u16) -> Option<u16> {
        either!(self, ring => ring.coming(after))
    }

    /// Publishes all chains added since the last call. Returns whether the device wants a kick for them.
    #[inline]
    #[must_use = "a device that is not kicked when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        either!(self, ring => ring.publish())
    }

    /// Takes the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// The device broke the ring. It stays so, and every further poll says the same.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<UsedChain>, DeviceFault> {
        either!(self, ring => ring.poll())
    }

    /// Asks the device for a call when it uses the next chain. True if one is used already: then there may be no call.
    pub fn arm(&mut self) -> bool {
        either!(self, ring => ring.arm())
    }

    /// Tells the device that we poll. A hint: calls may come nevertheless.
    pub fn disarm(&mut self) {
        either!(self, ring => ring.disarm());
    }

    /// Chains added and not come back.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.in_flight())
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<DeviceFault> {
        either!(self, ring => ring.fault())
    }
}
