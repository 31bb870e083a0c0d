//! The interface to the NVMe host: a controller over vfio-user as its transport.
//!
//! A failed access means that the device is gone. Its server may access our memory until it has closed the connection,
//! which is reported to the host.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::{DmaDomain, Region, View};
use blkyard_nvme::{ControllerTransport, DeviceGone};
use blkyard_sys::EventFd;

use crate::nvme::{HostParts, NvmeTransport};
use crate::vfio_user::{VfioUserConfig, VfioUserController};

impl ControllerTransport for VfioUserController {
    fn read32(&mut self, offset: usize) -> Result<u32, DeviceGone> {
        self.read_register(offset as u64).map_err(|_| DeviceGone)
    }

    fn write32(&mut self, offset: usize, value: u32) -> Result<(), DeviceGone> {
        self.write_register(offset as u64, value).map_err(|_| DeviceGone)
    }

    fn dma_domain(&self) -> &Arc<DmaDomain> {
        self.domain()
    }

    fn dma_addr(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        self.mapped_address(region, offset)
    }

    fn doorbells(&self) -> Option<View> {
        self.shared_doorbells().cloned()
    }

    fn signal_doorbell(&mut self, qid: u16) {
        if let Some(eventfd) = self.doorbell_eventfd(qid) {
            eventfd.signal_shared();
        }
    }

    fn doorbell_bytes(&self) -> usize {
        VfioUserController::doorbell_bytes(self)
    }

    fn vectors(&self) -> u16 {
        self.eventfds().len() as u16
    }

    fn eventfd(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.eventfds().get(usize::from(vector)).map(AsFd::as_fd)
    }

    fn reset_function(&mut self) -> bool {
        self.reset_device().unwrap_or(false)
    }

    fn is_silent_when_gone(&self) -> bool {
        self.is_closed_by_server()
    }
}

impl NvmeTransport for VfioUserController {
    type Config = VfioUserConfig;

    fn open(config: &VfioUserConfig, parts: &HostParts) -> Result<VfioUserController, String> {
        VfioUserController::open_with(config, parts).map_err(|error| error.to_string())
    }

    fn sync_dma(&mut self) {
        // The connection is unusable after an error, and the next access fails.
        let _ = VfioUserController::sync_dma(self);
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.failure().is_none().then(|| self.socket())
    }

    fn look(&mut self) -> bool {
        VfioUserController::look(self).is_ok()
    }

    fn take_reset(&mut self) -> bool {
        VfioUserController::take_reset(self)
    }

    fn failure(&self) -> Option<String> {
        VfioUserController::failure(self).map(|error| error.to_string())
    }

    fn doorbell_eventfd(&self, qid: u16) -> Option<&Arc<EventFd>> {
        self.doorbell_eventfds().get(usize::from(qid))
    }
}
