//! Bring-up: from a controller in any state to a live one, command by command.
//!
//! Memory of the admin queue, registers, Identify Controller, limits, number of queues, shadow doorbells, I/O queues,
//! events, keep-alive, namespaces. If the controller rejects an I/O queue, all are deleted and fewer are created, so
//! that the split into kinds is made for the number there is. Their number was granted before, and can be asked for
//! only until the first one is created.

use blkyard_mem::View;
use blkyard_mq::QueueCounts;

use crate::host::admin::{ADMIN_TIMEOUT_NS, AdminData, AdminMemory, AdminQueue};
use crate::host::host_controller::{AdminPurpose, HostPhase};
use crate::host::io_queues::IoQueueSlot;
use crate::host::negotiate::{doorbell_queues, granted, queues_dword, ring_entries, split, vector};
use crate::host::nvm_limits::NvmLimits;
use crate::host::scan::{NamespaceScope, Scan, ScannedNamespace};
use crate::host::watch::KeepAlive;
use crate::host::{ControllerState, ControllerTransport, Enable, HostController, HostEvent, NvmeHostError};
use crate::{Doorbells, IdentifyController, NvmeStatus, PAGE, Sqe, admin, cns, feature};

/// Time for all commands of a bring-up together, ns. Each has the time of an admin command, but they may be thousands.
const SET_UP_MAX_NS: u64 = 5 * ADMIN_TIMEOUT_NS;
/// Notices to enable if supported: namespace attributes changed. Errors are always reported.
const NOTICES: u32 = 1 << 8;

/// A command of the bring-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SetupStep {
    Identify,
    NvmLimits,
    QueueCount,
    Shadow,
    CreateCq(u16),
    CreateSq(u16),
    /// Queues are deleted from this one down, and fewer are requested afterwards.
    DeleteSq(u16),
    DeleteCq(u16),
    Events,
    KeepAlive,
    Scan,
}

impl SetupStep {
    pub(crate) fn name(self) -> &'static str {
        match self {
            SetupStep::Identify => "Identify (controller)",
            SetupStep::NvmLimits => "Identify (NVM command set)",
            SetupStep::QueueCount => "Set Features (number of queues)",
            SetupStep::Shadow => "Doorbell Buffer Config",
            SetupStep::CreateCq(_) => "Create I/O Completion Queue",
            SetupStep::CreateSq(_) => "Create I/O Submission Queue",
            SetupStep::DeleteSq(_) => "Delete I/O Submission Queue",
            SetupStep::DeleteCq(_) => "Delete I/O Completion Queue",
            SetupStep::Events => "Set Features (asynchronous events)",
            SetupStep::KeepAlive => "Set Features (keep-alive timer)",
            SetupStep::Scan => "Identify (namespaces)",
        }
    }
}

impl<T: ControllerTransport> HostController<T> {
    /// Starts the bring-up.
    pub(crate) fn connect(&mut self, now_ns: u64) {
        self.is_mute = false;
        if let Some(admin) = &self.admin {
            self.phase = HostPhase::Enable(Enable::new(admin.rings()));
            return;
        }
        let made = AdminMemory::new(&self.transport)
            .and_then(|memory| Ok((memory.rings(&self.transport).ok_or(NvmeHostError::Memory)?, memory)));
        match made {
            Ok((rings, memory)) => {
                self.admin_memory = Some(memory);
                self.phase = HostPhase::Enable(Enable::new(rings));
            }
            Err(error) => self.end(error, now_ns),
        }
    }

    /// Continues after the controller is enabled.
    pub(crate) fn enabled(&mut self, now_ns: u64) {
        let HostPhase::Enable(enable) = &self.phase else { return };
        self.capabilities = enable.capabilities();
        if let Some(memory) = &self.admin_memory {
            let shared = self.transport.doorbells();
            let is_forwarded = shared.is_none();
            let registers = shared.map_or_else(|| self.private_doorbells(), Ok);
            let (registers, rings) = match (registers, memory.rings(&self.transport)) {
                (Ok(registers), Some(rings)) => (registers, rings),
                (Err(error), _) => return self.end(error, now_ns),
                (_, None) => return self.end(NvmeHostError::Memory, now_ns),
            };
            let stride = self.capabilities.doorbell_stride;
            if doorbell_queues(registers.len(), stride) == 0 {
                return self.end(NvmeHostError::Memory, now_ns);
            }
            self.registers = Some(registers.clone());
            let memory = self.admin_memory.take();
            self.admin = memory.map(|memory| AdminQueue::new(memory, rings, registers, is_forwarded, stride));
        }
        self.set_up_until_ns = now_ns.saturating_add(SET_UP_MAX_NS);
        self.set_up(SetupStep::Identify, now_ns);
    }

