//! An NVMe controller: registers, admin queue, enable, reset and shutdown.
//!
//! [`Controller`] is the admin side, owned by the control path. I/O queues ([`ControllerIoQueue`]) are owned by lanes.
//! The two sides exchange plain messages when a queue is created or deleted, a command is aborted, or the controller is
//! reset.
//!
//! ```text
//!   registers ──▶ Controller ──ControllerRequest──▶ owner ──ControllerQueueCommand──▶ ControllerIoQueue
//!  (transport)        ▲                                                                      │
//!                     └─────────────────────────ControllerQueueReply─────────────────────────┘
//! ```
//!
//! A reset ends (CSTS.RDY 0) when each I/O queue has reported that it is stopped. From then on no earlier command
//! writes to the memory of the host.
//!
//! It starts no thread, reads no clock (time is an argument), and sends no signal: it reports due signals. Devices,
//! memory and transport belong to its owner.

mod admin;
mod capabilities;
mod capsules;
mod cross_reset;
mod events;
mod features;
mod group;
mod io;
mod logs;
mod namespaces;
mod pair;
mod registers;
mod rings;
mod snapshot;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{Region, Segment, View};

use self::admin::PendingAdmin;
pub use self::capabilities::{ControllerOptions, FabricsOptions};
use self::capsules::CapsuleQueue;
pub use self::capsules::{AdminCompletion, ConnectedQueue, KEEP_ALIVE_LATE_NS};
use self::cross_reset::CrossReset;
use self::events::{ControllerEvent, PendingEvents};
use self::features::Features;
pub(crate) use self::io::IoShared;
pub use self::io::{
    ControllerIoQueue, ControllerMemory, ControllerQueueCommand, ControllerQueueReply, NewSubmissionQueue, NextBio,
};
use self::logs::ControllerLogs;
pub use self::logs::ErrorEntry;
pub use self::namespaces::{NamespaceTable, ServedNamespace};
pub use self::pair::{ControllerQueuePair, ControllerRings, Fetched};
use self::registers::QueueAddresses;
pub use self::registers::RegisterFault;
pub use self::rings::DoorbellFault;
use self::rings::{CompletionRing, SubmissionRing};
pub use self::snapshot::{ControllerSnapshot, SnapshotError};
use crate::doorbell::{Doorbells, ShadowDoorbells};
use crate::registers as reg;
use crate::{DataWalker, DiscoveryLog, DmaMap, DmaRights, IdentifyController, NvmeStatus};

/// Maximum admin commands executed by one call of [`Controller::poll`], since the thread has other work.
const COMMANDS_MAX: usize = 64;

/// Request of a controller to its owner.
#[derive(Debug)]
pub enum ControllerRequest {
    /// Assign this I/O completion queue to a lane, and reply [`ControllerQueueReply::Created`] once it is served, or
    /// [`ControllerQueueReply::NotCreated`].
    Create(Box<ControllerIoQueue>),
    /// Pass a command to the I/O completion queue of this identifier.
    Queue(u16, ControllerQueueCommand),
    /// Flush the devices of all namespaces, then call [`Controller::flushed`] or [`Controller::flush_failed`] with this
    /// number.
    Flush(u64),
}

/// Host address and bytes of a ring.
type RingRange = (u64, usize);

/// State of an I/O completion queue on the admin side.
#[derive(Debug)]
struct IoCompletionQueue {
    ring: RingRange,
    shared: Arc<IoShared>,
    /// Whether the command that creates it is not complete.
    is_creating: bool,
    is_deleting: bool,
}

/// State of an I/O submission queue on the admin side.
#[derive(Debug)]
struct IoSubmissionQueue {
    ring: RingRange,
    cqid: u16,
    is_deleting: bool,
}

