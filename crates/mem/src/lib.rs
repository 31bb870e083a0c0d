//! Every byte that has more than one writer.
//!
//! A guest, the kernel and other threads write to memory that this process reads. This crate is the one place where
//! such memory is accessed: regions and the segments that point into them, the domains in which devices reach regions,
//! registered buffers, NUMA nodes, views of fields shared with a peer, the rings, mailboxes and oneshot channels
//! between threads, and the words that say which thread owns a queue and which sleeps. Everything here is `unsafe`
//! inside and safe outside. Besides a call that sends bytes from their places over a socket, it knows nothing of I/O,
//! devices or protocols.

mod baton;
mod counting;
mod dma;
mod fault;
mod gather;
#[cfg(kill)]
pub mod kill;
mod mailbox;
mod mapping;
mod node;
mod oneshot;
mod region;
mod registered;
pub mod ring;
mod segment;
pub mod sync;
mod tables;
mod view;
mod wake_flag;

pub use baton::{Baton, Holder};
pub use counting::CountingAllocator;
pub use dma::{DmaDomain, DmaMapping};
pub use fault::{EXPORT_BYTES_MAX, EXPORT_REGIONS_MAX};
pub use gather::{GATHER_MAX, GatherPiece, send_gathered};
pub use mailbox::Mailbox;
pub use mapping::{BufferAddresses, BufferMapping};
pub use node::{prefer_node, preferred_node};
pub use oneshot::{OneshotReceiver, OneshotSender, oneshot};
pub use region::{MapError, Region, check_near};
pub use registered::{BUFFERS_MAX, BufferAccess, BufferId, BufferMap, RegisterError, RegisteredBuffer};
pub use segment::{RegionTable, Segment, Span};
pub use view::{View, warm};
pub use wake_flag::WakeFlag;

/// Bytes in a page of the host's memory, as the mappings here assume.
///
/// x86-64 and most others. Regions are aligned to it, so that file I/O straight into them satisfies any alignment a
/// file system asks for.
pub const PAGE_BYTES: usize = 4096;