    /// Time limit of a command that is sent now.
    fn command_deadline_ns(&self, now_ns: u64) -> u64 {
        let own_ns = now_ns.saturating_add(ADMIN_TIMEOUT_NS);
        if self.state == ControllerState::Connecting { own_ns.min(self.set_up_until_ns) } else { own_ns }
    }

    /// Sends the command of a step; steps that do not apply are skipped.
    pub(crate) fn set_up(&mut self, step: SetupStep, now_ns: u64) {
        self.phase = HostPhase::Setup(step);
        let command = match step {
            SetupStep::Identify => Ok((Sqe::identify(cns::CONTROLLER, 0, 0, 0), AdminData::Read)),
            SetupStep::NvmLimits => Ok((Sqe::identify(cns::CSI_CONTROLLER, 0, 0, 0), AdminData::Read)),
            SetupStep::QueueCount => {
                Ok((Sqe::feature(admin::SET_FEATURES, feature::QUEUES, queues_dword(self.asked)), AdminData::None))
            }
            SetupStep::Shadow => match self.shadow_command() {
                Some(sqe) => Ok((sqe, AdminData::None)),
                None => return self.doorbells_ready(false, now_ns),
            },
            SetupStep::CreateCq(qid) | SetupStep::CreateSq(qid) => {
                let is_sq = matches!(step, SetupStep::CreateSq(_));
                self.create_command(qid, is_sq).map(|sqe| (sqe, AdminData::None))
            }
            SetupStep::DeleteSq(qid) | SetupStep::DeleteCq(qid) => {
                let is_sq = matches!(step, SetupStep::DeleteSq(_));
                let queue = self.queue_mut(qid).filter(|queue| if is_sq { queue.has_sq } else { queue.has_cq });
                match queue {
                    Some(queue) => Ok((queue.delete(is_sq), AdminData::None)),
                    None => return self.deleted(step, now_ns),
                }
            }
            SetupStep::Events => match self.identify.async_events & NOTICES {
                0 => return self.set_up(SetupStep::KeepAlive, now_ns),
                notices => Ok((Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, notices), AdminData::None)),
            },
            SetupStep::KeepAlive if self.config.keep_alive_ms > 0 && self.identify.keep_alive > 0 => {
                Ok((Sqe::feature(admin::SET_FEATURES, feature::KEEP_ALIVE, self.config.keep_alive_ms), AdminData::None))
            }
            SetupStep::KeepAlive => return self.set_up(SetupStep::Scan, now_ns),
            SetupStep::Scan => {
                self.scan = Some(Scan::new(NamespaceScope::All, self.namespaces.clone()));
                return self.go_on_scanning(now_ns);
            }
        };
        match command {
            Ok((sqe, data)) => {
                let deadline_ns = self.command_deadline_ns(now_ns);
                if !self.submit(sqe, data, AdminPurpose::Setup(step), deadline_ns) {
                    self.end(NvmeHostError::Timeout(step.name()), now_ns);
                }
            }
            Err(error) => self.end(error, now_ns),
        }
    }

    /// Handles the completion of a step's command.
    pub(crate) fn setup_completed(&mut self, step: SetupStep, slot: u16, status: NvmeStatus, result: u64, now_ns: u64) {
        if !matches!(self.phase, HostPhase::Setup(current) if current == step) {
            // The bring-up was cancelled meanwhile.
            return;
        }
        let is_ok = status.is_success();
        match step {
            SetupStep::Identify if is_ok => {
                if let Some(admin) = &self.admin {
                    self.identify = IdentifyController::parse(&admin.data(slot));
                }
                self.watch.start(self.identify.abort_limit);
                self.set_up(SetupStep::NvmLimits, now_ns);
            }
            SetupStep::Identify => self.end(NvmeHostError::Command { command: step.name(), status }, now_ns),
            SetupStep::NvmLimits => {
                // Before version 2.0 there are none.
                let data = self.admin.as_ref().filter(|_| is_ok).map(|admin| admin.data(slot));
                self.nvm_limits = data.map_or_else(NvmLimits::default, |data| NvmLimits::parse(&data));
                // Private memory in place of the registers is rounded up to a page.
                let bytes = self.registers.as_ref().map_or(0, View::len).min(self.transport.doorbell_bytes());
                let doorbells = doorbell_queues(bytes, self.capabilities.doorbell_stride);
                self.asked = self.config.queues.total().min(doorbells);
                self.set_up(SetupStep::QueueCount, now_ns);
            }
            SetupStep::QueueCount => {
                let queues = if is_ok { granted(result, self.asked) } else { 0 };
                self.plan(queues, now_ns);
            }
            SetupStep::Shadow => self.doorbells_ready(is_ok, now_ns),
            SetupStep::CreateCq(qid) if is_ok => {
                self.queue_mut(qid).into_iter().for_each(|queue| queue.has_cq = true);
                self.set_up(SetupStep::CreateSq(qid), now_ns);
            }
            SetupStep::CreateSq(qid) if is_ok => {
                self.queue_mut(qid).into_iter().for_each(|queue| queue.has_sq = true);
                if usize::from(qid) < self.planned.map_or(0, QueueCounts::total) {
                    self.create(qid + 1, now_ns);
                } else {
                    self.queues_created(now_ns);
                }
            }
            SetupStep::CreateCq(qid) | SetupStep::CreateSq(qid) => {
                // The controller accepts no more than the previous ones: these are created next.
                self.asked = qid - 1;
                self.set_up(SetupStep::DeleteSq(qid), now_ns);
            }
            SetupStep::DeleteSq(_) | SetupStep::DeleteCq(_) => self.deleted(step, now_ns),
            // Asynchronous events are optional.
            SetupStep::Events => self.set_up(SetupStep::KeepAlive, now_ns),
            SetupStep::KeepAlive => {
                self.keep_alive = is_ok.then(|| {
                    let is_by_traffic = self.identify.keeps_alive_by_traffic();
                    KeepAlive::new(u64::from(self.config.keep_alive_ms) * 1_000_000, is_by_traffic, now_ns)
                });
                self.set_up(SetupStep::Scan, now_ns);
            }
            SetupStep::Scan => {}
        }
    }

    /// Continues with this number of granted queues.
    fn plan(&mut self, queues: u16, now_ns: u64) {
        self.planned = split(queues, self.transport.vectors(), self.config.queues);
        self.set_up(SetupStep::Shadow, now_ns);
    }

    /// The command for shadow doorbells, if the controller supports them and they fit a page.
    fn shadow_command(&mut self) -> Option<Sqe> {
        let queues = self.planned.map_or(0, QueueCounts::total) + 1;
        let bytes = queues * (8 << self.capabilities.doorbell_stride);
        let is_wanted = self.config.has_shadow && self.identify.has_shadow_doorbells() && bytes <= PAGE as usize;
        let admin = self.admin.as_ref().filter(|_| is_wanted)?;
        admin.clear_shadow();
        let [doorbells, events] = admin.shadow().1;
        Some(Sqe::doorbell_buffer(doorbells, events))
    }

    /// Continues once the use of shadow doorbells is decided.
    fn doorbells_ready(&mut self, has_shadow: bool, now_ns: u64) {
        let (Some(registers), Some(admin)) = (&self.registers, &self.admin) else { return };
        let stride = self.capabilities.doorbell_stride;
        let shadow = has_shadow.then(|| admin.shadow().0);
        if self.queues.iter().any(IoQueueSlot::is_taken) && has_shadow != self.has_shadow {
            // Existing owners continue with their queues.
            let status = NvmeStatus::INVALID_OPCODE;
            return self.end(NvmeHostError::Command { command: SetupStep::Shadow.name(), status }, now_ns);
        }
        self.has_shadow = has_shadow;
        self.doorbells = Some(Doorbells::new(registers.clone(), stride, shadow));
        if self.planned.is_some() {
            self.create(1, now_ns);
        } else {
            self.queues_created(now_ns);
        }
    }

    fn create(&mut self, qid: u16, now_ns: u64) {
        let entries = ring_entries(self.capabilities.queue_entries_max, self.config.ring_entries);
        match self.prepare_queue(qid, entries) {
            Ok(()) => self.set_up(SetupStep::CreateCq(qid), now_ns),
            Err(error) => self.end(error, now_ns),
        }
    }

    fn create_command(&mut self, qid: u16, is_sq: bool) -> Result<Sqe, NvmeHostError> {
        let vector = self.planned.and_then(|counts| vector(qid - 1, self.transport.vectors(), counts));
        let queue = self.queues.get(usize::from(qid) - 1).ok_or(NvmeHostError::Memory)?;
        queue.create(&self.transport, vector, is_sq).ok_or(NvmeHostError::Memory)
    }

    /// Handles the end of a queue's deletion: first the submission queues, in descending order, then the completion
    /// queues.
    fn deleted(&mut self, step: SetupStep, now_ns: u64) {
        let highest = self.queues.len() as u16;
        let next = match step {
            SetupStep::DeleteSq(qid) => {
                self.queue_mut(qid).into_iter().for_each(|queue| queue.has_sq = false);
                if qid > 1 { SetupStep::DeleteSq(qid - 1) } else { SetupStep::DeleteCq(highest) }
            }
            SetupStep::DeleteCq(qid) => {
                self.queue_mut(qid).into_iter().for_each(|queue| queue.has_cq = false);
                if qid <= 1 {
                    return self.plan(self.asked, now_ns);
                }
                SetupStep::DeleteCq(qid - 1)
            }
            other => other,
        };
        self.set_up(next, now_ns);
    }

    fn queues_created(&mut self, now_ns: u64) {
        self.counts = self.planned;
        self.set_up(SetupStep::Events, now_ns);
    }

    /// Sends the next command of a scan, or ends the scan.
    pub(crate) fn go_on_scanning(&mut self, now_ns: u64) {
        let Some(scan) = &self.scan else { return };
        if let Some(step) = scan.step() {
            let deadline_ns = self.command_deadline_ns(now_ns);
            let is_sent = self.submit(step.sqe(), AdminData::Read, AdminPurpose::Scan(step), deadline_ns);
            if !is_sent && self.state == ControllerState::Connecting {
                self.end(NvmeHostError::Timeout(SetupStep::Scan.name()), now_ns);
            } else if !is_sent {
                // All slots are in use: the command is sent later.
                self.scan = None;
                self.watch.wants_scan = true;
            }
            return;
        }
        let (found, _) = self.scan.take().map_or_else(Default::default, Scan::into_found);
        let is_same = found.len() == self.namespaces.len()
            && found.iter().zip(&self.namespaces).all(|(new, old)| ScannedNamespace::is_same(new, old));
        self.namespaces = found;
        if !is_same {
            self.events.push_back(HostEvent::NamespacesChanged);
        }
        if matches!(self.phase, HostPhase::Setup(SetupStep::Scan)) {
            self.live(now_ns);
        }
    }

    pub(crate) fn scan_completed(&mut self, slot: u16, status: NvmeStatus, now_ns: u64) {
        let (Some(scan), Some(admin)) = (&mut self.scan, &self.admin) else { return };
        scan.completed(status, &admin.data(slot), &self.identify, &self.nvm_limits);
        self.go_on_scanning(now_ns);
    }

    /// Ends the bring-up.
    fn live(&mut self, now_ns: u64) {
        self.phase = HostPhase::Idle;
        self.start_queues();
        self.state.change(ControllerState::Live);
        self.watch.wants_event = true;
        self.events.push_back(HostEvent::Live);
        if self.wants_suspend {
            self.suspend(now_ns);
        }
    }
}