/// A controller.
#[derive(Debug)]
pub struct Controller {
    options: ControllerOptions,
    /// CC as written by the host.
    cc: u32,
    status: reg::ControllerStatus,
    /// AQA, ASQ and ACQ.
    admin_addresses: QueueAddresses,
    /// Memory of the doorbell registers.
    registers: View,
    /// Addresses of the shadow doorbells and event indexes.
    shadow: Option<(u64, u64)>,
    doorbells: Doorbells,
    memory: ControllerMemory,
    bounce: Arc<Region>,
    namespaces: Arc<NamespaceTable>,
    /// The admin queue, while commands are processed; unset over fabrics.
    admin: Option<ControllerQueuePair>,
    /// The admin queue over fabrics.
    capsules: Option<CapsuleQueue>,
    /// Whether the admin queue's doorbell fault was recorded.
    is_admin_fault_told: bool,
    /// Indexed by identifier; entry 0 is empty.
    cqs: Box<[Option<IoCompletionQueue>]>,
    sqs: Box<[Option<IoSubmissionQueue>]>,
    pending: Vec<(u16, PendingAdmin)>,
    events: PendingEvents,
    /// Resets of other controllers, those included that the host may still read of.
    cross_resets: Vec<CrossReset>,
    features: Features,
    logs: ControllerLogs,
    walker: DataWalker,
    segments: Vec<Segment>,
    requests: VecDeque<ControllerRequest>,
    /// Number of queue owners that have not reported a stop yet; unset while queues run.
    stopping: Option<usize>,
    is_resetting: bool,
    /// Number of queue owners that still use the memory before the last change.
    remapping: usize,
    is_write_through: bool,
    /// Number of the last flush, and of the flush that a shutdown waits for.
    flushes: u64,
    shutdown_flush: Option<u64>,
    keep_alive_until_ns: Option<u64>,
    now_ns: u64,
}

impl Controller {
    /// A disabled controller. `registers` is the memory of its doorbell registers (from offset 1000h), with room for
    /// the admin queue and all I/O queues. It may be shared with the host.
    ///
    /// # Errors
    /// The system has no memory left.
    ///
    /// # Panics
    /// If options are out of range or `registers` is too short; both come from the caller.
    pub fn new(
        options: ControllerOptions,
        registers: View,
        map: &DmaMap,
        namespaces: NamespaceTable,
    ) -> std::io::Result<Controller> {
        options.check();
        let doorbell_bytes = reg::sq_doorbell(options.io_queues + 1, options.doorbell_stride);
        assert!(
            registers.len() >= doorbell_bytes && registers.len().is_multiple_of(8),
            "{} bytes of doorbells",
            registers.len()
        );
        // Devices in other processes map it, too.
        let bounce = if options.fabrics.is_some() {
            Region::anonymous(crate::PAGE as usize)?
        } else {
            Region::shared(2 * options.transfer_bytes as usize * usize::from(options.io_queues))?
        };
        let (map, number) = map.with_region(Arc::clone(&bounce));
        let walker = DataWalker::new(u64::from(options.transfer_bytes), false);
        let places = usize::from(options.io_queues) + 1;
        let mut controller = Controller {
            cc: 0,
            status: reg::ControllerStatus::default(),
            admin_addresses: QueueAddresses::default(),
            doorbells: Doorbells::new(registers.clone(), options.doorbell_stride, None),
            registers,
            shadow: None,
            memory: ControllerMemory::new(map, number, options.transfer_bytes),
            bounce,
            namespaces: Arc::new(namespaces),
            admin: None,
            capsules: options.fabrics.is_some().then(CapsuleQueue::default),
            is_admin_fault_told: false,
            cqs: (0..places).map(|_| None).collect(),
            sqs: (0..places).map(|_| None).collect(),
            pending: Vec::new(),
            events: PendingEvents::default(),
            cross_resets: Vec::new(),
            features: Features::new(options.io_queues, options.vectors),
            logs: ControllerLogs::new([0; 8]),
            segments: Vec::with_capacity(walker.segments_max()),
            walker,
            requests: VecDeque::new(),
            stopping: None,
            is_resetting: false,
            remapping: 0,
            is_write_through: false,
            flushes: 0,
            shutdown_flush: None,
            keep_alive_until_ns: None,
            now_ns: 0,
            options,
        };
        controller.logs = ControllerLogs::new(controller.identify_controller().firmware);
        Ok(controller)
    }

