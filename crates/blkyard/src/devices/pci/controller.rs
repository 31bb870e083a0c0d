//! The transport of an NVMe host through VFIO: registers and doorbells in memory, interrupts by eventfd.
//!
//! Owned by the controller's thread. The doorbells are written by the owners of queues. When the transport is dropped,
//! the device is closed, also if doorbells are still held: they are private memory from then on.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blkyard_attach::{HostParts, NvmeTransport};
use blkyard_mem::{DmaDomain, Region, View};
use blkyard_nvme::{ControllerTransport, DeviceGone};
use blkyard_os::{HostPciDevice, PciAddress, VfioDevice, VfioError, VfioInterface, now_ns};
use blkyard_sys::EventFd;

/// Offset of the doorbells in BAR 0 (NVMe over PCIe 1.0, 3.1.2).
const DOORBELLS_AT: u64 = 0x1000;
/// Minimum doorbell bytes of one queue.
const DOORBELL_PAIR_BYTES: u64 = 8;
/// Offsets and bits of the registers for an orderly shutdown (NVMe Base 2.0, 3.1.4).
const CONFIGURATION_AT: usize = 0x14;
const SHUTDOWN_MASK: u32 = 3 << 14;
const SHUTDOWN_NORMAL: u32 = 1 << 14;
/// CSTS never reads all ones while the device is there.
const STATUS_AT: usize = 0x1c;
const STATUS_READY: u32 = 1;
const STATUS_SHUTDOWN_MASK: u32 = 3 << 2;
const STATUS_SHUTDOWN_COMPLETE: u32 = 2 << 2;
/// Time limit of a shutdown that the kernel waits for. A controller writes its cache back within it; one that does not
/// loses no more than at a power failure.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// Which device to open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PciConfig {
    pub(super) address: PciAddress,
    /// Interface of the kernel to open it by; unset for the best one.
    pub(super) interface: Option<VfioInterface>,
}

/// An NVMe controller that this process has open through VFIO.
#[derive(Debug)]
pub(crate) struct PciController {
    device: VfioDevice,
    bar0: Arc<Region>,
    registers: View,
    doorbells: View,
    domain: Arc<DmaDomain>,
    eventfds: Vec<Arc<EventFd>>,
    /// Why the controller cannot be used: its own queues cannot be mapped.
    map_failure: OnceLock<String>,
    /// Whether the kernel has asked for the device, or the device is unplugged. It accesses no memory any more.
    is_lost: bool,
}

impl PciController {
    /// Opens a device of the driver vfio-pci. Its memory is that of the domain; its first interrupt vectors signal
    /// these eventfds, as far as it has vectors.
    pub(super) fn attach(
        function: &HostPciDevice,
        interface: Option<VfioInterface>,
        domain: &Arc<DmaDomain>,
        eventfds: &[Arc<EventFd>],
    ) -> Result<PciController, VfioError> {
        // Whoever has it meanwhile keeps it.
        function.bind(false)?;
        let device = VfioDevice::open(function, interface)?;
        let bar0 = device.map_bar0()?;
        let part = |what| VfioError::Part { device: function.address(), what };
        let bytes = bar0.len() as u64;
        let end = device.msix_in_bar0(DOORBELLS_AT)?.unwrap_or(bytes).min(bytes);
        let doorbells = end.checked_sub(DOORBELLS_AT).filter(|bytes| *bytes >= DOORBELL_PAIR_BYTES);
        let doorbells = doorbells.and_then(|bytes| View::new(Arc::clone(&bar0), DOORBELLS_AT, bytes as usize, 4));
        let doorbells = doorbells.ok_or_else(|| part("doorbell registers in BAR 0"))?;
        let registers = View::new(Arc::clone(&bar0), 0, DOORBELLS_AT as usize, 8);
        let registers = registers.ok_or_else(|| part("registers in BAR 0"))?;
        let vectors = eventfds.len().min(device.vectors_max() as usize);
        let eventfds = eventfds[..vectors].to_vec();
        if vectors > 0 {
            device.set_vectors(&eventfds.iter().map(|eventfd| eventfd.as_fd()).collect::<Vec<_>>())?;
        }
        let (domain, map_failure) = (Arc::clone(domain), OnceLock::new());
        Ok(PciController { device, bar0, registers, doorbells, domain, eventfds, map_failure, is_lost: false })
    }

