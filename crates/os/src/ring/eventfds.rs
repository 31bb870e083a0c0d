//! The eventfds that end a lane's sleep.
//!
//! ```text
//!            watch                signalled (read, which resets it)
//!   quiet ──────────▶ listening ──────────────────────────────────▶ quiet
//!     ▲                   │ forget, or another descriptor under the same number
//!     └───────────────────┘ (cancelled; the answer of an older generation is ignored)
//! ```
//!
//! Polls are level-triggered: an eventfd signalled before the lane listens ends the next sleep all the same, so no
//! signal is lost between the last check and the sleep. Holds a duplicate of each descriptor, since its owner may close
//! it at any time and the number may then name another file. One that cannot be duplicated, for want of descriptors, is
//! tried again before each sleep, and sleeps are short until then. Pushes no entries itself.
//!
//! An eventfd that is signalled repeatedly without work wakes the lane in vain, and one created as a semaphore stays
//! readable after a single write. Such an eventfd is polled less and less often, as in interrupt moderation: after
//! [`IN_VAIN_FREE`] wake-ups in a row without work only after a pause, which doubles up to [`PAUSE_MAX_NS`]. No signal
//! is lost by that: the lane looks for work when the pause is over, and then listens again.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use io_uring::{opcode, squeue, types};

use super::{KIND_EVENTFD, name};

/// Completions that one eventfd may have outstanding: of its poll, of a poll that is being cancelled, and of the
/// cancellation. As many as one signal slot.
pub(super) const COMPLETIONS_EACH: usize = 3;

/// Wake-ups in a row without work that an eventfd may cause before it is moderated. An honest driver causes one now and
/// then, when its kick crosses a poll of ours.
const IN_VAIN_FREE: u32 = 8;
/// The first pause: less than a wake-up costs.
const PAUSE_MIN_NS: u64 = 16_000;
/// The longest pause, and so the longest that a kick waits: a thousand wake-ups a second take a hundredth of a CPU.
const PAUSE_MAX_NS: u64 = 1_000_000;

/// The pause after `in_vain` wake-ups in a row without work.
fn pause_ns(in_vain: u32) -> u64 {
    match in_vain.checked_sub(IN_VAIN_FREE + 1) {
        None => 0,
        Some(doublings) => 2_u64.saturating_pow(doublings).saturating_mul(PAUSE_MIN_NS).min(PAUSE_MAX_NS),
    }
}

#[derive(Debug, Default)]
struct EventfdPoll {
    /// Our duplicate, and the number it had with its owner.
    held: Option<(OwnedFd, i32)>,
    generation: u32,
    listening: bool,
    /// Could not be reset: polling it again would never end.
    broken: bool,
    /// Could not be duplicated the last time.
    deaf: bool,
    /// Signalled since its queue was last asked for work.
    signalled: bool,
    /// Wake-ups in a row that brought no work.
    in_vain: u32,
    /// Not listened to before this time.
    paused_until_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct EventfdPolls {
    eventfds: Vec<EventfdPoll>,
    /// How many could not be duplicated.
    deaf: usize,
}

/// Next operation of the ring to poll an eventfd.
pub(super) struct PollStep {
    /// The poll of the descriptor that this eventfd was before.
    pub(super) cancel: Option<u64>,
    pub(super) poll: squeue::Entry,
}

impl EventfdPolls {
    /// Whether some eventfd is not polled until it is watched again.
    #[inline]
    pub(super) fn are_deaf(&self) -> bool {
        self.deaf > 0
    }

    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, index: usize) -> Option<PollStep> {
        if self.eventfds.len() <= index {
            self.eventfds.resize_with(index + 1, EventfdPoll::default);
        }
        let same = self.eventfds[index].held.as_ref().is_some_and(|(_, number)| *number == fd.as_raw_fd());
        if same && (self.eventfds[index].listening || self.eventfds[index].broken) {
            return None;
        }
        let is_other = !same && self.eventfds[index].held.is_some();
        let cancel = if is_other { self.forget(index) } else { None };
        let eventfd = &mut self.eventfds[index];
        if eventfd.held.is_none() {
            match fd.try_clone_to_owned() {
                Ok(own) => {
                    eventfd.held = Some((own, fd.as_raw_fd()));
                    self.deaf -= usize::from(std::mem::take(&mut eventfd.deaf));
                }
                Err(error) => {
                    if !eventfd.deaf {
                        tracing::error!(%error, index, "an eventfd cannot be duplicated, so its queue is polled at intervals; raise the limit on open files");
                        eventfd.deaf = true;
                        self.deaf += 1;
                    }
                    return None;
                }
            }
        }
        let (own, _) = eventfd.held.as_ref()?;
        eventfd.listening = true;
        let poll = opcode::PollAdd::new(types::Fd(own.as_raw_fd()), libc::POLLIN as u32).build().user_data(name(
            KIND_EVENTFD,
            index as u32,
            eventfd.generation,
        ));
        Some(PollStep { cancel, poll })
    }

    /// Records whether the queue of an eventfd had work since the last sleep. Returns the time until which the eventfd
    /// is not polled, if it was signalled in vain too often.
    pub(super) fn moderate(&mut self, fd: BorrowedFd<'_>, index: usize, worked: bool, now_ns: u64) -> Option<u64> {
        let eventfd = self.eventfds.get_mut(index)?;
        if eventfd.held.as_ref().is_none_or(|(_, number)| *number != fd.as_raw_fd()) {
            return None;
        }
        let signalled = std::mem::take(&mut eventfd.signalled);
        if worked {
            (eventfd.in_vain, eventfd.paused_until_ns) = (0, 0);
        } else if signalled {
            eventfd.in_vain = eventfd.in_vain.saturating_add(1);
            eventfd.paused_until_ns = now_ns + pause_ns(eventfd.in_vain);
        }
        (eventfd.paused_until_ns > now_ns).then_some(eventfd.paused_until_ns)
    }