    /// Executes admin commands and reports events. Returns whether vector 0 is to be signalled.
    pub fn poll(&mut self, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        for _ in 0..COMMANDS_MAX {
            let Some(fetched) = self.admin.as_mut().and_then(|pair| pair.fetch().ok().flatten()) else { break };
            self.execute(fetched.token, &fetched.sqe);
        }
        self.answer_slow_resets();
        self.tell_events();
        let is_posted = self.admin.as_mut().is_some_and(ControllerQueuePair::take_posted);
        // Last: a Keep Alive in the ring is in time, however late this call is.
        if self.keep_alive_deadline_ns().is_some_and(|until| now_ns >= until) {
            self.expire();
        }
        is_posted
    }

    /// Requests register writes for the admin queue. Returns whether commands are already available.
    pub fn arm(&mut self) -> bool {
        self.admin.as_mut().is_some_and(|pair| pair.arm() == Ok(true))
    }

    /// Latest time of the next [`Controller::poll`].
    pub fn deadline_ns(&self) -> Option<u64> {
        self.keep_alive_deadline_ns().into_iter().chain(self.cross_reset_deadline_ns()).min()
    }

    fn keep_alive_deadline_ns(&self) -> Option<u64> {
        self.keep_alive_until_ns.filter(|_| self.admin.is_some() || self.capsules.is_some())
    }

    /// Whether it processes admin commands.
    pub fn is_processing(&self) -> bool {
        self.admin.is_some() || self.capsules.as_ref().is_some_and(CapsuleQueue::is_open)
    }

    /// The next request to the owner.
    pub fn take_request(&mut self) -> Option<ControllerRequest> {
        self.requests.pop_front()
    }

    /// Handles a reply from the owner of an I/O completion queue.
    pub fn reply(&mut self, cqid: u16, reply: ControllerQueueReply) {
        match reply {
            // A queue whose deletion was on its way has no other answer.
            ControllerQueueReply::Stopped | ControllerQueueReply::Deleted | ControllerQueueReply::NotCreated
                if self.stopping.is_some() =>
            {
                if self.remove_cq(cqid)
                    && let Some(left) = &mut self.stopping
                {
                    *left = left.saturating_sub(1);
                    self.finish_stop();
                }
            }
            ControllerQueueReply::Stopped => {
                self.remove_cq(cqid);
            }
            ControllerQueueReply::MemorySet => self.remapping = self.remapping.saturating_sub(1),
            // Requests from before a reset or shutdown are obsolete.
            _ if self.stopping.is_some() => {}
            ControllerQueueReply::Created => {
                if let Some(Some(queue)) = self.cqs.get_mut(usize::from(cqid)) {
                    queue.is_creating = false;
                }
                self.finish_pending(PendingAdmin::CreateCq(cqid), 0);
            }
            ControllerQueueReply::NotCreated => {
                self.remove_cq(cqid);
                self.end_pending(PendingAdmin::CreateCq(cqid), NvmeStatus::INTERNAL, 0);
            }
            ControllerQueueReply::SubmissionQueueDeleted(qid) => {
                self.sqs[usize::from(qid)] = None;
                self.finish_pending(PendingAdmin::DeleteSq(qid), 0);
            }
            ControllerQueueReply::Deleted => {
                self.remove_cq(cqid);
                self.finish_pending(PendingAdmin::DeleteCq(cqid), 0);
            }
            ControllerQueueReply::AbortDone { sqid, cid, is_aborted } => {
                self.finish_pending(PendingAdmin::Abort { sqid, cid }, u64::from(!is_aborted));
            }
            ControllerQueueReply::DoorbellsSet => self.doorbells_set(),
            ControllerQueueReply::Fault(sqid, _) => self.doorbell_fault(sqid),
            ControllerQueueReply::Failed(entry) => self.logs.errors.push(entry),
        }
    }

    /// All namespaces were flushed for [`ControllerRequest::Flush`].
    pub fn flushed(&mut self, number: u64) {
        if self.shutdown_flush == Some(number) {
            self.shutdown_flush = None;
            self.status.shutdown = reg::SHUTDOWN_COMPLETE;
        }
        self.finish_pending(PendingAdmin::Flush(number), 0);
    }

