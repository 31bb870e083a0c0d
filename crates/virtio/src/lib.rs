//! Virtio rings and the logic of virtio-blk, of the device and of the driver.
//!
//! A guest shares its memory and a ring with the device. [`DeviceRing`] fetches chains of descriptors from the ring,
//! [`GuestMemory`] translates their addresses, [`parse`] turns a chain into a bio, and the result goes back as a
//! status byte and a used element. All input from the guest is hostile: each field is read once into a copy, the copy
//! is parsed into a type that cannot be wrong, and each refusal has a reason that is counted ([`Refusals`]).
//!
//! The driver's side is in [`driver`], which trusts the device as little.
//!
//! This crate does no I/O, has no thread and makes no system call; it knows neither eventfds nor sockets. Nothing is
//! allocated between the construction of a ring and its end.
//!
//! Clauses in brackets are those of the Virtual I/O Device (VIRTIO) specification, version 1.2.
#![forbid(unsafe_code)]

mod blk;
mod chain;
mod config;
mod counters;
mod descriptor;
mod dirty;
pub mod driver;
pub mod driver_model;
mod features;
mod guest;
mod inflight;
#[cfg(test)]
mod notify_model;
mod order;
mod packed;
mod ring;
mod split;

pub use blk::{
    ParseContext, Parsed, Refusal, RequestFault, SerialError, SerialId, VirtioStatus, parse, status_of, write_status,
    written,
};
pub use chain::{Chain, ChainFault};
pub use config::{BlkConfig, CACHE_MODE_AT, CONFIG_BYTES};
pub use counters::{Refusals, Violations};
pub use descriptor::INDIRECT_BYTES_MAX;
pub use dirty::{DirtyLog, LOG_PAGE_BYTES};
pub use features::Features;
pub use guest::{GuestMemory, GuestRange, RangeError, TranslateError};
pub use inflight::{Inflight, InflightFault, inflight_bytes};
pub use packed::{PackedRing, packed_ring_bytes};
pub use ring::{ChainHead, DeviceRing, RING_SIZE_MAX, RingBase, RingFault, RingLayout, RingSetupError};
pub use split::{SplitRing, ring_bytes};
