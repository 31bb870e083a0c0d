//! SIGINT, SIGTERM and SIGHUP as events that the main thread waits for.
//!
//! The handler records the signal and signals an eventfd. The third SIGINT or SIGTERM has its default effect: a
//! program that does not obey the first two is killed. One that comes within [`TOGETHER_NS`] of another is the same:
//! `timeout` and some supervisors signal the process and then its group.
//!
//! Unsafe: installing a handler, and the handler itself. It uses atomics, one `write` and the clock, all
//! async-signal-safe.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blkyard_sys::{EventFd, PollFd, PollFlags, wait_until};

/// A signal that was caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// `kill`, or the service manager.
    Terminate,
    /// The terminal is gone, or a daemon is to reload.
    Hangup,
}

/// The handler's descriptor; unset if negative.
static EVENTFD: AtomicI32 = AtomicI32::new(-1);
/// Signals that came and were not waited for yet: a bit for each of [`KINDS`].
static CAME: AtomicU8 = AtomicU8::new(0);
/// How many SIGINT and SIGTERM came since they were taken over.
static ENDINGS: AtomicU8 = AtomicU8::new(0);
/// As many of them are caught.
const ENDINGS_MAX: u8 = 2;
/// When the last of them was counted, ns of the monotonic clock; zero before.
static COUNTED_NS: AtomicU64 = AtomicU64::new(0);
/// Those that come within this time of a counted one are not counted: nobody presses a key again so soon.
const TOGETHER_NS: u64 = 50_000_000;

const KINDS: [(libc::c_int, Signal); 3] =
    [(libc::SIGINT, Signal::Interrupt), (libc::SIGTERM, Signal::Terminate), (libc::SIGHUP, Signal::Hangup)];

/// The program's wait for signals.
#[derive(Debug)]
pub struct Signals {
    eventfd: &'static EventFd,
}

impl Signals {
    /// Takes SIGINT and SIGTERM over, for the whole process and for good. Done again, two more of them are caught.
    ///
    /// # Errors
    /// The system refuses a descriptor or the handler.
    pub fn install() -> io::Result<Signals> {
        static KEPT: std::sync::OnceLock<EventFd> = std::sync::OnceLock::new();
        // Never closed: the handler may use it at any time.
        let made = EventFd::new()?;
        let eventfd = KEPT.get_or_init(|| made);
        EVENTFD.store(eventfd.as_fd().as_raw_fd(), Ordering::Release);
        ENDINGS.store(0, Ordering::Release);
        COUNTED_NS.store(0, Ordering::Release);
        [libc::SIGINT, libc::SIGTERM].into_iter().try_for_each(take_over)?;
        // A file at its size limit is an error of that request, and no reason to end.
        // SAFETY: ignoring a signal runs no code of ours.
        if unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        Ok(Signals { eventfd })
    }

    /// Takes SIGHUP over as well.
    ///
    /// # Errors
    /// The system refuses the handler.
    pub fn and_hangup(self) -> io::Result<Signals> {
        take_over(libc::SIGHUP).map(|()| self)
    }

    /// Waits for a signal, but no longer than this. A signal that came before is found at once.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Signal> {
        let mut now = Instant::now();
        let deadline = timeout.map(|timeout| now + timeout);
        loop {
            if let Some(signal) = taken() {
                return Some(signal);
            }
            // Signalled for a signal already taken, or after the check: check again.
            if self.eventfd.take() {
                continue;
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return None;
            }
            // After an early end everything is checked again.
            let _ = wait_until(&mut [PollFd::new(self.eventfd, PollFlags::IN)], now, deadline);
            now = Instant::now();
        }
    }
}

impl AsFd for Signals {
    /// Readable once a signal has come, until it is waited for.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

fn take_over(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid value to start from.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is initialised, the handler has the required signature and is async-signal-safe.
    match unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn taken() -> Option<Signal> {
    for (index, (_, signal)) in KINDS.iter().enumerate() {
        if CAME.fetch_and(!(1 << index), Ordering::AcqRel) & 1 << index != 0 {
            return Some(*signal);
        }
    }
    None
}

extern "C" fn on_signal(number: libc::c_int) {
    // SAFETY: the calling thread's errno, which the write below must leave as the interrupted code knows it.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above, valid for the thread's life.
    let before = unsafe { *errno };
    let is_ending = number != libc::SIGHUP;
    if !is_ending || is_counted() {
        record(number, is_ending);
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

fn record(number: libc::c_int, is_ending: bool) {
    if let Some(index) = KINDS.iter().position(|(signal, _)| *signal == number) {
        CAME.fetch_or(1 << index, Ordering::AcqRel);
    }
    if is_ending && ENDINGS.fetch_add(1, Ordering::AcqRel) >= ENDINGS_MAX {
        // SAFETY: both may be called in a handler. The signal is delivered when this returns, and ends the process.
        unsafe {
            libc::signal(number, libc::SIG_DFL);
            libc::raise(number);
        }
    }
    let one = 1_u64;
    // SAFETY: eight bytes of ours; the descriptor is never closed once it is stored. A failure has no remedy.
    unsafe { libc::write(EVENTFD.load(Ordering::Acquire), (&raw const one).cast(), 8) };
}

/// Counts a SIGINT or SIGTERM, unless another one was a moment ago: of two threads that handle one each at the same
/// time, one counts its own.
fn is_counted() -> bool {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time to `now`; async-signal-safe. The clock exists on every system.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    let counted_ns = COUNTED_NS.load(Ordering::Acquire);
    let is_apart = counted_ns == 0 || now_ns.saturating_sub(counted_ns) >= TOGETHER_NS;
    is_apart && COUNTED_NS.compare_exchange(counted_ns, now_ns, Ordering::AcqRel, Ordering::Acquire).is_ok()
}
