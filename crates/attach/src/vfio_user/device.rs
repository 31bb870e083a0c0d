//! An NVMe controller of a vfio-user server: registers by message, doorbells in shared memory if the server offers it,
//! memory mapped by descriptor, interrupts by eventfd.
//!
//! [`VfioUserController`] is owned by the thread that controls the device. Queues get the doorbells, addresses and
//! eventfds, and do not use it. Each call is bounded by the time limit of the server's replies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blkyard_mem::{DmaDomain, Region, View};
use blkyard_nvme::registers::{CAP, Capabilities};
use blkyard_sys::{EventFd, TimeSource};
use blkyard_wire::vfio_user::{
    DeviceFlags, DeviceRegions, IO_FDS_BYTES, IrqAction, IrqData, IrqRange, IrqSetRequest, REGION_INFO_BYTES,
    RegionAccess, RegionFlags, RegionInfo, VfioRequest, irq_index, region_index,
};

use crate::HostParts;
use crate::connector::{Connector, DirectConnector, connect_until};
use crate::vfio_user::VfioUserError;
use crate::vfio_user::connection::ServerConnection;
use crate::vfio_user::doorbells::SignalledDoorbells;
use crate::vfio_user::memory::ServerMemory;
use crate::vfio_user::pci::{self, CONFIG_BYTES, MsixCapability};
use crate::vfio_user::session::VfioAnswer;

/// Offset of the doorbells in BAR 0 (NVMe over PCIe 1.0, 3.1.2).
const DOORBELLS_AT: u64 = 0x1000;
/// Minimum doorbell bytes of one queue.
const DOORBELL_PAIR_BYTES: u64 = 8;

/// Connection parameters of a controller.
#[derive(Clone, Debug)]
pub struct VfioUserConfig {
    /// The server's socket.
    pub socket: PathBuf,
    /// Makes the connection to it.
    pub connector: Arc<dyn Connector>,
    /// The clock of the thread that controls the device.
    pub clock: Arc<dyn TimeSource>,
    /// Time limit of the server's replies.
    pub reply_max: Duration,
    /// Maximum interrupt vectors to use.
    pub vectors_max: u16,
    /// Whether the server is asked for eventfds of the doorbells. If not, or if it has none, a doorbell that is not
    /// shared is a message.
    pub doorbell_eventfds: bool,
    /// Readable when the device is closed: waiting for replies then ends.
    pub end: Arc<EventFd>,
}

impl VfioUserConfig {
    /// The defaults for a socket, with one vector for the admin queue and one for each of 32 I/O queues.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new(socket: impl Into<PathBuf>, clock: Arc<dyn TimeSource>) -> std::io::Result<VfioUserConfig> {
        Ok(VfioUserConfig {
            socket: socket.into(),
            connector: Arc::new(DirectConnector),
            clock,
            // A busy machine answers within milliseconds, hardly ever within seconds.
            reply_max: Duration::from_secs(10),
            vectors_max: 33,
            doorbell_eventfds: true,
            end: Arc::new(EventFd::new()?),
        })
    }
}

/// The connection, and the memory mapped by the server.
#[derive(Debug)]
pub(crate) struct DeviceState {
    connection: ServerConnection,
    memory: ServerMemory,
}

/// An NVMe controller over vfio-user.
#[derive(Debug)]
pub struct VfioUserController {
    state: Mutex<DeviceState>,
    domain: Arc<DmaDomain>,
    /// Signalled when the domain's list has changed.
    dma_changed: Arc<EventFd>,
    /// Whether the server supports DEVICE_RESET.
    is_resettable: bool,
    bar0_bytes: u64,
    msix: Option<MsixCapability>,
    vectors: Vec<Arc<EventFd>>,
    /// A duplicate of the socket's descriptor.
    socket: OwnedFd,
    doorbells: Option<View>,
    /// To be signalled after a write of a shared doorbell, by queue; empty if the server polls them.
    doorbell_eventfds: Vec<Arc<EventFd>>,
    doorbell_bytes: usize,
    /// Whether another party was found to have reset the device.
    was_reset: bool,
}

impl VfioUserController {
    /// Connects to the server, and prepares the device as a PCI driver does. Its registers are as the server has them.
    /// The server has the time of a reply for each of: connection, version, description, preparation.
    ///
    /// # Errors
    /// See [`VfioUserError`].
    pub fn open(config: &VfioUserConfig) -> Result<VfioUserController, VfioUserError> {
        let system = |error: std::io::Error| VfioUserError::System(error.to_string());
        let changed = Arc::new(EventFd::new().map_err(system)?);
        let parts = HostParts::new(config.vectors_max, changed, Arc::clone(&config.end)).map_err(system)?;
        VfioUserController::open_with(config, &parts)
    }

