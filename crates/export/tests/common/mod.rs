//! Shared by the tests of this crate: exports to connect to, recording devices, front-ends, guests.
//!
//! Every wait is bounded: a wait that times out panics with its condition.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

mod devices;
mod front;
mod guest;
mod hand;
mod line;
mod load;
pub mod nvme;
pub mod nvme_host;
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
pub use nvme::{AdminHost, NvmeWorld, RawClient};
pub use raw::{Raw, Request, addresses, state, words64};
pub use world::{SERIAL, Served, World, end, start_lanes};

/// Longer than any test on a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until the condition holds; checks every millisecond.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends the threads of a scope when dropped: also when a check fails, which would otherwise wait for them without end.
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

/// Number of signals of an event descriptor since the last call.
pub fn rung(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(_) => 0,
    }
}
