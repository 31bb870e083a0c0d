//! NVMe over shared memory and over TCP, host side and controller side.
//!
//! Formats: [registers], submission and completion queue entries ([`Sqe`], [`Cqe`]), [`NvmeStatus`] and the fields of
//! identify data that a block driver uses.
//!
//! Data pointers: the host writes PRP lists and SGLs ([`ListPool`]), the controller walks them ([`DataWalker`]). Both
//! translate addresses by a [`DmaMap`]. I/O in registered buffers needs no lists ([`IoQueue::add_buffer`]).
//!
//! Queue pairs: [`HostQueuePair`] and [`ControllerQueuePair`] over the same rings and [`Doorbells`]. On top of them are
//! the driver of an I/O queue ([`IoQueue`]) and the controller's parser of I/O commands ([`IoParser`]);
//! [`NvmeLoopback`] combines both on one thread.
//!
//! Control: [`HostController`] brings up, monitors, resets and removes a controller over a [`ControllerTransport`].
//! [`Controller`] is the other side: registers, admin commands, I/O queues.
//!
//! Fabrics: [tcp] has queues over TCP connections, [fabrics] their commands, [auth] the authentication of both sides,
//! [tls] the keys of encrypted connections, [`DiscoveryLog`] the log of a discovery service.
//!
//! This crate does no I/O, starts no thread, reads no clock and makes no system call.
//!
//! Names are those of the NVMe Base Specification 2.0 and the NVM Command Set Specification 1.0. All values are
//! little-endian in memory.
#![forbid(unsafe_code)]

mod ana;
pub mod auth;
mod controller;
mod cqe;
mod cross_reset;
mod discovery;
mod dma;
pub mod doorbell;
pub mod fabrics;
mod fabrics_host;
mod fields;
mod host;
mod identify;
mod io_queue;
mod key_text;
mod lists;
mod loopback;
mod namespace;
mod parse;
mod registered;
pub mod registers;
mod sqe;
mod status;
mod subsystem;
pub mod tcp;
pub mod tls;
mod walk;

pub use ana::{ANA_LOG, AnaGroup, AnaGroups, AnaLog, AnaSnapshot, AnaState};
pub use controller::{
    AdminCompletion, ConnectedQueue, Controller, ControllerIoQueue, ControllerMemory, ControllerOptions,
    ControllerQueueCommand, ControllerQueuePair, ControllerQueueReply, ControllerRequest, ControllerRings,
    ControllerSnapshot, DoorbellFault, ErrorEntry, FabricsOptions, Fetched, KEEP_ALIVE_LATE_NS, NamespaceTable,
    NewSubmissionQueue, NextBio, RegisterFault, ServedNamespace, SnapshotError,
};
pub use cqe::{CQE_BYTES, Cqe};
pub use cross_reset::{
    CROSS_RESET_ENTRIES_MAX, CROSS_RESET_LOG, CROSS_RESET_LOG_BYTES, ControllerInstance, CrossResetEntry,
    CrossResetState,
};
pub use discovery::{
    DISCOVERY_ENTRIES_MAX, DISCOVERY_ENTRY_BYTES, DISCOVERY_LOG, DISCOVERY_PORT, DiscoveredLog, DiscoveryEntry,
    DiscoveryError, DiscoveryHeader, DiscoveryKind, DiscoveryLog, SecureChannel,
};
pub use dma::{DmaMap, DmaMapError, DmaRange, DmaRights, DmaSegment, RegionSet};
pub use doorbell::{Doorbells, ShadowDoorbells};
pub use fabrics_host::{
    DISCOVERY_SERVICES_MAX, DiscoveryService, DiscoveryWalk, FabricsConnect, FabricsData, FabricsHost, FabricsHostAuth,
    FabricsHostConfig, FabricsHostError, FabricsHostEvent, FabricsIoQueue, FabricsIoQueueOptions, FabricsQueueCommand,
    FabricsQueueReport, StreamRequest,
};
pub use fields::{
    CONTROLLER_FIELDS, ERROR_ENTRY_BYTES, ErrorLogEntry, FieldKind, NAMESPACE_FIELDS, NvmeField, PowerState,
    SMART_FIELDS, SMART_LOG_BYTES,
};
pub use host::{
    AdminData, AdminRings, CANCELLED_RETRY_NS, Completed, ControllerState, ControllerTransport, CqeFault, CqeFaults,
    DeviceGone, Disable, Disposition, Enable, HostController, HostEvent, HostQueuePair, HostStep, LateAction,
    NAMESPACES_MAX, NamespaceIds, NamespaceScope, NvmLimits, NvmeHostConfig, NvmeHostError, PassthroughQueue,
    QueueDemand, QueuePositions, QueueRings, RETRIES_MAX, Retries, RetryDelays, ScannedNamespace, Silence,
    TransferBuffer,
};
pub use identify::{IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, LbaFormat};
pub use io_queue::{IoQueue, IoQueueCommand, IoQueueReport, LateCommand};
pub use lists::{ListError, ListPool, SGL_DESCRIPTORS_MAX, TRANSFER_BYTES_MAX};
pub use loopback::{
    LoopbackBuffers, LoopbackController, LoopbackHost, LoopbackQueue, NvmeLoopback, NvmeLoopbackConfig,
};
pub use namespace::NvmeNamespace;
pub use parse::{IoCommand, IoParser, NamespaceFormat};
pub use sqe::{DSM_RANGE_BYTES, DsmRange, Psdt, SQE_BYTES, Sqe, admin, cns, control, feature, io};
pub use status::NvmeStatus;
pub use subsystem::{
    ConnectRefusal, Connected, FabricsAssociation, FabricsSubsystem, SubsystemOptions, SubsystemSnapshot,
};
pub use walk::DataWalker;

/// Memory page size of a controller, bytes: 4096 (CC.MPS 0), for any page size of the host.
const PAGE: u64 = 4096;
