//! The NVMe controller of a session: its registers and admin queue on the control path, its I/O queues on their lanes.
//!
//! Registers are written by messages, and doorbells by messages or in memory that the client has, where each queue has
//! an eventfd ([`DoorbellEventfds`]) or is polled. The admin queue is processed after a message or its eventfd, and
//! with polled doorbells periodically. Commands of the admin side for an I/O queue are executed while that queue is
//! suspended, like changes of the device: suspend, change, resume. Two need no drained queue, and are executed by the
//! lane of a running one: see [`QueueOrders`].
//!
//! A queue may drain for as long as its device takes. A message waits for that a moment only: what takes longer, such
//! as a deletion or a reset, is complete later, and the host sees it by the completion or by CSTS. The reply to
//! a change of memory says that the old memory is no longer used, so it is sent later: see `change.rs`.
//!
//! Abort of an I/O command: the lane of a running queue aborts the command as far as no device has it
//! ([`ControllerIoQueue::abort`]). A command at a device is answered with "not aborted": a device cannot cancel it.
//!
//! Message handling is in `session.rs`, handover in `handover.rs`.

use std::collections::VecDeque;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkyard_mem::{DmaMapping, Region, View};
use blkyard_nvme::registers::DOORBELLS;
use blkyard_nvme::{
    Controller, ControllerIoQueue, ControllerOptions, ControllerQueueCommand, ControllerQueueReply, ControllerRequest,
    RegisterFault,
};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{DmaMapRequest, DmaUnmapRequest};

use super::change::{FunctionChange, PendingChange};
use super::doorbells::{DoorbellEventfds, doorbell_bytes, registers_in};
use super::memory::{DmaError, DmaSlots};
use super::pci::PciFunction;
use super::queue::{NvmeQueueSetup, QueueOrders, QueueSlot, ReplyQueue};
use super::session::VfioSessionError;
use super::{NvmeDisk, NvmeDoorbells, TRANSFER_BYTES, VfioUserExport};
use crate::core::{ExportLog, LaneGone, PendingFlush, Suspension, drain_poll};

/// Maximum entries of an I/O queue.
const ENTRIES_MAX: u16 = 1024;
/// Maximum commands in flight of an I/O queue.
const DEPTH: u16 = 256;

/// Calls of the controller in one update, at most: a host with shared doorbells can add admin commands without end.
const POLLS_MAX: usize = 64;
/// Shortest and longest polling interval of the admin queue's shared doorbell. In between it is an eighth of the time
/// since the last completion. Each poll takes 40 to 80 us of a CPU; at the longest interval that is below 0.1 % of it.
const ADMIN_POLL: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(100);

/// Time for which a message waits for queues to drain or to flush.
pub(super) const DRAIN_WAIT: Duration = Duration::from_millis(20);

/// State of a created queue.
enum QueueState {
    /// In its slot.
    Stopped,
    /// On its lane.
    Running,
    /// On its lane, until its last bio is back.
    Draining(Suspension<()>),
}

/// An I/O completion queue that the host has created.
pub(super) struct CreatedQueue {
    /// Slot of the stopped queue.
    pub(super) slot: QueueSlot,
    /// Commands for it while it runs.
    orders: Arc<QueueOrders>,
    /// Kick eventfd for messages that write its doorbells. Unset if the client has doorbell eventfds or polled
    /// doorbells, or if no descriptor was left.
    pub(super) kick: Option<Arc<EventFd>>,
    vector: Option<u16>,
    /// Whether the command that creates it is not answered.
    pub(super) is_new: bool,
    /// Whether the vector's eventfd was set while the queue was not running.
    pub(super) is_call_new: bool,
    state: QueueState,
}

