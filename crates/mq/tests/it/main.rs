//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it are the models for loom and shuttle.
#![forbid(unsafe_code)]
#![cfg(not(any(loom, shuttle)))]

#[path = "../common/mod.rs"]
mod common;
mod core;
mod disk;
mod disk_threads;
mod moving;
mod properties;
mod queue;
mod shared_alloc;
mod shared_steps;
mod shared_threads;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
