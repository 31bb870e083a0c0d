//! `nvme:/dev/ngXnY`: a namespace of the kernel's NVMe driver, by passthrough in an io_uring.
//!
//! Commands skip the kernel's block layer. The kernel keeps the controller: it aborts late commands, resets, and
//! notices a changed size.

mod queue;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blkyard_mq::{DeviceInfo, QueueKind, SECTOR_SHIFT, TagSet};
use blkyard_nvme::{
    IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, NamespaceIds, NvmLimits, NvmeNamespace, RetryDelays, Sqe,
    cns,
};
use blkyard_os::{
    NvmeCharConfig, NvmeCharDevice, NvmeCharError, NvmeCharLimits, NvmeCharQueue, NvmeDeviceNode, NvmeIoctlQueue,
};

use self::queue::NvmeCharDriver;
use super::{DeviceKind, MakeConnector, no_handover};
use crate::device::{Backing, Device, DeviceError, DeviceHandover, DeviceOps, DeviceQueue, ReceivedDevice};
use crate::nvme::NvmeStatus;
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["nvme"], usage: "nvme:/dev/ngXnY", open, adopt: Some(adopt), open_all: None };

const IDENTIFY_TIMEOUT: Duration = Duration::from_mins(1);
/// Waits for the end of a reset of the controller by the kernel: ten seconds in all.
const RESET_TRIES: u32 = 100;
const RESET_PAUSE: Duration = Duration::from_millis(100);

fn open(spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    open_by(spec, NvmeCharDevice::open)
}

fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
    let ReceivedDevice { file: Some(file), claim: Some(claim), .. } = received else { return Err(no_handover(&spec)) };
    open_by(spec, |config| NvmeCharDevice::adopt(config, file, claim))
}

fn open_by(
    mut spec: Spec,
    open: impl FnOnce(NvmeCharConfig) -> Result<NvmeCharDevice, NvmeCharError>,
) -> Result<Device, DeviceError> {
    let config = NvmeCharConfig {
        path: PathBuf::from(&spec.body),
        read_only: spec.take_switch("readonly")?.unwrap_or(false),
        poll: spec.take_switch("poll")?.unwrap_or(false),
    };
    let name = spec.address();
    spec.finish()?;
    let read_only = config.read_only;
    let device = Arc::new(open(config)?);
    let mut disk = identify(&name, device)?;
    disk.info.read_only |= read_only;
    Ok(disk.into())
}

impl From<NvmeCharError> for DeviceError {
    fn from(error: NvmeCharError) -> DeviceError {
        match error {
            NvmeCharError::Held { .. } => DeviceError::Held(error.into()),
            error => DeviceError::Other(error.into()),
        }
    }
}

/// Asks the controller for the properties of the namespace.
fn identify(name: &str, device: Arc<NvmeCharDevice>) -> Result<NvmeCharDisk, DeviceError> {
    let nsid = device.namespace_id();
    let (node, path) = (device.node(), device.path());
    let ask = |what: u8, nsid| {
        identify_data(node, what, nsid).map_err(|cause| {
            let cause = format!("Identify {what:02x}h fails: {cause}");
            DeviceError::from(SpecError::new(
                name,
                cause,
                format!("see the kernel's log, or use file:{}", path.display()),
            ))
        })
    };
    let controller = IdentifyController::parse(&ask(cns::CONTROLLER, 0)?);
    let namespace = IdentifyNamespace::parse(&ask(cns::NAMESPACE, nsid)?);
    // Absent in controllers before 2.0, which have none of these limits.
    let nvm = ask(cns::CSI_CONTROLLER, 0).map(|bytes| NvmLimits::parse(&bytes)).unwrap_or_default();
    let Some((namespace, mut info)) = NvmeNamespace::new(nsid, &controller, &namespace, &nvm) else {
        let cause = "its format is not supported: it has metadata, or blocks that are not of 512 bytes to 4 KiB";
        return Err(SpecError::new(name, cause, "format it without metadata, see `nvme format`").into());
    };
    // Absent in controllers before 1.3.
    let ids = ask(cns::NAMESPACE_IDS, nsid).map(|bytes| NamespaceIds::parse(&bytes)).unwrap_or_default();
    limit(&mut info, device.limits());
    name.clone_into(&mut info.name);
    Ok(NvmeCharDisk { device, namespace, ids, delays: RetryDelays::new(&controller), info })
}

fn identify_data(node: &NvmeDeviceNode, what: u8, nsid: u32) -> Result<[u8; IDENTIFY_BYTES], String> {
    let mut data = [0; IDENTIFY_BYTES];
    let dwords = Sqe::identify(what, nsid, 0, 0).dwords();
    for tries in 0.. {
        let ended = node.submit(NvmeIoctlQueue::Admin, dwords, &mut data, &mut [], IDENTIFY_TIMEOUT);
        let status = match ended {
            Ok(ended) => NvmeStatus(ended.status),
            Err(error) if was_cancelled(&error) => NvmeStatus::HOST_ABORTED,
            Err(error) => return Err(error.to_string()),
        };
        if status.is_success() {
            break;
        }
        if !status.is_path_error() || tries == RESET_TRIES {
            return Err(status.to_string());
        }
        std::thread::sleep(RESET_PAUSE);
    }
    Ok(data)
}

