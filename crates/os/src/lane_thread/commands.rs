//! Commands to a lane from other threads, and how these wait for the answers.
//!
//! A lane that is held up answers late: each wait has a limit, and says afterwards where the poller is.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkyard_mem::{Mailbox, OneshotReceiver, OneshotSender, oneshot};
use blkyard_mq::{IdlePolicy, Wake};

use super::LaneError;
use crate::wake::Waker;

/// Command to a lane from another thread.
pub(super) enum LaneCommand<S> {
    /// A poller comes to live here; it is made or carried here by this, unless that was taken back. Answered when it
    /// has entered.
    Admit(u32, MakeSlot<S>, Sender<()>),
    /// A poller is to come to rest and leave. The answer is the poller, or none if it stays after all.
    Leave(u32, OneshotSender<Option<S>>),
    /// It may stay, if it has not left.
    Stay(u32),
    /// Sets the idle policy. Answered when it applies.
    Policy(IdlePolicy, Sender<()>),
    /// No more commands.
    Close,
}

/// Makes a poller, or unpacks one that comes from another lane.
pub type MakePoller<S> = Box<dyn FnOnce() -> S + Send>;
/// It is taken from here by the lane, or back by who gave it.
type MakeSlot<S> = Arc<Mutex<Option<MakePoller<S>>>>;

pub(super) fn take_make<S>(slot: &Mutex<Option<MakePoller<S>>>) -> Option<MakePoller<S>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// A poller on its way to a lane.
#[must_use]
pub struct Admission<S> {
    lane: String,
    make: MakeSlot<S>,
    entered: Receiver<()>,
}

/// A poller that did not come to a lane.
pub struct NotAdmitted<S> {
    /// The lane has ended, or does not respond.
    pub error: LaneError,
    /// What makes it, unless it is gone with the lane.
    pub make: Option<MakePoller<S>>,
}

impl<S> Admission<S> {
    /// Waits until it has entered. If the lane does not look at its commands for `limit`, the poller is taken back.
    ///
    /// # Errors
    /// See [`NotAdmitted`].
    pub fn wait(self, limit: Duration) -> Result<(), NotAdmitted<S>> {
        let error = match self.entered.recv_timeout(limit) {
            Ok(()) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => LaneError::Ended { name: self.lane },
            Err(RecvTimeoutError::Timeout) => LaneError::Unresponsive { name: self.lane, limit },
        };
        match (error, take_make(&self.make)) {
            // The lane has it.
            (LaneError::Unresponsive { .. }, None) => Ok(()),
            (error, make) => Err(NotAdmitted { error, make }),
        }
    }
}

/// A poller that was asked to leave its lane.
#[must_use]
pub struct Release<S> {
    lane: String,
    poller: u32,
    answer: OneshotReceiver<Option<S>>,
    mailbox: Arc<Mailbox<LaneCommand<S>>>,
    waker: Arc<Waker>,
}

impl<S> Release<S> {
    /// Waits until the poller is drained and nothing of it is left on the lane. If that takes longer than `drain`, it
    /// stays and goes on. The lane has `answer` to say that it does.
    ///
    /// # Errors
    /// It was not drained in time, or the lane has ended or does not respond.
    pub fn wait(self, drain: Duration, answer: Duration) -> Result<S, LaneError> {
        let Release { lane: name, poller, .. } = self;
        let released = match self.answer.recv_timeout(drain) {
            Ok(released) => released,
            Err(RecvTimeoutError::Disconnected) => return Err(LaneError::Ended { name }),
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.mailbox.send(LaneCommand::Stay(poller));
                self.waker.wake();
                // It may have left at the last moment.
                match self.answer.recv_timeout(answer) {
                    Ok(released) => released,
                    Err(RecvTimeoutError::Disconnected) => return Err(LaneError::Ended { name }),
                    // From here on the lane keeps it.
                    Err(RecvTimeoutError::Timeout) => match self.answer.close() {
                        Some(released) => released,
                        None => return Err(LaneError::Unresponsive { name, limit: answer }),
                    },
                }
            }
        };
        released.ok_or(LaneError::Restless { name, poller, limit: drain })
    }
}

/// A change of policy that lanes were told of.
#[must_use]
pub struct PolicyChange(Vec<(String, Receiver<()>)>);

impl PolicyChange {
    pub(crate) fn of(told: impl Iterator<Item = (String, Receiver<()>)>) -> PolicyChange {
        PolicyChange(told.collect())
    }

    /// Waits until it is in force on all of them.
    ///
    /// # Errors
    /// A lane has ended, or none answered for `limit`. It is in force on the others, and will be on one that goes on.
    pub fn wait(self, limit: Duration) -> Result<(), LaneError> {
        let begin = Instant::now();
        let wait = |(name, done): (String, Receiver<()>)| {
            done.recv_timeout(limit.saturating_sub(begin.elapsed())).map_err(|error| match error {
                RecvTimeoutError::Disconnected => LaneError::Ended { name },
                RecvTimeoutError::Timeout => LaneError::Unresponsive { name, limit },
            })
        };
        let outcomes: Vec<_> = self.0.into_iter().map(wait).collect();
        outcomes.into_iter().collect()
    }
}

/// Where commands are given.
pub(super) struct LaneCommands<S> {
    pub(super) mailbox: Arc<Mailbox<LaneCommand<S>>>,
    pub(super) waker: Arc<Waker>,
}

impl<S> LaneCommands<S> {
    /// If the lane is gone the command is dropped, and with it the channel for the answer.
    pub(super) fn give(&self, command: LaneCommand<S>) {
        let _ = self.mailbox.send(command);
        self.waker.wake();
    }

    /// Has the lane make a poller, under a name that no other one there has.
    pub(super) fn admit(&self, lane: &str, name: u32, make: MakePoller<S>) -> Admission<S> {
        let (told, entered) = channel();
        let make = Arc::new(Mutex::new(Some(make)));
        self.give(LaneCommand::Admit(name, Arc::clone(&make), told));
        Admission { lane: lane.to_owned(), make, entered }
    }

    /// Asks for a poller back that lives there.
    pub(super) fn release(&self, lane: &str, name: u32) -> Release<S> {
        let (given, answer) = oneshot();
        self.give(LaneCommand::Leave(name, given));
        let LaneCommands { mailbox, waker } = self;
        let (mailbox, waker) = (Arc::clone(mailbox), Arc::clone(waker));
        Release { lane: lane.to_owned(), poller: name, answer, mailbox, waker }
    }

    /// Changes the idle policy. Returns where the lane answers.
    pub(super) fn set_policy(&self, policy: IdlePolicy) -> Receiver<()> {
        let (done, wait) = channel();
        self.give(LaneCommand::Policy(policy, done));
        wait
    }
}

impl<S> Drop for LaneCommands<S> {
    fn drop(&mut self) {
        self.give(LaneCommand::Close);
    }
}