/// The controller and the state of its client.
pub(crate) struct NvmeFunction {
    pub(crate) pci: PciFunction,
    pub(super) controller: Controller,
    /// Memory of the doorbell registers, at their offset in its region.
    pub(super) registers: View,
    /// Whether the client maps that memory and signals nothing, so that it is polled.
    pub(super) is_polled: bool,
    /// What the client signals otherwise, if it maps that memory.
    pub(super) doorbell_eventfds: DoorbellEventfds,
    /// Whether admin commands are left from the last update.
    is_behind: bool,
    /// Time of the last update, and of the last admin completion.
    pub(super) updated: Instant,
    /// Since when requests wait for queues, and none was executed.
    waits_since: Option<Instant>,
    admin_active: Instant,
    pub(super) dma: DmaSlots,
    /// Keeps the memory mapped for the device, independent of its queues.
    mappings: Vec<DmaMapping>,
    /// Indexed by identifier of the completion queue, from 1.
    pub(super) queues: Vec<Option<CreatedQueue>>,
    /// Requests of the controller that wait for queues, in order.
    requests: VecDeque<ControllerRequest>,
    /// The running flush, and its number.
    flushing: Option<(u64, PendingFlush)>,
    /// Eventfd of each vector.
    pub(super) vectors: Vec<Option<Arc<EventFd>>>,
    /// The admin queue interrupted while vector 0 had no eventfd.
    pub(super) is_admin_call_pending: bool,
    /// The change that waits for a silent device. Queues stay stopped meanwhile.
    pub(super) change: Option<PendingChange>,
    replies: Arc<ReplyQueue>,
    pub(super) log: Arc<ExportLog>,
    began: Instant,
    /// Time of the controller at `began`, ns: that of the process that it comes from.
    pub(super) before_ns: u64,
}

impl NvmeFunction {
    /// A controller after power-on, for the client of this connection.
    ///
    /// # Errors
    /// The system has no memory left.
    pub(crate) fn new(
        config: &VfioUserExport,
        replies: &Arc<ReplyQueue>,
        log: &Arc<ExportLog>,
    ) -> io::Result<NvmeFunction> {
        let len = DOORBELLS + doorbell_bytes(&config.disk);
        let (registers, dma) = (registers_in(Region::shared(len)?), DmaSlots::default());
        let controller = new_controller(&config.disk, &registers, &dma)?;
        Ok(NvmeFunction::with(config, (replies, log), registers, dma, controller))
    }

    /// A controller with this memory.
    pub(super) fn with(
        config: &VfioUserExport,
        (replies, log): (&Arc<ReplyQueue>, &Arc<ExportLog>),
        registers: View,
        dma: DmaSlots,
        controller: Controller,
    ) -> NvmeFunction {
        let io_queues = config.disk.io_queues();
        let vectors = io_queues + 1;
        let bar0_bytes = bar0_bytes(&controller);
        let began = Instant::now();
        let mut function = NvmeFunction {
            pci: PciFunction::new(config.disk.pci_id, bar0_bytes, vectors),
            controller,
            registers,
            is_polled: config.disk.doorbells == NvmeDoorbells::Shared,
            doorbell_eventfds: DoorbellEventfds::default(),
            is_behind: false,
            updated: began,
            waits_since: None,
            admin_active: began,
            dma,
            mappings: config.domains.iter().map(|domain| domain.map(Vec::new())).collect(),
            queues: (0..io_queues).map(|_| None).collect(),
            requests: VecDeque::new(),
            flushing: None,
            vectors: vec![None; usize::from(vectors)],
            is_admin_call_pending: false,
            change: None,
            replies: Arc::clone(replies),
            log: Arc::clone(log),
            began,
            before_ns: 0,
        };
        function.map_for_device();
        function
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

    /// Bytes of mapped memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.dma.bytes()
    }

    /// I/O completion queues that the host has created.
    pub(crate) fn io_queues(&self) -> usize {
        self.queues.iter().flatten().count()
    }

    /// Reads a register. Offsets after the last register read as zero, and a function that is off as ones.
    pub(crate) fn read_register(&self, offset: u64, bytes: usize) -> Result<u64, RegisterFault> {
        let value = match self.controller.read_register(offset, bytes) {
            Err(RegisterFault::Outside(_)) => 0,
            other => other?,
        };
        Ok(if self.pci.is_off() { u64::MAX } else { value })
    }

