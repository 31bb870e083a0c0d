//! The admin queue of a controller over fabrics: commands come in capsules with their data, and completions are taken.
//!
//! Its owner has the connection. A command is known by a slot that the owner chooses. The keep-alive timer is that of
//! the association and starts with Connect; CC.EN decides whether admin commands are executed. When the controller
//! stops, all commands of the queue are completed, since the connection stays.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{Region, View};

use super::features::Features;
use super::{Controller, ControllerOptions, IoCompletionQueue, IoShared, NamespaceTable};
use crate::fabrics::PropertySize;
use crate::registers as reg;
use crate::{DmaMap, NvmeStatus, PAGE, Sqe};

/// A completed admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminCompletion {
    /// Slot of the command.
    pub slot: u16,
    /// Its status.
    pub status: NvmeStatus,
    /// Its result.
    pub result: u64,
    /// Data for the host.
    pub data: Vec<u8>,
}

/// Lateness of the keep-alive timer, ns: for so long a Keep Alive that waits in its socket is in time, and a queue
/// executes commands. The rest of the quiesce time is for bytes that arrive late.
pub const KEEP_ALIVE_LATE_NS: u64 = 500_000_000;

/// What the owner of an I/O queue shares with its controller.
#[derive(Debug)]
pub struct ConnectedQueue {
    /// Identifier of the queue.
    pub qid: u16,
    pub(crate) namespaces: Arc<NamespaceTable>,
    pub(crate) shared: Arc<IoShared>,
}

/// The admin queue over fabrics.
#[derive(Debug, Default)]
pub(super) struct CapsuleQueue {
    is_open: bool,
    /// When the keep-alive timer expired, ns.
    expired_ns: Option<u64>,
    /// Slot and cid of the commands that are not complete.
    commands: Vec<(u16, u16)>,
    /// Data of the present command from the host.
    input: Vec<u8>,
    /// Data of the present command for the host, and its maximum.
    output: Vec<u8>,
    room: usize,
    done: VecDeque<AdminCompletion>,
}

impl CapsuleQueue {
    /// Whether commands other than fabrics commands are executed.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    pub(super) fn set_open(&mut self, is_open: bool) {
        self.is_open = is_open;
    }

    /// Completes all commands.
    pub(super) fn close(&mut self) {
        self.is_open = false;
        for (slot, _) in std::mem::take(&mut self.commands) {
            self.push(slot, NvmeStatus::SQ_DELETED, 0, Vec::new());
        }
    }

    /// Slot of the command with this cid.
    pub(super) fn slot_of(&self, cid: u16) -> Option<u16> {
        self.commands.iter().find(|(_, known)| *known == cid).map(|(slot, _)| *slot)
    }

    pub(super) fn complete(&mut self, slot: u16, status: NvmeStatus, result: u64) {
        if let Some(place) = self.commands.iter().position(|(known, _)| *known == slot) {
            self.commands.swap_remove(place);
            let data = if status.is_success() { std::mem::take(&mut self.output) } else { Vec::new() };
            self.push(slot, status, result, data);
        }
    }

    /// Transfers data to the host.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<(), NvmeStatus> {
        if bytes.len() > self.room {
            return Err(NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr());
        }
        self.output = bytes.to_vec();
        Ok(())
    }

    /// Transfers data from the host.
    pub(super) fn receive(&self, bytes: &mut [u8]) -> Result<(), NvmeStatus> {
        let from = self.input.get(..bytes.len()).ok_or(NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())?;
        bytes.copy_from_slice(from);
        Ok(())
    }

    fn push(&mut self, slot: u16, status: NvmeStatus, result: u64, data: Vec<u8>) {
        self.done.push_back(AdminCompletion { slot, status, result, data });
    }
}

