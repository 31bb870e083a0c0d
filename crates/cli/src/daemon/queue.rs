//! How a queue of an export is made: its driver where it is asked for, the queue itself on its lane.

use blkyard::rate::RateSlot;
use blkyard::spec::SpecError;
use blkyard::{Device, DeviceError, DeviceQueue};
use blkyard_export::{QueueRemote, VhostQueue, queue_pair, shared_queue_pair};
use blkyard_mq::{HwQueue, HwQueueConfig, QueueKind};
use blkyard_virtio::SerialId;

use super::ServedDevice;

/// How a queue is made, on its lane.
pub(crate) type Make = Box<dyn FnOnce() -> VhostQueue<DeviceQueue> + Send>;

/// Has the driver of one more queue of a device, and says how the queue is made.
///
/// # Errors
/// The device, or the system, has no more.
pub(crate) fn make_queue(
    served: &ServedDevice,
    serial: SerialId,
    of_export: &RateSlot,
) -> Result<(QueueRemote, Make), DeviceError> {
    let (device, info) = (&served.device, served.info());
    let (remote, port) = queue_pair();
    let config = HwQueueConfig { depth: depth_of(device), scheduler: served.scheduler(), ..HwQueueConfig::default() };
    let driver = device.queue(QueueKind::Default, config.depth)?;
    let (stream, rates) = (served.new_stream(), served.rates(of_export));
    let make = move || {
        let mut hw = HwQueue::new(driver, info, config);
        hw.set_rates(0, rates);
        VhostQueue::new(hw, serial, port).with_stream(stream)
    };
    Ok((remote, Box::new(make)))
}

/// Has the driver of one queue of a device for all queues of an export, and says how they are made.
///
/// # Errors
/// The device, or the system, has no more.
pub(crate) fn make_shared_queue(
    served: &ServedDevice,
    serial: SerialId,
    of_export: &RateSlot,
    queues: usize,
) -> Result<(Vec<QueueRemote>, Make), DeviceError> {
    let (device, info) = (&served.device, served.info());
    let (remotes, port) = shared_queue_pair(queues)
        .map_err(|source| SpecError::new(&info.name, source, "raise the limit on open files"))?;
    let usual = HwQueueConfig::default();
    // Each virtqueue has as many bios as with a hardware queue of its own.
    let bios_max = usual.bios_max * queues;
    let config = HwQueueConfig { depth: depth_of(device), scheduler: served.scheduler(), bios_max, ..usual };
    let driver = device.queue(QueueKind::Default, config.depth)?;
    let streams: Vec<_> = (0..queues).map(|_| served.new_stream()).collect();
    let rates = served.rates(of_export);
    let make = move || {
        let mut hw = HwQueue::new(driver, info, config);
        hw.set_rates(0, rates);
        VhostQueue::shared(hw, serial, port).with_streams(streams)
    };
    Ok((remotes, Box::new(make)))
}

/// Requests in flight of each queue that serves a device.
pub(crate) fn depth_of(device: &Device) -> usize {
    HwQueueConfig::default().depth.min(device.depth_max())
}
