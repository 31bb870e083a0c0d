//! `vhost-user:SOCKET`: a disk that another process serves, through rings in shared memory.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use blkyard_attach::{AttachConfig, AttachError, Attached};
use blkyard_mem::{DmaDomain, PAGE_BYTES};
use blkyard_mq::{DeviceInfo, QueueKind, Region, SECTOR_SHIFT};
use blkyard_os::SystemClock;

use super::{DeviceKind, MakeConnector};
use crate::device::{Backing, Device, DeviceError, DeviceHandover, DeviceOps, DeviceQueue};
use crate::spec::Spec;

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["vhost-user"], usage: "vhost-user:SOCKET", open, adopt: None, open_all: None };

fn open(mut spec: Spec, connector: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
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
    let connector = connector.map_or_else(|| Ok(Arc::clone(&usual.connector)), |make| make());
    let connector = connector.map_err(|source| AttachError::System { disk: usual.name(), source })?;
    let config = AttachConfig {
        connector,
        queues: queues.map(|queues| queues as u16),
        queue_size: size.unwrap_or(usual.queue_size),
        packed,
        reply_max: timeout_s.map_or(usual.reply_max, Duration::from_secs),
        io_max: timeout_s.map_or(usual.io_max, Duration::from_secs),
        gone_max: gone_s.map_or(usual.gone_max, Duration::from_secs),
        ..usual
    };
    Ok(Attached::open(config)?.into())
}

impl From<AttachError> for DeviceError {
    fn from(error: AttachError) -> DeviceError {
        DeviceError::Other(error.into())
    }
}

impl DeviceOps for Attached {
    fn info(&self) -> &DeviceInfo {
        Attached::info(self)
    }

    fn describe(&self) -> String {
        let features: Vec<_> = self.features().iter_names().map(|(name, _)| name.to_lowercase()).collect();
        format!("vhost-user, up to {} queues; {}", Attached::queues_max(self), features.join(", "))
    }

    fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(Attached::queue(self, kind, depth)?))
    }

    fn queues_max(&self) -> usize {
        Attached::queues_max(self)
    }

    fn depth_max(&self) -> usize {
        Attached::depth_max(self)
    }

    /// One region in all: the back-end maps it as well, and may have room for no more than eight.
    fn memory(&self, parts: usize, bytes: usize) -> io::Result<Vec<(Arc<Region>, u64)>> {
        let part_bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let all = part_bytes.checked_mul(parts).ok_or(io::ErrorKind::OutOfMemory)?;
        let region = Attached::memory(self, all)?;
        Ok((0..parts).map(|part| (Arc::clone(&region), (part_bytes * part) as u64)).collect())
    }

    fn dma_domains(&self) -> Vec<Arc<DmaDomain>> {
        vec![Arc::clone(self.dma_domain())]
    }

    fn backing(&self) -> io::Result<Backing> {
        let fixed = ("is served by another process", "resize it there; the new size is read automatically");
        Ok(Backing::Remote { bytes: self.capacity_sectors() << SECTOR_SHIFT, fixed })
    }

    fn sectors_now(&self) -> Option<u64> {
        Some(self.capacity_sectors())
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        Err("its back-end serves this daemon only")
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        let view = self.view();
        let all = [
            ("connected", u64::from(view.is_connected)),
            ("sessions", view.sessions),
            ("faults", view.faults),
            ("tracked", u64::from(view.is_tracked)),
        ];
        let mut counters = BTreeMap::from(all.map(|(name, count)| (name.to_owned(), count)));
        for queue in view.queues {
            counters.insert(format!("{} violations", queue.name), queue.violations.total());
            counters.insert(format!("{} deaths", queue.name), queue.deaths.load(Relaxed));
        }
        counters
    }

    fn has_ended(&self) -> bool {
        self.is_finished()
    }
}
