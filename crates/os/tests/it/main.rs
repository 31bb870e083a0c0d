//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it are tests that need a process of their own, for limits, signals and open descriptors are the process's.

mod block_device;
#[path = "../common/mod.rs"]
mod common;
mod driver_eventfd;
mod file_io;
mod file_open;
mod lane;
mod lanes;
#[path = "../common/loop_device.rs"]
mod loop_device;
mod no_alloc;
mod receiver;
mod second_ring;
mod shared;
mod streams;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
