//! Devices of a simulation and their drivers, as one enum each.

use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Batch, BlockDevice, DeviceInfo, Done, Driver, TimedOut};

use super::oracle::word_of;
use super::{WorldDevice, WorldOptions};
use crate::{
    ChaosConfig, ChaosDevice, ChaosQueue, DiskModel, FixedLatency, Flash, FlashModel, Keeps, LineModel, Model,
    Modelled, ModelledQueue, RotaryDisk,
};

/// A device of a simulation.
pub(super) enum SimDevice {
    Modelled(Modelled),
    Chaos(ChaosDevice),
}

/// A driver for one queue of it.
pub(super) enum SimDeviceQueue {
    Modelled(ModelledQueue),
    Chaos(ChaosQueue),
}

impl SimDevice {
    pub(super) fn new(info: &Arc<DeviceInfo>, options: &WorldOptions, seed: u64) -> SimDevice {
        let model = match options.device {
            WorldDevice::Chaos => {
                let config = ChaosConfig {
                    fail_every: options.errors as u32,
                    requeue_every: options.requeues as u32,
                    lose_every: options.losses as u32,
                    ..ChaosConfig::wild(seed)
                };
                let device = ChaosDevice::new(vec![Arc::clone(info)], config);
                return SimDevice::Chaos(device.unwrap_or_else(|error| panic!("{error}")));
            }
            WorldDevice::Disk => Model::Disk(Box::new(RotaryDisk::new(small_disk(info, options), seed))),
            WorldDevice::Flash => {
                // A few dies with small pages and blocks, and a cache that is soon full.
                let model = FlashModel {
                    channels: 2,
                    dies: 2,
                    page_sectors: 8,
                    block_pages: 16,
                    write_cache_sectors: if options.cache { 64 } else { 0 },
                    ..FlashModel::NVME_2018
                };
                Model::Flash(Box::new(Flash::new(model)))
            }
            WorldDevice::Line => {
                let model = LineModel {
                    access_ns: 5_000,
                    bytes_per_s: 1_000_000_000,
                    latency_ns: 80_000,
                    jitter_ns: 20_000,
                    depth: 64,
                };
                Model::Line(FixedLatency::new(model, seed))
            }
        };
        let device = Modelled::new(DeviceInfo::clone(info), model, Keeps::Medium);
        SimDevice::Modelled(device.unwrap_or_else(|error| panic!("{error}")))
    }

    pub(super) fn queue(&self, depth: usize) -> SimDeviceQueue {
        match self {
            SimDevice::Modelled(device) => SimDeviceQueue::Modelled(device.queue(depth)),
            SimDevice::Chaos(device) => SimDeviceQueue::Chaos(device.queue(depth)),
        }
    }

    /// Power fails. A chaos device only reports the data that would be left.
    pub(super) fn cut_power(&self, now_ns: u64) {
        if let SimDevice::Modelled(device) = self {
            device.cut_power(now_ns);
        }
    }

    /// The word that a sector is made of after a power failure.
    pub(super) fn word(&self, sector: u64) -> u64 {
        let mut bytes = [0; 512];
        match self {
            SimDevice::Modelled(device) => device.read(sector, &mut bytes),
            SimDevice::Chaos(device) => device.read_stable(0, sector, &mut bytes),
        }
        word_of(&bytes)
    }

    /// Completions that no device should send have been refused.
    pub(super) fn check_honest(&self) {
        if let SimDevice::Chaos(device) = self {
            let counts = device.counts();
            assert_eq!(counts.sent, counts.refused, "a forged completion came through");
        }
    }
}

/// A disk of a few tracks with a cache that is soon full, so that the arm has to move and writes have to wait.
fn small_disk(info: &DeviceInfo, options: &WorldOptions) -> DiskModel {
    DiskModel {
        sectors: info.capacity_sectors,
        zones: 2,
        outer_bytes_per_s: 2_000_000,
        inner_bytes_per_s: 1_000_000,
        segments: 3,
        segment_sectors: 64,
        read_ahead_sectors: 32,
        stretch_sectors: 24,
        write_cache_sectors: if options.cache { 128 } else { 0 },
        dirty_extents: 16,
        destage_above_sectors: 64,
        destage_sectors: 16,
        ..DiskModel::DESKTOP_2012
    }
}

impl Driver<()> for SimDeviceQueue {
    fn queue_rqs(&mut self, cx: &mut (), memory: &RegionTable, batch: &mut Batch<'_>) {
        match self {
            SimDeviceQueue::Modelled(queue) => queue.queue_rqs(cx, memory, batch),
            SimDeviceQueue::Chaos(queue) => queue.queue_rqs(cx, memory, batch),
        }
    }

    fn poll(&mut self, cx: &mut (), memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        match self {
            SimDeviceQueue::Modelled(queue) => queue.poll(cx, memory, done, now_ns),
            SimDeviceQueue::Chaos(queue) => queue.poll(cx, memory, done, now_ns),
        }
    }

    fn timed_out(
        &mut self,
        cx: &mut (),
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        match self {
            SimDeviceQueue::Modelled(queue) => queue.timed_out(cx, memory, place, done, now_ns),
            SimDeviceQueue::Chaos(queue) => queue.timed_out(cx, memory, place, done, now_ns),
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        match self {
            SimDeviceQueue::Modelled(queue) => Driver::<()>::deadline_ns(queue),
            SimDeviceQueue::Chaos(queue) => Driver::<()>::deadline_ns(queue),
        }
    }
}
