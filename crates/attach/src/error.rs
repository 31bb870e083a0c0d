//! Errors of attaching a disk, and of a session: object, cause, cure.

use std::time::Duration;

use blkyard_virtio::driver::ConfigError;

/// Error between us and a back-end. The connection is unusable after it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TalkError {
    /// It has closed.
    #[error("its back-end closed the connection at {request}; see the back-end's log")]
    Closed {
        /// Message or request.
        request: String,
    },
    /// The same, outside of a request.
    #[error("its back-end closed the connection; see the back-end's log")]
    HungUp,
    /// The device is closed; the back-end has no fault.
    #[error("the disk was closed")]
    LetGo,
    /// It answers messages, if at all, and a request it does not.
    #[error(
        "its back-end did not answer {request} within {limit:?}: it hangs or lost the request; see its log, or raise \
         timeout_s"
    )]
    Silent {
        /// Queue and request.
        request: String,
        /// How long it had.
        limit: Duration,
    },
    /// A queue of ours did not drain for a change of memory.
    #[error("{queue} was not quiesced within {limit:?} for a change of memory; the session is set up again")]
    Restless {
        /// The queue, by its name.
        queue: String,
        /// How long it had.
        limit: Duration,
    },
    /// It did not answer in time.
    #[error(
        "its back-end did not answer {request} within {limit:?}: it hangs, or serves another front-end; end that \
         front-end, restart the back-end, or raise timeout_s"
    )]
    Late {
        /// Message or request.
        request: String,
        /// How long it had.
        limit: Duration,
    },
    /// It answered something else.
    #[error("its back-end's answer to {request} is invalid; check that the socket belongs to a vhost-user back-end")]
    Nonsense {
        /// Message or request.
        request: String,
    },
    /// It said no.
    #[error("its back-end refused {request} with code {code}; see the back-end's log")]
    Refused {
        /// Message.
        request: String,
        /// Its answer.
        code: u64,
    },
    /// It says that a ring of ours makes no sense to it.
    #[error("its back-end reports a broken ring; see the back-end's log")]
    RingError,
    /// It broke a ring.
    #[error("its back-end corrupted {queue}: {fault}; see the back-end's log")]
    Fault {
        /// The queue, by its name.
        queue: String,
        /// Violation.
        fault: String,
    },
    /// It knows no memory of ours, and so no ring.
    #[error("its back-end has no slot for the memory region of the rings; give it more memory slots")]
    NoMemory,
    /// The disk is not the same as before.
    #[error("its back-end changed: {what}; serve the same disk there with the same options")]
    Changed {
        /// Difference.
        what: String,
    },
    /// The system refused.
    #[error("a system call failed: {0}; see the limits on memory, threads and open files")]
    System(String),
}

/// Why a disk is not attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no way to the socket.
    #[error("{disk}: {cause}")]
    Socket {
        /// Name of the disk.
        disk: String,
        /// Cause and cure.
        cause: String,
    },
    /// The back-end does not do as it should.
    #[error("{disk}: {source}")]
    Talk {
        /// Name of the disk.
        disk: String,
        /// Violation.
        #[source]
        source: TalkError,
    },
    /// The back-end lacks a feature.
    #[error("{disk}: its back-end does not offer {feature}: {cure}")]
    Feature {
        /// Name of the disk.
        disk: String,
        /// Missing feature.
        feature: &'static str,
        /// Cure.
        cure: &'static str,
    },
    /// The back-end's configuration is inconsistent.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// More queues are wanted than there are.
    #[error("{disk}: the back-end has {have} of {wanted} queues; {cure}")]
    Queues {
        /// Name of the disk.
        disk: String,
        /// Number requested.
        wanted: usize,
        /// Number available.
        have: usize,
        /// Cure.
        cure: &'static str,
    },
    /// A queue deeper than its ring.
    #[error("{disk}: a queue of {depth} requests exceeds its ring of {room}; {cure}")]
    Depth {
        /// Name of the disk.
        disk: String,
        /// Requested depth.
        depth: usize,
        /// Available depth.
        room: usize,
        /// Cure.
        cure: String,
    },
    /// A controller does not answer: it may later.
    #[error("{disk}: {cause}")]
    Unreachable {
        /// Name of the disk.
        disk: String,
        /// Cause and cure.
        cause: String,
    },
    /// A controller cannot be opened, or brought up.
    #[error("{disk}: {cause}")]
    Controller {
        /// Name of the disk.
        disk: String,
        /// Cause and cure.
        cause: String,
    },
    /// The system gives no memory, thread or descriptor.
    #[error("{disk}: system call failed: {source}; see the limits on memory, threads and open files")]
    System {
        /// Name of the disk.
        disk: String,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
    /// The thread that talks to the back-end has no time.
    #[error(
        "{disk}: no answer within {limit:?}: its back-end is slow to answer messages; try again, or allow less with \
         timeout_s"
    )]
    Busy {
        /// Name of the disk.
        disk: String,
        /// How long it had.
        limit: Duration,
    },
    /// It is not connected, so it cannot be suspended or resumed.
    #[error("{disk}: its controller is not connected; it is {when} as soon as it is")]
    NotConnected {
        /// Name of the disk.
        disk: String,
        /// `suspended` or `resumed`.
        when: &'static str,
    },
    /// While it was being suspended or resumed, the opposite was asked for.
    #[error("{disk}: the opposite was asked for meanwhile; inspect it, and set again what it is to be")]
    Overtaken {
        /// Name of the disk.
        disk: String,
    },
    /// The thread that talks to the back-end is gone: a bug of ours.
    #[error("{disk}: its control thread has ended; see the messages above, and report a bug")]
    Ended {
        /// Name of the disk.
        disk: String,
    },
}
