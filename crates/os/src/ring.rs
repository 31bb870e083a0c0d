//! The ring of system calls, one for each lane: it submits the operations of all queues with one call, and the lane
//! sleeps in it.
//!
//! Owned by one thread at a time, and lent to each driver for the length of a call (`Cx` of `blkyard_mq::Driver`). A
//! driver opens an inbox, pushes entries for it, and takes from it the completions that the lane has reaped. An entry
//! carries the inbox and the driver's [`Cid`]; a completion whose id is not in flight is counted and dropped.
//!
//! The completion ring cannot overflow: an entry is pushed only while there is [room](Ring::room) for its completion,
//! and the slot is returned when the driver takes it. Eventfds have separate slots.
//!
//! It reads no clock except for the length of a sleep, and knows nothing of requests, files or guests.
//!
//! Unsafe: entries hold addresses that the kernel will use later. The code that pushes one guarantees that they stay
//! valid until the completion is taken; the ring is not dropped before the kernel has finished.

mod buffers;
mod error;
mod eventfds;
mod files;
mod nops;
mod setup;
mod signals;
mod streams;

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::Cid;
use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{IoUring, squeue};

use crate::file::disk::{DiskRoom, DiskUse};
use crate::now_ns;
pub(crate) use buffers::Buffers;
pub use buffers::{Attachment, FixedBuffers};
pub use error::RingError;
pub use error::{Holdings, RingCounters};
use eventfds::EventfdPolls;
pub(crate) use files::FileHolder;
use files::Files;
pub use nops::NopRing;
pub use setup::RingConfig;
use setup::set_up;
use signals::EventfdSignals;
use streams::RingStreams;

/// Names one driver's inbox. Only good with the ring that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InboxId {
    ring: u32,
    index: u32,
}

/// Result of one entry: a count, or a negative errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) cid: Cid,
    pub(crate) result: i32,
}

#[derive(Debug)]
struct CompletionInbox {
    arrived: VecDeque<Completion>,
    /// Pushed and not yet reaped.
    out: u32,
    /// Given back: free for another driver.
    closed: bool,
}

/// Longest sleep of a lane that lacks a descriptor to poll an eventfd: rare enough to cost nothing, frequent enough
/// that a guest does not give up.
const DEAF_NS: u64 = 100_000_000;

/// Owner of an entry: the upper byte of its `user_data`.
const KIND_DRIVER: u64 = 1;
const KIND_EVENTFD: u64 = 2;
const KIND_CANCEL: u64 = 3;
const KIND_SIGNAL: u64 = 4;
const KIND_STREAM: u64 = 5;
const KIND_SHIFT: u32 = 56;
/// Below the kind, above the 32 bits of the cid, or of an eventfd's generation.
const INDEX_SHIFT: u32 = 32;
const INDEX_MASK: u64 = 0xff_ffff;

fn name(kind: u64, index: u32, low: u32) -> u64 {
    kind << KIND_SHIFT | u64::from(index) << INDEX_SHIFT | u64::from(low)
}

/// One io_uring.
pub struct Ring {
    uring: IoUring,
    config: RingConfig,
    id: u32,
    inboxes: Vec<CompletionInbox>,
    eventfds: EventfdPolls,
    /// Numbers of the eventfds that were signalled since the lane last asked.
    signalled: Vec<usize>,
    signals: EventfdSignals,
    streams: RingStreams,
    buffers: Buffers,
    files: Files,
    disks: Vec<Weak<DiskUse>>,
    view: Arc<RingCounters>,
    /// Places of the completion ring that drivers hold: pushed and not yet taken.
    held: usize,
    held_max: usize,
    /// Completions reaped and not yet taken: a lane with some does not sleep.
    untaken: usize,
    /// Total of entries pushed and completions reaped: the difference, less the entries still in the ring, is in the
    /// kernel.
    pushed: u64,
    reaped: u64,
    /// Why the kernel serves the ring no more.
    failure: Option<std::io::Error>,
}