impl Controller {
    /// A disabled controller over fabrics, for the association of a Connect with this keep-alive timeout.
    ///
    /// # Errors
    /// The system has no memory left.
    ///
    /// # Panics
    /// If options are out of range or those of a controller with queues in memory; they come from the caller.
    pub fn over_fabrics(
        options: ControllerOptions,
        namespaces: NamespaceTable,
        keep_alive_ms: u32,
        now_ns: u64,
    ) -> std::io::Result<Controller> {
        assert!(options.fabrics.is_some(), "options of a controller with queues in memory");
        let registers = View::new(Region::anonymous(PAGE as usize)?, 0, PAGE as usize, PAGE as usize);
        let Some(registers) = registers else { unreachable!("a region starts at a page") };
        let mut controller = Controller::new(options, registers, &DmaMap::default(), namespaces)?;
        controller.features.set_keep_alive(keep_alive_ms);
        controller.now_ns = now_ns;
        controller.start_keep_alive();
        Ok(controller)
    }

    /// Reads a property.
    ///
    /// # Errors
    /// Invalid Field for a property that does not exist or has another size.
    pub fn property(&self, size: PropertySize, offset: u32) -> Result<u64, NvmeStatus> {
        let bytes = match (size, offset as usize) {
            (PropertySize::Eight, reg::CAP) => 8,
            (PropertySize::Four, reg::VS | reg::CC | reg::CSTS | reg::CRTO) => 4,
            _ => return Err(NvmeStatus::INVALID_FIELD.with_dnr()),
        };
        self.read_register(offset.into(), bytes).map_err(|_| NvmeStatus::INVALID_FIELD.with_dnr())
    }

    /// Writes a property.
    ///
    /// # Errors
    /// Invalid Field for any property but CC.
    pub fn set_property(&mut self, size: PropertySize, offset: u32, value: u64) -> Result<(), NvmeStatus> {
        if (size, offset as usize) != (PropertySize::Four, reg::CC) {
            return Err(NvmeStatus::INVALID_FIELD.with_dnr());
        }
        self.write_register(offset.into(), 4, value).map_err(|_| NvmeStatus::INVALID_FIELD.with_dnr())?;
        Ok(())
    }

    /// Executes an admin command other than a fabrics command. `input` is data from the host, `room` the length of its
    /// buffer. The completion follows by [`Controller::take_completion`], for some commands after an event.
    ///
    /// # Panics
    /// If the controller has its queues in memory, or the slot is in use.
    pub fn submit(&mut self, slot: u16, sqe: &Sqe, input: Vec<u8>, room: usize, now_ns: u64) {
        if self.is_overdue(now_ns) {
            // A host that counts on the timer has given the association up, whenever this command was sent.
            self.expire();
        }
        self.now_ns = now_ns;
        let Some(capsules) = &mut self.capsules else { panic!("a controller with queues in memory") };
        assert!(capsules.commands.iter().all(|(known, _)| *known != slot), "slot {slot} is in use");
        let is_in_use = capsules.slot_of(sqe.cid()).is_some();
        capsules.commands.push((slot, sqe.cid()));
        (capsules.input, capsules.room) = (input, room);
        capsules.output.clear();
        if !capsules.is_open {
            self.complete_admin(slot, NvmeStatus::COMMAND_SEQUENCE.with_dnr(), 0);
        } else if is_in_use {
            self.complete_admin(slot, NvmeStatus::CID_CONFLICT.with_dnr(), 0);
        } else {
            self.execute(slot, sqe);
        }
    }

    /// The next completed admin command over fabrics.
    pub fn take_completion(&mut self) -> Option<AdminCompletion> {
        self.capsules.as_mut()?.done.pop_front()
    }

    /// Whether the keep-alive timer of the association has expired: it is to be ended.
    pub fn is_expired(&self) -> bool {
        self.capsules.as_ref().is_some_and(|capsules| capsules.expired_ns.is_some())
    }

    /// Whether its keep-alive timer should have expired so long ago that no queue serves any more.
    pub fn is_overdue(&self, now_ns: u64) -> bool {
        self.capsules.is_some() && self.serves_until_ns() <= now_ns
    }

