//! A mailbox: commands of other threads for an owner that checks it now and then.
//!
//! Any thread sends. The owner checks [`Mailbox::is_pending`] as often as it likes, which costs a plain load, and
//! takes the commands. Sending wakes no thread: a sender to an owner that may sleep wakes it afterwards, by a
//! [`WakeFlag`](crate::WakeFlag) or an eventfd.
//!
//! No command is lost: a sender adds its command and then sets the flag; the owner clears the flag and then takes the
//! commands. A command that the owner just misses has its flag set after the owner cleared it, because the lock orders
//! the two. Commands sent after [`Mailbox::close`] are returned to their sender.
//!
//! For the control path: a lock and a list. The owner takes the lock only if a command was sent.

use std::sync::PoisonError;

use crate::sync::{AtomicBool, Mutex, Ordering};

/// Commands for one thread.
#[derive(Debug)]
pub struct Mailbox<T> {
    /// Set when something was sent that has not been taken.
    pending: AtomicBool,
    /// `None` once closed.
    sent: Mutex<Option<Vec<T>>>,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Mailbox<T> {
        Mailbox { pending: AtomicBool::new(false), sent: Mutex::new(Some(Vec::new())) }
    }
}

impl<T> Mailbox<T> {
    /// Puts something in.
    ///
    /// # Errors
    /// The mailbox is closed; it comes back.
    pub fn send(&self, command: T) -> Result<(), T> {
        match &mut *self.sent.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(sent) => sent.push(command),
            None => return Err(command),
        }
        // After the lock: an owner that sees it need not wait for us. Relaxed: the lock makes the command visible, and
        // an owner that must see it is woken.
        self.pending.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether a message was sent. May be late by as much as stores take; an owner woken after a message sees it.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// Takes all that was sent, in its order. For the owner alone.
    #[cold]
    pub fn take(&self) -> Vec<T> {
        // Before the list is read, see the module's head.
        self.pending.store(false, Ordering::Relaxed);
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.as_mut().map_or_else(Vec::new, std::mem::take)
    }

    /// Closes the mailbox: waiting messages are dropped, and later ones are returned to their senders.
    pub fn close(&self) {
        let left = self.sent.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Not under the lock: to drop a command may send another.
        drop(left);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn commands_are_taken_once_in_their_order() {
        let mailbox = Mailbox::default();
        assert!(!mailbox.is_pending() && mailbox.take().is_empty());
        (0..3).for_each(|command| mailbox.send(command).unwrap());
        assert!(mailbox.is_pending());
        assert_eq!((mailbox.take(), mailbox.is_pending()), (vec![0, 1, 2], false));
        assert!(mailbox.take().is_empty());
    }

    #[test]
    fn a_closed_mailbox_drops_and_returns_commands() {
        let (mailbox, kept) = (Mailbox::default(), std::sync::Arc::new(()));
        mailbox.send(std::sync::Arc::clone(&kept)).unwrap();
        mailbox.close();
        assert_eq!(std::sync::Arc::strong_count(&kept), 1);
        assert!(mailbox.send(kept).is_err() && mailbox.take().is_empty());
    }
}
