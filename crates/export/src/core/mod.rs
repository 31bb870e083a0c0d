//! The core of all front ends, independent of the protocol: the control loop that runs all exports of a daemon, their
//! listening sockets and acceptors, and their log; the state of an export; the queues with their bios, bounds and
//! commands.
//!
//! A protocol implements [`FrontEndSession`] for the messages of a connection, and [`QueueSession`] for the content of
//! a ring. The core depends on no protocol.

mod acceptor;
mod control_loop;
mod drain;
mod front_end;
mod handover;
mod log;
mod orders;
mod queue;
mod server;
mod socket;
mod waiters;
mod workers;

pub use acceptor::{Accepted, Acceptor};
pub use control_loop::{AwaitedFd, ControlLoop};
pub(crate) use drain::drain_poll;
pub use front_end::{ExportConfig, ExportedDisk, FrontEndSession, SessionEnd, SessionStep};
pub use handover::{ExportState, Handed, QuiescedExport};
pub use log::ExportLog;
pub(crate) use log::SHARE;
pub use orders::{Changed, ExportHand};
pub use queue::{
    BioFeed, DetachedQueue, FetchPace, HwQueueSet, LaneGone, PartError, PendingFlush, QueueHost, QueueMover,
    QueuePoller, QueuePort, QueueRemote, QueueSession, QueueShare, QueueSignals, QueueView, QueueWatch, RingView,
    Suspension, on_demand_queue, queue_pair,
};
pub use server::{ExportStatus, Server, Taking};
pub(crate) use socket::out_of_descriptors;
pub use socket::{BoundSocket, SocketConfig, SocketError};