    /// The association has ended: no queue executes a further command, whatever its owner does, and none is connected.
    /// Returns when its host could know of that, ns: not later than its keep-alive timer ends.
    pub fn end_service(&mut self, now_ns: u64) -> u64 {
        self.tell_queues(0);
        self.capsules.iter_mut().for_each(|capsules| capsules.set_open(false));
        let expired_ns = self.capsules.as_ref().and_then(|capsules| capsules.expired_ns);
        expired_ns.or(self.keep_alive_until_ns).map_or(now_ns, |until_ns| until_ns.min(now_ns))
    }

    fn serves_until_ns(&self) -> u64 {
        if self.is_expired() {
            0
        } else {
            self.keep_alive_until_ns.map_or(u64::MAX, |ns| ns.saturating_add(KEEP_ALIVE_LATE_NS))
        }
    }

    pub(super) fn tell_queues(&self, until_ns: u64) {
        for queue in self.cqs.iter().flatten() {
            queue.shared.serves_until_ns.store(until_ns, Relaxed);
        }
    }

    /// Starts the keep-alive timer. Its queues need not wait for the owner of the controller to look at it.
    pub(super) fn start_keep_alive(&mut self) {
        self.keep_alive_until_ns = self.features.keep_alive_ns().map(|timeout| self.now_ns.saturating_add(timeout));
        self.tell_queues(self.serves_until_ns());
    }

    /// Adds an I/O queue whose Connect is valid so far. Its owner gets requests of the controller as for queues in
    /// memory, of which only [`Stop`](super::ControllerQueueCommand::Stop) and
    /// [`SetNamespaces`](super::ControllerQueueCommand::SetNamespaces) occur.
    ///
    /// # Errors
    /// Command Sequence Error if the controller is not enabled, or has this queue.
    pub fn connect_queue(&mut self, qid: u16) -> Result<ConnectedQueue, NvmeStatus> {
        let is_free = self.cqs.get(usize::from(qid)).is_some_and(Option::is_none);
        if !self.is_processing() || !is_free {
            return Err(NvmeStatus::COMMAND_SEQUENCE.with_dnr());
        }
        let shared = Arc::new(IoShared::default());
        shared.write_through.store(self.is_write_through, Relaxed);
        shared.serves_until_ns.store(self.serves_until_ns(), Relaxed);
        let queue =
            IoCompletionQueue { ring: (0, 0), shared: Arc::clone(&shared), is_creating: false, is_deleting: false };
        self.cqs[usize::from(qid)] = Some(queue);
        self.features.queue_created();
        Ok(ConnectedQueue { qid, namespaces: Arc::clone(&self.namespaces), shared })
    }

    /// Maximum identifier of an I/O queue that the host may connect.
    pub fn queues_granted(&self) -> u16 {
        self.features.queues()[0]
    }

    pub(super) fn expire(&mut self) {
        if let Some(capsules) = &mut self.capsules {
            capsules.expired_ns = self.keep_alive_until_ns.or(Some(0));
        }
        self.tell_queues(0);
        self.keep_alive_until_ns = None;
        self.fail();
    }

    /// Completes an event request: by cid, or over fabrics by slot. False if the completion queue has no room.
    pub(super) fn complete_event(&mut self, request: u16, status: NvmeStatus, result: u64) -> bool {
        match (&mut self.admin, &mut self.capsules) {
            (Some(pair), _) => pair.complete_detached(request, status, result),
            (None, Some(capsules)) => {
                capsules.output.clear();
                capsules.complete(request, status, result);
                true
            }
            (None, None) => false,
        }
    }

    /// Sets all features to their defaults. The keep-alive timeout of an association stays.
    pub(super) fn reset_features(&mut self) {
        let keep_alive_ms = if self.capsules.is_some() { self.features.keep_alive_ms() } else { 0 };
        self.features = Features::new(self.options.io_queues, self.options.vectors);
        self.features.set_keep_alive(keep_alive_ms);
    }
}
