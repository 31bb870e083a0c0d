//! Devices by name: `file:PATH`, a bare path, `vhost-user:SOCKET`, `ram:SIZE`, `null:SIZE`, `chaos:SIZE`, `model:NAME`.
//!
//! The one place that knows every kind of device there is. Whoever has a [`Device`] treats all of them alike.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{AttachConfig, AttachError, Attached, AttachedQueue, Connector};
use blkyard_mem::PAGE_BYTES;
use blkyard_mq::{
    Batch, BlockDevice, DeviceInfo, Done, Driver, NullConfig, NullDevice, NullQueue, QueueKind, QueueLimits, RamDevice,
    RamQueue, Region, RegionTable, TagSet, TimedOut,
};
use blkyard_os::{Direct, FileConfig, FileDevice, FileQueue, Ring, SystemClock};
use blkyard_sim::{ChaosConfig, ChaosDevice, ChaosQueue, Modelled, ModelledQueue};

use crate::spec::{Spec, SpecError, parse_size};

/// A device that does nothing does not care how long a request is.
const NULL_SECTORS_MAX: u32 = 8 << 11;
/// Longest discard of such a device.
const NULL_DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// Longest request of a device that copies it in the lane's thread: 256 KiB, which takes some 20 us, or 200 where every
/// page of it is touched for the first time. The other queues of the lane wait for that long.
const MEMORY_SECTORS_MAX: u32 = 512;
/// Longest discard of memory: a huge page, which goes back to the system whole.
pub(crate) const MEMORY_DISCARD_SECTORS_MAX: u32 = 4096;

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Its name is not understood.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The file or block device cannot be used.
    #[error(transparent)]
    File(#[from] blkyard_os::OpenError),
    /// The back-end that serves it cannot be used, or has no more queues.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// There is no memory for it.
    #[error("{name}: out of memory: {source}; choose a smaller size")]
    Memory {
        /// The device's name.
        name: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// An open device.
#[derive(Debug)]
pub enum Device {
    /// A file or block device.
    File(FileDevice),
    /// A disk that another process serves.
    Attached(Attached),
    /// A disk in memory.
    Ram(RamDevice),
    /// A disk that does nothing.
    Null(NullDevice),
    /// A disk in memory that means ill.
    Chaos(ChaosDevice),
    /// A disk in memory that takes as long as a model says.
    Modelled(Modelled),
}

/// One hardware queue's driver, of whatever kind the device is.
#[derive(Debug)]
pub enum DeviceQueue {
    /// Through io_uring.
    File(FileQueue),
    /// Through rings in shared memory.
    Attached(Box<AttachedQueue>),
    /// By copying.
    Ram(RamQueue),
    /// Not at all.
    Null(NullQueue),
    /// As it pleases.
    Chaos(ChaosQueue),
    /// When the model says so.
    Modelled(ModelledQueue),
}

impl Device {
    /// Opens a device by its name. A back-end that serves it must be trusted: see [`Connector`].
    ///
    /// # Errors
    /// See [`DeviceError`]: each names the device, what is wrong and what helps.
    pub fn open(name: &str) -> Result<Device, DeviceError> {
        Device::from_spec(Spec::parse(name)?)
    }

    /// Opens a device by its name taken apart.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn from_spec(spec: Spec) -> Result<Device, DeviceError> {
        Device::open_spec(spec, None)
    }

    /// Opens a device by its name taken apart. If another process serves it, that one is connected to by `connector`,
    /// which sees to it that none of its descriptors can hang us.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn through(spec: Spec, connector: &Arc<dyn Connector>) -> Result<Device, DeviceError> {
        Device::open_spec(spec, Some(connector))
    }

    fn open_spec(spec: Spec, connector: Option<&Arc<dyn Connector>>) -> Result<Device, DeviceError> {
        match spec.scheme.as_str() {
            "" | "file" => open_file(spec),
            "vhost-user" => attach(spec, connector),
            "ram" | "null" | "chaos" => open_memory(spec),
            "model" => Ok(Device::Modelled(crate::model::open(spec)?)),
            other => {
                let cause = format!("'{other}' is no kind of device");
                Err(SpecError::new(
                    &spec.name,
                    cause,
                    "use file:PATH, vhost-user:SOCKET, ram:SIZE, null:SIZE, chaos:SIZE or model:NAME",
                )
                .into())
            }
        }
    }

    /// Goes on with a device that another process has open, from its name taken apart and what that one leaves of it.
    ///
    /// # Errors
    /// As for [`Device::open`]; also for devices that nobody can go on with.
    pub fn adopt(spec: Spec, file: Option<OwnedFd>, sync_failed: bool) -> Result<Device, DeviceError> {
        match (spec.scheme.as_str(), file) {
            ("" | "file", Some(file)) => Ok(Device::File(FileDevice::adopt(file_config(spec)?, file, sync_failed)?)),
            ("null", None) => open_memory(spec),
            _ => {
                Err(SpecError::new(&spec.name, "it is not handed over so", "start this daemon without --takeover")
                    .into())
            }
        }
    }

    /// Whether another process can go on with it.
    ///
    /// # Errors
    /// Says why not.
    pub fn can_be_handed(&self) -> Result<(), String> {
        let cause = match self {
            Device::File(_) | Device::Null(_) => return Ok(()),
            Device::Ram(_) | Device::Chaos(_) | Device::Modelled(_) => "its memory ends with this daemon",
            Device::Attached(_) => "its back-end knows this daemon only",
        };
        Err(SpecError::new(&self.info().name, cause, "serve it by a daemon of its own").to_string())
    }

    /// What carries its I/O and its lock, if that is a file.
    pub fn description(&self) -> Option<BorrowedFd<'_>> {
        if let Device::File(device) = self { Some(device.description()) } else { None }
    }

    /// Whether a sync of it has failed.
    pub fn sync_has_failed(&self) -> bool {
        if let Device::File(device) = self { device.sync_has_failed() } else { false }
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        match self {
            Device::File(device) => device.info(),
            Device::Attached(device) => device.info(),
            Device::Ram(device) => device.info(),
            Device::Null(device) => device.info(),
            Device::Chaos(device) => device.info(),
            Device::Modelled(device) => device.info(),
        }
    }

    /// A line on how the device is reached, for people.
    pub fn describe(&self) -> String {
        match self {
            Device::File(device) => device.mode().to_string(),
            Device::Attached(device) => {
                let features: Vec<_> = device.features().iter_names().map(|(name, _)| name.to_lowercase()).collect();
                format!("vhost-user, up to {} queues; {}", device.queues_max(), features.join(", "))
            }
            Device::Ram(_) => "memory, gone when this ends".into(),
            Device::Null(_) => "nothing: writes vanish, reads bring nothing".into(),
            Device::Chaos(_) => "memory, gone when this ends, behind a device that makes trouble".into(),
            Device::Modelled(_) => "memory, gone when this ends, in the time of a model".into(),
        }
    }

    /// Opens one more queue of `depth` requests.
    ///
    /// # Errors
    /// The device has no more queues, or none so deep.
    pub fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(match self {
            Device::File(device) => DeviceQueue::File(device.queue(depth)),
            Device::Attached(device) => DeviceQueue::Attached(Box::new(device.queue(kind, depth)?)),
            Device::Ram(device) => DeviceQueue::Ram(device.queue(depth)),
            Device::Null(device) => DeviceQueue::Null(device.queue(depth)),
            Device::Chaos(device) => DeviceQueue::Chaos(device.queue(depth)),
            Device::Modelled(device) => DeviceQueue::Modelled(device.queue(depth)),
        })
    }

    /// Queues that can be open at one time.
    pub fn queues_max(&self) -> usize {
        if let Device::Attached(device) = self { device.queues_max() } else { usize::MAX }
    }

    /// Requests that one queue can have in flight.
    pub fn depth_max(&self) -> usize {
        if let Device::Attached(device) = self { device.depth_max() } else { TagSet::DEPTH_MAX }
    }

    /// Memory of our own that its queues can reach, in so many parts of so many bytes. Each part is a region, and its
    /// first byte there.
    ///
    /// # Errors
    /// The system has no room.
    pub fn memory(&self, parts: usize, bytes: usize) -> std::io::Result<Vec<(Arc<Region>, u64)>> {
        let Device::Attached(device) = self else {
            // Private memory is cheapest, and a queue that is used with one part pins no other.
            return (0..parts).map(|_| Ok((Region::anonymous(bytes)?, 0))).collect();
        };
        // The back-end maps it as well, and may have room for eight regions in all.
        let part_bytes = bytes.checked_next_multiple_of(PAGE_BYTES);
        let all = part_bytes.and_then(|bytes| bytes.checked_mul(parts)).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let region = device.memory(all)?;
        Ok((0..parts).map(|part| (Arc::clone(&region), (all / parts * part) as u64)).collect())
    }
}

