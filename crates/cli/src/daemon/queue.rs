//! Construction of an export's queues: lane assignment at the start, and the queue itself when a front-end needs it.

use std::ops::Range;
use std::sync::Arc;

use blkyard::rate::RateSlot;
use blkyard::{Device, DeviceQueue};
use blkyard_export::{DetachedQueue, HwQueueSet, QueueHost, QueuePort, QueueRemote, QueueShare, on_demand_queue};
use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind, SchedulerConfig, TagSet};
use blkyard_os::Ring;
use blkyard_virtio::SerialId;

use super::protocols::{ByProtocol, ClientRemotes, Protocol, ServedQueue};
use super::{ServedDevice, ServedLanes, WeightSlot};

/// Parameters of an export's queues.
#[derive(Clone)]
pub(crate) struct QueueMaker {
    pub(crate) lanes: Arc<ServedLanes>,
    /// Number of the export.
    pub(crate) export: usize,
    pub(crate) protocol: Protocol,
    /// Its devices: one, or each namespace of a controller.
    pub(crate) devices: Vec<Arc<ServedDevice>>,
    /// Serial number of the disk.
    pub(crate) serial: SerialId,
    /// Shared rate limit of its queues.
    pub(crate) rate: Arc<RateSlot>,
    /// Its weight beside others of its devices.
    pub(crate) weight: Arc<WeightSlot>,
}

impl QueueMaker {
    /// Registers the maker of the export's hardware queues with the lanes.
    pub(crate) fn register(&self) {
        let (devices, rate, weight) = (self.devices.clone(), Arc::clone(&self.rate), Arc::clone(&self.weight));
        let make = move |queues| {
            let make = |numbers: Vec<u16>| {
                let served: Vec<_> = numbers.iter().map(|number| &*devices[usize::from(*number)]).collect();
                Ok::<_, String>((make_hw_queue(&served, &rate, &weight, queues)?, numbers))
            };
            let made = by_pool(&devices).into_iter().map(make).collect::<Result<_, _>>()?;
            HwQueueSet::sharing::<Ring>(made)
                .map_err(|error| format!("events of its devices: {error}; raise the limit on open files"))
        };
        self.lanes.make_by(self.export, Arc::new(make));
    }

    /// Makes the queue of this index. It is served when a front-end starts its ring. If the device has a bounded number
    /// of queues, it is served now, so that a lack of queues is found at the start.
    ///
    /// # Errors
    /// The device has no more queues, or the lane has no room: object, cause, cure.
    fn make<S: ServedQueue>(&self, queue: usize) -> Result<QueueRemote<S>, String> {
        let remote = on_demand_queue(Box::new(ClientHost { maker: self.clone(), queue }));
        self.lanes.move_by(self.export, queue, S::mover(remote.mover()));
        if self.devices.iter().any(|device| device.device.queues_max() < usize::MAX) {
            remote.open_for_good()?;
        }
        Ok(remote)
    }

    /// Makes the queues of these indexes, up to the first that cannot be made: the reason, then.
    pub(crate) fn make_all(&self, queues: Range<usize>) -> (ClientRemotes, Option<String>) {
        match self.protocol {
            Protocol::VhostUser(()) => {
                let (made, problem) = self.make_some(queues);
                (ByProtocol::VhostUser(made), problem)
            }
            Protocol::VfioUser(()) => {
                let (made, problem) = self.make_some(queues);
                (ByProtocol::VfioUser(made), problem)
            }
            Protocol::NvmeTcp(()) => {
                let (made, problem) = self.make_some(queues);
                (ByProtocol::NvmeTcp(made), problem)
            }
        }
    }

    fn make_some<S: ServedQueue>(&self, queues: Range<usize>) -> (Vec<QueueRemote<S>>, Option<String>) {
        let mut made = Vec::new();
        for queue in queues {
            match self.make(queue) {
                Ok(remote) => made.push(remote),
                Err(why) => return (made, Some(why)),
            }
        }
        (made, None)
    }
}

/// The numbers of these devices, those together that have their queues in common.
fn by_pool(devices: &[Arc<ServedDevice>]) -> Vec<Vec<u16>> {
    let mut groups: Vec<(Option<u64>, Vec<u16>)> = Vec::new();
    for (number, served) in (0..).zip(devices) {
        let pool = served.device.queue_pool().map(|member| member.pool);
        match groups.iter_mut().find(|(known, _)| pool.is_some() && *known == pool) {
            Some((_, group)) => group.push(number),
            None => groups.push((pool, vec![number])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The hardware queue of a device, or of several that have their queues in common. Made before it is added to its lane:
/// this takes as long as a hundred I/Os of the lane's other queues.
fn make_hw_queue(
    devices: &[&ServedDevice],
    rate: &RateSlot,
    weight: &WeightSlot,
    queues: usize,
) -> Result<HwQueue<DeviceQueue>, String> {
    let (usual, first) = (HwQueueConfig::default(), &devices[0].device);
    let schedulers: Vec<_> = devices.iter().map(|device| weight.of(device.scheduler())).collect();
    // Each client queue has as many bios and tags as with a private hardware queue. A scheduler that orders gets the
    // tags of one.
    let orders = schedulers.iter().any(SchedulerConfig::orders);
    let wanted = if orders { usual.depth } else { usual.depth * queues };
    let depth = wanted.min(first.depth_max()).min(TagSet::DEPTH_MAX);
    let config = HwQueueConfig { depth, scheduler: schedulers[0], bios_max: usual.bios_max * queues, ..usual };
    let members: Vec<_> = devices.iter().filter_map(|served| served.device.queue_pool()).map(|of| of.index).collect();
    let driver = match devices {
        [_] => first.queue(QueueKind::Default, depth),
        _ => first.queue_of(&members, QueueKind::Default, depth),
    };
    let driver = driver.map_err(|error| error.to_string())?;
    let mut hw = HwQueue::with_namespaces(driver, devices.iter().map(|device| device.info()).collect(), config);
    for ((device, scheduler), number) in devices.iter().zip(schedulers).zip(0..) {
        if number > 0 {
            hw.schedule(number, scheduler);
        }
        hw.set_rates(number, device.rates(rate));
    }
    Ok(hw)
}

/// Serves one client queue on its lane.
struct ClientHost {
    maker: QueueMaker,
    queue: usize,
}

impl<S: ServedQueue> QueueHost<S> for ClientHost {
    fn open(&self, port: QueuePort<S>) -> Result<(), String> {
        let QueueMaker { lanes, export, devices, serial, .. } = &self.maker;
        let depth = depth_of_all(devices);
        let share = QueueShare { bios: HwQueueConfig::default().bios_max, depth, devices: devices.len() };
        let lane = lanes.seen(*export).lanes.get(self.queue).copied().unwrap_or_default();
        let identity = S::identity(*serial);
        let client = lanes.near(lane, move || DetachedQueue::new(identity, port, share));
        let client = client.map_err(|error| format!("its kicks: {error}; raise the limit on open files"))?;
        lanes.open(*export, self.queue, S::detached(client))
    }

    fn close(&self) {
        if let Err(error) = self.maker.lanes.close(self.maker.export, self.queue) {
            tracing::error!("{error}");
        }
    }
}

/// Requests in flight of each queue of these devices, on the device that takes most.
pub(crate) fn depth_of_all(devices: &[Arc<ServedDevice>]) -> usize {
    let depth = |device: &Device| HwQueueConfig::default().depth.min(device.depth_max());
    devices.iter().map(|served| depth(&served.device)).max().unwrap_or(1)
}
