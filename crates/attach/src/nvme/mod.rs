//! NVMe: a namespace of a controller as a disk, over any transport.
//!
//! A control thread owns the controller (`control.rs`, over `HostController` of crate `nvme`); each I/O queue is the
//! driver of a hardware queue of a lane (`queue.rs`). They exchange messages (`mailbox.rs`) and share no lock.
//!
//! ```text
//!   lane: NamespaceQueue ── commands in the submission ring, doorbell ──▶ controller
//!      ▲   │ reports, late commands, memory                               │ interrupt (eventfd)
//!      │   ▼                                                              ▼
//!   control thread: HostController ── registers, admin commands       the lane's sleep ends
//! ```
//!
//! A transport plugs in by [`NvmeTransport`]: it opens the device, maps the regions of a DMA domain, and has interrupt
//! vector *n* signal eventfd *n*. Domain and eventfds come from here ([`HostParts`]), since they outlive a device that
//! is lost and opened again. All methods are called on the control thread and may wait for a bounded time.
//!
//! A lane writes doorbells that are shared memory, and signals the controller if that does not poll them. Others are
//! written by the control thread, which the lane wakes.
//! Whether completions are polled or awaited is the lane's decision: an awake lane polls the completion ring, and a
//! lane that sleeps listens to the eventfd. A queue without an interrupt vector is polled at intervals instead.

mod control;
mod disk;
mod mailbox;
mod queue;
mod queue_use;
mod suspend;

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use blkyard_mem::DmaDomain;
use blkyard_nvme::{ControllerTransport, NvmeHostConfig};
use blkyard_sys::{EventFd, TimeSource};

use crate::protocol::RemoteOptions;

pub(crate) use control::{check_same, find_namespace};
pub use disk::{NamespaceView, QueuePoolMember, RemoteNamespace};
pub use queue::NamespaceQueue;

/// Parts of a controller that outlive its transport.
#[derive(Clone, Debug)]
pub struct HostParts {
    /// The address space of the controller.
    pub domain: Arc<DmaDomain>,
    /// Signalled when the domain's list has changed.
    pub dma_changed: Arc<EventFd>,
    /// The eventfd of each interrupt vector: of the admin queue, then of the I/O queues. A transport uses as many as
    /// the device has vectors.
    pub eventfds: Vec<Arc<EventFd>>,
    /// Readable when the device is closed while it is opened: waiting for the device then ends.
    pub end: Arc<EventFd>,
}

impl HostParts {
    /// Parts for a number of interrupt vectors. `dma_changed` is signalled when memory is to be mapped or unmapped.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new(vectors: u16, dma_changed: Arc<EventFd>, end: Arc<EventFd>) -> std::io::Result<HostParts> {
        let eventfds = (0..vectors).map(|_| Ok(Arc::new(EventFd::new()?))).collect::<std::io::Result<_>>()?;
        let changed = Arc::clone(&dma_changed);
        Ok(HostParts { domain: DmaDomain::new(move || changed.signal()), dma_changed, eventfds, end })
    }
}

/// A transport whose devices are opened here, and opened again when they were lost.
pub trait NvmeTransport: ControllerTransport + Debug + Send + Sized + 'static {
    /// Address of the device, and options of the transport.
    type Config: Debug + Send + 'static;

    /// Opens the device, with its interrupts and DMA. Its registers are left as they are. An earlier transport of the
    /// same device has been dropped.
    ///
    /// # Errors
    /// Cause and cure, for people.
    fn open(config: &Self::Config, parts: &HostParts) -> Result<Self, String>;

    /// Maps new regions of the domain and unmaps removed ones. A region that cannot be mapped has no
    /// [address](ControllerTransport::dma_addr); a lost device is noticed at the next access.
    fn sync_dma(&mut self);

    /// Whether to call [`NvmeTransport::unmap_returned`] now and then. Not by default.
    fn watches_memory(&self) -> bool {
        false
    }

    /// Unmaps regions of which their owner has given pages back, where the device would use the former ones. They have
    /// no address from then on. Returns their bytes.
    fn unmap_returned(&mut self) -> u64 {
        0
    }

    /// A descriptor that is readable when [`NvmeTransport::look`] has work. Unset if there is none, and after `look`
    /// has returned false.
    fn event_source(&self) -> Option<BorrowedFd<'_>>;

    /// Handles events of the device. Returns false once the device is lost.
    fn look(&mut self) -> bool;

    /// Whether another party was found to have reset the device, since the last call.
    fn take_reset(&mut self) -> bool {
        false
    }

    /// Reason why the device is lost, with cure.
    fn failure(&self) -> Option<String>;

    /// The eventfd to signal after a write of a shared doorbell of this queue, as
    /// [`ControllerTransport::signal_doorbell`] does. Its other end may have made it blocking. Unset by default.
    fn doorbell_eventfd(&self, _qid: u16) -> Option<&Arc<EventFd>> {
        None
    }
}

/// How a namespace is attached, over any transport.
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Name, clock and time limits.
    pub options: RemoteOptions,
    /// I/O queues to use, and their entries.
    pub host: NvmeHostConfig,
    /// The namespace; if unset, the controller must have exactly one.
    pub namespace: Option<u32>,
}

impl NamespaceConfig {
    /// The defaults: one queue, as many entries as Linux uses, and the time limits of other attached disks.
    pub fn new(name: impl Into<String>, clock: Arc<dyn TimeSource>) -> NamespaceConfig {
        let options = RemoteOptions {
            name: name.into(),
            clock,
            // As for disks over vhost-user.
            reply_max: Duration::from_secs(10),
            io_max: Duration::from_secs(30),
            gone_max: Duration::from_mins(1),
        };
        NamespaceConfig { options, host: NvmeHostConfig::default(), namespace: None }
    }
}