fn attach(mut spec: Spec, connector: Option<&Arc<dyn Connector>>) -> Result<Device, DeviceError> {
    let usual = AttachConfig::new(&spec.body, Arc::new(SystemClock));
    let queues = spec.take_number("queues", 1, 256)?;
    let size = spec.take_with("queue_size", "a power of two from 2 to 1024", |value| {
        let size = value.parse::<u16>().ok()?;
        (size.is_power_of_two() && (2..=blkyard_attach::QUEUE_SIZE_MAX).contains(&size)).then_some(size)
    })?;
    let packed = spec.take_switch("packed")?.unwrap_or(usual.packed);
    let timeout_s = spec.take_number("timeout_s", 1, 3600)?;
    let gone_s = spec.take_number("gone_s", 0, u64::from(u32::MAX))?;
    spec.finish()?;
    let config = AttachConfig {
        connector: connector.map_or_else(|| Arc::clone(&usual.connector), Arc::clone),
        queues: queues.map(|queues| queues as u16),
        queue_size: size.unwrap_or(usual.queue_size),
        packed,
        reply_max: timeout_s.map_or(usual.reply_max, Duration::from_secs),
        io_max: timeout_s.map_or(usual.io_max, Duration::from_secs),
        gone_max: gone_s.map_or(usual.gone_max, Duration::from_secs),
        ..usual
    };
    Ok(Device::Attached(Attached::open(config)?))
}

