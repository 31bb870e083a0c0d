//! Disks that other processes serve: a core shared by all protocols, and the front-end of vhost-user-blk on it.
//!
//! [`RemoteDisk`] is a disk that a back-end serves. Each of its queues is the driver of a hardware queue
//! ([`RemoteQueue`]). A control thread for each disk sends all messages to the back-end. No lane ever waits for it: a
//! queue whose ring or memory the back-end does not know yet accepts no request. A back-end that hangs, lies or dies is
//! disconnected, and reconnected; requests in flight are kept, and continue or are submitted again.
//!
//! A protocol is a module that implements the traits of `protocol.rs`; the core names none. There is one: [`Attached`]
//! is a disk over vhost-user. Its rings and headers are in memory of ours that the back-end maps; data stays in place,
//! in regions that have a file.
//!
//! A back-end may answer with descriptors whose close blocks, or blocks the close of a socket in which they lie unread:
//! a file of a FUSE mount whose server is silent, a TCP socket that lingers. Then the control thread hangs, and with it
//! the thread that drops the disk. Only a [`Connector`] that filters them is safe; by default there is none, for
//! trusted back-ends.
//!
//! [`RemoteNamespace`] is a namespace of an NVMe controller, over any [`NvmeTransport`]: the NVMe host of crate `nvme`
//! on a control thread, and its I/O queues as drivers ([`NamespaceQueue`]). [`VfioUserController`] is such a transport.
//! [`TcpNamespace`] is one over TCP, with sockets of the lanes.
//!
//! Does no file I/O and knows no `io_uring`: kicks go through the lane's way to signal eventfds.
#![forbid(unsafe_code)]

mod connector;
mod control;
mod error;
mod left_peer;
mod mailbox;
mod nvme;
mod nvme_tcp;
mod outage;
mod protocol;
mod queue;
mod queues;
mod remote;
mod shared;
mod vfio_user;
mod vhost_user;

pub use connector::Connector;
pub use error::{AttachError, TalkError};
pub use mailbox::DriverQueueView;
pub use nvme::{
    HostParts, NamespaceConfig, NamespaceQueue, NamespaceView, NvmeTransport, QueuePoolMember, RemoteNamespace,
};
pub use nvme_tcp::{
    AcceptNamespace, AdminAttempt, AdminConnector, AdminSocket, LateNamespace, TcpAdminClient, TcpAdminResult,
    TcpAssociation, TcpNamespace, TcpNamespaceConfig, TcpNamespaceQueue, TcpNamespaceView, TcpPeer, TcpQueueOpening,
    TcpSparePath, WalkedServices, read_discovery_log, walk_discovery_services,
};
pub use protocol::RemoteOptions;
pub use queue::RemoteQueue;
pub use remote::RemoteDisk;
pub use shared::AttachedView;
pub use vfio_user::{VfioUserConfig, VfioUserController, VfioUserError};
pub use vhost_user::{AttachConfig, Attached, AttachedQueue, QUEUE_SIZE_MAX};