impl Ring {
    /// Makes a ring. With [`RingConfig::single_owner`] this is the thread that uses it.
    ///
    /// # Errors
    /// See [`RingError`]: io_uring may be switched off, or too old.
    pub fn new(config: RingConfig) -> Result<Ring, RingError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let uring = set_up(config)?;
        let (held_max, pollers_max) = setup::room(uring.params(), config);
        let view = Arc::new(RingCounters::of(pollers_max));
        Ok(Ring {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            inboxes: Vec::new(),
            eventfds: EventfdPolls::default(),
            signalled: Vec::new(),
            signals: EventfdSignals::new(Arc::clone(&view)),
            streams: RingStreams::default(),
            buffers: Buffers::new(&uring.submitter(), Arc::clone(&view), config.registers_memory),
            files: Files::new(Arc::clone(&view)),
            disks: Vec::new(),
            view,
            held: 0,
            untaken: 0,
            held_max,
            pushed: 0,
            reaped: 0,
            failure: None,
            config,
            uring,
        })
    }

    /// The ring's counters for other threads.
    pub fn view(&self) -> &Arc<RingCounters> {
        &self.view
    }

    /// How it was made. A driver with a ring of its own makes that alike.
    pub(crate) fn config(&self) -> RingConfig {
        self.config
    }

    /// The ring's own descriptor: readable while completions wait in it.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.uring.as_fd()
    }

    /// Whether private memory that was attached is known to the kernel for good, or why not.
    pub fn buffers(&self) -> FixedBuffers {
        self.view.buffers()
    }

    /// Keeps a region mapped at least until the last holder of the attachment drops it. Private memory is registered
    /// with the kernel, so that I/O into it need not look up its pages each time; if the kernel refuses, I/O works
    /// without, and [`Ring::buffers`] has the cause.
    pub fn attach(&mut self, region: &Arc<Region>) -> Arc<Attachment> {
        self.buffers.attach(&self.uring.submitter(), region)
    }

    /// Registers an attached region for a buffer that was registered there, if this process made its memory. Private
    /// memory is registered already.
    pub(crate) fn want(&mut self, attachment: &Attachment) {
        self.buffers.want(&self.uring.submitter(), attachment);
    }

    /// Whether the region that this holds attached is one of the table.
    pub(crate) fn is_attached_in(&self, attachment: &Attachment, memory: &RegionTable) -> bool {
        let attached = self.buffers.region(attachment);
        attached.is_some_and(|attached| memory.iter().any(|(_, region)| Arc::ptr_eq(region, attached)))
    }

    /// Releases unheld memory and files. A control operation.
    pub fn sweep(&mut self) {
        self.buffers.sweep(&self.uring.submitter());
        self.files.sweep();
        self.sweep_streams();
    }

    /// The number under which the kernel knows these bytes of an attached region, if it does.
    #[inline]
    pub(crate) fn fixed(&self, attachment: &Attachment, offset: u64, len: u32) -> Option<u16> {
        self.buffers.fixed(attachment, offset, len)
    }

    /// Keeps a file open for entries that name it, until the last holder of the result drops it and the ring
    /// [sweeps](Ring::sweep).
    pub(crate) fn hold(&mut self, file: &Arc<OwnedFd>) -> FileHolder {
        self.sweep();
        self.files.hold(file)
    }

    /// What this lane has in flight on a disk.
    pub(crate) fn disk_use(&mut self, room: &Arc<DiskRoom>) -> Arc<DiskUse> {
        self.disks.retain(|disk| disk.strong_count() > 0);
        let known = self.disks.iter().filter_map(Weak::upgrade).find(|disk| disk.is_of(room));
        known.unwrap_or_else(|| {
            let disk = Arc::new(DiskUse::new(Arc::clone(room)));
            self.disks.push(Arc::downgrade(&disk));
            disk
        })
    }

    /// An inbox for a driver with at most `depth` entries in flight.
    pub(crate) fn inbox(&mut self, depth: usize) -> InboxId {
        let inbox = CompletionInbox { arrived: VecDeque::with_capacity(depth), out: 0, closed: false };
        let free = self.inboxes.iter().position(|inbox| inbox.closed);
        let index = free.unwrap_or(self.inboxes.len());
        assert!(index as u64 <= INDEX_MASK, "more inboxes than names");
        match self.inboxes.get_mut(index) {
            Some(place) => *place = inbox,
            None => self.inboxes.push(inbox),
        }
        self.view.count_inboxes(1);
        InboxId { ring: self.id, index: index as u32 }
    }

    /// Takes an inbox back from a driver that leaves this ring. Its number may be another's from now on.
    ///
    /// # Panics
    /// If an entry is out, or an answer was not taken: it would be another's.
    pub(crate) fn close(&mut self, inbox: InboxId) {
        assert!(inbox.ring == self.id, "closed an inbox of another ring");
        let inbox = &mut self.inboxes[inbox.index as usize];
        assert!(inbox.out == 0 && inbox.arrived.is_empty() && !inbox.closed, "an inbox was closed while in use");
        *inbox = CompletionInbox { arrived: VecDeque::new(), out: 0, closed: true };
        self.view.count_inboxes(-1);
    }

    /// Number of entries that drivers may push: free slots for their completions.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.held_max - self.held
    }

    /// Pushes an entry, for the next call into the kernel. Makes that call if the ring is full.
    ///
    /// # Safety
    /// All memory that the entry names stays valid until the completion is [taken](Ring::take), or the ring is dropped.
    ///
    /// # Panics
    /// Without [room](Ring::room), or with the inbox of another ring.
    #[inline]
    pub(crate) unsafe fn push(&mut self, inbox: InboxId, cid: Cid, entry: squeue::Entry) {
        assert!(inbox.ring == self.id && self.held < self.held_max, "pushed to another ring, or without a place");
        self.held += 1;
        self.inboxes[inbox.index as usize].out += 1;
        // SAFETY: promised by the caller.
        unsafe { self.push_named(&entry.user_data(name(KIND_DRIVER, inbox.index, cid.0))) };
    }

    /// # Safety
    /// As for [`Ring::push`].
    #[inline]
    unsafe fn push_named(&mut self, entry: &squeue::Entry) {
        // SAFETY: promised by the caller.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.flush();
            if self.failure.is_some() {
                // It will never be answered: as good as one that the kernel keeps for good.
                return;
            }
            if self.uring.submission().is_full() {
                // The kernel is short of memory for requests. It has ours that are in flight to finish first.
                std::thread::yield_now();
            }
        }
        self.pushed += 1;
    }

    /// The next completion for an inbox, in the order they were reaped.
    #[inline]
    pub(crate) fn take(&mut self, inbox: InboxId) -> Option<Completion> {
        assert!(inbox.ring == self.id, "took from another ring");
        let completion = self.inboxes[inbox.index as usize].arrived.pop_front()?;
        self.held -= 1;
        self.untaken -= 1;
        Some(completion)
    }

    /// Submits all entries pushed since the last call, for all queues, and lets the kernel deliver completions. Without
    /// either, no call is made. Entries that the kernel does not accept now stay in the ring for the next call.
    #[inline]
    pub fn submit(&mut self) {
        self.run_streams();
        self.flush();
    }

    #[inline]
    fn flush(&mut self) {
        let (waiting, wanted) = {
            let queue = self.uring.submission();
            (queue.len(), queue.taskrun() || queue.cq_overflow())
        };
        if waiting > 0 || wanted {
            self.enter();
        }
    }

    fn enter(&mut self) {
        /// Calls in a row that may be refused for want of memory before the queues get their turn again.
        const TRIES: u32 = 8;
        for _ in 0..TRIES {
            if self.failure.is_some() {
                return;
            }
            match self.uring.submit() {
                Ok(_) if self.uring.submission().is_empty() => return,
                Ok(_) => {}
                Err(error) => self.refused(error),
            }
        }
    }

    /// Records a failed call: all its entries are still in the ring.
    fn refused(&mut self, error: std::io::Error) {
        match error.raw_os_error() {
            Some(libc::EINTR | libc::ETIME) => {}
            // Too little memory, or completions that must be taken first.
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                self.reap();
                std::thread::yield_now();
            }
            _ => {
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Whether the kernel refuses the ring. Its owner must drop it: no entry completes any more.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Why the kernel serves the ring no more, once.
    pub(crate) fn take_failure(&mut self) -> Option<std::io::Error> {
        self.failure.take()
    }

    /// Moves completions into the inboxes, and resets the eventfds that were signalled. Makes no call into the ring.
    /// Returns the number of completions.
    #[inline]
    pub fn reap(&mut self) -> usize {
        let mut count = 0;
        for entry in self.uring.completion() {
            count += 1;
            let (data, result) = (entry.user_data(), entry.result());
            let index = (data >> INDEX_SHIFT & INDEX_MASK) as usize;
            let known = match data >> KIND_SHIFT {
                KIND_DRIVER => match self.inboxes.get_mut(index) {
                    Some(inbox) if inbox.out > 0 => {
                        inbox.out -= 1;
                        inbox.arrived.push_back(Completion { cid: Cid(data as u32), result });
                        self.untaken += 1;
                        true
                    }
                    _ => false,
                },
                KIND_EVENTFD => {
                    let known = self.eventfds.poll_ended(index, data as u32, result);
                    // The result of a cancelled poll says nothing about the later one.
                    if !self.eventfds.is_listening(index) {
                        self.signalled.push(index);
                    }
                    known
                }
                // Its eventfd may be replaced already.
                KIND_SIGNAL => result == 0,
                KIND_STREAM => self.streams.ended(index, data as u32, result),
                KIND_CANCEL => true,
                _ => false,
            };
            if !known {
                self.view.count_stray();
            }
        }
        self.reaped += count;
        self.run_streams();
        count as usize
    }

    /// Polls an eventfd from now on, under an index of the caller's: a signal ends a sleep, resets the descriptor and
    /// ends the poll. Does nothing if it is polled already.
    pub fn watch(&mut self, eventfd: BorrowedFd<'_>, index: usize) {
        let Some(step) = self.eventfds.watch(eventfd, index) else { return };
        // Room for each from the start: reaping allocates nothing.
        self.signalled.reserve((index + 1).saturating_sub(self.signalled.len()));
        if let Some(old) = step.cancel {
            self.cancel(old);
        }
        // SAFETY: the entry points to no memory, and its descriptor is a duplicate that the eventfds hold.
        unsafe { self.push_named(&step.poll) };
    }

    /// Whether the eventfd of this number is listened to.
    pub(crate) fn is_listening(&self, index: usize) -> bool {
        self.eventfds.is_listening(index)
    }

    /// The number of an eventfd that was signalled, once for each time.
    #[inline]
    pub fn next_signalled(&mut self) -> Option<usize> {
        self.signalled.pop()
    }

    /// Polls the eventfd of a poller, which `worked` since the last sleep or not. Delayed, if the eventfd has ended
    /// many sleeps in vain: returns the time at which to look for work and poll again.
    pub(crate) fn watch_moderated(
        &mut self,
        eventfd: BorrowedFd<'_>,
        index: usize,
        worked: bool,
        now_ns: u64,
    ) -> Option<u64> {
        let paused_until_ns = self.eventfds.moderate(eventfd, index, worked, now_ns);
        if paused_until_ns.is_none() {
            self.watch(eventfd, index);
        }
        paused_until_ns
    }

    /// Stops listening to the eventfd of this number, if there is one.
    pub fn unwatch(&mut self, index: usize) {
        if let Some(old) = self.eventfds.forget(index) {
            self.cancel(old);
        }
    }

    fn cancel(&mut self, name_of_poll: u64) {
        let entry = io_uring::opcode::AsyncCancel::new(name_of_poll).build().user_data(name(KIND_CANCEL, 0, 0));
        // SAFETY: the entry points to no memory.
        unsafe { self.push_named(&entry) };
    }

    /// Whether entries wait to be submitted, or completions were reaped and not taken by their driver.
    #[inline]
    pub(crate) fn has_unsubmitted_or_untaken(&mut self) -> bool {
        let is_due = self.streams.has_due() || !self.uring.submission().is_empty();
        is_due || self.untaken > 0 || self.streams.has_events()
    }

    /// Submits pushed entries and sleeps until a completion, an eventfd, a signal, or the deadline. Returns at once if
    /// a completion has not been reaped yet, or was reaped and not taken by its driver, or by the lane if it is an
    /// eventfd's.
    pub fn sleep(&mut self, deadline_ns: Option<u64>) {
        self.run_streams();
        if self.untaken > 0 || !self.signalled.is_empty() || self.streams.has_events() {
            self.flush();
            return;
        }
        // An eventfd that is not polled cannot end a sleep.
        let deadline_ns = if self.eventfds.are_deaf() {
            Some(deadline_ns.unwrap_or(u64::MAX).min(now_ns() + DEAF_NS))
        } else {
            deadline_ns
        };
        let slept = match deadline_ns {
            None => self.uring.submit_and_wait(1),
            Some(deadline_ns) => {
                let left_ns = deadline_ns.saturating_sub(now_ns());
                let time = Timespec::new().sec(left_ns / 1_000_000_000).nsec((left_ns % 1_000_000_000) as u32);
                self.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        if let Err(error) = slept {
            self.refused(error);
        }
    }
}

impl Drop for Ring {
    /// Waits until the kernel has completed every submitted entry: it may be writing to memory that is unmapped right
    /// after. Entries that were pushed and not submitted are dropped.
    fn drop(&mut self) {
        if self.quiesce() {
            // The kernel takes a ring apart some time after it is closed; limits on locked memory should not have to
            // wait for that. If it refuses, they do.
            let _ = self.uring.submitter().unregister_buffers();
        } else {
            // The time of completion is unknown: the memory it may write to stays mapped permanently.
            self.buffers.leak();
            self.streams.leak();
        }
    }
}

impl Ring {
    /// Waits until no entry in the kernel could touch memory. False if that cannot be known.
    fn quiesce(&mut self) -> bool {
        // Polls are over once they are cancelled. One that has completed meanwhile, or was never submitted,
        // is not found. Kernels before 6.0 have no such cancel; there a poll ends with the ring, and need not be waited
        // for, since it writes to no memory.
        let cancel = |old: u64| self.uring.submitter().register_sync_cancel(None, CancelBuilder::user_data(old));
        let left = |old: u64| loop {
            match cancel(old).map_err(|error| error.kind()) {
                Ok(()) | Err(ErrorKind::NotFound) => break false,
                // A signal: the remaining ones would count as cancelled although they are not.
                Err(ErrorKind::Interrupted) => {}
                Err(_) => break true,
            }
        };
        // Operations of connections end when those are reset. Accepts and timers write to no memory either.
        self.streams.reset_all();
        self.streams.out(true).for_each(|old| _ = left(old));
        let polls = self.eventfds.armed().chain(self.streams.out(false));
        let polls_left = polls.filter(|old| left(*old)).count() as u64;
        loop {
            self.reap();
            let waiting = self.uring.submission().len() as u64;
            let with_kernel = self.pushed - self.reaped - waiting;
            if with_kernel <= polls_left {
                return true;
            }
            // SAFETY: submits no entry and passes no argument.
            let waited = unsafe {
                self.uring.submitter().enter::<libc::sigset_t>(0, 1, io_uring::EnterFlags::GETEVENTS.bits(), None)
            };
            if let Err(error) = waited
                && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
            {
                return false;
            }
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("inboxes", &self.inboxes.len())
            .field("held", &self.held)
            .field("buffers", &self.buffers())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
