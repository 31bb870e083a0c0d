//! Options that `ram:SIZE`, `null:SIZE` and `chaos:SIZE` share. Not a kind by itself.

use blkyard_mq::{DeviceInfo, NullConfig, QueueLimits};

use super::{take_block_bytes, take_write_back};
use crate::spec::{Spec, SpecError, parse_size};

/// Upper bounds of the requests of a device.
#[derive(Clone, Copy)]
pub(super) struct RequestBounds {
    /// Longest read or write, sectors.
    pub(super) sectors: u32,
    /// Longest discard, sectors.
    pub(super) discard_sectors: u32,
}

impl RequestBounds {
    /// Bounds of a device that copies in the lane's thread. 256 KiB take some 20 us, or 200 where every page is touched
    /// for the first time; the other queues of the lane wait for that long. A discard is up to a huge page, which goes
    /// back to the system whole.
    pub(super) const COPIED: RequestBounds = RequestBounds { sectors: 512, discard_sectors: 4096 };
}

/// Takes latency and throughput.
pub(super) fn take_pace(spec: &mut Spec) -> Result<NullConfig, SpecError> {
    let latency_us = take_latency_us(spec)?;
    let mbps = spec.take_number("mbps", 1, 1_000_000)?;
    Ok(NullConfig { latency_ns: latency_us.unwrap_or(0) * 1000, bytes_per_s: mbps.unwrap_or(0) * 1_000_000 })
}

pub(super) fn take_latency_us(spec: &mut Spec) -> Result<Option<u64>, SpecError> {
    spec.take_number("latency_us", 0, 10_000_000)
}

/// Takes all other options, which are the last of the name.
pub(super) fn take_info(mut spec: Spec, bounds: RequestBounds) -> Result<DeviceInfo, SpecError> {
    let block_bytes = take_block_bytes(&mut spec)?.unwrap_or(512);
    let size = parse_size(&spec.body).filter(|size| *size > 0 && size.is_multiple_of(u64::from(block_bytes)));
    let size = size.ok_or_else(|| {
        let cause = format!("'{}' is not a size in blocks of {block_bytes} bytes", spec.body);
        SpecError::new(&spec.name, cause, "give a size such as 512M or 4G")
    })?;
    let read_only = spec.take_switch("readonly")?.unwrap_or(false);
    let discard = spec.take_switch("discard")?.unwrap_or(true);
    let volatile_cache = take_write_back(&mut spec)?.unwrap_or(false);
    let sectors_max = spec.take_number("max_sectors", 8, u64::from(bounds.sectors))?;
    let virt_boundary = spec.take_switch("virt_boundary")?.unwrap_or(false);
    let name = spec.name.clone();
    spec.finish()?;
    let discard_sectors_max = if discard { bounds.discard_sectors } else { 0 };
    let limits = QueueLimits {
        logical_block_bytes: block_bytes,
        physical_block_bytes: block_bytes.max(4096),
        sectors_max: sectors_max.map_or(bounds.sectors, |sectors| sectors as u32),
        virt_boundary_mask: if virt_boundary { 4095 } else { 0 },
        segments_max: 256,
        segment_bytes_max: 1 << 30,
        discard_sectors_max,
        discard_granularity_bytes: block_bytes.max(4096),
        write_zeroes_sectors_max: discard_sectors_max,
        ..QueueLimits::default()
    };
    limits.check().map_err(|error| SpecError::new(&name, error, "choose another block_size or max_sectors"))?;
    Ok(DeviceInfo {
        name,
        capacity_sectors: size >> 9,
        limits,
        read_only,
        volatile_cache,
        fua: true,
        ..DeviceInfo::default()
    })
}
