//! What every front end stands on, whatever its protocol: the control loop that runs all exports of a daemon, the
//! sockets they listen on and who accepts there, their log; an export's life from front-end to front-end; the queues
//! with their bios, bounds and commands.
//!
//! A protocol implements [`FrontEndSession`], for what a connection says, and [`QueueSession`], for what lies in a
//! ring. Nothing here names a protocol.

mod acceptor;
mod control_loop;
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
pub use front_end::{ExportConfig, ExportedDisk, FrontEndSession, SessionEnd, SessionStep};
pub use handover::{ExportState, Handed, QuiescedExport};
pub use log::ExportLog;
pub use orders::{Changed, ExportHand};
pub use queue::{
    BioFeed, DetachedQueue, FetchPace, LaneGone, PartError, QueueHost, QueueMover, QueuePoller, QueuePort, QueueRemote,
    QueueSession, QueueShare, QueueSignals, QueueView, QueueWatch, RingView, Suspension, on_demand_queue, queue_pair,
};
pub use server::{ExportStatus, Server, Taking};
pub use socket::{BoundSocket, SocketConfig, SocketError};
