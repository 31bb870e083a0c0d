//! The queues of an open disk: their number, which may change while its threads do I/O, and their counters.
//!
//! The queues have the time from the clock of their threads, so a change of them does, too.

use std::sync::Arc;

use blkyard_mq::{HwStats, QueueCounts, QueueKind, SharedDisk};
use blkyard_os::Clock;

use crate::disk::Queues;
use crate::{Device, DiskError};

/// The queues of an open [`Disk`](crate::Disk): see [`Disk::queues`](crate::Disk::queues).
#[derive(Clone, Debug)]
pub struct DiskQueues {
    disk: Arc<SharedDisk<Queues<Arc<Device>>>>,
}

impl DiskQueues {
    pub(crate) fn new(disk: &Arc<SharedDisk<Queues<Arc<Device>>>>) -> DiskQueues {
        DiskQueues { disk: Arc::clone(disk) }
    }

    /// How many queues there are.
    pub fn counts(&self) -> QueueCounts {
        self.disk.queues()
    }

    /// The counters of each queue, in the order of their numbers.
    pub fn stats(&self) -> Vec<(QueueKind, Arc<HwStats>)> {
        self.disk.stats()
    }

    /// Changes the number of queues, also while threads use them. Returns the new numbers: of each kind at most the
    /// number of threads. Drains the present queues.
    ///
    /// Meanwhile a `NOWAIT` bio comes back with [`Status::Again`](crate::Status::Again); others wait.
    ///
    /// # Errors
    /// See [`DiskError`]; the disk then keeps the queues that it had.
    pub fn set(&self, counts: QueueCounts) -> Result<QueueCounts, DiskError> {
        let clock = Clock::new();
        Ok(self.disk.set_queues(counts, &|| clock.now_ns())?)
    }
}
