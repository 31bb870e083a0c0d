//! Reads the length of a file and grows it, for the control plane. No I/O depends on either.

use std::io;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ftruncate, seek};
use rustix::io::Errno;

use super::FileDevice;

impl FileDevice {
    /// Bytes it has now. Others may have changed that since it was opened.
    ///
    /// # Errors
    /// What the system said.
    pub fn length_bytes(&self) -> io::Result<u64> {
        // Nothing uses the offset of this description: all I/O says where it goes.
        Ok(seek(&*self.shared.file, SeekFrom::End(0))?)
    }

    /// Whether it is a block device, whose length is not ours to change.
    pub fn is_block_device(&self) -> bool {
        self.shared.is_block_device
    }

    /// Makes it longer, sparsely but for its last byte. One that is as long already stays as it is, even if somebody
    /// else makes it so just now.
    ///
    /// # Errors
    /// What the system said: it is open for reading only, or the file system cannot hold a file of that length.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        let file = &*self.shared.file;
        // Asking for the last byte makes a file longer and never shorter, and changes no data.
        let Some(last) = bytes.checked_sub(1) else { return Ok(()) };
        match rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::empty(), last, 1)) {
            // The file system has no such call. What another does between these two is lost.
            Err(Errno::OPNOTSUPP) if self.length_bytes()? < bytes => Ok(ftruncate(file, bytes)?),
            Err(Errno::OPNOTSUPP) => Ok(()),
            done => Ok(done?),
        }
    }
}
