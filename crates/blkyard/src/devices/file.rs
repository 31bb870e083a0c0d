//! `file:PATH` or a bare path: a file or block device, through io_uring.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use blkyard_mq::{BlockDevice, DeviceInfo, QueueKind};
use blkyard_os::{Direct, FileConfig, FileDevice, OpenError};

use super::{DeviceKind, MakeConnector, no_handover, take_block_bytes, take_write_back};
use crate::device::{Backing, Device, DeviceError, DeviceHandover, DeviceOps, DeviceQueue, ReceivedDevice};
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["", "file"], usage: "file:PATH", open, adopt: Some(adopt), open_all: None };

fn open(spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    Ok(FileDevice::open(config(spec)?)?.into())
}

fn adopt(spec: Spec, received: ReceivedDevice) -> Result<Device, DeviceError> {
    let ReceivedDevice { file: Some(file), claim: None, sync_failed } = received else {
        return Err(no_handover(&spec));
    };
    Ok(FileDevice::adopt(config(spec)?, file, sync_failed)?.into())
}

fn config(mut spec: Spec) -> Result<FileConfig, SpecError> {
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

impl From<OpenError> for DeviceError {
    fn from(error: OpenError) -> DeviceError {
        match error {
            OpenError::Held { .. } => DeviceError::Held(error.into()),
            error => DeviceError::Other(error.into()),
        }
    }
}

impl DeviceOps for FileDevice {
    fn info(&self) -> &DeviceInfo {
        BlockDevice::info(self)
    }

    fn describe(&self) -> String {
        self.mode().to_string()
    }

    fn queue(&self, _: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(BlockDevice::queue(self, depth)))
    }

    fn backing(&self) -> io::Result<Backing> {
        let fixed = if self.is_block_device() {
            Some(("is a block device", "grow it with its own tools, and then set size=probe"))
        } else if BlockDevice::info(self).read_only {
            Some(("is open read-only", "grow it with another program, and then set size=probe"))
        } else {
            None
        };
        Ok(Backing::File { bytes: self.length_bytes()?, fixed })
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        FileDevice::grow(self, bytes)
    }

    fn handover(&self) -> Result<DeviceHandover<'_>, &'static str> {
        let (file, sync_failed) = (Some(self.description()), self.sync_has_failed());
        Ok(DeviceHandover { file, sync_failed, ..DeviceHandover::default() })
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        let counters = FileDevice::counters(self);
        let all = [
            ("bounced", counters.bounced()),
            ("continued", counters.continued()),
            ("retried", counters.retried()),
            ("forged", counters.forged()),
        ];
        all.map(|(name, count)| (name.to_owned(), count)).into()
    }
}
