//! How long a file is now, and growing it. For whoever serves it and is told to; no I/O depends on either.

use std::io;

use rustix::fs::{SeekFrom, seek};

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

    /// Makes it longer, sparsely. One that is as long already stays as it is.
    ///
    /// # Errors
    /// What the system said: it is open for reading only, or the file system cannot hold a file of that length.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        if bytes > self.length_bytes()? {
            rustix::fs::ftruncate(&*self.shared.file, bytes)?;
        }
        Ok(())
    }
}
