//! Threads with a private descriptor table.
//!
//! A descriptor whose close blocks then blocks only the thread in whose table it is. Such a thread ends without closing
//! untrusted descriptors: the kernel closes them after the thread has ended for all others.
//!
//! Unsafe: a descriptor number names one file in one table and another, or none, in the next.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc::channel;

use rustix::fs::{Mode, OFlags, open};

/// Standard input, output and error. They stay open in every table, so that foreign descriptors do not get their
/// numbers.
const STANDARD: RawFd = 3;
/// Bytes of a thread's stack: a session's data is on the heap.
pub(super) const STACK_BYTES: usize = 256 << 10;

/// A descriptor with a number beyond those of standard input, output and errors.
pub(super) fn raise(file: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, STANDARD)?)
}

/// Gives the calling thread a private table with only these descriptors of the old one, and with /dev/null as standard
/// input, output and error.
fn isolate(kept: &[RawFd]) -> io::Result<()> {
    unshare()?;
    let mut kept: Vec<_> = kept.iter().map(|fd| fd.cast_unsigned()).collect();
    kept.sort_unstable();
    let mut from = STANDARD.cast_unsigned();
    for fd in kept {
        close_range(from, fd.checked_sub(1))?;
        from = fd + 1;
    }
    close_range(from, Some(u32::MAX))?;
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for number in 0..STANDARD {
        put(&null, number)?;
    }
    Ok(())
}

/// Gives the calling thread a copy of the shared table, by a `close_range` that closes no descriptor: containers allow
/// `unshare` only together with mounting.
fn unshare() -> io::Result<()> {
    // SAFETY: no descriptor has this number, so none is closed. The callers below ensure that this thread uses no
    // descriptor of the old table but those it keeps.
    let done = unsafe { libc::syscall(libc::SYS_close_range, u32::MAX, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
    if done == 0 { Ok(()) } else { Err(not_allowed()) }
}

/// Closes the descriptors from one number up to another.
fn close_range(first: u32, last: Option<u32>) -> io::Result<()> {
    let Some(last) = last.filter(|last| *last >= first) else { return Ok(()) };
    // SAFETY: closes descriptors of the calling thread's private table, which this thread does not use.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(not_allowed()),
    }
}

fn not_allowed() -> io::Error {
    let error = io::Error::last_os_error();
    io::Error::new(
        error.kind(),
        format!("a descriptor table for a thread: close_range: {error}; let the container's seccomp profile allow it"),
    )
}

/// Has a standard number name this file.
fn put(file: &OwnedFd, number: RawFd) -> io::Result<()> {
    // SAFETY: standard input, output and error have no owner in a thread with a private table.
    if unsafe { libc::dup2(file.as_raw_fd(), number) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives the calling thread a private table with this descriptor only. The thread must use no other descriptor that was
/// made before.
///
/// # Errors
/// The system gives no table.
pub(super) fn isolate_with(file: &OwnedFd) -> io::Result<()> {
    isolate(&[file.as_raw_fd()])
}

/// Starts a thread with a private table that has these descriptors, and no others of the caller's. The caller's are
/// closed before the thread begins.
///
/// # Errors
/// The system gives no thread or table. The descriptors come back.
pub(super) fn spawn<F>(name: &str, files: Vec<OwnedFd>, work: F) -> Result<(), (io::Error, Vec<OwnedFd>)>
where
    F: FnOnce(Vec<OwnedFd>) + Send + 'static,
{
    let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let (told, ready) = channel();
    let (go, started) = channel();
    let begin = move || {
        let isolated = isolate(&numbers);
        let is_alone = isolated.is_ok();
        if told.send(isolated).is_err() || started.recv().is_err() || !is_alone {
            return;
        }
        // SAFETY: the numbers name the same files in this thread's private table, where they have no other owner.
        let files = numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect();
        work(files);
    };
    let thread = std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    if let Err(error) = thread.spawn(begin) {
        return Err((error, files));
    }
    match ready.recv() {
        Ok(Ok(())) => {
            // Here they are not the last of their files. The thread waits, so that they are not the last later either.
            drop(files);
            let _ = go.send(());
            Ok(())
        }
        Ok(Err(error)) => Err((error, files)),
        Err(_) => Err((io::ErrorKind::Other.into(), files)),
    }
}

/// A descriptor that is left to the end of its thread.
pub(super) type Foreign = ManuallyDrop<OwnedFd>;

/// Leaves a descriptor to the end of the thread.
pub(super) fn leave(file: OwnedFd) {
    let _ = Foreign::new(file);
}
