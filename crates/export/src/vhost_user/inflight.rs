//! The memory of a session's in-flight records, from which another daemon continues after a crash.
//!
//! Allocated here when the front-end requests it, kept by the front-end, and passed to the next back-end: the same
//! daemon, an older or newer one, or another program. Received memory is checked before it is mapped. `blkyard_virtio`
//! defines its content.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::{MapError, Region};
use blkyard_virtio::{Features, Inflight, inflight_bytes};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Zeroed memory for the records of this number of queues in the negotiated format, as a file with a sealed length; and
/// its length in bytes.
///
/// # Errors
/// The system has no memory or descriptors left.
pub(crate) fn make(features: Features, queues: u16, queue_size: u16) -> io::Result<(File, u64)> {
    let bytes = u64::from(queues) * inflight_bytes(features, queue_size) as u64;
    let file = memfd_create("blkyard-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((file.into(), bytes))
}

/// Reason for refusing a region.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("{bytes} bytes at {offset} are too few for the records of {queues} queues of {queue_size}")]
    TooSmall { bytes: u64, offset: u64, queues: u16, queue_size: u16 },
}

/// A session's records.
pub(crate) struct Records {
    region: Arc<Region>,
    queues: u16,
    queue_size: u16,
}

impl Records {
    /// Maps the front-end's memory: length and offset in a file.
    pub(crate) fn map(
        features: Features,
        file: &File,
        offset: u64,
        bytes: u64,
        queues: u16,
        queue_size: u16,
    ) -> Result<Records, RecordError> {
        let region = Region::map_file(file.as_fd(), offset, bytes)?;
        let records = Records { region, queues, queue_size };
        let last = queues.checked_sub(1).map(usize::from);
        match last.and_then(|last| records.part(features, last)) {
            Some(_) => Ok(records),
            None => Err(RecordError::TooSmall { bytes, offset, queues, queue_size }),
        }
    }

    /// The front-end's description of it, and a duplicate of its file.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn announced(&self) -> io::Result<(Vec<u8>, OwnedFd)> {
        let Some((file, offset)) = self.region.file() else { unreachable!("records are kept in a file") };
        let places = [self.region.len() as u64, offset].map(u64::to_ne_bytes).concat();
        // Two unused fields.
        let counts = [self.queues, self.queue_size, 0, 0].map(u16::to_ne_bytes).concat();
        Ok(([places, counts].concat(), file.try_clone_to_owned()?))
    }

    /// The record of one queue, longer for a packed ring; `None` if there is none.
    pub(crate) fn part(&self, features: Features, queue: usize) -> Option<Inflight> {
        let bytes = inflight_bytes(features, self.queue_size);
        let place = (queue < usize::from(self.queues)).then_some(queue * bytes)?;
        Inflight::new(Arc::clone(&self.region), place as u64, bytes)
    }

    /// Clears the records for new rings.
    pub(crate) fn forget(&self, features: Features) {
        (0..usize::from(self.queues)).filter_map(|queue| self.part(features, queue)).for_each(|part| part.forget());
    }
}
