//! Reads the length of a file and grows it, for the control plane. No I/O depends on either.

use std::io;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ftruncate, seek};
use rustix::io::Errno;

use super::FileDevice;

impl FileDevice {
    /// Current length, bytes. Other processes may have changed it since it was opened.
    ///
    /// # Errors
    /// The system's error.
    pub fn length_bytes(&self) -> io::Result<u64> {
        // The offset of this description is unused: all I/O names its offset.
        Ok(seek(&*self.shared.file, SeekFrom::End(0))?)
    }

    /// Whether it is a block device, whose length cannot be set.
    pub fn is_block_device(&self) -> bool {
        self.shared.is_block_device
    }

    /// Grows the file, sparsely except for its last byte. A file of this length or longer stays as it is, even if
    /// another process grows it at this moment.
    ///
    /// # Errors
    /// The system's error: it is open for reading only, or the file system cannot hold a file of that length.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        let file = &*self.shared.file;
        // Asking for the last byte makes a file longer and never shorter, and changes no data.
        let Some(last) = bytes.checked_sub(1) else { return Ok(()) };
        match rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::empty(), last, 1)) {
            // The file system has no such call. A concurrent write between these two is lost.
            Err(Errno::OPNOTSUPP) if self.length_bytes()? < bytes => Ok(ftruncate(file, bytes)?),
            Err(Errno::OPNOTSUPP) => Ok(()),
            done => Ok(done?),
        }
    }
}