/// Whether a reset of the controller cancelled the command (EINTR), or met its start (EIO).
fn was_cancelled(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted || error.raw_os_error() == Some(5)
}

/// Applies the limits of the kernel. Memory of any alignment will do: the kernel copies it if need be.
fn limit(info: &mut DeviceInfo, kernel: NvmeCharLimits) {
    let limits = &mut info.limits;
    let block = limits.logical_block_bytes;
    let bytes_max = kernel.bytes_max.min(limits.segment_bytes_max).max(block) / block * block;
    limits.sectors_max = limits.sectors_max.min(bytes_max >> SECTOR_SHIFT);
    limits.segment_bytes_max = bytes_max;
    limits.segments_max = kernel.segments_max;
    (limits.virt_boundary_mask, limits.dma_alignment_mask) = (0, 0);
    info.read_only |= kernel.is_read_only;
}

/// An open namespace as a device.
#[derive(Debug)]
struct NvmeCharDisk {
    device: Arc<NvmeCharDevice>,
    namespace: NvmeNamespace,
    ids: NamespaceIds,
    delays: RetryDelays,
    info: DeviceInfo,
}

impl DeviceOps for NvmeCharDisk {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn describe(&self) -> String {
        let found = if self.device.is_polled() { ", polled" } else { "" };
        format!("the kernel's NVMe driver by passthrough, namespace {}{found}", self.namespace.nsid)
    }

    fn queue(&self, kind: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        let has_poll_queues = kind == QueueKind::Poll && self.device.limits().has_poll_queues;
        let is_polled = self.device.is_polled() || has_poll_queues;
        let (segments, ranges) = (self.info.limits.segments_max, self.info.limits.discard_segments_max);
        let queue = NvmeCharQueue::new(&self.device, depth, segments, ranges, is_polled);
        let queue = queue.map_err(|source| DeviceError::Memory { name: self.info.name.clone(), source })?;
        Ok(Box::new(NvmeCharDriver::new(queue, self.namespace, depth as u16, self.delays)))
    }

    /// As many as a hardware queue of the kernel takes: more would wait on its threads.
    fn depth_max(&self) -> usize {
        self.device.limits().depth_max.min(TagSet::DEPTH_MAX)
    }

    fn backing(&self) -> io::Result<Backing> {
        let sectors = self.device.sectors_now().unwrap_or(self.info.capacity_sectors);
        let fixed = ("is a namespace of a controller", "resize it there; the new size is read automatically");
        Ok(Backing::Remote { bytes: sectors << SECTOR_SHIFT, fixed })
    }

    fn sectors_now(&self) -> Option<u64> {
        self.device.sectors_now().filter(|sectors| *sectors > 0)
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        let (file, claim) = self.device.descriptions();
        let (file, claim, ids) = (Some(file), Some(claim), Some(self.ids));
        Ok(DeviceHandover { file, claim, ids, sync_failed: false })
    }

    fn ids(&self) -> NamespaceIds {
        self.ids
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        [("forged".to_owned(), self.device.forged())].into()
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mq::QueueLimits;

    use super::*;

    #[test]
    fn limits_are_the_stricter_of_controller_and_kernel() {
        let controller = |sectors_max: u32, has_sgl: bool| {
            let limits = QueueLimits {
                sectors_max,
                segment_bytes_max: sectors_max * 512,
                segments_max: 256,
                virt_boundary_mask: if has_sgl { 0 } else { 4095 },
                ..QueueLimits::default()
            };
            DeviceInfo { limits, ..DeviceInfo::default() }
        };
        let kernel = NvmeCharLimits {
            bytes_max: 126 * 4096,
            segments_max: 127,
            depth_max: 1023,
            is_read_only: false,
            has_poll_queues: false,
        };
        for (mut info, sectors_max) in [(controller(1024, true), 1008), (controller(256, false), 256)] {
            limit(&mut info, kernel);
            assert_eq!((info.limits.sectors_max, info.limits.segments_max), (sectors_max, 127));
            assert_eq!((info.limits.virt_boundary_mask, info.limits.dma_alignment_mask, info.read_only), (0, 0, false));
            assert_eq!(info.limits.check(), Ok(()));
            limit(&mut info, NvmeCharLimits { is_read_only: true, bytes_max: 0, ..kernel });
            assert_eq!((info.limits.sectors_max, info.read_only, info.limits.check()), (1, true, Ok(())));
        }
    }
}
