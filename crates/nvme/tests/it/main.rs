//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it is the model for loom.
#![forbid(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
mod controller_admin;
mod controller_hostile;
mod controller_io;
mod controller_registers;
mod controller_snapshot;
mod cross_reset;
mod data_pointers;
mod fabrics;
mod host;
mod io_queue;
#[path = "../common/machine.rs"]
mod machine;
mod queue_pair;
mod registered;
#[path = "../common/seeds.rs"]
mod seeds;
mod subsystem;
mod tcp;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
