//! State of a controller as plain data, for a controller in another process that continues with it.
//!
//! It is saved at rest: I/O queues are stopped, and each request of the controller is executed. Memory, devices and
//! time belong to the owner, which provides them again. The owner also keeps the doorbell registers, since a host may
//! write them at any time.
//!
//! The data is checked like any input: an invalid state is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::View;
use serde::{Deserialize, Serialize};

use super::admin::PendingAdmin;
use super::cross_reset::CrossReset;
use super::events::{PendingEvents, REQUESTS_MAX};
use super::features::Features;
use super::io::{ControllerIoQueue, IoQueueSnapshot, IoShared};
use super::logs::{CommandErrorLog, IoTotals};
use super::pair::{ControllerQueuePair, QueuePairSnapshot};
use super::registers::QueueAddresses;
use super::rings::{CompletionRing, SubmissionRing};
use super::{Controller, ControllerOptions, ControllerRequest, IoCompletionQueue, IoSubmissionQueue, NamespaceTable};
use crate::DmaMap;
use crate::registers::ControllerStatus;

/// Maximum entries of an admin ring: the limit of AQA.
const ADMIN_ENTRIES_MAX: u16 = 4096;

/// Reason for which a controller cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The controller is not at rest.
    #[error("the controller is not at rest: {0}")]
    Busy(&'static str),
    /// The state is invalid for a controller with these options.
    #[error("the state of the controller is invalid: {0}")]
    Invalid(&'static str),
    /// The system has no memory left.
    #[error(transparent)]
    System(#[from] std::io::Error),
}

/// State of a controller at rest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ControllerSnapshot {
    /// CAP.DSTRD, by which the host has found the doorbells.
    doorbell_stride: u8,
    cc: u32,
    csts: u32,
    admin_addresses: QueueAddresses,
    /// Addresses of the shadow doorbells and event indexes.
    shadow: Option<(u64, u64)>,
    /// The admin queue, while commands are processed.
    admin: Option<QueuePairSnapshot>,
    is_admin_fault_told: bool,
    /// Admin commands that wait for the start of a completion queue: cid, and the queue.
    creations: Vec<(u16, u16)>,
    /// Admin commands that wait for the deletion of a submission queue: cid, and the queue.
    deletions: Vec<(u16, u16)>,
    queues: Vec<IoQueueSnapshot>,
    events: PendingEvents,
    features: Features,
    errors: CommandErrorLog,
    /// Totals of all queues.
    totals: IoTotals,
    changed_namespaces: Vec<u32>,
    /// A shutdown or fatal error has stopped it until the next reset.
    is_stopped: bool,
    is_write_through: bool,
    flushes: u64,
    keep_alive_until_ns: Option<u64>,
    now_ns: u64,
    /// Set for a controller over fabrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    capsules: Option<CapsulesSnapshot>,
}

/// State of a controller over fabrics beside that of all.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct CapsulesSnapshot {
    /// Whether it executes commands other than fabrics commands.
    is_open: bool,
    cross_resets: Vec<CrossReset>,
}

impl ControllerSnapshot {
    /// Whether the command that creates this completion queue is not complete.
    pub fn is_creating(&self, cqid: u16) -> bool {
        self.creations.iter().any(|(_, queue)| *queue == cqid)
    }

    /// Time of the last call of [`Controller::poll`]. The restored controller expects later times.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }
}

