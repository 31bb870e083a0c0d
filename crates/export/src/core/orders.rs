//! What an export may be told while it serves, from outside its socket: another size, other limits, another number of
//! queues.
//!
//! The export itself does it, in a step between two messages of its front-end or while it waits for one. So nothing
//! changes under a message; and a front-end that stops in the middle of one, or never reads an answer, delays nothing.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use blkyard_mq::{DeviceInfo, RateLimit, SchedulerConfig};

use super::control_loop::EndpointCaller;
use super::front_end::FrontEndSession;
use super::handover::Handed;
use super::queue::QueueRemote;

/// What came of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// No front-end is connected; the next finds it so.
    Unseen,
    /// The front-end need not know.
    Silent,
    /// The front-end was told.
    Told,
    /// The front-end cannot be told, and finds it so when it looks.
    Untold,
}

/// What an export is told.
pub(super) enum ExportCommand<F: FrontEndSession> {
    /// The device is this from now on.
    Change(Arc<DeviceInfo>, Sender<Result<Changed, String>>),
    /// Each queue has no more than so many requests in flight; the answer is what that came to.
    Depth(usize, Sender<Result<usize, String>>),
    /// Each queue orders what waits by this scheduler.
    Schedule(SchedulerConfig, Sender<Result<(), String>>),
    /// Each queue passes these limits.
    Rates(Vec<Arc<RateLimit>>, Sender<Result<(), String>>),
    /// Have these queues as well, and offer so many from the next front-end on.
    Offer(u16, Vec<QueueRemote<F::Queue>>, Sender<Result<Changed, String>>),
    /// Say that orders are heard.
    Hear(Sender<()>),
    /// Come to rest, and wait until it is known whether somebody else goes on.
    HandOver(Sender<Result<Handed<F::State>, String>>),
}

/// A hand on an export from outside. Cloned at will; keeps nothing alive.
pub struct ExportHand<F: FrontEndSession> {
    orders: Sender<ExportCommand<F>>,
    caller: EndpointCaller,
}

impl<F: FrontEndSession> Clone for ExportHand<F> {
    fn clone(&self) -> ExportHand<F> {
        ExportHand { orders: self.orders.clone(), caller: self.caller.clone() }
    }
}

/// The export's end.
pub(super) struct ExportCommands<F: FrontEndSession>(Receiver<ExportCommand<F>>);

/// Makes the two ends, for an export that is called by this.
pub(super) fn orders<F: FrontEndSession>(caller: EndpointCaller) -> (ExportHand<F>, ExportCommands<F>) {
    let (orders, receiver) = channel();
    (ExportHand { orders, caller }, ExportCommands(receiver))
}

impl<F: FrontEndSession> ExportHand<F> {
    /// Asks that the device be this from now on: of another size, of other limits. Queues finish what they fetched,
    /// change and go on; a front-end that can be told hears of another size. The channel ends without an answer if the
    /// export has ended.
    pub fn change(&self, info: Arc<DeviceInfo>) -> Receiver<Result<Changed, String>> {
        self.give(|answer| ExportCommand::Change(info, answer))
    }

    /// Asks that each queue have no more than so many requests in flight. What the limit has become is the answer: at
    /// most what the queues were made for.
    pub fn set_depth(&self, depth: usize) -> Receiver<Result<usize, String>> {
        self.give(|answer| ExportCommand::Depth(depth, answer))
    }

    /// Asks that each queue order what waits by this scheduler from now on. Nothing is lost, and nothing has to come to
    /// rest.
    pub fn schedule(&self, config: SchedulerConfig) -> Receiver<Result<(), String>> {
        self.give(|answer| ExportCommand::Schedule(config, answer))
    }

    /// Asks that what passes its queues, all together, pass each of these limits from now on; none is no limit. Nothing
    /// has to come to rest.
    pub fn set_rates(&self, limits: Vec<Arc<RateLimit>>) -> Receiver<Result<(), String>> {
        self.give(|answer| ExportCommand::Rates(limits, answer))
    }

    /// Asks that so many queues be offered from the next front-end on: at least one, at most as many as were made, with
    /// those in `more`, which live on their lanes already. They are given the device and the bound that the others have
    /// by now.
    pub fn offer(&self, queues: u16, more: Vec<QueueRemote<F::Queue>>) -> Receiver<Result<Changed, String>> {
        self.give(|answer| ExportCommand::Offer(queues, more, answer))
    }

    /// Asks whether orders are heard by now: not while it waits for a device, or for what its front-end sent. The
    /// channel ends without an answer if the export has ended.
    pub fn hears(&self) -> Receiver<()> {
        self.give(ExportCommand::Hear)
    }

    /// Asks that it come to rest with all it serves, so that another process can go on with that. It rests until what
    /// comes is let go of or dropped.
    pub fn hand_over(&self) -> Receiver<Result<Handed<F::State>, String>> {
        self.give(ExportCommand::HandOver)
    }

    fn give<T>(&self, order: impl FnOnce(Sender<T>) -> ExportCommand<F>) -> Receiver<T> {
        let (answer, wait) = channel();
        // If the export is over the order is dropped, and the channel for the answer with it.
        let _ = self.orders.send(order(answer));
        self.caller.call();
        wait
    }
}

impl<F: FrontEndSession> ExportCommands<F> {
    /// The next order, if there is one.
    pub(super) fn next(&self) -> Option<ExportCommand<F>> {
        self.0.try_recv().ok()
    }
}
