//! A block device of the kernel over a file, where one may be made. Says so where not.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device; goes with its holder.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Over this file, with further options of `losetup`.
    pub fn new(backing: &Path, options: &[&str]) -> Option<Loop> {
        let made = Command::new("losetup").args(["--find", "--show"]).args(options).arg(backing).output();
        let made = made.ok().filter(|made| made.status.success());
        let Some(made) = made else {
            println!("skipped: no loop device can be made here");
            return None;
        };
        Some(Loop(String::from_utf8(made.stdout).unwrap().trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
