//! The lock on an image: one writer, or any number of readers, for this program and for QEMU.
//!
//! Open file description locks over the whole file: they belong to the description that carries the I/O, not to the
//! process, and last as long as it. They reach beyond the end of the file, so that they work on block devices and
//! images of any size.
//!
//! QEMU locks single bytes in the same way (`block/file-posix.c`, RAW_LOCK_*): a shared lock on byte 100 + p means
//! that it uses permission p, one on byte 200 + p that no other may use it; then it tests whether another process
//! holds the opposite byte. Permissions are consistent read, write, write unchanged and resize: 0 to 3. A writer of
//! ours locks all bytes exclusively, and so conflicts with any of those, in either order. A reader of ours follows
//! QEMU's protocol: it announces that it reads and that no other may write or resize, and tests whether another does.
//!
//! ```text
//!   byte      0 ............ 100 │ 101 102 103 ......... 200 │ 201 ........... end
//!   writer    exclusive, all of it
//!   reader    shared             │ not locked: others write? │ shared
//! ```
//!
//! Unsafe: these locks have no safe wrapper.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const USES_READ: i64 = 100;
const USES_WRITE: i64 = 101;
const USES_RESIZE: i64 = 103;
const FORBIDS_WRITE: i64 = 201;
/// To the end of the file and beyond.
const REST: i64 = 0;

/// Result of a lock attempt.
#[derive(Debug)]
pub(crate) enum Locked {
    Yes,
    /// Another description holds one that does not go with ours.
    Taken {
        /// The process, where it holds a lock of the older kind, which names it.
        pid: Option<i32>,
    },
}

/// Locks a file for a writer or a reader, without waiting.
///
/// # Errors
/// Locks do not work on this file.
pub(crate) fn lock(file: BorrowedFd<'_>, read_only: bool) -> io::Result<Locked> {
    let (kind, ranges): (_, &[(i64, i64)]) = if read_only {
        (libc::F_RDLCK, &[(0, USES_READ + 1), (FORBIDS_WRITE, REST)])
    } else {
        (libc::F_WRLCK, &[(0, REST)])
    };
    for &(start, len) in ranges {
        match set(file, kind, start, len) {
            Ok(()) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                let pid = holder(file, kind, start, len).ok().flatten().and_then(|pid| (pid > 0).then_some(pid));
                return Ok(Locked::Taken { pid });
            }
            Err(error) => return Err(error),
        }
    }
    if read_only {
        // After our own lock is in place: of a concurrent reader and writer at least one sees the other.
        let writer = holder(file, libc::F_WRLCK, USES_WRITE, USES_RESIZE - USES_WRITE + 1)?;
        if let Some(pid) = writer {
            return Ok(Locked::Taken { pid: (pid > 0).then_some(pid) });
        }
    }
    Ok(Locked::Yes)
}

fn request(kind: libc::c_int, start: i64, len: i64) -> libc::flock {
    // SAFETY: an all-zero flock is a valid value; its process id must be zero for this kind of lock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start;
    lock.l_len = len;
    lock
}

fn set(file: BorrowedFd<'_>, kind: libc::c_int, start: i64, len: i64) -> io::Result<()> {
    let lock = request(kind, start, len);
    // SAFETY: the descriptor is open, and the command reads one flock, which `lock` is.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Process that holds a conflicting lock, -1 if the lock does not name it; `None` without a conflict.
fn holder(file: BorrowedFd<'_>, kind: libc::c_int, start: i64, len: i64) -> io::Result<Option<i32>> {
    let mut lock = request(kind, start, len);
    // SAFETY: the descriptor is open, and the command reads and writes one flock, which `lock` is.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 if libc::c_int::from(lock.l_type) == libc::F_UNLCK => Ok(None),
        0 => Ok(Some(lock.l_pid)),
        _ => Err(io::Error::last_os_error()),
    }
}