fn open_file(spec: Spec) -> Result<Device, DeviceError> {
    Ok(Device::File(FileDevice::open(file_config(spec)?)?))
}

fn file_config(mut spec: Spec) -> Result<FileConfig, SpecError> {
    let direct = spec.take_with("direct", "auto, on or off", |value| match value {
        "auto" => Some(Direct::Auto),
        "on" => Some(Direct::On),
        "off" => Some(Direct::Off),
        _ => None,
    })?;
    let write_back = take_write_back(&mut spec)?;
    let config = FileConfig {
        path: PathBuf::from(&spec.body),
        read_only: spec.take_switch("readonly")?.unwrap_or(false),
        block_bytes: take_block_bytes(&mut spec)?,
        direct: direct.unwrap_or(Direct::Auto),
        write_through: !write_back.unwrap_or(true),
    };
    spec.finish()?;
    Ok(config)
}

fn open_memory(mut spec: Spec) -> Result<Device, DeviceError> {
    let block_bytes = take_block_bytes(&mut spec)?.unwrap_or(512);
    let size = parse_size(&spec.body).filter(|size| *size > 0 && size.is_multiple_of(u64::from(block_bytes)));
    let size = size.ok_or_else(|| {
        let cause = format!("'{}' is not a size in blocks of {block_bytes} bytes", spec.body);
        SpecError::new(&spec.name, cause, "write it as 512M or 4G, say")
    })?;
    let latency_us = spec.take_number("latency_us", 0, 10_000_000)?;
    let chaos = if spec.scheme == "chaos" { Some(take_chaos(&mut spec, latency_us)?) } else { None };
    let mbps = if chaos.is_none() { spec.take_number("mbps", 1, 1_000_000)? } else { None };
    let read_only = spec.take_switch("readonly")?.unwrap_or(false);
    let discard = spec.take_switch("discard")?.unwrap_or(true);
    let write_back = take_write_back(&mut spec)?.unwrap_or(false);
    let (longest, longest_trim) = if spec.scheme == "null" {
        (NULL_SECTORS_MAX, NULL_DISCARD_SECTORS_MAX)
    } else {
        (MEMORY_SECTORS_MAX, MEMORY_DISCARD_SECTORS_MAX)
    };
    let sectors_max = spec.take_number("max_sectors", 8, u64::from(longest))?;
    let virt_boundary = spec.take_switch("virt_boundary")?.unwrap_or(false);
    let (is_ram, name) = (spec.scheme == "ram", spec.name.clone());
    spec.finish()?;
    let trim_sectors_max = if discard { longest_trim } else { 0 };
    let limits = QueueLimits {
        logical_block_bytes: block_bytes,
        physical_block_bytes: block_bytes.max(4096),
        sectors_max: sectors_max.map_or(longest, |sectors| sectors as u32),
        virt_boundary_mask: if virt_boundary { 4095 } else { 0 },
        segments_max: 256,
        segment_bytes_max: 1 << 30,
        discard_sectors_max: trim_sectors_max,
        discard_granularity_bytes: block_bytes.max(4096),
        write_zeroes_sectors_max: trim_sectors_max,
        ..QueueLimits::default()
    };
    limits.check().map_err(|error| SpecError::new(&name, error, "choose another block_size or max_sectors"))?;
    let info = DeviceInfo {
        name: name.clone(),
        capacity_sectors: size >> 9,
        limits,
        read_only,
        volatile_cache: write_back,
        fua: true,
        ..DeviceInfo::default()
    };
    let no_memory = |source| DeviceError::Memory { name, source };
    let config = NullConfig { latency_ns: latency_us.unwrap_or(0) * 1000, bytes_per_s: mbps.unwrap_or(0) * 1_000_000 };
    if let Some(config) = chaos {
        Ok(Device::Chaos(ChaosDevice::new(vec![Arc::new(info)], config).map_err(no_memory)?))
    } else if is_ram {
        Ok(Device::Ram(RamDevice::new(info, config).map_err(no_memory)?))
    } else {
        Ok(Device::Null(NullDevice::new(info, config)))
    }
}