    /// Has the controller write its cache back before the kernel takes it.
    fn shut_down(&mut self) {
        let Ok(configuration) = self.read32(CONFIGURATION_AT) else { return };
        let until_ns = now_ns() + SHUTDOWN_LIMIT.as_nanos() as u64;
        if !self.read32(STATUS_AT).is_ok_and(|status| status & STATUS_READY != 0)
            || self.write32(CONFIGURATION_AT, (configuration & !SHUTDOWN_MASK) | SHUTDOWN_NORMAL).is_err()
        {
            return;
        }
        while self.read32(STATUS_AT).is_ok_and(|status| status & STATUS_SHUTDOWN_MASK != STATUS_SHUTDOWN_COMPLETE)
            && now_ns() < until_ns
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn lose(&mut self) -> DeviceGone {
        if !std::mem::replace(&mut self.is_lost, true) {
            // It may be there still, or cut off for a while only.
            self.device.disable_bus_master();
        }
        DeviceGone
    }

    fn check(&self) -> Result<(), DeviceGone> {
        if self.is_lost || self.bar0.is_faulted() { Err(DeviceGone) } else { Ok(()) }
    }
}

impl NvmeTransport for PciController {
    type Config = PciConfig;

    fn open(config: &PciConfig, parts: &HostParts) -> Result<PciController, String> {
        let open = |function| PciController::attach(&function, config.interface, &parts.domain, &parts.eventfds);
        let opened = HostPciDevice::find(config.address).and_then(open);
        opened.map_err(|error| error.to_string())
    }

    fn sync_dma(&mut self) {
        if let Err(error) = self.device.sync_dma(&self.domain) {
            tracing::error!("{error}");
        }
    }

    fn watches_memory(&self) -> bool {
        self.device.watches_memory()
    }

    fn unmap_returned(&mut self) -> u64 {
        self.device.unmap_returned()
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_lost).then(|| self.device.removal())
    }

    fn look(&mut self) -> bool {
        if !self.is_lost && self.device.take_removal() {
            self.shut_down();
            self.lose();
        }
        !self.is_lost
    }

    fn failure(&self) -> Option<String> {
        let lost = "the device is unplugged, or the kernel has asked for it; plug it in or bind it to vfio-pci again";
        self.is_lost.then(|| lost.into()).or_else(|| self.map_failure.get().cloned())
    }
}

impl ControllerTransport for PciController {
    fn read32(&mut self, offset: usize) -> Result<u32, DeviceGone> {
        self.check()?;
        let value = self.registers.load_u32(offset, Acquire);
        let is_gone = self.bar0.is_faulted() || (offset == STATUS_AT && value == u32::MAX);
        if is_gone { Err(self.lose()) } else { Ok(value) }
    }

    fn write32(&mut self, offset: usize, value: u32) -> Result<(), DeviceGone> {
        self.check()?;
        match offset.checked_sub(DOORBELLS_AT as usize) {
            Some(offset) => self.doorbells.store_u32(offset, value, Release),
            None => self.registers.store_u32(offset, value, Release),
        }
        self.check()
    }

    fn dma_domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    fn dma_addr(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        let mapped = self.device.sync_dma(&self.domain);
        let addr = self.device.dma_addr(region, offset);
        if let (Err(error), None) = (mapped, addr) {
            // Memory of users is mapped by `NvmeTransport::sync_dma` first, so this is the controller's own.
            let _ = self.map_failure.set(error.to_string());
        }
        addr
    }

    fn doorbells(&self) -> Option<View> {
        Some(self.doorbells.clone())
    }

    fn doorbell_bytes(&self) -> usize {
        self.doorbells.len()
    }

    fn vectors(&self) -> u16 {
        self.eventfds.len() as u16
    }

    fn eventfd(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.eventfds.get(usize::from(vector)).map(|eventfd| eventfd.as_fd())
    }

    fn reset_function(&mut self) -> bool {
        self.device.reset()
    }
}

impl Drop for PciController {
    fn drop(&mut self) {
        // The kernel waits for this mapping, too, when it wants the device back.
        self.bar0.detach();
    }
}
