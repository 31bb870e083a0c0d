//! NVMe over shared memory, host side and controller side.
//!
//! Formats: [registers](registers), submission and completion queue entries ([`Sqe`], [`Cqe`]), [`NvmeStatus`] and the
//! identify data that a block driver uses.
//!
//! This crate does no I/O, starts no thread, reads no clock and makes no system call.
//!
//! Names are those of the NVMe Base Specification 2.0 and the NVM Command Set Specification 1.0. All values are
//! little-endian in memory.
#![forbid(unsafe_code)]

mod cqe;
mod identify;
pub mod registers;
mod sqe;
mod status;

pub use cqe::{CQE_BYTES, Cqe};
pub use identify::{IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, LbaFormat};
pub use sqe::{DSM_RANGE_BYTES, DsmRange, Psdt, SQE_BYTES, Sqe, admin, cns, control, feature, io};
pub use status::NvmeStatus;
