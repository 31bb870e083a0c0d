//! Descriptors that are registered once and waited for many times (`epoll`), each under a token of the caller.
//!
//! For one thread that waits for hundreds of descriptors: the cost of a wait depends on the ready descriptors, not on
//! the registered ones. Events are level-triggered unless the caller asks for `ET`. Deadlines are absolute and the time
//! is the caller's, as in [`wait_until`](crate::wait_until).
//!
//! The kernel forgets a closed descriptor only if no duplicate of it is open, and another process has a duplicate of
//! each descriptor that was sent to it. So a [`Registered`] owns its descriptor, and removes it from the set before it
//! is closed.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::wait::timespec;

/// The longest wait: the range of the system call, in milliseconds. A longer one returns early.
const WAIT_MAX: Duration = Duration::from_millis(i32::MAX as u64);

/// Events that one wait returns at most. Other ready descriptors are returned by the next waits, in turn.
pub const EVENTS_MAX: usize = 64;

/// A set of descriptors, for the one thread that waits.
///
/// Readable when a descriptor of the set is ready, so a set can be waited for like any other descriptor.
#[derive(Debug)]
pub struct Epoll(Arc<OwnedFd>);

/// Events of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyFd {
    /// The token under which it is registered.
    pub token: u64,
    /// The events that are pending; `HUP` and `ERR` are reported whether asked for or not.
    pub events: EventFlags,
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// The system has no descriptors or no memory left.
    pub fn new() -> io::Result<Epoll> {
        Ok(Epoll(Arc::new(epoll::create(CreateFlags::CLOEXEC)?)))
    }

    /// Registers a descriptor for these events, under a token that waits return with it.
    ///
    /// # Errors
    /// The descriptor cannot be waited for, as a regular file, or the system's limit on watches is reached. The
    /// descriptor is dropped.
    pub fn register<D: AsFd>(&self, descriptor: D, token: u64, events: EventFlags) -> io::Result<Registered<D>> {
        epoll::add(&self.0, &descriptor, EventData::new_u64(token), events)?;
        Ok(Registered { descriptor: Some(descriptor), token, set: Arc::clone(&self.0) })
    }

    /// Waits until a descriptor is ready, the deadline has passed, or a signal arrives, and returns the ready ones.
    /// Without a deadline the wait is unlimited. An empty result does not mean that the deadline has passed.
    ///
    /// A descriptor that is dropped while the result is processed may still follow in it, so its token is not used
    /// again before the next wait.
    ///
    /// # Errors
    /// The system has no memory.
    pub fn wait(&self, now: Instant, deadline: Option<Instant>) -> io::Result<Vec<ReadyFd>> {
        // Rounded up to a whole millisecond by the call: a wait never ends just before its deadline.
        let timeout = deadline.map(|deadline| deadline.saturating_duration_since(now).min(WAIT_MAX));
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS_MAX];
        match epoll::wait(&self.0, &mut events, timespec(timeout).as_ref()) {
            Ok((ready, _)) => {
                Ok(ready.iter().map(|event| ReadyFd { token: event.data.u64(), events: event.flags }).collect())
            }
            Err(Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor in a set, for as long as this is not dropped.
#[derive(Debug)]
pub struct Registered<D: AsFd> {
    /// Missing only once it was taken out.
    descriptor: Option<D>,
    token: u64,
    set: Arc<OwnedFd>,
}

impl<D: AsFd> Registered<D> {
    /// The descriptor.
    ///
    /// # Panics
    /// Never: only [`into_inner`](Registered::into_inner) takes it out.
    pub fn get(&self) -> &D {
        self.descriptor.as_ref().expect("taken out only by value")
    }

    /// The descriptor, to be changed in place.
    ///
    /// # Panics
    /// Never: only [`into_inner`](Registered::into_inner) takes it out.
    pub fn get_mut(&mut self) -> &mut D {
        self.descriptor.as_mut().expect("taken out only by value")
    }

    /// Waits for these events from now on. Without any, `HUP` and `ERR` are still reported.
    ///
    /// # Errors
    /// The system has no memory.
    pub fn set_events(&self, events: EventFlags) -> io::Result<()> {
        Ok(epoll::modify(&self.set, self.get(), EventData::new_u64(self.token), events)?)
    }

    /// Removes the descriptor from its set and returns it.
    ///
    /// # Panics
    /// Never.
    pub fn into_inner(mut self) -> D {
        self.remove();
        self.descriptor.take().expect("taken out only here")
    }

    fn remove(&self) {
        if let Some(descriptor) = &self.descriptor {
            let removed = epoll::delete(&self.set, descriptor);
            debug_assert!(removed.is_ok(), "what was registered can be removed: {removed:?}");
        }
    }
}

impl<D: AsFd> Drop for Registered<D> {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::EventFd;

    fn at_once(set: &Epoll) -> Vec<ReadyFd> {
        let now = Instant::now();
        set.wait(now, Some(now)).unwrap()
    }

    fn readable(token: u64) -> ReadyFd {
        ReadyFd { token, events: EventFlags::IN }
    }

    #[test]
    fn ready_descriptors_are_found_by_their_tokens_until_they_are_read() {
        let set = Epoll::new().unwrap();
        let events: Vec<_> =
            (0..3).map(|token| set.register(EventFd::new().unwrap(), 10 + token, EventFlags::IN).unwrap()).collect();
        assert_eq!(at_once(&set), []);
        events[2].get().signal();
        assert_eq!(at_once(&set), [readable(12)]);
        assert_eq!(at_once(&set), [readable(12)], "level-triggered");
        assert!(crate::is_ready(&set, rustix::event::PollFlags::IN), "a set is a descriptor");
        events[2].set_events(EventFlags::empty()).unwrap();
        assert_eq!(at_once(&set), []);
        events[2].set_events(EventFlags::IN).unwrap();
        events[2].get().take();
        assert_eq!(at_once(&set), []);
    }

    #[test]
    fn a_wait_returns_a_bounded_number_and_starves_none() {
        const COUNT: u64 = 3 * EVENTS_MAX as u64 / 2;
        let set = Epoll::new().unwrap();
        let events: Vec<_> =
            (0..COUNT).map(|token| set.register(EventFd::new().unwrap(), token, EventFlags::IN).unwrap()).collect();
        events.iter().for_each(|event| event.get().signal());
        let waits = [at_once(&set), at_once(&set)];
        assert!(waits.iter().all(|ready| ready.len() == EVENTS_MAX));
        let mut seen: Vec<_> = waits.iter().flatten().map(|ready| ready.token).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, (0..COUNT).collect::<Vec<_>>());
    }

    #[test]
    fn a_dropped_descriptor_leaves_the_set_though_a_duplicate_is_open() {
        let set = Epoll::new().unwrap();
        let event = EventFd::new().unwrap();
        let theirs = EventFd::from_foreign(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let registered = set.register(event, 1, EventFlags::IN).unwrap();
        theirs.signal();
        assert_eq!(at_once(&set), [readable(1)]);
        drop(registered);
        assert_eq!(at_once(&set), []);
        let again = set.register(theirs, 2, EventFlags::IN).unwrap();
        assert_eq!(at_once(&set), [readable(2)]);
        let theirs = again.into_inner();
        assert_eq!(at_once(&set), []);
        assert!(theirs.take());
    }

    #[test]
    fn a_peer_that_closes_is_seen_without_being_asked_for() {
        let set = Epoll::new().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let near = set.register(near, 7, EventFlags::empty()).unwrap();
        assert_eq!(at_once(&set), []);
        drop(far);
        let ready = at_once(&set);
        assert!(ready.len() == 1 && ready[0].token == 7 && ready[0].events.contains(EventFlags::HUP), "{ready:?}");
        drop(near);
        assert_eq!(at_once(&set), []);
    }

    #[test]
    fn a_descriptor_may_outlive_its_set() {
        let set = Epoll::new().unwrap();
        let registered = set.register(EventFd::new().unwrap(), 1, EventFlags::IN).unwrap();
        drop(set);
        registered.get().signal();
        registered.set_events(EventFlags::empty()).unwrap();
        assert!(registered.into_inner().take());
    }

    #[test]
    fn a_wait_never_ends_before_its_deadline() {
        let set = Epoll::new().unwrap();
        for wait in [1, 999_999, 1_000_001, 2_345_678].map(Duration::from_nanos) {
            let start = Instant::now();
            let deadline = start + wait;
            let mut waits = 0;
            while Instant::now() < deadline {
                assert_eq!(set.wait(Instant::now(), Some(deadline)).unwrap().len(), 0);
                waits += 1;
            }
            assert!(waits <= 1, "{wait:?}: the rest of a millisecond was spun through, {waits} waits");
        }
    }

    #[test]
    fn deadlines_in_the_past_and_far_away_are_taken() {
        let set = Epoll::new().unwrap();
        let event = set.register(EventFd::new().unwrap(), 1, EventFlags::IN).unwrap();
        let now = Instant::now();
        assert_eq!(set.wait(now + Duration::from_secs(9), Some(now)).unwrap().len(), 0);
        event.get().signal();
        let far = now + Duration::from_secs(u64::from(u32::MAX));
        assert_eq!(set.wait(now, Some(far)).unwrap().len(), 1);
        assert_eq!(set.wait(now, None).unwrap().len(), 1);
    }

    #[test]
    fn what_cannot_be_waited_for_is_refused() {
        let set = Epoll::new().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(set.register(file, 1, EventFlags::IN).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
    }
}
