//! The memory of a session's in-flight records, from which another daemon continues after a crash.
//!
//! Allocated here when the front-end requests it, kept by the front-end, and passed to the next back-end: the same
//! daemon, an older or newer one, or another program. Received memory is checked before it is mapped. `blkyard_virtio`
//! defines its content.
//!
//! Memory that was made here has the cache mode of the disk behind the records, in its last bytes: a guest that has
//! chosen write-through sends no flush to the next daemon either, and no message tells that one. Other back-ends do not
//! look there.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use blkyard_mem::{MapError, Region, View};
use blkyard_virtio::{Features, Inflight, inflight_bytes};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;

/// Bytes behind the records, of which the last word is the cache mode.
const MODE_BYTES: u64 = 64;
const MODE_WORD: u64 = size_of::<u64>() as u64;
/// The words of the two cache modes. Anything else is not ours.
const WRITE_BACK: u64 = u64::from_ne_bytes(*b"wce=on\0\0");
const WRITE_THROUGH: u64 = u64::from_ne_bytes(*b"wce=off\0");

fn mode_word(write_back: bool) -> u64 {
    if write_back { WRITE_BACK } else { WRITE_THROUGH }
}

/// Zeroed memory for the records of this number of queues in the negotiated format, and with this cache mode, as a file
/// with a sealed length; and its length in bytes.
///
/// # Errors
/// The system has no memory or descriptors left.
pub(crate) fn make(features: Features, queues: u16, queue_size: u16, write_back: bool) -> io::Result<(File, u64)> {
    let bytes = u64::from(queues) * inflight_bytes(features, queue_size) as u64 + MODE_BYTES;
    let file = memfd_create("blkyard-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    pwrite(&file, &mode_word(write_back).to_ne_bytes(), bytes - MODE_WORD)?;
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
    /// Cache mode; unset in memory of other back-ends.
    mode: Option<View>,
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
        let mode_at = bytes.saturating_sub(MODE_WORD);
        let has_mode = |mode: &View| [WRITE_BACK, WRITE_THROUGH].contains(&mode.load_u64(0, Acquire));
        let mode = View::new(Arc::clone(&region), mode_at, MODE_WORD as usize, align_of::<u64>()).filter(has_mode);
        let behind = u64::from(queues) * inflight_bytes(features, queue_size) as u64;
        let records = Records { region, queues, queue_size, mode: mode.filter(|_| behind <= mode_at) };
        let last = queues.checked_sub(1).map(usize::from);
        match last.and_then(|last| records.part(features, last)) {
            Some(_) => Ok(records),
            None => Err(RecordError::TooSmall { bytes, offset, queues, queue_size }),
        }
    }

    /// Length of the memory, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.region.len() as u64
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

    /// Whether the cache is write-back, as the guest of these records knows it.
    pub(crate) fn write_back(&self) -> Option<bool> {
        self.mode.as_ref().map(|mode| mode.load_u64(0, Acquire) == WRITE_BACK)
    }

    /// Notes the cache mode for the next daemon.
    pub(crate) fn note_write_back(&self, write_back: bool) {
        self.mode.iter().for_each(|mode| mode.store_u64(0, mode_word(write_back), Release));
    }

    /// Clears the records for new rings.
    pub(crate) fn forget(&self, features: Features) {
        (0..usize::from(self.queues)).filter_map(|queue| self.part(features, queue)).for_each(|part| part.forget());
    }
}
