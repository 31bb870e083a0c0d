//! Construction of an export's queues: their slots on lanes at the start, the rest when a front-end needs it.

use std::sync::Arc;

use blkyard::rate::RateSlot;
use blkyard::{Device, DeviceQueue};
use blkyard_export::{
    DetachedVirtqueue, QueueHost, QueueShare, VirtqueuePort, VirtqueueRemote, VirtqueueSession, on_demand_queue,
};
use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind, TagSet};
use blkyard_virtio::SerialId;

use super::{ServedDevice, ServedLanes};

/// Parameters of the queues of one export.
#[derive(Clone)]
pub(crate) struct QueueMaker {
    pub(crate) lanes: Arc<ServedLanes>,
    /// Number of the export.
    pub(crate) export: usize,
    pub(crate) device: Arc<ServedDevice>,
    /// Serial number of the disk.
    pub(crate) serial: SerialId,
    /// Rate limit of its queues together.
    pub(crate) rate: Arc<RateSlot>,
}

impl QueueMaker {
    /// Has the lanes know how hardware queues of the export are made.
    pub(crate) fn register(&self) {
        let (device, rate) = (Arc::clone(&self.device), Arc::clone(&self.rate));
        let make = move |queues| make_hw_queue(&device, &rate, queues);
        self.lanes.make_by(self.export, Box::new(make));
    }

    /// Makes the queue of this number. It is not served until a front-end starts its ring, unless the device has a
    /// bounded number of queues: then it has to be known now whether they are enough.
    ///
    /// # Errors
    /// The device has no more queues, or the lane has no room: object, cause, cure.
    pub(crate) fn make(&self, queue: usize) -> Result<VirtqueueRemote, String> {
        let remote = on_demand_queue(Box::new(VirtqueueHost {
            maker: self.clone(),
            queue,
            // For schedulers.
            stream: self.device.new_stream(),
        }));
        self.lanes.move_by(self.export, queue, remote.mover());
        if self.device.device.queues_max() < usize::MAX {
            remote.open_for_good()?;
        }
        Ok(remote)
    }
}

/// Created before it enters its lane: that takes as long as a hundred I/Os of the lane's other queues.
fn make_hw_queue(device: &ServedDevice, rate: &RateSlot, queues: usize) -> Result<HwQueue<DeviceQueue>, String> {
    let (usual, scheduler) = (HwQueueConfig::default(), device.scheduler());
    // Each virtqueue has as many bios and tags as with a private hardware queue. A scheduler that orders needs the tags
    // of one.
    let wanted = if scheduler.orders() { usual.depth } else { usual.depth * queues };
    let depth = wanted.min(device.device.depth_max()).min(TagSet::DEPTH_MAX);
    let config = HwQueueConfig { depth, scheduler, bios_max: usual.bios_max * queues, ..usual };
    let driver = device.device.queue(QueueKind::Default, depth).map_err(|error| error.to_string())?;
    let mut hw = HwQueue::new(driver, device.info(), config);
    hw.set_rates(0, device.rates(rate));
    Ok(hw)
}

/// Has one virtqueue served on its lane.
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

/// Requests in flight of each queue that serves a device.
pub(crate) fn depth_of(device: &Device) -> usize {
    HwQueueConfig::default().depth.min(device.depth_max())
}
