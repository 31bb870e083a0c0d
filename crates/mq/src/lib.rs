//! The queue core: submitters (software queues, virtqueues) feed hardware queues, every request in flight holds a tag,
//! and the I/O path shares no memory unless it must.
//!
//! A submitter fills a [`Bio`] and passes it to a [`HwQueue`]. The queue splits it into requests within the
//! [`QueueLimits`] of the device, gives each a [`Tag`], and passes them in batches to its [`Driver`]. A completed bio
//! comes back with its [`Status`]. Work on a hardware queue happens through `&mut`: one owner at a time.
//!
//! This crate starts no thread, reads no clock and makes no system call. Time is an argument.
#![forbid(unsafe_code)]

mod bio;
mod budget;
mod cancelled;
mod disk;
mod driver;
mod errors;
mod fence;
mod fifo;
mod hedge;
mod hw;
mod idle;
mod lane;
mod latency;
mod limits;
mod log_limit;
mod map;
mod null;
mod pace;
mod part;
mod ram;
mod rate;
mod request;
mod sched;
mod stats;
mod status;
mod stream;
mod sw;
mod tag;

pub use bio::{Bio, BioFlags, Op, Priority};
pub use blkyard_mem::{BufferAccess, BufferId, Region, RegionTable, RegisterError, RegisteredBuffer, Segment, Span};
pub use budget::{Budget, BudgetError, BudgetShare};
pub use cancelled::Cancellations;
pub use disk::{QueueFactory, QueuesError, SharedDisk, SharedSubmitter};
pub use driver::{Batch, BlockDevice, DeviceInfo, Done, Driver, Shortage, TimedOut};
pub use errors::{ErrorCode, IoError, IoErrors};
pub use fence::{FenceEvidence, Fenced, PathGeneration, TakenBio, UnfencedBio};
pub use hedge::{EndedHedge, HedgeDriver};
pub use hw::{FlushSnapshot, HwQueue, HwQueueConfig, HwSnapshot, Merging, NamespaceSnapshot, RequestSnapshot};
pub use idle::{CpuUse, IdlePolicy};
pub use lane::{Idle, Lane, LaneWaker, Poller, PollerState, SIGNAL_AGAIN_NS, SignalEventfd, SignalSlot, Slot, Wake};
pub use latency::{LatencyWindow, TrackerConfig};
pub use limits::{BioSplit, Cursor, LimitsError, QueueLimits};
pub use log_limit::{HeldBack, LogLimit};
pub use map::{CpuPlace, QueueCounts, QueueKind, QueueMap, QueueMaps, QueueRange};
pub use null::{NullConfig, NullDevice, NullQueue};
pub use part::{BatchPart, TakenRequest, UnfencedRequest};
pub use ram::{RamDevice, RamQueue, RamStore};
pub use rate::{RateConfig, RateLimit};
pub use request::{Ranges, Request, RequestState, Segments};
pub use sched::{
    DeadlineConfig, FAIR_WEIGHTS_MAX, FairConfig, FairDevice, KyberConfig, Reach, Scheduler, SchedulerConfig,
    SchedulerSnapshot, Selected, SharedDepth, SharedTenure, SliceKey, SliceOrder, StreamKey, TimesliceConfig,
};
pub use stats::{
    DeviceTime, Held, Histogram, HistogramSnapshot, HwStats, OpClass, OpSnapshot, StatsSnapshot, TurnStats,
};
pub use status::{Retry, Status};
pub use stream::{
    SendPiece, StreamDestination, StreamError, StreamEvent, StreamId, StreamInbox, StreamLimits, StreamService,
    StreamSocket,
};
pub use sw::{Context, Parker, SwQueue};
pub use tag::{Cid, Cids, Forged, Tag, TagSet};

/// Bytes in a sector, for any logical block size.
pub const SECTOR_BYTES: u64 = 512;
/// The same as a shift.
pub const SECTOR_SHIFT: u32 = 9;