/// What trouble is made, after Linux's null_blk: what is injected, and how often, once in so many requests
/// (`interval`).
fn take_chaos(spec: &mut Spec, latency_us: Option<u64>) -> Result<ChaosConfig, SpecError> {
    let config = ChaosConfig::wild(spec.take_number("seed", 0, u64::MAX)?.unwrap_or(0));
    let mut every = |key, usual| {
        let every = spec.take_number(key, 0, u64::from(u32::MAX))?;
        Ok(every.map_or(usual, |every| every as u32))
    };
    Ok(ChaosConfig {
        delay_ns_max: latency_us.map_or(config.delay_ns_max, |latency_us| latency_us * 1000),
        fail_every: every("errors", config.fail_every)?,
        requeue_every: every("requeues", config.requeue_every)?,
        lose_every: every("timeouts", config.lose_every)?,
        ..config
    })
}

/// Whether completed writes may wait for a flush.
pub(crate) fn take_write_back(spec: &mut Spec) -> Result<Option<bool>, SpecError> {
    spec.take_with("cache", "writeback or writethrough", |value| match value {
        "writeback" => Some(true),
        "writethrough" => Some(false),
        _ => None,
    })
}

fn take_block_bytes(spec: &mut Spec) -> Result<Option<u32>, SpecError> {
    spec.take_with("block_size", "512, 1k, 2k or 4k", |value| {
        let bytes = u32::try_from(parse_size(value)?).ok()?;
        (bytes.is_power_of_two() && (512..=4096).contains(&bytes)).then_some(bytes)
    })
}

impl Driver<Ring> for DeviceQueue {
    #[inline]
    fn queue_rqs(&mut self, ring: &mut Ring, memory: &RegionTable, batch: &mut Batch<'_>) {
        match self {
            DeviceQueue::File(queue) => queue.queue_rqs(ring, memory, batch),
            DeviceQueue::Attached(queue) => queue.queue_rqs(ring, memory, batch),
            DeviceQueue::Ram(queue) => queue.queue_rqs(ring, memory, batch),
            DeviceQueue::Null(queue) => queue.queue_rqs(ring, memory, batch),
            DeviceQueue::Chaos(queue) => queue.queue_rqs(ring, memory, batch),
            DeviceQueue::Modelled(queue) => queue.queue_rqs(ring, memory, batch),
        }
    }

    #[inline]
    fn poll(&mut self, ring: &mut Ring, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        match self {
            DeviceQueue::File(queue) => queue.poll(ring, memory, done, now_ns),
            DeviceQueue::Attached(queue) => queue.poll(ring, memory, done, now_ns),
            DeviceQueue::Ram(queue) => queue.poll(ring, memory, done, now_ns),
            DeviceQueue::Null(queue) => queue.poll(ring, memory, done, now_ns),
            DeviceQueue::Chaos(queue) => queue.poll(ring, memory, done, now_ns),
            DeviceQueue::Modelled(queue) => queue.poll(ring, memory, done, now_ns),
        }
    }

    fn timed_out(
        &mut self,
        ring: &mut Ring,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        match self {
            DeviceQueue::File(queue) => queue.timed_out(ring, memory, place, done, now_ns),
            DeviceQueue::Attached(queue) => queue.timed_out(ring, memory, place, done, now_ns),
            DeviceQueue::Ram(queue) => queue.timed_out(ring, memory, place, done, now_ns),
            DeviceQueue::Null(queue) => queue.timed_out(ring, memory, place, done, now_ns),
            DeviceQueue::Chaos(queue) => queue.timed_out(ring, memory, place, done, now_ns),
            DeviceQueue::Modelled(queue) => queue.timed_out(ring, memory, place, done, now_ns),
        }
    }