    /// Writes a register, and executes its effects; a function that is off ignores it. The inner result is the errno of
    /// the client.
    pub(crate) fn write_register(
        &mut self,
        config: &VfioUserExport,
        offset: u64,
        bytes: usize,
        value: u64,
    ) -> Result<Result<(), RegisterFault>, VfioSessionError> {
        if self.pci.is_off() {
            return Ok(Ok(()));
        }
        match self.controller.write_register(offset, bytes, value) {
            Ok(Some(cqid)) if cqid > 0 => self.kick(config, cqid)?,
            Ok(_) => self.update(config)?,
            // Writes after the last register are ignored.
            Err(RegisterFault::Outside(_)) => {}
            Err(fault) => return Ok(Err(fault)),
        }
        Ok(Ok(()))
    }

    /// Latest time of the next [`NvmeFunction::update`], or look at the queues that an end waits for.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.is_ending() {
            // The controller is not updated any more.
            return self.drain_deadline();
        }
        let after = |until_ns: u64| self.began + Duration::from_nanos(until_ns.saturating_sub(self.before_ns));
        let keep_alive = self.controller.deadline_ns().map(after);
        let idle = (self.updated - self.admin_active) / 8;
        let poll = if self.is_behind { Duration::ZERO } else { idle.clamp(*ADMIN_POLL.start(), *ADMIN_POLL.end()) };
        let doorbell = (self.is_polled && self.controller.is_processing()).then(|| self.updated + poll);
        [keep_alive, doorbell, self.drain_deadline()].into_iter().flatten().min()
    }

    /// Time of the controller.
    pub(super) fn time_ns(&self, now: Instant) -> u64 {
        self.before_ns.saturating_add((now - self.began).as_nanos() as u64)
    }

    /// Whether that time has come.
    pub(crate) fn is_due(&self) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Whether requests wait for queues that are to be polled now.
    pub(crate) fn is_drain_due(&self) -> bool {
        self.drain_deadline().is_some_and(|deadline| deadline <= Instant::now())
    }

    fn drain_deadline(&self) -> Option<Instant> {
        let changes_since = self.change.as_ref().map(|pending| pending.since);
        let since = [self.waits_since, changes_since].into_iter().flatten().min()?;
        Some(self.updated + drain_poll(self.updated.saturating_duration_since(since)))
    }

    /// Executes admin commands, passes on their requests to queues, and resumes stopped queues.
    pub(crate) fn update(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.take_replies();
        let mut is_posted = false;
        self.updated = Instant::now();
        self.is_behind = true;
        // Waits for new requests only.
        let wait = if self.requests.is_empty() { DRAIN_WAIT } else { Duration::ZERO };
        let until = Some(self.updated + wait);
        for _ in 0..POLLS_MAX {
            is_posted |= self.controller.poll(self.time_ns(self.updated));
            self.requests.extend(std::iter::from_fn(|| self.controller.take_request()));
            let is_executed = self.advance(config, until)?;
            if is_executed {
                self.waits_since = None;
            }
            // The answer of a creation is completed by the next poll.
            if !is_executed && !self.resume(config)? && !self.controller.arm() {
                self.is_behind = false;
                break;
            }
        }
        self.waits_since = if self.requests.is_empty() { None } else { self.waits_since.or(Some(self.updated)) };
        self.resume(config)?;
        self.is_admin_call_pending |= is_posted;
        if is_posted {
            self.admin_active = self.updated;
        }
        self.call_admin(config)?;
        // A lane notices this only while one of its queues runs.
        if self.controller.memory().table().is_faulted() {
            return Err(VfioSessionError::Truncated);
        }
        Ok(())
    }

    /// Adds a mapping. The inner result is the errno of the client. The mapping is in use unless the change is
    /// [pending](NvmeFunction::is_changing).
    pub(crate) fn map(
        &mut self,
        config: &VfioUserExport,
        request: &DmaMapRequest,
        file: Option<OwnedFd>,
    ) -> Result<Result<(), DmaError>, VfioSessionError> {
        match self.dma.with(request, file) {
            Ok(dma) => self.change_memory(config, dma).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Removes mappings. As for [`NvmeFunction::map`].
    pub(crate) fn unmap(
        &mut self,
        config: &VfioUserExport,
        request: &DmaUnmapRequest,
    ) -> Result<Result<(), DmaError>, VfioSessionError> {
        match self.dma.without(request) {
            Ok(dma) => self.change_memory(config, dma).map(Ok),
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
        self.call_admin(config)?;
        for (queue, remote) in self.queues.iter_mut().zip(&config.queues) {
            let is_its = |queue: &&mut CreatedQueue| queue.vector.map(u32::from) == Some(vector);
            let Some(queue) = queue.as_mut().filter(is_its) else { continue };
            // The session of a draining queue may have ended.
            queue.is_call_new = !matches!(queue.state, QueueState::Running);
            if !matches!(queue.state, QueueState::Stopped) {
                remote.set_call(eventfd.cloned())?;
            }
        }
        Ok(())
    }

    /// Signals the eventfd of a vector, if set. The first lane does: this thread could wait for the client.
    pub(crate) fn signal(&self, config: &VfioUserExport, vector: u32) -> Result<(), LaneGone> {
        if let Some(Some(eventfd)) = self.vectors.get(vector as usize)
            && let Err(why) = config.queues[0].signal(eventfd)?
        {
            self.log.warn(format_args!("vector {vector} is not signalled: {why}"));
        }
        Ok(())
    }

    /// Signals the admin queue's interrupt if it is due, once vector 0 has an eventfd. I/O queues signal a new eventfd
    /// themselves.
    fn call_admin(&mut self, config: &VfioUserExport) -> Result<(), LaneGone> {
        if self.is_admin_call_pending && self.vectors[0].is_some() {
            self.is_admin_call_pending = false;
            self.signal(config, 0)?;
        }
        Ok(())
    }

    /// Resets the function: restores the power-on state except for memory and eventfds. Returns whether it is done.
    pub(crate) fn reset(&mut self, config: &VfioUserExport) -> Result<bool, VfioSessionError> {
        self.begin_change(config, FunctionChange::Reset)
    }

    /// The same with drained queues.
    pub(super) fn restart(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.queues.fill_with(|| None);
        self.requests.clear();
        self.waits_since = None;
        // Replies of the deleted queues are obsolete.
        self.replies.take();
        self.is_admin_call_pending = false;
        self.controller = new_controller(&config.disk, &self.registers, &self.dma)?;
        self.pci = self.reset_pci(config);
        self.map_for_device();
        Ok(())
    }

    /// The PCI function after a reset.
    pub(super) fn reset_pci(&self, config: &VfioUserExport) -> PciFunction {
        PciFunction::new(config.disk.pci_id, self.bar0_bytes(), self.vectors.len() as u16)
    }

    /// Changes the device; all queues are suspended.
    pub(crate) fn set_device(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.controller.set_namespaces(config.disk.table());
        self.update(config)
    }

    /// Drains all queues, and waits for them.
    pub(crate) fn suspend_all(&mut self, config: &VfioUserExport) -> Result<(), LaneGone> {
        self.suspend_until(config, None).map(drop)
    }

    /// Drains all queues, and waits for them until then. Returns whether all are drained and no flush runs.
    pub(super) fn suspend_until(&mut self, config: &VfioUserExport, until: Option<Instant>) -> Result<bool, LaneGone> {
        let places = 0..self.queues.len();
        let asked: Vec<_> = places.clone().map(|place| self.begin_drain(config, place)).collect();
        // All are awaited, also after one has failed.
        let drained: Vec<_> = places.map(|place| self.drain(config, place, until)).collect();
        let flushed = match self.flush_number() {
            Some(number) => self.end_flush(until).map(|is_durable| {
                let Some(is_durable) = is_durable else { return false };
                self.requests.retain(|request| !matches!(request, ControllerRequest::Flush(of) if *of == number));
                self.report_flush(number, is_durable);
                true
            }),
            None => Ok(true),
        };
        asked.into_iter().collect::<Result<(), _>>()?;
        let silent = drained.into_iter().chain([flushed]).collect::<Result<Vec<_>, _>>()?;
        Ok(silent.into_iter().all(|is_silent| is_silent))
    }

    /// Drains all queues, and executes each request of the controller. Queues stay stopped until the next
    /// [`NvmeFunction::update`].
    pub(super) fn quiesce(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
        self.suspend_all(config)?;
        self.take_replies();
        loop {
            self.requests.extend(std::iter::from_fn(|| self.controller.take_request()));
            if !self.advance(config, None)? {
                return Ok(());
            }
        }
    }

    /// Executes requests as far as their queues drain until then. Requests for one queue are executed in order, and a
    /// flush after all before it. Returns whether any was executed.
    ///
    /// No request waits for a flush before it. Thus a change of memory, of namespaces or of the doorbells, and a reset,
    /// reach a stopped queue at once, and a queue that ends leaves no request behind.
    fn advance(&mut self, config: &VfioUserExport, until: Option<Instant>) -> Result<bool, VfioSessionError> {
        let running = self.flush_number();
        let mut requests = std::mem::take(&mut self.requests);
        // Flushes from before a reset are obsolete. They must not accumulate behind a slow one.
        requests.retain(|request| match request {
            ControllerRequest::Flush(number) => running == Some(*number) || self.controller.awaits_flush(*number),
            _ => true,
        });
        // All queues drain at the same time.
        for request in &requests {
            if let ControllerRequest::Queue(cqid, command) = request
                && !is_order(command)
            {
                self.begin_drain(config, usize::from(*cqid) - 1)?;
            }
        }
        let mut is_executed = false;
        while let Some(request) = requests.pop_front() {
            let is_blocked = match &request {
                ControllerRequest::Create(_) | ControllerRequest::Queue(_, ControllerQueueCommand::Abort { .. }) => {
                    false
                }
                ControllerRequest::Queue(cqid, _) => {
                    let is_its = |earlier: &_| matches!(earlier, ControllerRequest::Queue(other, _) if other == cqid);
                    self.requests.iter().any(is_its)
                }
                ControllerRequest::Flush(_) => !self.requests.is_empty(),
            };
            match if is_blocked { Some(request) } else { self.obey(config, request, until)? } {
                Some(request) => self.requests.push_back(request),
                None => is_executed = true,
            }
        }
        Ok(is_executed)
    }

    /// Has a running queue drain.
    fn begin_drain(&mut self, config: &VfioUserExport, place: usize) -> Result<(), LaneGone> {
        if let Some(created) = &mut self.queues[place]
            && matches!(created.state, QueueState::Running)
        {
            // Without a lane there is nothing to wait for.
            created.state = QueueState::Stopped;
            created.state = QueueState::Draining(config.queues[place].suspend()?);
        }
        Ok(())
    }

    /// Waits until a queue is drained, or until then. Returns whether it is.
    fn drain(&mut self, config: &VfioUserExport, place: usize, until: Option<Instant>) -> Result<bool, LaneGone> {
        self.begin_drain(config, place)?;
        let Some(created) = &mut self.queues[place] else { return Ok(true) };
        let QueueState::Draining(suspension) = &created.state else { return Ok(true) };
        let is_drained = suspension.wait_until(until);
        if !matches!(is_drained, Ok(false)) {
            created.state = QueueState::Stopped;
            self.obey_orders(place);
        }
        is_drained
    }

    /// Executes a request of the admin side, or returns it if its queues are not drained by then.
    fn obey(
        &mut self,
        config: &VfioUserExport,
        request: ControllerRequest,
        until: Option<Instant>,
    ) -> Result<Option<ControllerRequest>, VfioSessionError> {
        match request {
            ControllerRequest::Create(queue) => self.create(queue),
            ControllerRequest::Queue(cqid, command) if is_order(&command) => self.order(config, cqid, command)?,
            ControllerRequest::Queue(cqid, command) => {
                if !self.drain(config, usize::from(cqid) - 1, until)? {
                    return Ok(Some(ControllerRequest::Queue(cqid, command)));
                }
                self.command(cqid, command);
            }
            ControllerRequest::Flush(number) => match self.flush(config, number, until)? {
                Some(is_durable) => self.report_flush(number, is_durable),
                None => return Ok(Some(ControllerRequest::Flush(number))),
            },
        }
        Ok(None)
    }

    fn flush_number(&self) -> Option<u64> {
        self.flushing.as_ref().map(|(number, _)| *number)
    }

    fn report_flush(&mut self, number: u64, is_durable: bool) {
        if is_durable {
            self.controller.flushed(number);
        } else {
            self.log.warn("a flush for the client failed: earlier writes may not be durable");
            self.controller.flush_failed(number);
        }
    }

    pub(super) fn create(&mut self, queue: Box<ControllerIoQueue>) {
        let place = usize::from(queue.cqid()) - 1;
        let is_signalled = self.doorbell_eventfds.get(place + 1).is_some();
        let has_kick = !self.is_polled && !is_signalled;
        let kick = if has_kick { EventFd::new().ok().map(Arc::new) } else { None };
        if has_kick && kick.is_none() {
            self.log.warn("no descriptor is left for the kick of a queue, so that is polled");
        }
        let vector = queue.vector();
        let slot = Arc::new(Mutex::new(Some(queue)));
        let state = QueueState::Stopped;
        let (orders, is_new, is_call_new) = (Arc::default(), true, false);
        self.queues[place] = Some(CreatedQueue { slot, orders, kick, vector, is_new, is_call_new, state });
    }

    /// Has an I/O queue execute a command, running or stopped, without a wait. Its reply comes later.
    fn order(&mut self, config: &VfioUserExport, cqid: u16, command: ControllerQueueCommand) -> Result<(), LaneGone> {
        let place = usize::from(cqid) - 1;
        let Some(created) = &self.queues[place] else {
            if let ControllerQueueCommand::Abort { sqid, cid } = command {
                self.controller.reply(cqid, ControllerQueueReply::AbortDone { sqid, cid, is_aborted: false });
            }
            return Ok(());
        };
        created.orders.push(command);
        if matches!(created.state, QueueState::Stopped) {
            self.obey_orders(place);
            return Ok(());
        }
        config.queues[place].notify()
    }

    /// Executes the orders that a stopped queue has left.
    fn obey_orders(&mut self, place: usize) {
        let orders = self.queues[place].as_ref().map(|created| created.orders.take());
        for command in orders.into_iter().flatten() {
            self.command(place as u16 + 1, command);
        }
    }

    /// Passes a command to a stopped I/O queue.
    fn command(&mut self, cqid: u16, command: ControllerQueueCommand) {
        let place = usize::from(cqid) - 1;
        let Some(created) = &self.queues[place] else { return };
        let slot = Arc::clone(&created.slot);
        // Takes earlier replies: none may arrive after the queue is gone.
        self.take_replies();
        let mut queue = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = queue.as_mut() else { return };
        queue.handle(command);
        while let Some(reply) = queue.take_reply() {
            if matches!(reply, ControllerQueueReply::Deleted | ControllerQueueReply::Stopped) {
                self.queues[place] = None;
            }
            self.controller.reply(cqid, reply);
        }
    }

    pub(super) fn take_replies(&mut self) {
        for (cqid, reply) in self.replies.take() {
            self.controller.reply(cqid, reply);
        }
    }

    /// Makes durable what was fetched before, until then at most. Returns the result; the queues are drained then.
    fn flush(
        &mut self,
        config: &VfioUserExport,
        number: u64,
        until: Option<Instant>,
    ) -> Result<Option<bool>, VfioSessionError> {
        if self.flushing.is_none() {
            // A write without FUA could be in flight, and end after the flush.
            for place in 0..self.queues.len() {
                self.begin_drain(config, place)?;
            }
            for place in 0..self.queues.len() {
                if !self.drain(config, place, until)? {
                    return Ok(None);
                }
            }
            config.queues[0].open().map_err(VfioSessionError::Queue)?;
            self.flushing = Some((number, config.queues[0].begin_flush()?));
        }
        Ok(self.end_flush(until)?)
    }

    /// Waits for the flush that runs, until then at most. Returns its result.
    fn end_flush(&mut self, until: Option<Instant>) -> Result<Option<bool>, LaneGone> {
        let Some((_, flush)) = &self.flushing else { return Ok(None) };
        let is_durable = flush.wait_until(until)?;
        if is_durable.is_some() {
            self.flushing = None;
        }
        Ok(is_durable)
    }

    /// Resumes all stopped queues for which no request waits, and answers the creation of new ones. Returns whether
    /// there were any.
    fn resume(&mut self, config: &VfioUserExport) -> Result<bool, VfioSessionError> {
        let mut is_answered = false;
        if self.is_halted() {
            return Ok(false);
        }
        for (place, remote) in config.queues.iter().enumerate().take(self.queues.len()) {
            let waits = self.requests.iter().any(|request| match request {
                ControllerRequest::Queue(cqid, _) => usize::from(*cqid) == place + 1,
                _ => true,
            });
            let is_stopped = |created: &&CreatedQueue| matches!(created.state, QueueState::Stopped) && !waits;
            let Some(created) = self.queues[place].as_ref().filter(is_stopped) else { continue };
            let is_new = created.is_new;
            let setup = self.setup(&config.name, place, created);
            let reply = match remote.run(setup)? {
                Ok(()) => ControllerQueueReply::Created,
                Err(why) if is_new => {
                    self.log.warn(format_args!("queue {} is not created: {why}", place + 1));
                    ControllerQueueReply::NotCreated
                }
                Err(why) => return Err(VfioSessionError::Queue(why)),
            };
            match &mut self.queues[place] {
                Some(created) if reply == ControllerQueueReply::Created => {
                    created.state = QueueState::Running;
                    (created.is_new, created.is_call_new) = (false, false);
                }
                place => *place = None,
            }
            if is_new {
                self.controller.reply(place as u16 + 1, reply);
                is_answered = true;
            }
        }
        Ok(is_answered)
    }

    /// The setup of a session for this queue.
    fn setup(&self, export: &str, place: usize, created: &CreatedQueue) -> NvmeQueueSetup {
        let call = created.vector.and_then(|vector| self.vectors.get(usize::from(vector)).cloned().flatten());
        NvmeQueueSetup {
            name: format!("{export}, queue {}", place + 1),
            log: Arc::clone(&self.log),
            slot: Arc::clone(&created.slot),
            orders: Arc::clone(&created.orders),
            kick: self.kick_of(place, created),
            call,
            is_call_new: created.is_call_new,
            replies: Arc::clone(&self.replies),
        }
    }

    /// Gives the present memory to the controller and its queues.
    pub(super) fn publish_memory(&mut self, config: &VfioUserExport) -> Result<(), VfioSessionError> {
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

/// Whether a queue executes a command while it runs.
fn is_order(command: &ControllerQueueCommand) -> bool {
    matches!(command, ControllerQueueCommand::Abort { .. } | ControllerQueueCommand::SetMemory(..))
}

fn new_controller(disk: &NvmeDisk, registers: &View, dma: &DmaSlots) -> io::Result<Controller> {
    Controller::new(options(disk), registers.clone(), &dma.map(), disk.table())
}

pub(super) fn options(disk: &NvmeDisk) -> ControllerOptions {
    let io_queues = disk.io_queues();
    ControllerOptions {
        vendor: disk.pci_id.vendor,
        serial: disk.serial.clone(),
        subsystem: disk.subsystem(),
        io_queues,
        // All commands of a ring can be in flight: those for a namespace that hangs keep no others out.
        queue_entries: if disk.namespaces.len() > 1 { DEPTH } else { ENTRIES_MAX },
        depth: DEPTH,
        vectors: io_queues + 1,
        transfer_bytes: TRANSFER_BYTES,
        doorbell_stride: ControllerOptions::widest_stride(io_queues),
        // They would only be written and read in addition.
        has_shadow: disk.doorbells == NvmeDoorbells::Message,
        ..ControllerOptions::default()
    }
}

fn bar0_bytes(controller: &Controller) -> u64 {
    (controller.register_bytes().max(DOORBELLS) as u64).next_power_of_two()
}
