//! The NVMe controller of a session: its registers and admin queue on the control path, its I/O queues on their lanes.
//!
//! Registers and the doorbell of the admin queue are written by messages, so the admin queue is processed after such a
//! write and at no other time. Commands of the admin side for an I/O queue are executed while that queue is suspended,
//! like changes of memory, of the device and of interrupts: suspend, change, resume. A deletion of a queue and a reset
//! are therefore complete when their message is.
//!
//! Message handling is in `session.rs`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use blkyard_mem::{DmaMapping, Region, View};
use blkyard_mq::DeviceInfo;
use blkyard_nvme::registers::{DOORBELLS, sq_doorbell};
use blkyard_nvme::{
    Controller, ControllerIoQueue, ControllerOptions, ControllerQueueCommand, ControllerQueueReply, ControllerRequest,
    NamespaceTable, RegisterFault, ServedNamespace,
};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{DmaMapRequest, DmaUnmapRequest};

use super::memory::{DmaError, DmaSlots};
use super::pci::PciFunction;
use super::queue::{NvmeQueueSetup, QueueSlot, ReplyQueue};
use super::session::VfioSessionError;
use super::{NvmeDisk, TRANSFER_BYTES, VfioUserExport};
use crate::core::{ExportLog, LaneGone};

/// The one namespace.
const NSID: u32 = 1;
/// Maximum entries of an I/O queue.
const ENTRIES_MAX: u16 = 1024;
/// Maximum commands in flight of an I/O queue.
const DEPTH: u16 = 256;

/// An I/O completion queue that the host has created.
struct CreatedQueue {
    /// Slot of the stopped queue.
    slot: QueueSlot,
    /// Kick eventfd for doorbell writes; unset if no descriptor was left: the queue is polled then.
    kick: Option<Arc<EventFd>>,
    vector: Option<u16>,
    is_running: bool,
}

/// The controller and the state of its client.
pub(crate) struct NvmeFunction {
    pub(crate) pci: PciFunction,
    controller: Controller,
    /// Memory of the doorbell registers.
    registers: View,
    dma: DmaSlots,
    /// Keeps the memory mapped for the device, independent of its queues.
    mappings: Vec<DmaMapping>,
    /// Indexed by identifier of the completion queue, from 1.
    queues: Vec<Option<CreatedQueue>>,
    /// Eventfd of each vector.
    vectors: Vec<Option<Arc<EventFd>>>,
    /// The admin queue interrupted while vector 0 had no eventfd.
    is_admin_call_pending: bool,
    replies: Arc<ReplyQueue>,
    connection: Arc<UnixStream>,
    log: Arc<ExportLog>,
    began: Instant,
}

impl NvmeFunction {
    /// A controller after power-on, for the client of this connection.
    ///
    /// # Errors
    /// The system has no memory left.
    pub(crate) fn new(
        config: &VfioUserExport,
        connection: &Arc<UnixStream>,
        replies: &Arc<ReplyQueue>,
        log: &Arc<ExportLog>,
    ) -> io::Result<NvmeFunction> {
        let io_queues = config.disk.io_queues();
        let region = Region::anonymous(sq_doorbell(io_queues + 1, 0).next_multiple_of(4096))?;
        let len = region.len();
        let registers = View::new(region, 0, len, 8).unwrap_or_else(|| unreachable!("a whole region"));
        let dma = DmaSlots::default();
        let controller = new_controller(&config.disk, &registers, &dma)?;
        let vectors = io_queues + 1;
        let bar0_bytes = bar0_bytes(&controller);
        let mut function = NvmeFunction {
            pci: PciFunction::new(bar0_bytes, vectors),
            controller,
            registers,
            dma,
            mappings: config.domains.iter().map(|domain| domain.map(Vec::new())).collect(),
            queues: (0..io_queues).map(|_| None).collect(),
            vectors: vec![None; usize::from(vectors)],
            is_admin_call_pending: false,
            replies: Arc::clone(replies),
            connection: Arc::clone(connection),
            log: Arc::clone(log),
            began: Instant::now(),
        };
        function.map_for_device();
        Ok(function)
    }

