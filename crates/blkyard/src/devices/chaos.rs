//! `chaos:SIZE`: a disk in memory with injected faults.

use std::sync::Arc;

use blkyard_mq::{BlockDevice, DeviceInfo, QueueKind};
use blkyard_sim::{ChaosConfig, ChaosDevice};

use super::memory::{RequestBounds, take_info, take_latency_us};
use super::{DeviceKind, MakeConnector};
use crate::device::{Device, DeviceError, DeviceOps, DeviceQueue};
use crate::spec::{Spec, SpecError};

pub(super) const KIND: DeviceKind =
    DeviceKind { schemes: &["chaos"], usage: "chaos:SIZE", open, adopt: None, open_all: None };

fn open(spec: Spec, _: Option<MakeConnector<'_>>) -> Result<Device, DeviceError> {
    Ok(open_chaos(spec)?.into())
}

fn open_chaos(mut spec: Spec) -> Result<ChaosDevice, DeviceError> {
    let config = take_config(&mut spec)?;
    let info = take_info(spec, RequestBounds::COPIED)?;
    let name = info.name.clone();
    ChaosDevice::new(vec![Arc::new(info)], config).map_err(|source| DeviceError::Memory { name, source })
}

/// Takes the injected faults, and their rate: one in so many requests (`interval` of Linux's null_blk).
fn take_config(spec: &mut Spec) -> Result<ChaosConfig, SpecError> {
    let latency_us = take_latency_us(spec)?;
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

impl DeviceOps for ChaosDevice {
    fn info(&self) -> &DeviceInfo {
        BlockDevice::info(self)
    }

    fn describe(&self) -> String {
        "memory, gone when this ends, behind a device that makes trouble".into()
    }

    fn queue(&self, _: QueueKind, depth: usize) -> Result<DeviceQueue, DeviceError> {
        Ok(Box::new(BlockDevice::queue(self, depth)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_say_which_faults_are_injected() {
        let spec = Spec::parse("chaos:1M?seed=7&errors=9&timeouts=100&latency_us=3").unwrap();
        let device = open_chaos(spec).unwrap();
        let config = ChaosConfig { fail_every: 9, lose_every: 100, delay_ns_max: 3000, ..ChaosConfig::wild(7) };
        assert_eq!((device.config(), BlockDevice::info(&device).capacity_sectors), (&config, 2048));
    }
}
