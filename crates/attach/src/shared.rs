//! State shared by a disk, its queues and its control thread, and its view for other threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::mailbox::DriverQueueView;
use crate::protocol::RemoteOptions;

/// State of a disk at one moment, for other threads.
#[derive(Clone, Debug, Default)]
pub struct AttachedView {
    /// A back-end serves it.
    pub is_connected: bool,
    /// Number of connections that were made, this one included.
    pub sessions: u64,
    /// Number of rings that a back-end broke.
    pub faults: u64,
    /// Why the last connection was left.
    pub last_loss: Option<String>,
    /// Whether the back-end records requests in flight, for its successor.
    pub is_tracked: bool,
    /// Queues in use.
    pub queues: Vec<DriverQueueView>,
}

/// State shared by the disk, its queues and its control thread.
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) options: RemoteOptions,
    capacity_sectors: AtomicU64,
    view: Mutex<AttachedView>,
}

impl SharedState {
    pub(crate) fn new(options: RemoteOptions, capacity_sectors: u64) -> SharedState {
        SharedState { options, capacity_sectors: AtomicU64::new(capacity_sectors), view: Mutex::default() }
    }

    /// State for inspection.
    pub(crate) fn view(&self) -> AttachedView {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The size of the disk, sectors.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity_sectors.load(Ordering::Relaxed)
    }

    /// Records a change.
    pub(crate) fn note(&self, change: impl FnOnce(&mut AttachedView)) {
        change(&mut self.view.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Sets the size of the disk. Returns the previous one.
    pub(crate) fn set_capacity(&self, sectors: u64) -> u64 {
        self.capacity_sectors.swap(sectors, Ordering::Relaxed)
    }
}
