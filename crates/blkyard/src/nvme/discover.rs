//! Looks at discovery services over TCP.

use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::read_discovery_log;
use blkyard_nvme::fabrics::{DISCOVERY_NQN, Nqn};
use blkyard_nvme::{DiscoveredLog, FabricsHostConfig};
use blkyard_os::SystemClock;

use super::NvmeError;
use crate::device::DeviceError;
use crate::devices::nvme_tcp::{NQN_FORM, named_host, own_host};
use crate::spec::SpecError;

/// Reads the log of the discovery service at `HOST:PORT` within `limit`, as this host or under another name.
///
/// # Errors
/// The name is invalid, or there is no answer, a refusal, or an invalid log.
///
/// # Panics
/// Never: the NQN of discovery services is valid.
pub fn discover(address: &str, host_nqn: Option<&str>, limit: Duration) -> Result<DiscoveredLog, NvmeError> {
    let (host, host_id) = match host_nqn {
        Some(name) => {
            let invalid = || SpecError::new(address, format!("{name} is no NQN"), format!("give {NQN_FORM}"));
            named_host(Nqn::new(name).ok_or_else(invalid).map_err(DeviceError::from)?)
        }
        None => own_host(address).map_err(DeviceError::from)?,
    };
    let service = Nqn::new(DISCOVERY_NQN).expect("the NQN of discovery services is valid");
    let config = FabricsHostConfig::new(host, host_id, service);
    Ok(read_discovery_log(address, address, config, limit, Arc::new(SystemClock)).map_err(DeviceError::from)?)
}
