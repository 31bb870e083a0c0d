//! Namespaces of NVMe controllers, over any transport: options and operations.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{NamespaceConfig, NvmeTransport, QueuePoolMember, RemoteNamespace};
use blkyard_mem::{DmaDomain, PAGE_BYTES};
use blkyard_mq::{DeviceInfo, QueueKind, Region, SECTOR_SHIFT};
use blkyard_nvme::{NamespaceIds, QueueDemand};
use blkyard_os::{SystemClock, cpu_places};

use crate::device::{Backing, Device, DeviceError, DeviceHandover, DeviceOps, DeviceQueue};
use crate::spec::{Spec, SpecError};

/// Options of every kind of NVMe device, named as those of `vhost-user:`.
#[derive(Clone, Copy, Debug)]
pub(super) struct NvmeOptions {
    namespace: Option<u64>,
    queues: Option<u64>,
    read_queues: Option<u64>,
    poll_queues: Option<u64>,
    queue_size: Option<u64>,
    has_shadow: Option<bool>,
    timeout_s: Option<u64>,
    gone_s: Option<u64>,
}

impl NvmeOptions {
    /// Takes the options from a name.
    pub(super) fn take(spec: &mut Spec) -> Result<NvmeOptions, SpecError> {
        Ok(NvmeOptions {
            namespace: NvmeOptions::take_nsid(spec)?,
            queues: spec.take_number("queues", 1, 256)?,
            read_queues: spec.take_number("read_queues", 0, 256)?,
            poll_queues: spec.take_number("poll_queues", 0, 256)?,
            queue_size: spec.take_number("queue_size", 2, 4095)?,
            has_shadow: spec.take_switch("shadow_doorbells")?,
            timeout_s: spec.take_number("timeout_s", 1, 3600)?,
            gone_s: spec.take_number("gone_s", 0, u64::from(u32::MAX))?,
        })
    }

    /// Takes the options from several names with one address: those of the first, and the namespace of each.
    pub(super) fn take_all(specs: &mut [Spec]) -> Result<(NvmeOptions, Vec<u32>), SpecError> {
        let Some((first, others)) = specs.split_first_mut() else { unreachable!("no device is named") };
        let options = NvmeOptions::take(first)?;
        let mut namespaces = vec![(first.name.clone(), options.namespace)];
        for other in others {
            let nsid = NvmeOptions::take_nsid(other)?;
            let name = other.name.clone();
            let cause = "a further namespace of a controller has no options other than namespace=N";
            let finished = other.clone().finish();
            finished.map_err(|_| SpecError::new(&name, cause, "write them at the first device with this address"))?;
            namespaces.push((name, nsid));
        }
        if let [_] = namespaces[..] {
            return Ok((options, Vec::new()));
        }
        let mut chosen: Vec<u32> = Vec::new();
        for (name, nsid) in namespaces {
            let Some(nsid) = nsid else {
                let cause = "several devices are namespaces of this controller";
                return Err(SpecError::new(name, cause, "choose one for each, by ?namespace=N"));
            };
            if chosen.contains(&(nsid as u32)) {
                let cause = format!("namespace {nsid} is another device already");
                return Err(SpecError::new(name, cause, "name each namespace once"));
            }
            chosen.push(nsid as u32);
        }
        Ok((options, chosen))
    }

    fn take_nsid(spec: &mut Spec) -> Result<Option<u64>, SpecError> {
        spec.take_number("namespace", 1, u64::from(u32::MAX) - 1)
    }

    /// The configuration of a device with this name.
    pub(super) fn config(&self, name: &str) -> NamespaceConfig {
        let mut config = NamespaceConfig::new(name, Arc::new(SystemClock));
        let queues = self.queues.map_or_else(|| cpu_places().len(), |queues| queues as usize);
        config.host.queues = demand(
            u16::try_from(queues).unwrap_or(u16::MAX),
            self.read_queues.unwrap_or(0) as u16,
            self.poll_queues.unwrap_or(0) as u16,
        );
        if let Some(entries) = self.queue_size {
            config.host.ring_entries = entries as u16;
        }
        config.host.has_shadow = self.has_shadow.unwrap_or(config.host.has_shadow);
        config.namespace = self.namespace.map(|number| number as u32);
        if let Some(timeout) = self.timeout_s.map(Duration::from_secs) {
            (config.options.reply_max, config.options.io_max) = (timeout, timeout);
        }
        if let Some(gone) = self.gone_s.map(Duration::from_secs) {
            config.options.gone_max = gone;
        }
        config
    }
}