    fn set_memory(&mut self, ring: &mut Ring, memory: &RegionTable) {
        match self {
            DeviceQueue::File(queue) => queue.set_memory(ring, memory),
            DeviceQueue::Attached(queue) => queue.set_memory(ring, memory),
            DeviceQueue::Ram(queue) => Driver::<Ring>::set_memory(queue, ring, memory),
            DeviceQueue::Null(queue) => Driver::<Ring>::set_memory(queue, ring, memory),
            DeviceQueue::Chaos(queue) => Driver::<Ring>::set_memory(queue, ring, memory),
            DeviceQueue::Modelled(queue) => Driver::<Ring>::set_memory(queue, ring, memory),
        }
    }

    // Of all of these one kind alone has an eventfd and a control thread.

    #[inline]
    fn wants_poll(&self) -> bool {
        if let DeviceQueue::Attached(queue) = self { Driver::<Ring>::wants_poll(&**queue) } else { false }
    }

    #[inline]
    fn arm(&mut self) -> bool {
        if let DeviceQueue::Attached(queue) = self { Driver::<Ring>::arm(&mut **queue) } else { false }
    }

    #[inline]
    fn disarm(&mut self) {
        if let DeviceQueue::Attached(queue) = self {
            Driver::<Ring>::disarm(&mut **queue);
        }
    }

    #[inline]
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        if let DeviceQueue::Attached(queue) = self { Driver::<Ring>::eventfd(&**queue) } else { None }
    }

    fn deadline_ns(&self) -> Option<u64> {
        match self {
            DeviceQueue::File(queue) => Driver::<Ring>::deadline_ns(queue),
            DeviceQueue::Attached(queue) => Driver::<Ring>::deadline_ns(&**queue),
            DeviceQueue::Ram(queue) => Driver::<Ring>::deadline_ns(queue),
            DeviceQueue::Null(queue) => Driver::<Ring>::deadline_ns(queue),
            DeviceQueue::Chaos(queue) => Driver::<Ring>::deadline_ns(queue),
            DeviceQueue::Modelled(queue) => Driver::<Ring>::deadline_ns(queue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_devices_by_name() {
        let device = Device::open("ram:64M?block_size=4k&readonly=on").unwrap();
        let info = device.info();
        assert_eq!((info.capacity_sectors, info.limits.logical_block_bytes, info.read_only), (131_072, 4096, true));
        info.limits.check().unwrap();
        assert!(matches!(Device::open("null:8T").unwrap(), Device::Null(_)));
    }

    #[test]
    fn a_chaos_device_makes_the_trouble_it_is_told_to() {
        let Device::Chaos(device) = Device::open("chaos:1M?seed=7&errors=9&timeouts=100&latency_us=3").unwrap() else {
            panic!("another kind of device");
        };
        let config = ChaosConfig { fail_every: 9, lose_every: 100, delay_ns_max: 3000, ..ChaosConfig::wild(7) };
        assert_eq!((device.config(), device.info().capacity_sectors), (&config, 2048));
    }

    #[test]
    fn names_that_are_wrong_say_what_would_be_right() {
        for (name, words) in [
            ("ram:lots", ["lots", "512M"]),
            ("vhost-user:/nonexistent.sock", ["/nonexistent.sock", "start its back-end"]),
            ("vhost-user:/dev/null", ["/dev/null", "nobody listens"]),
            ("vhost-user:/x?queue_size=100", ["queue_size=100", "power of two"]),
            ("vhost-user:/x?queues=0", ["queues=0", "from 1"]),
            ("vhost-user:/x?queue=1", ["'queue'", "queues, queue_size, packed"]),
            ("ram:1000", ["1000", "blocks of 512"]),
            ("floppy:a", ["floppy", "file:PATH"]),
            ("null:1G?sise=4", ["sise", "latency_us"]),
            ("null:1G?seed=4", ["seed", "latency_us"]),
            ("chaos:1G?mbps=4", ["mbps", "timeouts"]),
            ("ram:1G?block_size=513", ["block_size=513", "4k"]),
            ("file:/x?direct=perhaps", ["direct=perhaps", "auto"]),
        ] {
            let error = Device::open(name).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{name}: {error}");
        }
    }
}
