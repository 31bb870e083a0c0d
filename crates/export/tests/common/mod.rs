//! What the tests of this crate share: exports to connect to, devices that tell what they saw, front-ends, guests.
//!
//! Nothing here waits without a limit: who waits too long panics and says for what.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

mod devices;
mod front;
mod guest;
mod hand;
mod line;
mod load;
mod raw;
mod world;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use blkyard_sys::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use devices::{AnyDevice, AnyQueue, Gate, Seen, disk_info};
pub use front::{Bystander, Front, PLAIN, SPLIT, one_queue};
pub use guest::{DATA_MAX, Data, Ram, VQ_BYTES, Vq, kind, range};
pub use hand::Hand;
pub use line::{LINE_BYTES, Line, PAGE, kinds};
pub use load::load;
pub use raw::{Raw, Request, addresses, state, words64};
pub use world::{SERIAL, Served, World, end, start_lanes};

/// Longer than anything here takes on a busy machine; what takes longer hangs.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until something holds; looks again every millisecond.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tells the threads of a scope to end once it is dropped: also when a check fails, which would wait for them for ever.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Whether a descriptor has something to read, or is closed at the other end, within a time.
pub fn readable(fd: impl AsFd, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&time)) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.unwrap() > 0,
        }
    }
}

/// An event descriptor.
pub fn event() -> OwnedFd {
    EventFd::new().unwrap().into()
}

/// Rings an event descriptor.
pub fn ring(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

/// How often an event descriptor was rung since it was last asked.
pub fn rung(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(_) => 0,
    }
}
