//! Orders to a serving export from outside its socket: another size, other limits, another number of queues.
//!
//! The export executes them in a step between two messages of its front-end or while it waits for one. So nothing
//! changes during a message; and a front-end that stops in the middle of one, or never reads a reply, delays no order.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use blkyard_mq::{DeviceInfo, RateLimit, SchedulerConfig};

use super::control_loop::EndpointCaller;
use super::front_end::FrontEndSession;
use super::handover::Handed;
use super::queue::QueueRemote;

/// Result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// No front-end is connected; the next finds it so.
    Unseen,
    /// The front-end need not know.
    Silent,
    /// The front-end was notified.
    Told,
    /// The front-end cannot be notified, and sees it when it reads the configuration.
    Untold,
}

/// An order to an export.
pub(super) enum ExportCommand<F: FrontEndSession> {
    /// The device is this from now on.
    Change(Arc<DeviceInfo>, Sender<Result<Changed, String>>),
    /// Limits the requests in flight of each queue; the answer is the new limit.
    Depth(usize, Sender<Result<usize, String>>),
    /// Sets the scheduler of each queue.
    Schedule(SchedulerConfig, Sender<Result<(), String>>),
    /// Each queue passes these limits.
    Rates(Vec<Arc<RateLimit>>, Sender<Result<(), String>>),
    /// Have these queues as well, and offer so many from the next front-end on.
    Offer(u16, Vec<QueueRemote<F::Queue>>, Sender<Result<Changed, String>>),
    /// Say that orders are heard.
    Hear(Sender<()>),
    /// Drains, and waits for the result of a handover.
    HandOver(Sender<Result<Handed<F::State>, String>>),
}

/// A handle on an export. Cloned at will; keeps nothing alive.
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
    /// Changes the device: another size, other limits. Queues drain, change and continue; a front-end that can be
    /// notified learns of another size. The channel ends without an answer if the export has ended.
    pub fn change(&self, info: Arc<DeviceInfo>) -> Receiver<Result<Changed, String>> {
        self.give(|answer| ExportCommand::Change(info, answer))
    }

    /// Limits the requests in flight of each queue. The answer is the new limit: at most the one the queues were made
    /// for.
    pub fn set_depth(&self, depth: usize) -> Receiver<Result<usize, String>> {
        self.give(|answer| ExportCommand::Depth(depth, answer))
    }

    /// Sets the scheduler of each queue. No bio is lost, and no queue is drained.
    pub fn schedule(&self, config: SchedulerConfig) -> Receiver<Result<(), String>> {
        self.give(|answer| ExportCommand::Schedule(config, answer))
    }

    /// Sets the rate limits of its queues together; empty for unlimited. No queue is drained.
    pub fn set_rates(&self, limits: Vec<Arc<RateLimit>>) -> Receiver<Result<(), String>> {
        self.give(|answer| ExportCommand::Rates(limits, answer))
    }

    /// Asks that so many queues be offered from the next front-end on: at least one, at most as many as were made, with
    /// those in `more`, which live on their lanes already. They are given the device and the bound that the others have
    /// by now.
    pub fn offer(&self, queues: u16, more: Vec<QueueRemote<F::Queue>>) -> Receiver<Result<Changed, String>> {
        self.give(|answer| ExportCommand::Offer(queues, more, answer))
    }

    /// Asks whether orders are executed by now: not while it waits for a device, or for a descriptor of its front-end.
    /// The channel ends without an answer if the export has ended.
    pub fn hears(&self) -> Receiver<()> {
        self.give(ExportCommand::Hear)
    }

    /// Drains the export, so that another process can continue with it. It stays quiesced until the answer is let go of
    /// or dropped.
    pub fn hand_over(&self) -> Receiver<Result<Handed<F::State>, String>> {
        self.give(ExportCommand::HandOver)
    }

    fn give<T>(&self, order: impl FnOnce(Sender<T>) -> ExportCommand<F>) -> Receiver<T> {
        let (answer, wait) = channel();
        // If the export has ended the order is dropped, and with it the channel for the answer.
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