    /// A flush that [`ControllerRequest::Flush`] asked for failed. A command that was to disable the volatile write
    /// cache fails, and the cache stays enabled. A shutdown completes with a fatal error (CSTS.CFS), since
    /// the host waits for its end.
    pub fn flush_failed(&mut self, number: u64) {
        if self.shutdown_flush == Some(number) {
            self.shutdown_flush = None;
            self.status.shutdown = reg::SHUTDOWN_COMPLETE;
            self.status.fatal = true;
        }
        if !self.end_pending(PendingAdmin::Flush(number), NvmeStatus::INTERNAL, 0) {
            return;
        }
        // A later command that disables it waits for a flush of its own.
        if !self.pending.iter().any(|(_, pending)| matches!(pending, PendingAdmin::Flush(_))) {
            self.features.write_cache = true;
            self.set_write_through(false);
        }
    }

    /// Whether an admin command or a shutdown waits for the [`ControllerRequest::Flush`] of this number. After a reset
    /// earlier flushes are obsolete.
    pub fn awaits_flush(&self, number: u64) -> bool {
        let is_its = |(_, pending): &(u16, PendingAdmin)| *pending == PendingAdmin::Flush(number);
        self.shutdown_flush == Some(number) || self.pending.iter().any(is_its)
    }

    /// Replaces the memory of the host. Later commands use the new one; those in flight may use the previous one until
    /// [`Controller::is_remapping`] is false. Regions with an address in both have the same number in both, and the
    /// table has those of bios in flight. The number of one that has lost its address is free from then on, that of
    /// the controller's own memory never: a table with an empty slot 0 leaves it that one.
    ///
    /// A queue whose rings or shadow doorbells are not mapped pauses, and continues once they are mapped again. A write
    /// of its tail doorbell register meanwhile is a fatal error.
    pub fn set_memory(&mut self, map: &DmaMap) {
        let (map, number) = map.with_region(Arc::clone(&self.bounce));
        self.memory = self.memory.changed(map, number);
        self.find_shadow();
        if let Some(pair) = &mut self.admin {
            pair.bind(self.memory.map(), &self.doorbells);
        }
        if self.stopping.is_none() {
            for cqid in self.kept_cq_ids() {
                self.remapping += 1;
                self.ask(cqid, ControllerQueueCommand::SetMemory(self.memory.clone(), self.doorbells.clone()));
            }
        }
    }

    /// Whether an owner of a queue may still use memory that has no address any more.
    pub fn is_remapping(&self) -> bool {
        let is_deleting = self.cqs.iter().flatten().any(|queue| queue.is_deleting);
        self.remapping > 0 || is_deleting || self.stopping.is_some_and(|owners| owners > 0)
    }

    /// Replaces the namespaces, and notifies the host of changed ones.
    pub fn set_namespaces(&mut self, namespaces: NamespaceTable) {
        let is_changed = self.logs.compare(&self.namespaces, &namespaces);
        self.namespaces = Arc::new(namespaces);
        for cqid in self.kept_cq_ids() {
            self.ask(cqid, ControllerQueueCommand::SetNamespaces(Arc::clone(&self.namespaces)));
        }
        if is_changed {
            self.events.push(ControllerEvent::NamespacesChanged, self.features.async_events);
        }
    }

    /// Notifies the host that a group of namespaces has another ANA state.
    pub fn ana_changed(&mut self) {
        if self.namespaces.ana().is_some() {
            self.events.push(ControllerEvent::AnaChanged, self.features.async_events);
        }
    }

    /// The log of a discovery controller.
    pub(crate) fn discovery_log(&self) -> Option<&Arc<DiscoveryLog>> {
        self.options.fabrics.as_ref()?.discovery.as_ref()
    }

    /// The memory accessible to the controller.
    pub fn memory(&self) -> &ControllerMemory {
        &self.memory
    }

    fn identify_controller(&self) -> IdentifyController {
        self.options.identify(&self.namespaces)
    }

