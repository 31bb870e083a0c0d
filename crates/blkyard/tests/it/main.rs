//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it is the test that uses up the memory of its process.
#![forbid(unsafe_code)]

mod any_bio;
mod no_alloc;
mod panics;
mod queues;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
