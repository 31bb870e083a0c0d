//! Interface of a protocol to the core: sessions for the control thread, and rings for the lanes.
//!
//! The core opens queues, carries commands to them, announces memory, waits, gives up on a session and reconnects. A
//! protocol defines messages and rings, and no times.

use std::fmt::{Debug, Display};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use blkyard_mem::{Region, Segment};
use blkyard_mq::{Batch, DeviceInfo, Done, Tag};
use blkyard_sys::{EventFd, PollFd, TimeSource};
use blkyard_virtio::Violations;

use crate::{AttachError, TalkError};

/// Name, clock and time limits of a disk, for any protocol.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// The name, for messages.
    pub name: String,
    /// The clock of the control thread.
    pub clock: Arc<dyn TimeSource>,
    /// How long the back-end may take to answer messages: all of a set-up, or of one change.
    pub reply_max: Duration,
    /// How long it may take for a request. After that its session is given up.
    pub io_max: Duration,
    /// How long I/O waits for a back-end that is gone, or is submitted again at one that does not answer it.
    pub gone_max: Duration,
}

/// State that the rings of one queue share, across all sessions.
#[derive(Clone, Debug)]
pub struct QueueShared {
    /// Signalled by the back-end when it has finished something.
    pub call: Arc<EventFd>,
    /// Violations of the back-end on the queue.
    pub violations: Arc<Violations>,
}

/// The driver's end of one queue of a session, used by its lane.
pub trait RemoteRing: Debug + Send + 'static {
    /// How the back-end broke the ring.
    type Fault: Display;

    /// Takes requests from the batch and offers them to the back-end at once. `translate` returns the back-end's
    /// address of a segment, or `None` if it cannot reach it. True if the back-end wants a kick.
    #[must_use = "a back-end that is not kicked when it wants to be sleeps for ever"]
    fn queue(&mut self, batch: &mut Batch<'_>, translate: impl FnMut(Segment) -> Option<u64>) -> bool;

    /// Returns requests that the back-end has completed.
    ///
    /// # Errors
    /// The back-end broke the ring, now or before. Requests stay in flight.
    fn poll(&mut self, done: &mut Done<'_>) -> Result<(), Self::Fault>;

    /// The slots of the requests in flight.
    fn in_flight(&self) -> impl Iterator<Item = usize>;

    /// Takes back the tags of all requests in flight, for good: the back-end can no longer touch their memory.
    fn take_in_flight(&mut self) -> impl Iterator<Item = Tag>;

    /// Asks the back-end to signal the call eventfd. True if something came before it was asked.
    fn arm(&mut self) -> bool;

    /// The back-end need not signal any more.
    fn disarm(&mut self);

    /// Has its memory on this NUMA node, as far as the back-end has not touched it.
    fn prefer_node(&self, node: u32);
}

/// One connection to a back-end, agreed on all but memory and rings. Owned by the control thread.
///
/// A method that returns a [`TalkError`] ends the session.
pub trait RemoteSession: Sized + Send + 'static {
    /// Address of the back-end, and requested options.
    type Config: Debug + Send + Sync;
    /// Result of the first negotiation, valid for all later sessions.
    type Agreed: Clone + Debug + Send;
    /// The driver's end of a queue.
    type Ring: RemoteRing;
    /// The control thread's end of the rings of all queues. Dropped when no session can serve them any more.
    type Rings: Send;

    /// Connects to the back-end, and agrees on all but memory and rings. Ends early once `end` is readable.
    ///
    /// # Errors
    /// See [`AttachError`].
    fn open(config: &Self::Config, end: &Arc<EventFd>) -> Result<Self, AttachError>;

    /// Result of the negotiation.
    fn agreed(&self) -> &Self::Agreed;

    /// Checks that this session can serve users of the earlier negotiation.
    ///
    /// # Errors
    /// The difference.
    fn check_same(&self, agreed: &Self::Agreed) -> Result<(), TalkError>;

    /// Properties of the back-end's disk.
    fn info(&self) -> &DeviceInfo;

    /// Reads the properties of the back-end's disk again.
    ///
    /// # Errors
    /// [`AttachError::Talk`] ends the session; after any other error the earlier properties stay valid.
    fn read_info(&self, config: &Self::Config) -> Result<DeviceInfo, AttachError>;

    /// Number of queues in use; before [`set_queues`](RemoteSession::set_queues) the number that may be used.
    fn queues(&self) -> usize;

    /// Uses so many queues, at most as many as it has.
    fn set_queues(&mut self, queues: usize);

    /// Requests that a queue can have in flight.
    fn depth_max(&self, config: &Self::Config) -> usize;

    /// How a user gets deeper queues, for an error.
    fn depth_cure() -> String;

    /// Whether the back-end records requests in flight, for the next session.
    fn is_tracked(&self) -> bool;

    /// Begins a conversation: from now on the back-end has all its time to answer.
    fn begin(&mut self);

    /// Whether regions are added and removed while rings run.
    fn adds_regions(&self) -> bool;

    /// Whether all queues must be quiesced and all rings stopped before the back-end knows these regions.
    fn must_quiesce(&self, wanted: &[Arc<Region>]) -> bool;

    /// Announces these regions and withdraws all others. A back-end may have slots for some of them only.
    ///
    /// # Errors
    /// See [`TalkError`].
    fn set_regions(&mut self, wanted: Vec<Arc<Region>>) -> Result<(), TalkError>;

    /// Whether the back-end knows all of these.
    fn knows(&self, regions: &[Arc<Region>]) -> bool;

    /// Number of regions that it knows.
    fn regions(&self) -> usize;

    /// Makes a ring for each queue, in new memory. Returns the driver's end of each, with its kick.
    ///
    /// # Errors
    /// See [`TalkError`].
    fn make_rings(&self, queues: &[QueueShared]) -> Result<(Self::Rings, Vec<NewRing<Self::Ring>>), TalkError>;

    /// The memory of rings, if the back-end must know some.
    fn ring_region(rings: &Self::Rings) -> Option<&Arc<Region>>;

    /// Whether requests in flight in these rings are recorded, so that another session can continue in them.
    fn is_recorded(rings: &Self::Rings) -> bool;

    /// Has the back-end serve these rings; `resumed` if it may find requests of another session there.
    ///
    /// # Errors
    /// See [`TalkError`].
    fn start_rings(&mut self, rings: &Self::Rings, queues: &[QueueShared], resumed: bool) -> Result<(), TalkError>;

    /// Has the back-end stop all rings.
    ///
    /// # Errors
    /// See [`TalkError`].
    fn stop_rings(&mut self) -> Result<(), TalkError>;

    /// Whether the back-end serves rings.
    fn runs(&self) -> bool;

    /// Adds the descriptors that are ready when [`look`](RemoteSession::look) has a message to read.
    fn add_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>);

    /// Reads unsolicited messages of the back-end, without waiting. True if its disk has changed.
    ///
    /// # Errors
    /// The session has ended, or a ring is broken.
    fn look(&mut self) -> Result<bool, TalkError>;

    /// Shuts our side of the connection down. The back-end may use our memory until it closes its side of the returned
    /// socket.
    fn leave(self) -> OwnedFd;
}

/// A ring for one queue.
#[derive(Debug)]
pub struct NewRing<R> {
    /// The driver's end.
    pub ring: R,
    /// Kick eventfd: signalled for the back-end to read the ring.
    pub kick: Arc<EventFd>,
}
