//! Name of a descriptor's file, as the kernel reports it in `/proc`.
//!
//! File systems are not queried, so a descriptor of another process cannot delay the caller.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Name of a descriptor's file: a path, or a kind in brackets such as `socket:[4711]`. A peer may have chosen it:
/// escape it before it is logged.
///
/// # Errors
/// `/proc` is not mounted, or the system refuses to read it.
pub fn fd_name(fd: impl AsFd) -> io::Result<String> {
    // A thread may have a private descriptor table.
    let link = std::fs::read_link(format!("/proc/thread-self/fd/{}", fd.as_fd().as_raw_fd()))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Whether a name of [`fd_name`] is that of an eventfd.
#[must_use]
pub fn is_eventfd_name(name: &str) -> bool {
    name.starts_with("anon_inode:[eventfd")
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::EventFd;

    #[test]
    fn only_an_eventfd_has_the_name_of_one() {
        let event = fd_name(EventFd::new().unwrap()).unwrap();
        assert!(is_eventfd_name(&event), "{event}");
        let memory = memfd_create("anon_inode:[eventfd]", MemfdFlags::CLOEXEC).unwrap();
        for other in [fd_name(&memory).unwrap(), fd_name(std::io::pipe().unwrap().0).unwrap()] {
            assert!(!is_eventfd_name(&other), "{other}");
        }
    }
}