    /// The same with DMA domain and eventfds of the caller.
    ///
    /// # Errors
    /// See [`VfioUserError`].
    pub fn open_with(config: &VfioUserConfig, parts: &HostParts) -> Result<VfioUserController, VfioUserError> {
        let VfioUserConfig { socket, connector, clock, reply_max, .. } = config;
        let (vectors_max, end) = (u16::try_from(parts.eventfds.len()).unwrap_or(u16::MAX), &parts.end);
        let stream = connect_until(&**connector, socket, clock.now() + *reply_max, end, &**clock).map_err(|error| {
            VfioUserError::Socket { socket: socket.display().to_string(), cause: error.to_string() }
        })?;
        let connection = ServerConnection::open(stream, Arc::clone(clock), Arc::clone(end), *reply_max)?;
        let mut state = DeviceState { connection, memory: ServerMemory::default() };
        state.connection.begin_series();
        let device = state.device()?;
        let (config_space, _) = state.region(region_index::CONFIG)?;
        if config_space.size < CONFIG_BYTES {
            return Err(VfioUserError::Device { what: "PCI configuration space" });
        }
        let (bar0, descriptors) = state.region(region_index::BAR0)?;
        let msix = MsixCapability::find(&mut state)?;
        let end = msix.and_then(|msix| msix.first_in_bar0(DOORBELLS_AT)).unwrap_or(bar0.size).min(bar0.size);
        if end < DOORBELLS_AT + DOORBELL_PAIR_BYTES {
            return Err(VfioUserError::Device { what: "doorbell registers in BAR 0" });
        }
        let vectors = if msix.is_some() { state.vectors(device, vectors_max)? } else { 0 };
        let mut doorbells = map_doorbells(&bar0, &descriptors, end)?;
        let mut doorbell_eventfds = Vec::new();
        if doorbells.is_none()
            && config.doorbell_eventfds
            && let Some(signalled) = state.signalled_doorbells(usize::from(vectors).max(2))?
        {
            (doorbells, doorbell_eventfds) = (Some(signalled.registers), signalled.eventfds);
        }
        let socket = state.connection.as_fd().try_clone_to_owned();
        let mut controller = VfioUserController {
            state: Mutex::new(state),
            domain: Arc::clone(&parts.domain),
            dma_changed: Arc::clone(&parts.dma_changed),
            is_resettable: device.flags.contains(DeviceFlags::RESET),
            bar0_bytes: bar0.size,
            msix,
            vectors: parts.eventfds.iter().take(usize::from(vectors)).cloned().collect(),
            socket: socket.map_err(|error| VfioUserError::System(error.to_string()))?,
            doorbell_bytes: doorbells.as_ref().map_or((end - DOORBELLS_AT) as usize, View::len),
            doorbells,
            doorbell_eventfds,
            was_reset: false,
        };
        controller.prepare()?;
        Ok(controller)
    }

    /// Reads a 32-bit register of BAR 0.
    ///
    /// # Errors
    /// See [`VfioUserError`].
    pub fn read_register(&mut self, offset: u64) -> Result<u32, VfioUserError> {
        let mut word = [0; 4];
        self.access_registers(|state| state.read_region(region_index::BAR0, offset, &mut word))?;
        Ok(u32::from_le_bytes(word))
    }

    /// Writes a 32-bit register of BAR 0.
    ///
    /// # Errors
    /// See [`VfioUserError`].
    pub fn write_register(&mut self, offset: u64, value: u32) -> Result<(), VfioUserError> {
        self.access_registers(|state| state.write_region(region_index::BAR0, offset, &value.to_le_bytes()))
    }

    /// Accesses BAR 0. A device that another party has reset decodes no memory and refuses: it is set up again, once.
    /// If it refuses then, the connection ends, since a server that keeps it open could access our memory without end.
    fn access_registers(
        &mut self,
        mut access: impl FnMut(&mut DeviceState) -> Result<(), VfioUserError>,
    ) -> Result<(), VfioUserError> {
        let refused = match access(self.state_mut()) {
            Err(error @ VfioUserError::Refused { .. }) => error,
            done => return done,
        };
        if pci::decodes_memory(self.state_mut())? {
            return Err(refused);
        }
        tracing::debug!("{refused}: the device is set up again");
        let again = self.prepare().and_then(|()| access(self.state_mut()));
        self.was_reset |= again.is_ok();
        again.inspect_err(|error| self.state_mut().connection.fail(error))
    }

