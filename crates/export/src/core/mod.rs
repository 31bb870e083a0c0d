//! What every front end stands on, whatever its protocol: the control loop that runs all exports of a daemon, the
//! sockets they listen on and who accepts there, their log.
//!
//! A protocol implements [`Endpoint`]: a state machine with the descriptors it waits for and a step. Nothing here names
//! a protocol.

mod acceptor;
mod control_loop;
mod log;
mod socket;
mod workers;

pub use acceptor::{Accepted, Acceptor};
pub use control_loop::ControlLoop;
pub(crate) use control_loop::{AwaitedFd, Endpoint, EndpointCaller, EndpointEnd, EndpointState};
pub(crate) use log::ExportLog;
pub use socket::{BoundSocket, SocketConfig, SocketError};
