//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it are tests that need a process of their own: they count descriptors, or read the log of all threads.
#![forbid(unsafe_code)]

mod any_back_end;
mod attached;
#[path = "../common/mod.rs"]
mod common;
mod dma;
mod foreign;
mod next_session;
mod no_alloc;
mod nvme_disk;
mod nvme_host;
#[path = "../nvme_rig/mod.rs"]
mod nvme_rig;
mod nvme_tcp;
mod nvme_trouble;
#[path = "../nvme_rig/server.rs"]
mod server;
mod set_up;
mod trouble;
mod vfio_user;
mod vfio_user_lies;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
