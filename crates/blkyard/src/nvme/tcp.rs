//! Admin commands to a controller over TCP.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{TcpAdminClient, TcpNamespaceConfig};
use blkyard_nvme::{FabricsData, IDENTIFY_BYTES, QueueDemand, Sqe};
use blkyard_os::SystemClock;

use super::{NvmeError, NvmePassthrough, PassthroughData, PassthroughResult, PassthroughTarget, TIMEOUT_DEFAULT};
use crate::device::DeviceError;
use crate::devices::nvme_tcp::take_config;
use crate::spec::{Spec, SpecError};

/// A controller over TCP, with an association of its own.
pub(super) struct TcpPassthrough {
    name: String,
    namespace: Option<u32>,
    queue: TcpAdminClient,
}

impl TcpPassthrough {
    /// Connects to a controller by the name of a device. Options are the device's.
    pub(super) fn open(name: &str) -> Result<TcpPassthrough, NvmeError> {
        let mut spec = Spec::parse(name).map_err(DeviceError::from)?;
        let config = take_config(&mut spec).map_err(DeviceError::from)?;
        spec.finish().map_err(DeviceError::from)?;
        let TcpNamespaceConfig { name, address, mut host, namespace, .. } = config;
        host.queues = QueueDemand { submitters: 1, write_queues: 0, poll_queues: 0 };
        let queue = TcpAdminClient::open(&name, &address, host, Arc::new(SystemClock)).map_err(DeviceError::from)?;
        Ok(TcpPassthrough { name, namespace, queue })
    }

    fn refused(&self, cause: &str, cure: &str) -> NvmeError {
        DeviceError::from(SpecError::new(&self.name, cause, cure)).into()
    }
}

impl NvmePassthrough for TcpPassthrough {
    fn name(&self) -> &str {
        &self.name
    }

    fn namespace_id(&self) -> Option<u32> {
        self.namespace
    }

    fn submit(
        &mut self,
        target: PassthroughTarget,
        sqe: Sqe,
        data: PassthroughData<'_>,
        metadata: PassthroughData<'_>,
        timeout: Duration,
    ) -> Result<PassthroughResult, NvmeError> {
        if target == PassthroughTarget::Io {
            return Err(self.refused("over TCP only admin commands are passed through", "use blkyard bench for I/O"));
        }
        if metadata.len() > 0 || data.len() > IDENTIFY_BYTES {
            let cause = "over TCP an admin command has at most 4096 bytes of data, and no metadata";
            return Err(self.refused(cause, "ask in parts"));
        }
        let timeout = if timeout.is_zero() { TIMEOUT_DEFAULT } else { timeout };
        let to_send = match &data {
            PassthroughData::None => FabricsData::None,
            PassthroughData::Read(bytes) => FabricsData::Read(bytes.len() as u32),
            PassthroughData::Write(bytes) => FabricsData::Write(bytes),
        };
        let (status, result, page) = self.queue.execute(sqe, to_send, timeout).map_err(DeviceError::from)?;
        if let (PassthroughData::Read(bytes), Some(page)) = (data, page) {
            bytes.copy_from_slice(&page[..bytes.len()]);
        }
        Ok(PassthroughResult { status, result })
    }
}

impl Debug for TcpPassthrough {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpPassthrough").field("name", &self.name).finish_non_exhaustive()
    }
}
