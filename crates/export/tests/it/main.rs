//! The tests of this crate from outside, in one program: a program each would take as long to link as to run.
//!
//! Beside it are tests that need a process of their own: they measure CPU time, or count descriptors and mappings.
#![forbid(unsafe_code)]

mod advice;
mod any_order;
mod changes;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod dirty;
mod greedy;
mod hostile_front_end;
mod hostile_guest;
mod inflight;
mod load;
mod memory;
mod moving;
mod no_alloc;
mod nvme_abort;
mod nvme_namespaces;
mod nvme_tcp_lanes;
mod on_demand;
mod own_protocol;
mod polite;
mod rings;
mod sessions;
mod shared;
mod takeover;
mod vfio_user;
mod vfio_user_doorbells;
mod vfio_user_hostile;
mod vfio_user_maps;
mod vfio_user_on_demand;
mod vfio_user_pci;
mod vfio_user_rights;
mod vfio_user_waits;

/// Counts the allocations of each thread.
#[global_allocator]
static ALLOCATOR: blkyard_mem::CountingAllocator = blkyard_mem::CountingAllocator;