    /// Bytes of BAR 0.
    pub(crate) fn bar0_bytes(&self) -> u64 {
        bar0_bytes(&self.controller)
    }

    /// Interrupt vectors.
    pub(crate) fn vectors(&self) -> u32 {
        self.vectors.len() as u32
    }

    /// DMA mappings.
    pub(crate) fn dma_maps(&self) -> usize {
        self.dma.len()
    }

    /// I/O completion queues that the host has created.
    pub(crate) fn io_queues(&self) -> usize {
        self.queues.iter().flatten().count()
    }

    /// Reads a register. Offsets after the last register read as zero.
    pub(crate) fn read_register(&self, offset: u64, bytes: usize) -> Result<u64, RegisterFault> {
        match self.controller.read_register(offset, bytes) {
            Err(RegisterFault::Outside(_)) => Ok(0),
            other => other,
        }
    }

    /// Writes a register, and executes its effects. The inner result is the errno of the client.
    pub(crate) fn write_register(
        &mut self,
        config: &VfioUserExport,
        offset: u64,
        bytes: usize,
        value: u64,
    ) -> Result<Result<(), RegisterFault>, VfioSessionError> {
        match self.controller.write_register(offset, bytes, value) {
            Ok(Some(cqid)) if cqid > 0 => self.kick(cqid),
            Ok(_) => self.update(config)?,
            // Writes after the last register are ignored.
            Err(RegisterFault::Outside(_)) => {}
            Err(fault) => return Ok(Err(fault)),
        }
        Ok(Ok(()))
    }

    /// Executes admin commands, passes on their requests to queues, and resumes stopped queues.
    pub(crate) fn update(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.take_replies();
        let mut is_posted = false;
        // The doorbell is written by messages only, so at most one ring of commands is pending.
        loop {
            is_posted |= self.controller.poll(self.began.elapsed().as_nanos() as u64);
            let mut is_asked = false;
            while let Some(request) = self.controller.take_request() {
                is_asked = true;
                self.obey(config, request)?;
            }
            if !is_asked && !self.controller.arm() {
                break;
            }
        }
        self.resume(config)?;
        self.is_admin_call_pending |= is_posted;
        self.call_admin();
        Ok(())
    }