    /// Whether a refused access has shown since the last call that another party has reset the device.
    pub fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.was_reset)
    }

    /// Resets the device and sets it up again. Returns false if the server does not support it.
    ///
    /// # Errors
    /// See [`VfioUserError`].
    pub fn reset_device(&mut self) -> Result<bool, VfioUserError> {
        if !self.is_resettable {
            return Ok(false);
        }
        self.state_mut().call(&VfioRequest::DeviceReset, &[])?;
        self.prepare()?;
        Ok(true)
    }

    /// The address space of the device.
    pub fn domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    /// Readable when [`VfioUserController::sync_dma`] has memory to map or unmap.
    pub fn dma_changed(&self) -> &EventFd {
        &self.dma_changed
    }

    /// Has the server map new regions of the domain and unmap removed ones.
    ///
    /// # Errors
    /// See [`VfioUserError`].
    pub fn sync_dma(&self) -> Result<(), VfioUserError> {
        self.dma_changed.take();
        let mut state = self.lock();
        let DeviceState { connection, memory } = &mut *state;
        memory.sync(connection, &self.domain)
    }

    /// Device address of a byte of a region in the domain's list; a new region is mapped first. `None` if the server
    /// cannot map it or does not respond.
    pub fn mapped_address(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        self.sync_dma().ok()?;
        self.lock().memory.address(region, offset)
    }

    /// The doorbell registers as memory shared with the server. If unset, each doorbell is written by
    /// [`VfioUserController::write_register`].
    pub fn shared_doorbells(&self) -> Option<&View> {
        self.doorbells.as_ref()
    }

    /// The eventfd to signal after a write of a shared doorbell, by queue; empty if the server polls them.
    pub fn doorbell_eventfds(&self) -> &[Arc<EventFd>] {
        &self.doorbell_eventfds
    }

    /// Bytes of the doorbell registers.
    pub fn doorbell_bytes(&self) -> usize {
        self.doorbell_bytes
    }

    /// The eventfd of each interrupt vector, shared with the server.
    pub fn eventfds(&self) -> &[Arc<EventFd>] {
        &self.vectors
    }

    /// Answers commands of the server. To be called when the socket is readable.
    ///
    /// # Errors
    /// The server is gone, or has violated the protocol.
    pub fn look(&mut self) -> Result<(), VfioUserError> {
        let DeviceState { connection, memory } = self.state_mut();
        connection.look(memory)
    }

    /// Error that made the connection unusable.
    pub fn failure(&self) -> Option<VfioUserError> {
        self.lock().connection.failure().cloned()
    }

    /// Whether the server has closed the connection. It has then released our memory, or has ended.
    pub fn is_closed_by_server(&self) -> bool {
        self.lock().connection.is_closed_by_peer()
    }

    /// The socket, to wait for commands of the server or its end.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// A driver's work after a reset, within the time of one reply.
    fn prepare(&mut self) -> Result<(), VfioUserError> {
        self.state_mut().connection.begin_series();
        let prepared = self.set_up();
        self.state_mut().connection.end_series();
        prepared
    }

    /// BAR 0, bus master, interrupts.
    fn set_up(&mut self) -> Result<(), VfioUserError> {
        let (msix, bar0_bytes) = (self.msix, self.bar0_bytes);
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        pci::enable(state, bar0_bytes)?;
        let Some(msix) = msix.filter(|_| !self.vectors.is_empty()) else { return Ok(()) };
        state.set_eventfds(&self.vectors)?;
        msix.enable(state)?;
        let range = IrqRange { index: irq_index::MSIX, start: 0, count: self.vectors.len() as u32 };
        let unmask = IrqSetRequest { range, action: IrqAction::Unmask, data: IrqData::All };
        match state.call(&VfioRequest::DeviceSetIrqs(unmask), &[]) {
            Err(VfioUserError::Refused { .. }) => msix.unmask(state, self.vectors.len() as u16),
            other => other.map(drop),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DeviceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&mut self) -> &mut DeviceState {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceState {
    /// Reads bytes of a region, in messages of the server's maximum size.
    pub(crate) fn read_region(&mut self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), VfioUserError> {
        let bytes_max = self.connection.peer().data_bytes as usize;
        let mut at = offset;
        for part in to.chunks_mut(bytes_max) {
            let access = RegionAccess { offset: at, region, count: part.len() as u32 };
            if let VfioAnswer::Data(data) = self.call(&VfioRequest::RegionRead(access), &[])? {
                part.copy_from_slice(&data);
            }
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes bytes of a region, in messages of the server's maximum size.
    pub(crate) fn write_region(&mut self, region: u32, offset: u64, from: &[u8]) -> Result<(), VfioUserError> {
        let bytes_max = self.connection.peer().data_bytes as usize;
        let mut at = offset;
        for part in from.chunks(bytes_max) {
            let access = RegionAccess { offset: at, region, count: part.len() as u32 };
            self.call(&VfioRequest::RegionWrite(access, part), &[])?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn call(
        &mut self,
        request: &VfioRequest<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<VfioAnswer<OwnedFd>, VfioUserError> {
        self.connection.call(request, descriptors, &self.memory)
    }

    fn device(&mut self) -> Result<DeviceRegions, VfioUserError> {
        match self.call(&VfioRequest::DeviceGetInfo, &[])? {
            VfioAnswer::Device(device)
                if device.flags.contains(DeviceFlags::PCI) && device.regions > region_index::CONFIG =>
            {
                Ok(device)
            }
            _ => Err(VfioUserError::Device { what: "PCI regions" }),
        }
    }

    /// A region, asked for again if its description is longer, once.
    fn region(&mut self, index: u32) -> Result<(RegionInfo, Vec<OwnedFd>), VfioUserError> {
        let argsz = REGION_INFO_BYTES as u32;
        let mut answer = self.call(&VfioRequest::DeviceGetRegionInfo { argsz, index }, &[])?;
        if let VfioAnswer::RegionNeeds(argsz) = answer {
            answer = self.call(&VfioRequest::DeviceGetRegionInfo { argsz, index }, &[])?;
        }
        match answer {
            VfioAnswer::Region(info, descriptors) => Ok((info, descriptors)),
            _ => Err(VfioUserError::Device { what: "such region" }),
        }
    }

    /// Doorbells with eventfds, if the server has them for this many queues at least.
    fn signalled_doorbells(&mut self, queues_min: usize) -> Result<Option<SignalledDoorbells>, VfioUserError> {
        if !self.connection.peer().region_io_fds {
            return Ok(None);
        }
        let mut ask =
            |argsz| match self.call(&VfioRequest::DeviceGetRegionIoFds { argsz, index: region_index::BAR0 }, &[]) {
                Err(VfioUserError::Refused { .. }) => Ok(VfioAnswer::Done),
                other => other,
            };
        let mut answer = ask(IO_FDS_BYTES as u32)?;
        if let VfioAnswer::IoFdsNeed(argsz) = answer {
            answer = ask(argsz)?;
        }
        let VfioAnswer::IoFds(fds, descriptors) = answer else { return Ok(None) };
        let mut cap = [0; 8];
        self.read_region(region_index::BAR0, CAP as u64, &mut cap)?;
        let stride = Capabilities::from_bits(u64::from_le_bytes(cap)).doorbell_stride;
        SignalledDoorbells::new(&fds, &descriptors, stride, queues_min)
    }

    /// Number of MSI-X vectors to use.
    fn vectors(&mut self, device: DeviceRegions, max: u16) -> Result<u16, VfioUserError> {
        if device.irqs <= irq_index::MSIX {
            return Ok(0);
        }
        match self.call(&VfioRequest::DeviceGetIrqInfo { index: irq_index::MSIX }, &[])? {
            VfioAnswer::Irq(info) => Ok(info.count.min(u32::from(max)) as u16),
            _ => Ok(0),
        }
    }

    /// Sets the eventfds of all vectors, with as many descriptors per message as the server accepts.
    fn set_eventfds(&mut self, vectors: &[Arc<EventFd>]) -> Result<(), VfioUserError> {
        let at_once = self.connection.peer().descriptors.max(1);
        let mut start = 0;
        for part in vectors.chunks(at_once) {
            let range = IrqRange { index: irq_index::MSIX, start, count: part.len() as u32 };
            let set = IrqSetRequest { range, action: IrqAction::Trigger, data: IrqData::SetEventfds };
            let descriptors: Vec<_> = part.iter().map(AsFd::as_fd).collect();
            self.call(&VfioRequest::DeviceSetIrqs(set), &descriptors)?;
            start += part.len() as u32;
        }
        Ok(())
    }
}

/// Maps the doorbells, up to `end` in BAR 0, if the server offers their first area.
fn map_doorbells(bar0: &RegionInfo, descriptors: &[OwnedFd], end: u64) -> Result<Option<View>, VfioUserError> {
    let Some(file) = descriptors.first().filter(|_| bar0.flags.contains(RegionFlags::MMAP)) else { return Ok(None) };
    let areas = bar0.sparse.as_ref().map(|areas| areas.iter().map(|area| (area.offset, area.size)).collect());
    let areas = areas.unwrap_or_else(|| vec![(0, bar0.size)]);
    let area = areas.into_iter().find(|(offset, size)| (*offset..offset + size).contains(&DOORBELLS_AT));
    let Some((offset, size)) = area else { return Ok(None) };
    let failed = |cause: String| VfioUserError::Map { index: bar0.index, cause };
    let region =
        Region::map_file(file.as_fd(), bar0.offset + offset, size).map_err(|error| failed(error.to_string()))?;
    let len = end.min(offset + size) - DOORBELLS_AT;
    let view = View::new(region, DOORBELLS_AT - offset, len as usize, 4);
    view.map(Some).ok_or_else(|| failed("its doorbells are not aligned".into()))
}