    /// Enables the controller with CC, AQA, ASQ and ACQ; invalid values are a fatal error (CSTS.CFS).
    fn enable(&mut self) {
        let QueueAddresses { sq, cq, .. } = self.admin_addresses;
        let (sq_entries, cq_entries) = reg::admin_queue_entries(self.admin_addresses.attributes);
        let config = reg::ControllerConfig::from_bits(self.cc);
        let is_supported = config.command_set == 0 && config.page == 0 && config.arbitration == 0;
        if let Some(capsules) = &mut self.capsules {
            (self.status.ready, self.status.fatal) = (is_supported, !is_supported);
            capsules.set_open(is_supported);
            return;
        }
        let are_rings = sq_entries >= 2 && cq_entries >= 2 && (sq | cq).is_multiple_of(crate::PAGE);
        let (map, doorbells) = (self.memory.map(), &self.doorbells);
        let rings = || {
            let cq = CompletionRing::map(0, cq, cq_entries, map, doorbells)?;
            Some(ControllerQueuePair::of(SubmissionRing::map(0, sq, sq_entries, map, doorbells)?, cq))
        };
        let Some(pair) = (is_supported && are_rings).then(rings).flatten() else {
            self.status.fatal = true;
            return;
        };
        self.admin = Some(pair);
        self.status.ready = true;
    }

    /// Starts a reset (CC.EN 0).
    fn reset(&mut self) {
        self.is_resetting = true;
        self.stop();
    }

    /// Starts a shutdown (CC.SHN).
    fn shut_down(&mut self) {
        self.status.shutdown = reg::SHUTDOWN_RUNNING;
        self.stop();
    }

    /// Stops processing commands, and stops all I/O queues.
    fn stop(&mut self) {
        self.admin = None;
        if let Some(capsules) = &mut self.capsules {
            capsules.close();
            self.events = PendingEvents::default();
        }
        self.pending.clear();
        self.cross_resets.clear();
        // That of an association goes on.
        self.keep_alive_until_ns = self.keep_alive_until_ns.filter(|_| self.capsules.is_some());
        // A stopping queue sends no other reply.
        self.remapping = 0;
        if self.stopping.is_none() {
            let has_owner = |(qid, queue): (usize, &Option<_>)| queue.as_ref().map(|_| qid as u16);
            let queues: Vec<_> = self.cqs.iter().enumerate().filter_map(has_owner).collect();
            self.stopping = Some(queues.len());
            for cqid in queues {
                self.ask(cqid, ControllerQueueCommand::Stop);
            }
        }
        self.finish_stop();
    }

    /// Continues a reset or shutdown once all queues are stopped.
    fn finish_stop(&mut self) {
        if self.stopping != Some(0) {
            return;
        }
        if self.is_resetting {
            self.finish_reset();
        } else if self.status.shutdown == reg::SHUTDOWN_RUNNING && self.shutdown_flush.is_none() {
            self.shutdown_flush = Some(self.request_flush());
        }
    }

    fn finish_reset(&mut self) {
        self.is_resetting = false;
        self.stopping = None;
        self.shutdown_flush = None;
        self.sqs.fill_with(|| None);
        self.events = PendingEvents::default();
        self.reset_features();
        self.is_write_through = false;
        self.is_admin_fault_told = false;
        self.shadow = None;
        self.doorbells = Doorbells::new(self.registers.clone(), self.options.doorbell_stride, None);
        self.status = reg::ControllerStatus::default();
        if reg::ControllerConfig::from_bits(self.cc).enabled {
            // The host has not waited for the end of the reset.
            self.enable();
        } else {
            self.cc = 0;
        }
    }

    /// Whether the rings and doorbells of a submission queue are mapped.
    fn is_mapped(&self, sqid: u16) -> bool {
        if sqid == 0 {
            return self.admin.as_ref().is_some_and(ControllerQueuePair::is_mapped);
        }
        let sq = self.sqs.get(usize::from(sqid)).and_then(Option::as_ref);
        let cq = sq.and_then(|sq| self.cqs[usize::from(sq.cqid)].as_ref());
        let is_mapped = |(addr, bytes): RingRange, access| self.memory.map().view(addr, bytes, access).is_some();
        let are_rings = sq.zip(cq).is_some_and(|(sq, cq)| {
            is_mapped(sq.ring, DmaRights::ReadOnly) && is_mapped(cq.ring, DmaRights::WriteOnly)
        });
        are_rings && self.doorbells.are_mapped(sqid)
    }

    /// Sets a fatal error: no command is processed before the next reset.
    fn fail(&mut self) {
        self.status.fatal = true;
        self.stop();
    }

