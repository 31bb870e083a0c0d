//! Queues over TCP: one admin or I/O queue over one connection, host side and target side.
//!
//! [`TcpHostQueue`] and [`TcpTargetQueue`] are state machines of a connection's owner. They get the bytes received, and
//! say where data belongs; they say what is to be sent, as a [`SendList`] of header bytes and segments. They copy no
//! data, and do no I/O.
//!
//! All numbers of the peer are checked. A violation ends the connection with the [`TermReq`] of the specification; a
//! wrong data digest fails one command. The connections of other queues are not concerned.
//!
//! On the target's side, [`TcpAdminQueue`] is a connection before its Connect and the admin queue of a controller, and
//! [`TcpIoQueue`] an I/O queue whose commands become bios.
//!
//! Not here: Connect and other fabrics commands ([`crate::fabrics`]), deadlines.

mod admin;
mod data;
mod host;
mod io;
mod list;
mod target;

pub use admin::{TcpAdminEvent, TcpAdminQueue};
pub use blkyard_mq::SendPiece;
pub use host::{TcpDirection, TcpHostEvent, TcpHostOptions, TcpHostQueue};
pub use io::{TcpDataMemory, TcpIoQueue, TcpIoQueueOptions};
pub use list::SendList;
pub use target::{TcpQueueSnapshot, TcpTargetEvent, TcpTargetOptions, TcpTargetQueue, TcpTransfer};

use blkyard_wire::nvme_tcp::{PduError, TermReq};

/// Reason for which a connection can be used no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpEnd {
    /// The peer has violated the protocol; a TermReq is to be sent.
    Violation(PduError),
    /// The peer has sent a TermReq.
    Terminated(TermReq),
    /// The connection was closed.
    Closed,
}

/// Types of SGL descriptors that NVMe/TCP uses, with their subtypes.
mod sgl {
    /// Data block at an offset of the capsule.
    pub const IN_CAPSULE: u8 = 0x01;
    /// Data that the transport transfers.
    pub const TRANSPORT: u8 = 0x5a;

    /// A descriptor at address 0.
    pub const fn words(kind: u8, bytes: u32) -> [u64; 2] {
        [0, bytes as u64 | (kind as u64) << 56]
    }
}
