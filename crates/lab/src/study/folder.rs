//! A temporary folder that is removed when it is dropped.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A private folder. Removed with its content on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// A folder of this name among the system's temporary ones; the name differs from those of other processes.
    pub(crate) fn new(name: &str) -> io::Result<Folder> {
        let path = std::env::temp_dir().join(format!("blkyard-{name}-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Folder(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