    /// Whether this eventfd is polled.
    pub(super) fn is_listening(&self, index: usize) -> bool {
        self.eventfds.get(index).is_some_and(|eventfd| eventfd.listening)
    }

    /// The number under which this descriptor is held.
    pub(super) fn index_of(&self, fd: BorrowedFd<'_>) -> Option<usize> {
        let number = fd.as_raw_fd();
        self.eventfds.iter().position(|eventfd| eventfd.held.as_ref().is_some_and(|(_, held)| *held == number))
    }

    /// Stops listening; returns the name of the poll to be cancelled.
    pub(super) fn forget(&mut self, index: usize) -> Option<u64> {
        let eventfd = self.eventfds.get_mut(index)?;
        let old = name(KIND_EVENTFD, index as u32, eventfd.generation);
        let listened = eventfd.listening;
        self.deaf -= usize::from(eventfd.deaf);
        eventfd.generation = eventfd.generation.wrapping_add(1);
        *eventfd = EventfdPoll { generation: eventfd.generation, ..EventfdPoll::default() };
        listened.then_some(old)
    }

    /// A poll has ended. False if there never was one of this name.
    pub(super) fn poll_ended(&mut self, index: usize, generation: u32, result: i32) -> bool {
        let Some(eventfd) = self.eventfds.get_mut(index) else { return false };
        if generation != eventfd.generation {
            return true; // Cancelled, or signalled during the cancellation.
        }
        let known = std::mem::take(&mut eventfd.listening);
        if result == -libc::ECANCELED {
            return known; // The thread that listened is ending, or the ring.
        }
        eventfd.signalled = true;
        eventfd.broken = result < 0 || eventfd.held.as_ref().is_none_or(|(own, _)| !quiet(own.as_fd()));
        if eventfd.broken {
            tracing::warn!(
                index,
                result,
                "an eventfd cannot be polled, so its queue is not served until it is replaced"
            );
        }
        known
    }

    /// The polls that the kernel may have.
    pub(super) fn armed(&self) -> impl Iterator<Item = u64> {
        let listening = self.eventfds.iter().enumerate().filter(|(_, eventfd)| eventfd.listening);
        listening.map(|(index, eventfd)| name(KIND_EVENTFD, index as u32, eventfd.generation))
    }
}

/// Reads the count of an event descriptor, without waiting for one. False if it is no such descriptor.
fn quiet(eventfd: BorrowedFd<'_>) -> bool {
    let mut count = [0_u8; 8];
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    // Its owner may have left the descriptor blocking, and may have read it first.
    match rustix::io::preadv2(eventfd, &mut buffers, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT) {
        Ok(8) | Err(rustix::io::Errno::AGAIN) => true,
        // An epoll instance cannot be read: it is reset once it has reported all its events.
        Err(rustix::io::Errno::INVAL) => quiet_set(eventfd),
        _ => false,
    }
}

/// Drains an edge-triggered epoll instance; with more events it stays readable. False if it is not one.
fn quiet_set(set: BorrowedFd<'_>) -> bool {
    /// As many as an export has queues.
    const EVENTS: usize = 64;
    let mut events = [const { MaybeUninit::uninit() }; EVENTS];
    rustix::event::epoll::wait(set, &mut events[..], Some(&rustix::event::Timespec::default())).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound() {
        assert_eq!([0, 1, IN_VAIN_FREE].map(pause_ns), [0; 3]);
        assert_eq!([9, 10, 11].map(pause_ns), [16_000, 32_000, 64_000]);
        assert_eq!(
            [14, 15, 16, 60, 73, u32::MAX].map(pause_ns),
            [512_000, 1_000_000, 1_000_000, 1_000_000, 1_000_000, 1_000_000]
        );
    }

    #[test]
    fn work_ends_the_moderation_of_an_eventfd_and_so_does_another_eventfd() {
        let [first, second] = [0; 2].map(|_| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
        let mut eventfds = EventfdPolls::default();
        let mut now_ns = 0;
        let mut ring_in_vain = |eventfds: &mut EventfdPolls, fd: &OwnedFd, times: u32| {
            let mut paused = None;
            for _ in 0..times {
                eventfds.watch(fd.as_fd(), 0).expect("it is not listened to");
                let generation = eventfds.eventfds[0].generation;
                assert!(eventfds.poll_ended(0, generation, libc::POLLIN.into()));
                paused = eventfds.moderate(fd.as_fd(), 0, false, now_ns);
                now_ns = paused.unwrap_or(now_ns);
            }
            paused.map(|_| pause_ns(eventfds.eventfds[0].in_vain))
        };
        assert_eq!(ring_in_vain(&mut eventfds, &first, IN_VAIN_FREE), None);
        assert_eq!(ring_in_vain(&mut eventfds, &first, 1), Some(PAUSE_MIN_NS));
        assert_eq!(ring_in_vain(&mut eventfds, &first, 20), Some(PAUSE_MAX_NS));
        assert_eq!(eventfds.moderate(first.as_fd(), 0, true, 0), None, "it had work");
        assert_eq!(ring_in_vain(&mut eventfds, &first, IN_VAIN_FREE), None);
        assert!(ring_in_vain(&mut eventfds, &first, 5).is_some());
        assert_eq!(eventfds.moderate(second.as_fd(), 0, false, 0), None);
        assert_eq!(ring_in_vain(&mut eventfds, &second, IN_VAIN_FREE), None, "this one has done nothing yet");
    }
}
