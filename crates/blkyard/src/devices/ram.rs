//! `ram:SIZE`: a disk in memory.

use blkyard_mq::{BlockDevice, DeviceInfo, QueueKind, RamDevice};

use super::memory::{RequestBounds, take_info, take_pace};
use super::{DeviceKind, MakeConnector};
use crate::device::{Device, DeviceError, DeviceOps, DeviceQueue};
use crate::spec::Spec;

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["ram"], usage: "ram:SIZE", open, adopt: None, open_all: None };

fn open(mut spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    let pace = take_pace(&mut spec)?;
    let info = take_info(spec, RequestBounds::COPIED)?;
    let name = info.name.clone();
    let device = RamDevice::new(info, pace).map_err(|source| DeviceError::Memory { name, source })?;
    Ok(device.into())
}

impl DeviceOps for RamDevice {
    fn info(&self) -> &DeviceInfo {
        BlockDevice::info(self)
    }

    fn describe(&self) -> String {
        "memory, gone when this ends".into()
    }

    fn queue(&self, _: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(BlockDevice::queue(self, depth)))
    }

    /// Pages never written are all the same page of zeroes, which sits in the cache.
    fn needs_preconditioning(&self) -> bool {
        true
    }
}
