//! A clock that tests advance.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blkyard_sys::{EventFd, PollFd, PollFlags, TimeSource, wait_for};

use super::until;

/// Time of a control thread and of the lanes beside it.
#[derive(Debug)]
pub struct TestClock {
    start: Instant,
    passed: Mutex<Duration>,
    /// Wakes the threads that wait by this clock.
    waiting: Mutex<Vec<Arc<EventFd>>>,
}

impl TestClock {
    pub fn new() -> Arc<TestClock> {
        let (passed, waiting) = (Mutex::default(), Mutex::default());
        Arc::new(TestClock { start: Instant::now(), passed, waiting })
    }

    /// How far it was moved.
    pub fn passed(&self) -> Duration {
        *self.passed.lock().unwrap()
    }

    /// The time of a queue's turn, ns. A turn takes 10 us, so that a queue retries refused requests.
    pub fn turn_ns(&self) -> u64 {
        let mut passed = self.passed.lock().unwrap();
        *passed += Duration::from_micros(10);
        (Duration::from_secs(1) + *passed).as_nanos() as u64
    }

    /// Advances it. Returns once the control thread has read the new time, and waits again.
    pub fn advance(&self, by: Duration) {
        *self.passed.lock().unwrap() += by;
        let woken = std::mem::take(&mut *self.waiting.lock().unwrap());
        woken.iter().for_each(|waiting| waiting.signal());
        until("the control thread waits", || !self.waiting.lock().unwrap().is_empty());
    }
}

impl TimeSource for TestClock {
    fn now(&self) -> Instant {
        self.start + self.passed()
    }

    fn wait(&self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> std::io::Result<usize> {
        let moved = Arc::new(EventFd::new()?);
        // Before the time is read: a later advance ends the wait.
        self.waiting.lock().unwrap().push(Arc::clone(&moved));
        let is_due = deadline.is_some_and(|deadline| self.now() >= deadline);
        let mut all = fds.to_vec();
        all.push(PollFd::new(&*moved, PollFlags::IN));
        wait_for(&mut all, is_due.then_some(Duration::ZERO))?;
        self.waiting.lock().unwrap().retain(|waiting| !Arc::ptr_eq(waiting, &moved));
        wait_for(fds, Some(Duration::ZERO))
    }
}