    /// Adds a mapping. The inner result is the errno of the client.
    pub(crate) fn map(
        &mut self,
        config: &VfioUserExport,
        request: &DmaMapRequest,
        file: Option<OwnedFd>,
    ) -> Result<Result<(), DmaError>, VfioSessionError> {
        match self.dma.with(request, file) {
            Ok(dma) => self.set_memory(config, dma).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Removes mappings. The inner result is the errno of the client.
    pub(crate) fn unmap(
        &mut self,
        config: &VfioUserExport,
        request: &DmaUnmapRequest,
    ) -> Result<Result<(), DmaError>, VfioSessionError> {
        match self.dma.without(request) {
            Ok(dma) => self.set_memory(config, dma).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Sets or removes the eventfd of an existing vector.
    pub(crate) fn set_vector(
        &mut self,
        config: &VfioUserExport,
        vector: u32,
        eventfd: Option<&Arc<EventFd>>,
    ) -> Result<(), VfioSessionError> {
        self.vectors[vector as usize] = eventfd.cloned();
        self.call_admin();
        for (queue, remote) in self.queues.iter().zip(&config.queues) {
            if queue.as_ref().is_some_and(|queue| queue.is_running && queue.vector.map(u32::from) == Some(vector)) {
                remote.set_call(eventfd.cloned())?;
            }
        }
        Ok(())
    }

    /// Signals the eventfd of a vector, if set.
    pub(crate) fn signal(&self, vector: u32) {
        if let Some(Some(eventfd)) = self.vectors.get(vector as usize) {
            eventfd.signal_shared();
        }
    }

    /// Signals the admin queue's interrupt if it is due, once vector 0 has an eventfd. I/O queues signal a new eventfd
    /// themselves.
    fn call_admin(&mut self) {
        if self.is_admin_call_pending && self.vectors[0].is_some() {
            self.is_admin_call_pending = false;
            self.signal(0);
        }
    }

    /// Resets the function: restores the power-on state except for memory and eventfds.
    pub(crate) fn reset(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.suspend_all(config)?;
        self.queues.fill_with(|| None);
        // Replies of the deleted queues are obsolete.
        self.replies.take();
        self.is_admin_call_pending = false;
        self.controller = new_controller(&config.disk, &self.registers, &self.dma)?;
        self.pci = PciFunction::new(self.bar0_bytes(), self.vectors.len() as u16);
        self.map_for_device();
        Ok(())
    }

    /// Changes the device; all queues are suspended.
    pub(crate) fn set_device(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.controller.set_namespaces(namespaces(&config.disk.info));
        self.update(config)
    }

    /// Drains all queues.
    pub(crate) fn suspend_all(&mut self, config: &VfioUserExport) -> Result<(), LaneGone> {
        let asked: Vec<_> = self
            .queues
            .iter_mut()
            .zip(&config.queues)
            .filter_map(|(queue, remote)| {
                let queue = queue.as_mut().filter(|queue| queue.is_running)?;
                queue.is_running = false;
                Some(remote.suspend())
            })
            .collect();
        // All suspensions are awaited, also after one has failed.
        let waited: Vec<_> = asked.into_iter().map(|suspension| suspension?.wait()).collect();
        waited.into_iter().try_for_each(|rested| rested.map(drop))
    }

    /// Executes a request of the admin side.
    fn obey(&mut self, config: &VfioUserExport, request: ControllerRequest) -> Result<(), VfioSessionError> {
        match request {
            ControllerRequest::Create(queue) => self.create(queue),
            // Devices cannot cancel a request, and a search for the command would have to wait for the device.
            ControllerRequest::Queue(cqid, ControllerQueueCommand::Abort { sqid, cid }) => {
                self.controller.reply(cqid, ControllerQueueReply::AbortDone { sqid, cid, is_aborted: false });
            }
            ControllerRequest::Queue(cqid, command) => self.command(config, cqid, command)?,
            ControllerRequest::Flush(number) => {
                if self.flush(config)? {
                    self.controller.flushed(number);
                } else {
                    self.log.warn("a flush for the client failed: earlier writes may not be durable");
                    self.controller.flush_failed(number);
                }
            }
        }
        Ok(())
    }

    fn create(&mut self, queue: Box<ControllerIoQueue>) {
        let place = usize::from(queue.cqid()) - 1;
        let kick = EventFd::new().ok().map(Arc::new);
        if kick.is_none() {
            self.log.warn("no descriptor is left for the kick of a queue, so that is polled");
        }
        let vector = queue.vector();
        let slot = Arc::new(Mutex::new(Some(queue)));
        self.queues[place] = Some(CreatedQueue { slot, kick, vector, is_running: false });
    }

    /// Passes a command to an I/O queue, which is stopped afterwards.
    fn command(
        &mut self,
        config: &VfioUserExport,
        cqid: u16,
        command: ControllerQueueCommand,
    ) -> Result<(), VfioSessionError> {
        let place = usize::from(cqid) - 1;
        let Some(created) = &mut self.queues[place] else { return Ok(()) };
        if std::mem::take(&mut created.is_running) {
            config.queues[place].suspend()?.wait()?;
        }
        let slot = Arc::clone(&created.slot);
        // Takes earlier replies: none may arrive after the queue is gone.
        self.take_replies();
        let mut queue = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = queue.as_mut() else { return Ok(()) };
        queue.handle(command);
        while let Some(reply) = queue.take_reply() {
            if matches!(reply, ControllerQueueReply::Deleted | ControllerQueueReply::Stopped) {
                self.queues[place] = None;
            }
            self.controller.reply(cqid, reply);
        }
        Ok(())
    }

    fn take_replies(&mut self) {
        for (cqid, reply) in self.replies.take() {
            self.controller.reply(cqid, reply);
        }
    }

    /// Signals a queue that one of its doorbells was written.
    fn kick(&self, cqid: u16) {
        let queue = self.queues.get(usize::from(cqid) - 1).and_then(Option::as_ref);
        if let Some(kick) = queue.and_then(|queue| queue.kick.as_ref()) {
            kick.signal();
        }
    }

    /// Makes durable what was fetched before. Says whether that worked; the queues are at rest afterwards.
    fn flush(&mut self, config: &VfioUserExport) -> Result<bool, VfioSessionError> {
        // A write without FUA could be in flight, and end after the flush.
        self.suspend_all(config)?;
        // A flush needs a session: a session without commands runs for it.
        let setup = self.setup(&config.name, 0, None);
        config.queues[0].run(setup)?.map_err(VfioSessionError::Queue)?;
        let is_durable = config.queues[0].flush()?;
        config.queues[0].suspend()?.wait()?;
        Ok(is_durable)
    }

    /// Resumes all stopped queues.
    fn resume(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        for (place, remote) in config.queues.iter().enumerate().take(self.queues.len()) {
            let Some(created) = self.queues[place].as_ref().filter(|created| !created.is_running) else { continue };
            let setup = self.setup(&config.name, place, Some(created));
            remote.run(setup)?.map_err(VfioSessionError::Queue)?;
            if let Some(created) = &mut self.queues[place] {
                created.is_running = true;
            }
        }
        Ok(())
    }

    fn setup(&self, export: &str, place: usize, created: Option<&CreatedQueue>) -> NvmeQueueSetup {
        let vector = created.and_then(|created| created.vector);
        NvmeQueueSetup {
            name: format!("{export}, queue {}", place + 1),
            log: Arc::clone(&self.log),
            slot: created.map(|created| Arc::clone(&created.slot)),
            table: Arc::clone(self.controller.memory().table()),
            kick: created.and_then(|created| created.kick.clone()),
            call: vector.and_then(|vector| self.vectors.get(usize::from(vector)).cloned().flatten()),
            replies: Arc::clone(&self.replies),
            connection: Arc::clone(&self.connection),
        }
    }

    /// Suspends the queues, replaces the memory, and resumes them.
    fn set_memory(&mut self, config: &VfioUserExport, dma: DmaSlots) -> Result<(), VfioSessionError> {
        self.suspend_all(config)?;
        self.dma = dma;
        self.controller.set_memory(&self.dma.map());
        self.map_for_device();
        self.update(config)
    }

    /// Maps the controller's present memory for the device.
    fn map_for_device(&mut self) {
        let table = self.controller.memory().table();
        let regions: Vec<_> = table.iter().map(|(_, region)| Arc::clone(region)).collect();
        self.mappings.iter_mut().for_each(|mapping| mapping.replace(regions.clone()));
    }
}

fn new_controller(disk: &NvmeDisk, registers: &View, dma: &DmaSlots) -> io::Result<Controller> {
    let io_queues = disk.io_queues();
    let options = ControllerOptions {
        serial: disk.serial.clone(),
        subsystem: format!("nqn.2026-11.local.blkyard:{}", disk.serial),
        io_queues,
        queue_entries: ENTRIES_MAX,
        depth: DEPTH,
        vectors: io_queues + 1,
        transfer_bytes: TRANSFER_BYTES,
        ..ControllerOptions::default()
    };
    Controller::new(options, registers.clone(), &dma.map(), namespaces(&disk.info))
}

/// The only namespace; none if the device's logical blocks cannot be represented.
fn namespaces(info: &DeviceInfo) -> NamespaceTable {
    let mut table = NamespaceTable::new(NSID);
    table.set(NSID, ServedNamespace::new(NSID, 0, info));
    table
}

fn bar0_bytes(controller: &Controller) -> u64 {
    (controller.register_bytes().max(DOORBELLS) as u64).next_power_of_two()
}
