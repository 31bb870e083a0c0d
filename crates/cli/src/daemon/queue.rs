//! Construction of an export's queues: lane assignment at the start, and the queue itself when a front-end needs it.

use std::sync::Arc;

use blkyard::rate::RateSlot;
use blkyard::{Device, DeviceQueue};
use blkyard_export::{
    DetachedVirtqueue, QueueHost, QueueShare, VirtqueuePort, VirtqueueRemote, VirtqueueSession, on_demand_queue,
};
use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind, TagSet};
use blkyard_virtio::SerialId;

use super::{ServedDevice, ServedLanes};

/// Parameters of an export's queues.
#[derive(Clone)]
pub(crate) struct QueueMaker {
    pub(crate) lanes: Arc<ServedLanes>,
    /// Number of the export.
    pub(crate) export: usize,
    pub(crate) device: Arc<ServedDevice>,
    /// Serial number of the disk.
    pub(crate) serial: SerialId,
    /// Shared rate limit of its queues.
    pub(crate) rate: Arc<RateSlot>,
}

impl QueueMaker {
    /// Registers the maker of the export's hardware queues with the lanes.
    pub(crate) fn register(&self) {
        let (device, rate) = (Arc::clone(&self.device), Arc::clone(&self.rate));
        let make = move |queues| make_hw_queue(&device, &rate, queues);
        self.lanes.make_by(self.export, Box::new(make));
    }

    /// Makes the queue of this index. It is served when a front-end starts its ring. If the device has a bounded number
    /// of queues, it is served now, so that a lack of queues is found at the start.
    ///
    /// # Errors
    /// The device has no more queues, or the lane has no room: object, cause, cure.
    pub(crate) fn make(&self, queue: usize) -> Result<VirtqueueRemote, String> {
        let remote = on_demand_queue(Box::new(VirtqueueHost {
            maker: self.clone(),
            queue,
            // Stream number for schedulers.
            stream: self.device.new_stream(),
        }));
        self.lanes.move_by(self.export, queue, remote.mover());
        if self.device.device.queues_max() < usize::MAX {
            remote.open_for_good()?;
        }
        Ok(remote)
    }
}

/// Made before it is added to its lane: this takes as long as a hundred I/Os of the lane's other queues.
fn make_hw_queue(device: &ServedDevice, rate: &RateSlot, queues: usize) -> Result<HwQueue<DeviceQueue>, String> {
    let (usual, scheduler) = (HwQueueConfig::default(), device.scheduler());
    // Each virtqueue has as many bios and tags as with a private hardware queue. A scheduler that orders gets the tags
    // of one.
    let wanted = if scheduler.orders() { usual.depth } else { usual.depth * queues };
    let depth = wanted.min(device.device.depth_max()).min(TagSet::DEPTH_MAX);
    let config = HwQueueConfig { depth, scheduler, bios_max: usual.bios_max * queues, ..usual };
    let driver = device.device.queue(QueueKind::Default, depth).map_err(|error| error.to_string())?;
    let mut hw = HwQueue::new(driver, device.info(), config);
    hw.set_rates(0, device.rates(rate));
    Ok(hw)
}

/// Serves one virtqueue on its lane.
struct VirtqueueHost {
    maker: QueueMaker,
    queue: usize,
    stream: u32,
}

impl QueueHost<VirtqueueSession> for VirtqueueHost {
    fn open(&self, port: VirtqueuePort) -> Result<(), String> {
        let QueueMaker { lanes, export, device, serial, .. } = &self.maker;
        let share = QueueShare { bios: HwQueueConfig::default().bios_max, depth: depth_of(&device.device) };
        let virtqueue = DetachedVirtqueue::new(*serial, port, share, self.stream);
        let virtqueue = virtqueue.map_err(|error| format!("its kicks: {error}; raise the limit on open files"))?;
        lanes.open(*export, self.queue, virtqueue)
    }

    fn close(&self) {
        if let Err(error) = self.maker.lanes.close(self.maker.export, self.queue) {
            tracing::error!("{error}");
        }
    }
}

/// Requests in flight of each queue of a device.
pub(crate) fn depth_of(device: &Device) -> usize {
    HwQueueConfig::default().depth.min(device.depth_max())
}
