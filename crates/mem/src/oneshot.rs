//! A oneshot channel: one value for a receiver that waits for a bounded time.
//!
//! Giving up is exact: a value is either received or returned to its sender. Closing a channel of the standard library
//! after a timeout drops a value that is sent at that moment. For the control path: a lock and a condition variable.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Makes a oneshot channel.
pub fn oneshot<T>() -> (OneshotSender<T>, OneshotReceiver<T>) {
    let shared = Arc::new(OneshotShared {
        state: Mutex::new(OneshotState { value: None, is_closed: false }),
        changed: Condvar::new(),
    });
    (OneshotSender(Arc::clone(&shared)), OneshotReceiver(shared))
}

#[derive(Debug)]
struct OneshotShared<T> {
    state: Mutex<OneshotState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct OneshotState<T> {
    value: Option<T>,
    /// One of the ends is gone.
    is_closed: bool,
}

impl<T> OneshotShared<T> {
    fn state(&self) -> MutexGuard<'_, OneshotState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the channel; returns a value that was not received.
    fn close(&self) -> Option<T> {
        let mut state = self.state();
        state.is_closed = true;
        state.value.take()
    }
}

/// The end that sends. Dropping it tells the receiver that no value comes.
#[derive(Debug)]
pub struct OneshotSender<T>(Arc<OneshotShared<T>>);

impl<T> OneshotSender<T> {
    /// Sends the value.
    ///
    /// # Errors
    /// The receiver has given up; the value comes back.
    pub fn send(self, value: T) -> Result<(), T> {
        let mut state = self.0.state();
        if state.is_closed {
            return Err(value);
        }
        state.value = Some(value);
        Ok(())
    }
}

impl<T> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        self.0.state().is_closed = true;
        self.0.changed.notify_one();
    }
}

/// The end that receives. A value that was sent and not received is dropped with it.
#[derive(Debug)]
pub struct OneshotReceiver<T>(Arc<OneshotShared<T>>);

impl<T> OneshotReceiver<T> {
    /// Waits for the value, but no longer than `limit`. After a timeout it may be waited for again.
    ///
    /// # Errors
    /// It was not sent in time, or the sender is gone.
    pub fn recv_timeout(&self, limit: Duration) -> Result<T, RecvTimeoutError> {
        let is_open = |state: &mut OneshotState<T>| state.value.is_none() && !state.is_closed;
        let waited = self.0.changed.wait_timeout_while(self.0.state(), limit, is_open);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match state.value.take() {
            Some(value) => Ok(value),
            None if state.is_closed => Err(RecvTimeoutError::Disconnected),
            None => Err(RecvTimeoutError::Timeout),
        }
    }

    /// Gives up: a value sent from now on is returned to its sender. Returns the value if it was sent before.
    pub fn close(self) -> Option<T> {
        self.0.close()
    }
}

impl<T> Drop for OneshotReceiver<T> {
    fn drop(&mut self) {
        // Not under the lock: to drop a value may take long.
        drop(self.0.close());
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn value_is_received_or_returned() {
        let (sender, receiver) = oneshot();
        assert_eq!(receiver.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        assert_eq!((sender.send(1), receiver.recv_timeout(PATIENCE)), (Ok(()), Ok(1)));
        assert_eq!(receiver.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
        let (sender, receiver) = oneshot();
        assert_eq!((receiver.close(), sender.send(2)), (None, Err(2)));
        let (sender, receiver) = oneshot();
        assert_eq!((sender.send(3), receiver.close()), (Ok(()), Some(3)));
        let (sender, receiver) = oneshot::<u8>();
        drop(sender);
        assert_eq!(receiver.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn value_sent_at_the_end_of_the_wait_is_not_lost() {
        for round in 0..2000_u32 {
            let (sender, receiver) = oneshot();
            let sending = std::thread::spawn(move || {
                (0..round % 64 * 50).for_each(|_| std::hint::spin_loop());
                sender.send(round)
            });
            let received = receiver.recv_timeout(Duration::from_micros(50)).ok().or_else(|| receiver.close());
            match sending.join().unwrap() {
                Ok(()) => assert_eq!(received, Some(round)),
                Err(value) => assert_eq!((received, value), (None, round)),
            }
        }
    }
}