/// The demand for this many queues of each kind. Without read queues, reads share the default ones.
pub(super) fn demand(default: u16, read: u16, poll: u16) -> QueueDemand {
    match read {
        0 => QueueDemand { submitters: default, write_queues: 0, poll_queues: poll },
        // In terms of the NVMe driver of Linux: a read queue for each submitter.
        read => QueueDemand { submitters: read, write_queues: default, poll_queues: poll },
    }
}

/// Opens these namespaces over a transport, or the one of the configuration if the list is empty; `what` describes the
/// transport to people. `not_exported` is the reason for which the devices cannot be exported, and cure.
pub(super) fn open_namespaces<T: NvmeTransport>(
    transport: T::Config,
    config: NamespaceConfig,
    namespaces: &[u32],
    what: &'static str,
    not_exported: Option<(&'static str, &'static str)>,
) -> Result<Vec<Device>, DeviceError> {
    let opened = match namespaces {
        [] => vec![RemoteNamespace::open::<T>(transport, config)?],
        several => RemoteNamespace::open_all::<T>(transport, config, several)?,
    };
    Ok(opened.into_iter().map(|namespace| NvmeDevice { namespace, what, not_exported }.into()).collect())
}

/// A namespace as a device.
#[derive(Debug)]
struct NvmeDevice {
    namespace: RemoteNamespace,
    what: &'static str,
    not_exported: Option<(&'static str, &'static str)>,
}

impl DeviceOps for NvmeDevice {
    fn info(&self) -> &DeviceInfo {
        self.namespace.info()
    }

    fn describe(&self) -> String {
        let shared = if self.namespace.queue_pool().is_some() { ", shared with its other namespaces" } else { "" };
        let (nsid, queues) = (self.namespace.nsid(), self.namespace.queues_max());
        format!("{}, namespace {nsid}, up to {queues} queues{shared}", self.what)
    }

    fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(self.namespace.queue(kind, depth)?))
    }

    fn queues_max(&self) -> usize {
        self.namespace.queues_max()
    }

    fn queue_pool(&self) -> Option<QueuePoolMember> {
        self.namespace.queue_pool()
    }

    fn queue_of(&self, members: &[usize], kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(self.namespace.queue_of(members, kind, depth)?))
    }

    fn depth_max(&self) -> usize {
        self.namespace.depth_max()
    }

    /// One region in all, since a controller may map few.
    fn memory(&self, parts: usize, bytes: usize) -> io::Result<Vec<(Arc<Region>, u64)>> {
        let part_bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let all = part_bytes.checked_mul(parts).ok_or(io::ErrorKind::OutOfMemory)?;
        let region = Region::shared(all)?;
        Ok((0..parts).map(|part| (Arc::clone(&region), (part_bytes * part) as u64)).collect())
    }

    fn dma_domains(&self) -> Vec<Arc<DmaDomain>> {
        vec![Arc::clone(self.namespace.dma_domain())]
    }

    fn backing(&self) -> io::Result<Backing> {
        let fixed = ("is a namespace of a controller", "resize it there; the new size is read automatically");
        Ok(Backing::Remote { bytes: self.namespace.capacity_sectors() << SECTOR_SHIFT, fixed })
    }

    fn sectors_now(&self) -> Option<u64> {
        Some(self.namespace.capacity_sectors())
    }

    fn check_export(&self) -> Result<(), (&'static str, &'static str)> {
        self.not_exported.map_or(Ok(()), Err)
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        Err("its controller serves this daemon only")
    }

    fn ids(&self) -> NamespaceIds {
        *self.namespace.ids()
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        let view = self.namespace.view();
        let all = [
            ("connected", u64::from(view.is_connected)),
            ("suspended", u64::from(view.is_suspended)),
            ("sessions", view.sessions),
            ("aborts", view.aborts),
            ("resets", view.resets),
        ];
        all.map(|(name, count)| (name.to_owned(), count)).into()
    }

    fn set_suspended(&self, is_suspended: bool) -> Result<(), DeviceError> {
        Ok(self.namespace.set_suspended(is_suspended)?)
    }

    fn has_ended(&self) -> bool {
        self.namespace.is_finished()
    }
}