    fn ask(&mut self, cqid: u16, command: ControllerQueueCommand) {
        self.requests.push_back(ControllerRequest::Queue(cqid, command));
    }

    /// I/O completion queues that are not being deleted: the owner of any other drops it without a further answer.
    fn kept_cq_ids(&self) -> Vec<u16> {
        let is_kept = |queue: &Option<IoCompletionQueue>| queue.as_ref().is_some_and(|queue| !queue.is_deleting);
        self.cqs.iter().enumerate().filter(|(_, queue)| is_kept(queue)).map(|(qid, _)| qid as u16).collect()
    }

    /// Says whether it was there.
    fn remove_cq(&mut self, cqid: u16) -> bool {
        let removed = self.cqs.get_mut(usize::from(cqid)).and_then(Option::take);
        if let Some(queue) = &removed {
            self.logs.totals.add(&queue.shared);
        }
        removed.is_some()
    }

    fn complete_admin(&mut self, token: u16, status: NvmeStatus, result: u64) {
        if let Some(pair) = &mut self.admin {
            pair.complete(token, status, result);
        } else if let Some(capsules) = &mut self.capsules {
            capsules.complete(token, status, result);
        }
    }

    /// Completes the commands that wait for this event.
    fn finish_pending(&mut self, what: PendingAdmin, result: u64) {
        self.end_pending(what, NvmeStatus::SUCCESS, result);
    }

    /// Completes the commands that wait for this, with a status. Says whether there were any.
    fn end_pending(&mut self, what: PendingAdmin, status: NvmeStatus, result: u64) -> bool {
        let mut is_found = false;
        while let Some(place) = self.pending.iter().position(|(_, pending)| *pending == what) {
            let (token, _) = self.pending.remove(place);
            self.complete_admin(token, status, result);
            is_found = true;
        }
        is_found
    }

    /// Counts one more owner for the first command that waits for shadow doorbells.
    fn doorbells_set(&mut self) {
        let waiting = self.pending.iter_mut().find_map(|(_, pending)| match pending {
            PendingAdmin::Doorbells(left) => Some(left),
            _ => None,
        });
        if let Some(left) = waiting {
            *left -= 1;
            self.finish_pending(PendingAdmin::Doorbells(0), 0);
        }
    }

    /// Finds the shadow doorbells, if they are set, in the present memory.
    fn find_shadow(&mut self) {
        if let Some((doorbells, events)) = self.shadow {
            match self.shadow_at(doorbells, events) {
                Some(shadow) => self.set_shadow(shadow),
                None => self.doorbells = Doorbells::unmapped(self.registers.clone(), self.options.doorbell_stride),
            }
        }
    }

    fn set_shadow(&mut self, shadow: ShadowDoorbells) {
        self.doorbells = Doorbells::new(self.registers.clone(), self.options.doorbell_stride, Some(shadow));
    }

    fn set_write_through(&mut self, is_write_through: bool) {
        self.is_write_through = is_write_through;
        for queue in self.cqs.iter().flatten() {
            queue.shared.write_through.store(is_write_through, Relaxed);
        }
    }

    fn request_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.requests.push_back(ControllerRequest::Flush(self.flushes));
        self.flushes
    }

    /// Handles an invalid doorbell value.
    fn doorbell_fault(&mut self, sqid: u16) {
        let status = NvmeStatus::INVALID_FIELD;
        self.logs.errors.push(ErrorEntry { sqid, cid: u16::MAX, status, location: u16::MAX, ..ErrorEntry::default() });
        self.events.push(ControllerEvent::InvalidDoorbellValue, self.features.async_events);
    }

    /// Completes event requests, as long as the completion queue has room.
    fn tell_events(&mut self) {
        let is_faulted = self.admin.as_ref().is_some_and(|pair| pair.fault().is_some());
        if is_faulted && !self.is_admin_fault_told {
            self.is_admin_fault_told = true;
            self.doorbell_fault(0);
        }
        while let Some((cid, event)) = self.events.next() {
            if !self.complete_event(cid, NvmeStatus::SUCCESS, u64::from(event.result())) {
                return;
            }
            self.events.told(event);
        }
    }
}