impl Controller {
    /// Saves the state of a controller and its I/O queues, which are stopped. The controller can continue unchanged.
    ///
    /// Over fabrics there are no queues: the owner saves the connections. Admin commands that are not complete are
    /// left out. They are submitted again.
    ///
    /// # Errors
    /// [`SnapshotError::Busy`]: a request is not executed, or a queue is missing or not at rest.
    pub fn snapshot<'a>(
        &self,
        queues: impl IntoIterator<Item = &'a ControllerIoQueue>,
    ) -> Result<ControllerSnapshot, SnapshotError> {
        let is_stopping = self.stopping.is_some_and(|owners| owners > 0) || self.is_resetting;
        if !self.requests.is_empty() || self.remapping > 0 || is_stopping || self.shutdown_flush.is_some() {
            return Err(SnapshotError::Busy("a request to its queues is not executed"));
        }
        let queues: Option<Vec<_>> = queues.into_iter().map(ControllerIoQueue::snapshot).collect();
        let is_over_fabrics = self.capsules.is_some();
        let queues = queues.filter(|queues| is_over_fabrics || queues.len() == self.cqs.iter().flatten().count());
        let (mut creations, mut deletions) = (Vec::new(), Vec::new());
        for (token, pending) in self.pending.iter().filter(|_| !is_over_fabrics) {
            let cid = self.admin.as_ref().and_then(|pair| pair.cid(*token));
            match (cid, pending) {
                (Some(cid), PendingAdmin::CreateCq(qid)) => creations.push((cid, *qid)),
                (Some(cid), PendingAdmin::DeleteSq(qid)) => deletions.push((cid, *qid)),
                _ => return Err(SnapshotError::Busy("an admin command waits for a queue")),
            }
        }
        let mut totals = self.logs.totals.clone();
        self.cqs.iter().flatten().for_each(|queue| totals.add(&queue.shared));
        Ok(ControllerSnapshot {
            doorbell_stride: self.options.doorbell_stride,
            cc: self.cc,
            csts: self.status.bits(),
            admin_addresses: self.admin_addresses,
            shadow: self.shadow,
            admin: self.admin.as_ref().map(ControllerQueuePair::snapshot),
            is_admin_fault_told: self.is_admin_fault_told,
            creations,
            deletions,
            queues: queues.ok_or(SnapshotError::Busy("a queue is not stopped"))?,
            events: if is_over_fabrics { self.events.without_requests() } else { self.events.clone() },
            features: self.features.clone(),
            errors: self.logs.errors.clone(),
            totals,
            changed_namespaces: self.logs.changed.clone(),
            is_stopped: self.stopping.is_some(),
            is_write_through: self.is_write_through,
            flushes: self.flushes,
            keep_alive_until_ns: self.keep_alive_until_ns,
            now_ns: self.now_ns,
            capsules: self
                .capsules
                .as_ref()
                .map(|capsules| CapsulesSnapshot { is_open: capsules.is_open(), cross_resets: self.saved_resets() }),
        })
    }

    /// A controller with saved state. `registers` has the doorbells as the host has last written them. The other
    /// arguments are as for [`Controller::new`]. Each I/O queue is a [`ControllerRequest::Create`]. Its reply completes
    /// the command that creates it, if that is not complete.
    ///
    /// # Errors
    /// The state is invalid for these options, or the system has no memory left.
    ///
    /// # Panics
    /// As for [`Controller::new`].
    pub fn restore(
        options: ControllerOptions,
        registers: View,
        map: &DmaMap,
        namespaces: NamespaceTable,
        saved: &ControllerSnapshot,
    ) -> Result<Controller, SnapshotError> {
        let mut controller = Controller::new(options, registers, map, namespaces)?;
        controller.restore_state(saved)?;
        if saved.admin.is_some() != (controller.status.ready && !saved.is_stopped) || saved.capsules.is_some() {
            return Err(SnapshotError::Invalid("the admin queue"));
        }
        controller.find_shadow();
        controller.restore_queues(saved).ok_or(SnapshotError::Invalid("an I/O queue"))?;
        controller.restore_admin(saved).ok_or(SnapshotError::Invalid("the admin queue"))?;
        Ok(controller)
    }

    /// A controller over fabrics with saved state. The owner then [connects](Controller::connect_queue) the I/O queues
    /// that it had, and submits the commands that were not complete.
    ///
    /// # Errors
    /// The state is invalid for these options, or the system has no memory left.
    ///
    /// # Panics
    /// As for [`Controller::over_fabrics`].
    pub fn restore_over_fabrics(
        options: ControllerOptions,
        namespaces: NamespaceTable,
        saved: &ControllerSnapshot,
    ) -> Result<Controller, SnapshotError> {
        let mut controller = Controller::over_fabrics(options, namespaces, 0, saved.now_ns)?;
        controller.restore_state(saved)?;
        let capsules = saved.capsules.as_ref().ok_or(SnapshotError::Invalid("not over fabrics"))?;
        let are_none = saved.admin.is_none() && saved.queues.is_empty() && saved.events.requests().len() == 0;
        if !are_none || (capsules.is_open && (!controller.status.ready || saved.is_stopped)) {
            return Err(SnapshotError::Invalid("the admin queue"));
        }
        if let Some(queue) = &mut controller.capsules {
            queue.set_open(capsules.is_open);
        }
        controller.restore_resets(&capsules.cross_resets);
        Ok(controller)
    }

    /// Restores what all controllers have.
    fn restore_state(&mut self, saved: &ControllerSnapshot) -> Result<(), SnapshotError> {
        let status = ControllerStatus::from_bits(saved.csts).ok_or(SnapshotError::Invalid("CSTS"))?;
        if saved.doorbell_stride != self.options.doorbell_stride {
            return Err(SnapshotError::Invalid("another doorbell stride"));
        }
        if !saved.features.are_of(self.options.io_queues, self.options.vectors) {
            return Err(SnapshotError::Invalid("other numbers of queues or vectors"));
        }
        (self.cc, self.status) = (saved.cc, status);
        (self.admin_addresses, self.shadow) = (saved.admin_addresses, saved.shadow);
        self.is_admin_fault_told = saved.is_admin_fault_told;
        (self.events, self.features) = (saved.events.clone(), saved.features.clone());
        (self.logs.errors, self.logs.totals) = (saved.errors.clone(), saved.totals.clone());
        self.logs.changed.clone_from(&saved.changed_namespaces);
        self.stopping = saved.is_stopped.then_some(0);
        self.is_write_through = saved.is_write_through;
        self.flushes = saved.flushes;
        (self.keep_alive_until_ns, self.now_ns) = (saved.keep_alive_until_ns, saved.now_ns);
        Ok(())
    }

    /// Returns `None` for an invalid state.
    fn restore_queues(&mut self, all: &ControllerSnapshot) -> Option<()> {
        let (entries_max, depth) = (self.options.queue_entries, self.options.depth);
        for saved in &all.queues {
            let (cqid, cq) = (saved.cqid, &saved.group.cq);
            let is_vector = saved.vector.is_none_or(|vector| vector < self.options.vectors);
            if cqid == 0 || cq.qid != cqid || !is_vector || self.cqs.get(usize::from(cqid))?.is_some() {
                return None;
            }
            for member in saved.group.members.iter().flatten() {
                let (ring, is_deleting) = (&member.ring, member.is_stopping);
                if ring.qid == 0 || self.sqs.get(usize::from(ring.qid))?.is_some() {
                    return None;
                }
                let range = (ring.addr, SubmissionRing::bytes(ring.entries));
                self.sqs[usize::from(ring.qid)] = Some(IoSubmissionQueue { ring: range, cqid, is_deleting });
            }
            let shared = Arc::new(IoShared::default());
            shared.write_through.store(self.is_write_through, Relaxed);
            let (memory, namespaces) = ((self.memory.clone(), &self.doorbells), Arc::clone(&self.namespaces));
            let queue =
                ControllerIoQueue::restore(saved, (entries_max, depth), memory, namespaces, Arc::clone(&shared))?;
            let ring = (cq.addr, CompletionRing::bytes(cq.entries));
            self.cqs[usize::from(cqid)] =
                Some(IoCompletionQueue { ring, shared, is_creating: all.is_creating(cqid), is_deleting: false });
            self.requests.push_back(ControllerRequest::Create(Box::new(queue)));
        }
        Some(())
    }

    /// Returns `None` for an invalid state.
    fn restore_admin(&mut self, saved: &ControllerSnapshot) -> Option<()> {
        let Some(pair) = &saved.admin else {
            let is_empty = saved.queues.is_empty() && saved.creations.is_empty() && saved.deletions.is_empty();
            return is_empty.then_some(());
        };
        let mut pair = ControllerQueuePair::restore_admin(pair, ADMIN_ENTRIES_MAX, self.memory.map(), &self.doorbells)?;
        let are_requests = self.events.requests().len() <= REQUESTS_MAX;
        if !are_requests || !self.events.requests().all(|cid| pair.claim_detached(cid)) {
            return None;
        }
        for &(cid, qid) in &saved.creations {
            self.cqs.get(usize::from(qid))?.as_ref()?;
            self.pending.push((pair.claim(cid)?, PendingAdmin::CreateCq(qid)));
        }
        for &(cid, qid) in &saved.deletions {
            self.sqs.get(usize::from(qid))?.as_ref().filter(|queue| queue.is_deleting)?;
            self.pending.push((pair.claim(cid)?, PendingAdmin::DeleteSq(qid)));
        }
        self.admin = Some(pair);
        Some(())
    }
}
