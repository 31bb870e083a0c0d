//! Orders to a serving export from outside its socket: changes of size, limits or number of queues, and handover.
//!
//! The export executes an order between two messages of its front-end or while waiting for one, never during a message.
//! A front-end that stops within a message, or never reads a reply, delays no order.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use blkyard_mq::{DeviceInfo, RateLimit, SchedulerConfig};

use super::control_loop::EndpointCaller;
use super::front_end::FrontEndSession;
use super::handover::Handed;
use super::queue::QueueRemote;

/// Notification state of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// No front-end is connected; the next one sees the change.
    Unseen,
    /// The change is invisible to the front-end.
    Silent,
    /// The front-end was notified.
    Told,
    /// The front-end cannot be notified; it sees the change when it reads the configuration.
    Untold,
}

/// An order to an export.
pub(super) enum ExportCommand<F: FrontEndSession> {
    /// Change the device of this number.
    Change(u16, Arc<DeviceInfo>, Sender<Result<Changed, String>>),
    /// Limit the requests in flight of each queue; the answer is the new limit.
    Depth(usize, Sender<Result<usize, String>>),
    /// Set the scheduler of a device in each queue.
    Schedule(u16, SchedulerConfig, Sender<Result<(), String>>),
    /// Set the rate limits of a device in each queue.
    Rates(u16, Vec<Arc<RateLimit>>, Sender<Result<(), String>>),
    /// Add these queues, and offer this number of queues from the next front-end on.
    Offer(u16, Vec<QueueRemote<F::Queue>>, Sender<Result<Changed, String>>),
    /// Confirm that orders are executed.
    Hear(Sender<()>),
    /// Drain, and wait for the result of a handover.
    HandOver(Sender<Result<Handed<F::State>, String>>),
}

/// Handle to control an export. Can be cloned; holds no strong reference.
pub struct ExportHand<F: FrontEndSession> {
    orders: Sender<ExportCommand<F>>,
    caller: EndpointCaller,
}

impl<F: FrontEndSession> Clone for ExportHand<F> {
    fn clone(&self) -> ExportHand<F> {
        ExportHand { orders: self.orders.clone(), caller: self.caller.clone() }
    }
}

/// The export's end of the order channel.
pub(super) struct ExportCommands<F: FrontEndSession>(Receiver<ExportCommand<F>>);

/// Makes both ends, for an export with this caller.
pub(super) fn orders<F: FrontEndSession>(caller: EndpointCaller) -> (ExportHand<F>, ExportCommands<F>) {
    let (orders, receiver) = channel();
    (ExportHand { orders, caller }, ExportCommands(receiver))
}

impl<F: FrontEndSession> ExportHand<F> {
    /// Changes the device of this number, such as its size or limits. Queues drain, change and resume; a front-end that
    /// supports it is notified of a changed size. The channel closes without an answer if the export has ended.
    pub fn change(&self, device: u16, info: Arc<DeviceInfo>) -> Receiver<Result<Changed, String>> {
        self.give(|answer| ExportCommand::Change(device, info, answer))
    }

    /// Limits the requests in flight of each queue. The answer is the new limit, which never exceeds that of the
    /// queues' creation.
    pub fn set_depth(&self, depth: usize) -> Receiver<Result<usize, String>> {
        self.give(|answer| ExportCommand::Depth(depth, answer))
    }

    /// Sets the scheduler of a device in each queue. Keeps all bios and drains no queue.
    pub fn schedule(&self, device: u16, config: SchedulerConfig) -> Receiver<Result<(), String>> {
        self.give(|answer| ExportCommand::Schedule(device, config, answer))
    }

    /// Sets the rate limits of a device, which its queues share; empty for unlimited. Drains no queue.
    pub fn set_rates(&self, device: u16, limits: Vec<Arc<RateLimit>>) -> Receiver<Result<(), String>> {
        self.give(|answer| ExportCommand::Rates(device, limits, answer))
    }

    /// Sets the number of queues offered from the next front-end on: at least one, at most the number of queues that
    /// exist, with those in `more`, which are on their lanes already. New queues get the present device and limit.
    pub fn offer(&self, queues: u16, more: Vec<QueueRemote<F::Queue>>) -> Receiver<Result<Changed, String>> {
        self.give(|answer| ExportCommand::Offer(queues, more, answer))
    }

    /// Asks for confirmation that orders are executed; none comes while the export waits for a device or for a
    /// descriptor of its front-end. The channel closes without an answer if the export has ended.
    pub fn hears(&self) -> Receiver<()> {
        self.give(ExportCommand::Hear)
    }

    /// Drains the export for a handover to another process. It stays quiesced until the answer is released or dropped.
    pub fn hand_over(&self) -> Receiver<Result<Handed<F::State>, String>> {
        self.give(ExportCommand::HandOver)
    }

    fn give<T>(&self, order: impl FnOnce(Sender<T>) -> ExportCommand<F>) -> Receiver<T> {
        let (answer, wait) = channel();
        // If the export has ended, the order is dropped with its answer channel.
        let _ = self.orders.send(order(answer));
        self.caller.call();
        wait
    }
}

impl<F: FrontEndSession> ExportCommands<F> {
    /// The next order, if any.
    pub(super) fn next(&self) -> Option<ExportCommand<F>> {
        self.0.try_recv().ok()
    }
}
