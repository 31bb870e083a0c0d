//! `null:SIZE`: a disk that completes requests without effect.

use std::io;

use blkyard_mq::{BlockDevice, DeviceInfo, NullDevice, QueueKind};

use super::memory::{RequestBounds, take_info, take_pace};
use super::{DeviceKind, MakeConnector, adopt_by_name};
use crate::device::{Backing, Device, DeviceError, DeviceHandover, DeviceOps, DeviceQueue, ReceivedDevice};
use crate::spec::Spec;

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["null"], usage: "null:SIZE", open, adopt: Some(adopt), open_all: None };

/// The cost of a request does not depend on its length.
const BOUNDS: RequestBounds = RequestBounds { sectors: 8 << 11, discard_sectors: 1 << 21 };

fn open(mut spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    let pace = take_pace(&mut spec)?;
    Ok(NullDevice::new(take_info(spec, BOUNDS)?, pace).into())
}

fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
    adopt_by_name(spec, received, open)
}

impl DeviceOps for NullDevice {
    fn info(&self) -> &DeviceInfo {
        BlockDevice::info(self)
    }

    fn describe(&self) -> String {
        "nothing: writes vanish, reads bring nothing".into()
    }

    fn queue(&self, _: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(BlockDevice::queue(self, depth)))
    }

    fn backing(&self) -> io::Result<Backing> {
        Ok(Backing::Nothing)
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        Ok(DeviceHandover::default())
    }
}
