//! Models of devices by name, `model:NAME?key=value`: memory with the service times of a real device.
//!
//! `docs/models.md` describes the models and their sources. Here they run in real time, with the lanes' clock.

use blkyard_mq::{BlockDevice, DeviceInfo, QueueKind, QueueLimits, SECTOR_SHIFT};
use blkyard_sim::{DiskModel, FixedLatency, Flash, FlashModel, Keeps, LineModel, Model, Modelled, RotaryDisk};

use super::memory::RequestBounds;
use super::{DeviceKind, MakeConnector, take_write_back};
use crate::device::{Device, DeviceError, DeviceOps, DeviceQueue};
use crate::spec::{Spec, SpecError, parse_size};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["model"], usage: "model:NAME", open, adopt: None, open_all: None };

/// Sizes are in blocks of this.
const BLOCK_BYTES: u64 = 4096;
/// Commands that a device of given latency takes at one time: as many as any queue has tags.
const LINE_DEPTH: usize = 10_240;
/// Longest request, sectors: how long commands are is a part of the model.
const SECTORS_MAX: u32 = 2048;

fn open(spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    Ok(open_model(spec)?.into())
}

fn open_model(mut spec: Spec) -> Result<Modelled, DeviceError> {
    let size = spec.take_with("size", "a size in blocks of 4k, such as 512M or 1T", |value| {
        parse_size(value).filter(|size| *size > 0 && size.is_multiple_of(BLOCK_BYTES))
    })?;
    let seed = spec.take_number("seed", 0, u64::MAX)?.unwrap_or(0);
    let read_only = spec.take_switch("readonly")?.unwrap_or(false);
    let limits = QueueLimits {
        physical_block_bytes: BLOCK_BYTES as u32,
        sectors_max: SECTORS_MAX,
        segments_max: 256,
        segment_bytes_max: 1 << 30,
        ..QueueLimits::default()
    };
    let mut info = DeviceInfo { name: spec.name.clone(), limits, read_only, fua: true, ..DeviceInfo::default() };
    let model = match spec.body.as_str() {
        "disk" => {
            info.volatile_cache = take_write_back(&mut spec)?.unwrap_or(true);
            info.rotational = true;
            let usual = DiskModel::DESKTOP_2012;
            info.capacity_sectors = size.map_or(usual.sectors / 8 * 8, |size| size >> SECTOR_SHIFT);
            if info.capacity_sectors > usual.sectors {
                let cause = format!("the disk has {} bytes", usual.sectors << SECTOR_SHIFT);
                return Err(SpecError::new(&spec.name, cause, "choose a size no larger").into());
            }
            let write_cache_sectors = if info.volatile_cache { usual.write_cache_sectors } else { 0 };
            Model::Disk(Box::new(RotaryDisk::new(DiskModel { write_cache_sectors, ..usual }, seed)))
        }
        "flash" => {
            info.volatile_cache = take_write_back(&mut spec)?.unwrap_or(true);
            take_memory(&mut info, size);
            let usual = FlashModel::NVME_2018;
            let write_cache_sectors = if info.volatile_cache { usual.write_cache_sectors } else { 0 };
            Model::Flash(Box::new(Flash::new(FlashModel { write_cache_sectors, ..usual })))
        }
        "latency" => {
            let us = spec.take_number("us", 0, 10_000_000)?.unwrap_or(100);
            let jitter_us = spec.take_number("jitter_us", 0, us / 6)?.unwrap_or(0);
            let iops = spec.take_number("iops", 1, 1_000_000_000)?;
            let mbps = spec.take_number("mbps", 1, 1_000_000)?.unwrap_or(0);
            take_memory(&mut info, size);
            let model = LineModel {
                access_ns: iops.map_or(0, |iops| 1_000_000_000 / iops),
                bytes_per_s: mbps * 1_000_000,
                latency_ns: us * 1000,
                jitter_ns: jitter_us * 1000,
                depth: LINE_DEPTH,
            };
            Model::Line(FixedLatency::new(model, seed))
        }
        other => {
            let cause = format!("unknown model '{other}'");
            return Err(SpecError::new(&spec.name, cause, "use model:disk, model:flash or model:latency").into());
        }
    };
    let name = spec.name.clone();
    spec.finish()?;
    Modelled::new(info, model, Keeps::Bytes).map_err(|source| DeviceError::Memory { name, source })
}

/// Properties that a model does not fix: a size, and support for discard.
fn take_memory(info: &mut DeviceInfo, size: Option<u64>) {
    info.capacity_sectors = size.unwrap_or(1 << 30) >> SECTOR_SHIFT;
    info.limits.discard_sectors_max = RequestBounds::COPIED.discard_sectors;
    info.limits.discard_granularity_bytes = BLOCK_BYTES as u32;
    info.limits.write_zeroes_sectors_max = RequestBounds::COPIED.discard_sectors;
}

impl DeviceOps for Modelled {
    fn info(&self) -> &DeviceInfo {
        BlockDevice::info(self)
    }

    fn describe(&self) -> String {
        "memory, gone when this ends, in the time of a model".into()
    }

    fn queue(&self, _: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(BlockDevice::queue(self, depth)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_named(name: &str) -> Result<DeviceInfo, String> {
        let spec = Spec::parse(name).map_err(|error| error.to_string())?;
        open_model(spec).map(|device| BlockDevice::info(&device).clone()).map_err(|error| error.to_string())
    }

    #[test]
    fn models_are_opened_by_name_and_say_whether_an_arm_moves() {
        let disk = open_named("model:disk?size=20G").unwrap();
        assert_eq!((disk.capacity_sectors, disk.rotational, disk.volatile_cache), (20 << 21, true, true));
        assert!(!open_named("model:disk?size=1G&cache=writethrough").unwrap().volatile_cache);
        let line = open_named("model:latency?us=80&iops=100000&size=1M").unwrap();
        assert_eq!((line.capacity_sectors, line.rotational, line.volatile_cache), (2048, false, false));
        let flash = open_named("model:flash?size=1M").unwrap();
        assert_eq!((flash.capacity_sectors, flash.rotational, flash.volatile_cache), (2048, false, true));
        assert!(flash.limits.check().is_ok());
        assert!(line.limits.check().is_ok() && disk.limits.check().is_ok());
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_helps() {
        for (name, part) in [
            ("model:disc", "model:disk"),
            ("model:disk?size=9T", "no larger"),
            ("model:disk?us=3", "unknown key 'us'"),
            ("model:latency?size=100", "4k"),
            ("model:latency?us=60&jitter_us=11", "from 0 to 10"),
        ] {
            let error = open_named(name).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
