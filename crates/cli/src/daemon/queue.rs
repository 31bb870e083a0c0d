//! How queues of an export are made: their places on lanes at the start, their poller when a front-end needs it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard::rate::RateSlot;
use blkyard::{Device, DeviceError};
use blkyard_export::{QueueHost, QueueRemote, SharedQueuePort, VhostQueue, VirtqueueShare, on_demand_queues};
use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind};
use blkyard_virtio::SerialId;

use super::{ServedDevice, ServedLanes};

/// What the queues of one export are made of.
pub(crate) struct QueueMaker {
    pub(crate) lanes: Arc<Mutex<ServedLanes>>,
    pub(crate) device: Arc<ServedDevice>,
    /// What the disk calls itself.
    pub(crate) serial: SerialId,
    /// What its queues together do not exceed.
    pub(crate) rate: Arc<RateSlot>,
}

impl QueueMaker {
    /// Makes as many queues as one poller serves, whose place on the lanes this is. There is no poller until a
    /// front-end starts one of their rings, unless the device has a bounded number of queues: then it has to be known
    /// now whether they are enough.
    ///
    /// # Errors
    /// The device has no more queues, or the lane has no room: object, cause, cure.
    pub(crate) fn make(&self, poller: usize, queues: usize) -> Result<Vec<QueueRemote>, String> {
        let host = PollerHost {
            lanes: Arc::clone(&self.lanes),
            poller,
            device: Arc::clone(&self.device),
            serial: self.serial,
            rate: Arc::clone(&self.rate),
            streams: (0..queues).map(|_| self.device.new_stream()).collect(),
        };
        let remotes = on_demand_queues(queues, Box::new(host));
        if self.device.device.queues_max() < usize::MAX {
            remotes[0].open_for_good()?;
        }
        Ok(remotes)
    }
}

/// Makes one poller, and has it live on its lane.
struct PollerHost {
    lanes: Arc<Mutex<ServedLanes>>,
    poller: usize,
    device: Arc<ServedDevice>,
    serial: SerialId,
    rate: Arc<RateSlot>,
    /// The stream of each queue, for schedulers.
    streams: Vec<u32>,
}

impl PollerHost {
    fn lanes(&self) -> MutexGuard<'_, ServedLanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Made here, not on the lane: that takes as long as a hundred I/Os of the lane's other queues.
    fn make(&self, port: SharedQueuePort) -> Result<VhostQueue<blkyard::DeviceQueue>, DeviceError> {
        let (device, info) = (&self.device.device, self.device.info());
        let usual = HwQueueConfig::default();
        // Each virtqueue has as many bios as with a hardware queue of its own.
        let bios_max = usual.bios_max * self.streams.len();
        let config = HwQueueConfig { depth: depth_of(device), scheduler: self.device.scheduler(), bios_max, ..usual };
        let share = VirtqueueShare { bios: usual.bios_max, depth: config.depth };
        let driver = device.queue(QueueKind::Default, config.depth)?;
        let mut hw = HwQueue::new(driver, info, config);
        hw.set_rates(0, self.device.rates(&self.rate));
        Ok(VhostQueue::shared(hw, self.serial, port, share).with_streams(self.streams.iter().copied()))
    }
}

impl QueueHost for PollerHost {
    fn open(&self, port: SharedQueuePort) -> Result<(), String> {
        let queue = self.make(port).map_err(|error| error.to_string())?;
        self.lanes().admit(self.poller, queue).map_err(|error| error.to_string())
    }

    fn close(&self) {
        let removed = self.lanes().remove(self.poller);
        if let Err(error) = removed {
            tracing::error!("{error}");
        }
    }
}

/// Requests in flight of each queue that serves a device.
pub(crate) fn depth_of(device: &Device) -> usize {
    HwQueueConfig::default().depth.min(device.depth_max())
}
