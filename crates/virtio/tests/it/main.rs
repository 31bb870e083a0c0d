//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it is the model with a killed device.
#![forbid(unsafe_code)]

mod blk;
#[path = "../common/mod.rs"]
mod common;
mod driver_blk;
#[path = "../common/driver/mod.rs"]
mod driver_common;
mod driver_config;
mod driver_hostile;
mod driver_ring;
mod fuzz;
mod hostile;
mod inflight;
mod no_alloc;
mod notify;
mod oracle;
mod packed;
mod ring;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
