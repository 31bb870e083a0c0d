//! A clock and a parker, for tests with real threads. Those of the program are in `os`.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blkyard_mq::{Parker, Wake};

/// Nanoseconds since the first call.
pub fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// A parker for devices without events, which have only deadlines.
#[derive(Default)]
pub struct TimedParker {
    called: Mutex<bool>,
    eventfd: Condvar,
}

impl TimedParker {
    pub fn new() -> Arc<TimedParker> {
        Arc::default()
    }
}

impl Wake for TimedParker {
    fn wake(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.eventfd.notify_all();
    }
}

impl Parker for TimedParker {
    fn sleep(&self) {
        let mut called = self.called.lock().unwrap_or_else(PoisonError::into_inner);
        while !*called {
            called = self.eventfd.wait(called).unwrap_or_else(PoisonError::into_inner);
        }
        *called = false;
    }

    fn watch(&self, deadline_ns: u64) {
        let left = Duration::from_nanos(deadline_ns.saturating_sub(now_ns()));
        let called = self.called.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.eventfd.wait_timeout_while(called, left, |called| !*called);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}
