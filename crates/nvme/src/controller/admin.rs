//! Admin commands of a controller.
//!
//! A command is completed at once, or pending until the owners of I/O queues have answered ([`PendingAdmin`]). Input of
//! a host is untrusted: each command is a copy, checked field by field, and the first invalid field determines the
//! status.

use std::sync::Arc;

use super::capabilities::{self, ABORTS_MAX};
use super::events::{ANA_NOTICES, CONFIGURABLE};
use super::features::{FeatureContext, FeatureEffect, Features, TIMESTAMP_BYTES};
use super::io::{ControllerIoQueue, ControllerQueueCommand, IoShared, NewSubmissionQueue};
use super::logs::ErrorEntry;
use super::rings::{CompletionRing, SubmissionRing};
use super::{Controller, ControllerRequest, IoCompletionQueue, IoSubmissionQueue};
use crate::cross_reset::{CROSS_RESET_NOTICES, REMOVE_COMPLETED};
use crate::doorbell::ShadowDoorbells;
use crate::registers::ControllerConfig;
use crate::{
    ANA_LOG, CROSS_RESET_LOG, ControllerInstance, DmaRights, IDENTIFY_BYTES, IdentifyNamespace, NvmeStatus, PAGE, Sqe,
    admin, cns,
};

/// Entry sizes required in CC before queues are created, as powers of two.
const ENTRY_SHIFTS: (u8, u8) = (6, 4);

/// Result of an admin command.
pub(super) enum AdminOutcome {
    /// Complete, with this result.
    Done(u64),
    /// Pending until owners of queues have answered.
    Pending(PendingAdmin),
    /// Pending until an event.
    Event,
}

/// Event that an admin command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingAdmin {
    CreateCq(u16),
    DeleteSq(u16),
    DeleteCq(u16),
    Abort {
        sqid: u16,
        cid: u16,
    },
    /// Use of the shadow doorbells by this number of owners.
    Doorbells(usize),
    /// Flush of the volatile write cache, by this number.
    Flush(u64),
    /// Reset of another controller.
    CrossReset(ControllerInstance),
}

pub(super) type AdminResult = Result<AdminOutcome, NvmeStatus>;

pub(super) fn refuse<T>(status: NvmeStatus) -> Result<T, NvmeStatus> {
    Err(status.with_dnr())
}

impl Controller {
    /// Executes a fetched admin command.
    pub(super) fn execute(&mut self, token: u16, sqe: &Sqe) {
        let outcome = if sqe.fused() == 0 { self.dispatch(sqe) } else { refuse(NvmeStatus::INVALID_FIELD) };
        match outcome {
            Ok(AdminOutcome::Done(result)) => self.complete_admin(token, NvmeStatus::SUCCESS, result),
            Ok(AdminOutcome::Pending(pending)) => self.pending.push((token, pending)),
            Ok(AdminOutcome::Event) => {
                if let Some(pair) = &mut self.admin {
                    let cid = pair.detach(token);
                    self.events.add_request(cid);
                } else {
                    self.events.add_request(token);
                }
            }
            Err(status) => {
                // An unknown command: the error log points to byte 0, the opcode.
                let location = if status.without_flags() == NvmeStatus::INVALID_OPCODE { 0 } else { u16::MAX };
                let status = status.with_more();
                let (cid, nsid) = (sqe.cid(), sqe.nsid());
                self.logs.errors.push(ErrorEntry { sqid: 0, cid, status, location, slba: 0, nsid });
                self.complete_admin(token, status, 0);
            }
        }
    }

    fn dispatch(&mut self, sqe: &Sqe) -> AdminResult {
        if !self.options.admin_opcodes().any(|opcode| opcode == sqe.opcode()) {
            // This includes Format NVM and namespace management: disks are made and erased by the daemon's operator,
            // and identify data (OACS) says so.
            return refuse(NvmeStatus::INVALID_OPCODE);
        }
        match sqe.opcode() {
            admin::CREATE_CQ => self.create_cq(sqe),
            admin::CREATE_SQ => self.create_sq(sqe),
            admin::DELETE_CQ => self.delete_cq(sqe.dword(10) as u16),
            admin::DELETE_SQ => self.delete_sq(sqe.dword(10) as u16),
            admin::IDENTIFY => self.identify(sqe),
            admin::GET_LOG_PAGE => self.get_log_page(sqe),
            admin::SET_FEATURES => self.set_features(sqe),
            admin::GET_FEATURES => self.get_features(sqe),
            admin::ABORT => Ok(self.abort(sqe)?),
            admin::ASYNC_EVENT if self.events.has_room() => Ok(AdminOutcome::Event),
            admin::ASYNC_EVENT => refuse(NvmeStatus::ASYNC_EVENT_LIMIT),
            admin::KEEP_ALIVE => {
                self.start_keep_alive();
                Ok(AdminOutcome::Done(0))
            }
            admin::CROSS_CONTROLLER_RESET => self.reset_other(sqe),
            admin::DOORBELL_BUFFER => self.doorbell_buffer(sqe),
            _ => refuse(NvmeStatus::INVALID_OPCODE),
        }
    }

    /// Common checks of Create I/O Completion Queue and Submission Queue; returns the entries.
    fn check_ring(&self, sqe: &Sqe, entry_shift: u8, entry_shift_wanted: u8) -> Result<u16, NvmeStatus> {
        let entries = (sqe.dword(10) >> 16) + 1;
        if entries < 2 || entries > u32::from(self.options.queue_entries) || entry_shift != entry_shift_wanted {
            return refuse(NvmeStatus::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR: queues must be physically contiguous.
        if sqe.dword(11) & 1 == 0 {
            return refuse(NvmeStatus::INVALID_FIELD);
        }
        if !sqe.data()[0].is_multiple_of(PAGE) {
            return refuse(NvmeStatus::INVALID_PRP_OFFSET);
        }
        Ok(entries as u16)
    }

    fn create_cq(&mut self, sqe: &Sqe) -> AdminResult {
        let (qid, flags) = (sqe.dword(10) as u16, sqe.dword(11));
        let [_, granted] = self.features.queues();
        if qid == 0 || qid > granted || self.cqs[usize::from(qid)].is_some() {
            return refuse(NvmeStatus::INVALID_QID);
        }
        let shift = ControllerConfig::from_bits(self.cc).cq_entry_shift;
        let entries = self.check_ring(sqe, shift, ENTRY_SHIFTS.1)?;
        let vector = (flags >> 16) as u16;
        let has_interrupts = flags & 2 != 0;
        if has_interrupts && vector >= self.options.vectors {
            return refuse(NvmeStatus::INVALID_VECTOR);
        }
        let ring = CompletionRing::map(qid, sqe.data()[0], entries, self.memory.map(), &self.doorbells);
        let ring = ring.ok_or(NvmeStatus::DATA_TRANSFER_ERROR.with_dnr())?;
        let shared = Arc::new(IoShared::default());
        shared.write_through.store(self.is_write_through, std::sync::atomic::Ordering::Relaxed);
        let queue = ControllerIoQueue::new(
            (qid, ring),
            has_interrupts.then_some(vector),
            self.options.depth,
            self.memory.clone(),
            Arc::clone(&self.namespaces),
            Arc::clone(&shared),
        );
        let range = (sqe.data()[0], CompletionRing::bytes(entries));
        self.cqs[usize::from(qid)] =
            Some(IoCompletionQueue { ring: range, shared, is_creating: true, is_deleting: false });
        self.features.queue_created();
        self.requests.push_back(ControllerRequest::Create(Box::new(queue)));
        Ok(AdminOutcome::Pending(PendingAdmin::CreateCq(qid)))
    }

    fn create_sq(&mut self, sqe: &Sqe) -> AdminResult {
        let (qid, cqid) = (sqe.dword(10) as u16, (sqe.dword(11) >> 16) as u16);
        let [granted, granted_cqs] = self.features.queues();
        if qid == 0 || qid > granted || self.sqs[usize::from(qid)].is_some() {
            return refuse(NvmeStatus::INVALID_QID);
        }
        if cqid == 0 || cqid > granted_cqs {
            return refuse(NvmeStatus::INVALID_QID);
        }
        if self.cqs[usize::from(cqid)].as_ref().is_none_or(|queue| queue.is_creating || queue.is_deleting) {
            return refuse(NvmeStatus::INVALID_CQ);
        }
        let shift = ControllerConfig::from_bits(self.cc).sq_entry_shift;
        let entries = self.check_ring(sqe, shift, ENTRY_SHIFTS.0)?;
        let ring = SubmissionRing::map(qid, sqe.data()[0], entries, self.memory.map(), &self.doorbells);
        let ring = ring.ok_or(NvmeStatus::DATA_TRANSFER_ERROR.with_dnr())?;
        let range = (sqe.data()[0], SubmissionRing::bytes(entries));
        self.sqs[usize::from(qid)] = Some(IoSubmissionQueue { ring: range, cqid, is_deleting: false });
        self.ask(cqid, ControllerQueueCommand::AddSubmissionQueue(NewSubmissionQueue(ring)));
        Ok(AdminOutcome::Done(0))
    }

    fn delete_sq(&mut self, qid: u16) -> AdminResult {
        let queue = self.sqs.get_mut(usize::from(qid)).and_then(Option::as_mut);
        let Some(queue) = queue.filter(|queue| !queue.is_deleting) else { return refuse(NvmeStatus::INVALID_QID) };
        queue.is_deleting = true;
        let cqid = queue.cqid;
        self.ask(cqid, ControllerQueueCommand::DeleteSubmissionQueue(qid));
        Ok(AdminOutcome::Pending(PendingAdmin::DeleteSq(qid)))
    }

    fn delete_cq(&mut self, qid: u16) -> AdminResult {
        let queue = self.cqs.get_mut(usize::from(qid)).and_then(Option::as_mut);
        let Some(queue) = queue.filter(|queue| !queue.is_creating && !queue.is_deleting) else {
            return refuse(NvmeStatus::INVALID_QID);
        };
        if self.sqs.iter().flatten().any(|sq| sq.cqid == qid) {
            return refuse(NvmeStatus::INVALID_QUEUE_DELETION);
        }
        queue.is_deleting = true;
        self.ask(qid, ControllerQueueCommand::Delete);
        Ok(AdminOutcome::Pending(PendingAdmin::DeleteCq(qid)))
    }

    fn abort(&mut self, sqe: &Sqe) -> AdminResult {
        let (sqid, cid) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) as u16);
        let aborts = self.pending.iter().filter(|(_, pending)| matches!(pending, PendingAdmin::Abort { .. })).count();
        if aborts >= ABORTS_MAX {
            return refuse(NvmeStatus::ABORT_LIMIT);
        }
        if sqid == 0 {
            // Commands of the admin queue are complete or wait for other commands; only event requests can be aborted.
            let request = self.capsules.as_ref().map_or(Some(cid), |capsules| capsules.slot_of(cid));
            let request = request.filter(|request| self.events.has_request(*request));
            let is_aborted =
                request.is_some_and(|request| self.complete_event(request, NvmeStatus::ABORT_REQUESTED, 0));
            if let Some(request) = request.filter(|_| is_aborted) {
                self.events.remove_request(request);
            }
            return Ok(AdminOutcome::Done(u64::from(!is_aborted)));
        }
        if self.capsules.is_some() {
            // Not aborted: nearly all commands of an I/O queue are with the device, which cannot cancel them.
            return Ok(AdminOutcome::Done(1));
        }
        match self.sqs.get(usize::from(sqid)).and_then(Option::as_ref) {
            Some(queue) => {
                let cqid = queue.cqid;
                self.ask(cqid, ControllerQueueCommand::Abort { sqid, cid });
                Ok(AdminOutcome::Pending(PendingAdmin::Abort { sqid, cid }))
            }
            // Not aborted: the command does not exist.
            None => Ok(AdminOutcome::Done(1)),
        }
    }

    fn identify(&mut self, sqe: &Sqe) -> AdminResult {
        capabilities::check_command_set(sqe)?;
        let (what, nsid) = (sqe.dword(10) as u8, sqe.nsid());
        if self.options.is_discovery() && what != cns::CONTROLLER {
            return refuse(NvmeStatus::INVALID_FIELD);
        }
        let mut bytes = [0; IDENTIFY_BYTES];
        let invalid = NvmeStatus::INVALID_NAMESPACE;
        let is_valid = (1..=self.namespaces.identifiers()).contains(&nsid);
        match what {
            // Without namespace management, all ones is no valid namespace either. Inactive namespaces read as zeros.
            cns::NAMESPACE | cns::CSI_NAMESPACE | cns::INDEPENDENT_NAMESPACE if !is_valid => return refuse(invalid),
            cns::NAMESPACE => {
                if let Ok(namespace) = self.namespaces.find(nsid) {
                    // A subsystem over fabrics has a controller for each association.
                    let sharing = u8::from(self.capsules.is_some());
                    IdentifyNamespace { sharing, ..namespace.identify() }.write(&mut bytes);
                }
            }
            // Zeros: no protection information, no zones.
            cns::CSI_NAMESPACE => {}
            cns::INDEPENDENT_NAMESPACE => {
                if let Ok(namespace) = self.namespaces.find(nsid) {
                    bytes[1] = u8::from(self.capsules.is_some());
                    bytes[4..8].copy_from_slice(&namespace.ana_group.to_le_bytes());
                    bytes[8] = u8::from(namespace.format.read_only);
                    // Ready.
                    bytes[14] = 1;
                }
            }
            cns::CONTROLLER => self.identify_controller().write(&mut bytes),
            cns::CSI_CONTROLLER => capabilities::identify_nvm(&mut bytes),
            cns::ACTIVE_NAMESPACES if nsid >= u32::MAX - 1 => return refuse(invalid),
            cns::ACTIVE_NAMESPACES => {
                let active = self.namespaces.iter().map(|namespace| namespace.format.nsid).filter(|id| *id > nsid);
                for (place, id) in bytes.chunks_exact_mut(4).zip(active) {
                    place.copy_from_slice(&id.to_le_bytes());
                }
            }
            cns::NAMESPACE_IDS => self.namespaces.find(nsid)?.descriptors(&mut bytes),
            _ => return refuse(NvmeStatus::INVALID_FIELD),
        }
        self.send(sqe, &bytes)
    }

    fn get_log_page(&mut self, sqe: &Sqe) -> AdminResult {
        let (dword10, dword11) = (sqe.dword(10), sqe.dword(11));
        let (id, retains) = (dword10 as u8, dword10 & 1 << 15 != 0);
        let bytes = (u64::from(dword10 >> 16 | (dword11 & 0xffff) << 16) + 1) * 4;
        let offset = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
        let queues = self.cqs.iter().flatten().map(|queue| &queue.shared);
        let page = match self.namespaces.ana().filter(|_| id == ANA_LOG) {
            // RGO: without the namespaces of the groups.
            Some(groups) => Some(groups.page(&self.namespaces, dword10 & 1 << 8 != 0)),
            None if id == CROSS_RESET_LOG && self.options.instance().is_some() => Some(self.cross_reset_page()),
            None => self.logs.page(id, queues, &self.namespaces, &self.options),
        };
        let Some(page) = page else { return refuse(NvmeStatus::INVALID_LOG_PAGE) };
        // Logs are those of the controller (LPA bit 0); offsets are in bytes.
        let has_index = sqe.dword(14) & 1 << 23 != 0;
        if !matches!(sqe.nsid(), 0 | u32::MAX) || has_index || !offset.is_multiple_of(4) || offset > page.len() as u64 {
            return refuse(NvmeStatus::INVALID_FIELD);
        }
        // Checked before that length is used.
        if bytes > u64::from(self.options.transfer_bytes) {
            return refuse(NvmeStatus::INVALID_FIELD);
        }
        let rest = &page[offset as usize..];
        let mut data = vec![0; bytes as usize];
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
        let done = self.send(sqe, &data)?;
        if !retains {
            self.logs.was_read(id);
            self.events.was_read(id);
        }
        if id == CROSS_RESET_LOG && (dword10 >> 8) as u8 & REMOVE_COMPLETED != 0 {
            self.remove_completed_resets();
        }
        Ok(done)
    }

    fn set_features(&mut self, sqe: &Sqe) -> AdminResult {
        let mut data = [0; TIMESTAMP_BYTES];
        let len = Features::set_bytes(sqe);
        if len > 0 {
            self.receive(sqe, &mut data[..len])?;
        }
        let context = self.feature_context();
        let (result, effect) = self.features.set(sqe, data, &context)?;
        match effect {
            FeatureEffect::KeepAlive => self.start_keep_alive(),
            FeatureEffect::WriteCache(is_enabled) => return Ok(self.switch_write_cache(is_enabled)),
            FeatureEffect::Nothing | FeatureEffect::SendTimestamp(_) => {}
        }
        Ok(AdminOutcome::Done(u64::from(result)))
    }

    /// Enables or disables the volatile write cache. When it is disabled, earlier writes are flushed, to be as durable
    /// as later ones.
    fn switch_write_cache(&mut self, is_enabled: bool) -> AdminOutcome {
        let was_enabled = !self.is_write_through;
        self.set_write_through(!is_enabled);
        let flush = match (was_enabled, is_enabled) {
            (_, true) => None,
            (true, false) => Some(self.request_flush()),
            // The command that disabled it may still wait for its flush.
            (false, false) => self.pending.iter().rev().find_map(|(_, pending)| match pending {
                PendingAdmin::Flush(number) => Some(*number),
                _ => None,
            }),
        };
        flush.map_or(AdminOutcome::Done(0), |number| AdminOutcome::Pending(PendingAdmin::Flush(number)))
    }

    fn get_features(&mut self, sqe: &Sqe) -> AdminResult {
        let (result, effect) = self.features.get(sqe, &self.feature_context())?;
        if let FeatureEffect::SendTimestamp(bytes) = effect {
            self.send(sqe, &bytes)?;
        }
        Ok(AdminOutcome::Done(u64::from(result)))
    }

    fn feature_context(&self) -> FeatureContext {
        FeatureContext {
            has_cache: self.namespaces.iter().any(|namespace| namespace.has_cache),
            identifiers: self.namespaces.identifiers(),
            async_events: CONFIGURABLE
                | self.namespaces.ana().map_or(0, |_| ANA_NOTICES)
                | self.options.instance().map_or(0, |_| CROSS_RESET_NOTICES),
            now_ns: self.now_ns,
        }
    }

    fn doorbell_buffer(&mut self, sqe: &Sqe) -> AdminResult {
        let [doorbells, events] = sqe.data();
        if !doorbells.is_multiple_of(PAGE) || !events.is_multiple_of(PAGE) || doorbells == events {
            return refuse(NvmeStatus::INVALID_FIELD);
        }
        let Some(shadow) = self.shadow_at(doorbells, events) else { return refuse(NvmeStatus::INVALID_FIELD) };
        self.shadow = Some((doorbells, events));
        self.set_shadow(shadow);
        let queues = self.kept_cq_ids();
        for cqid in &queues {
            self.ask(*cqid, ControllerQueueCommand::SetDoorbells(self.doorbells.clone()));
        }
        Ok(match queues.len() {
            0 => AdminOutcome::Done(0),
            owners => AdminOutcome::Pending(PendingAdmin::Doorbells(owners)),
        })
    }

    /// The two pages of shadow doorbells, if mapped.
    pub(super) fn shadow_at(&self, doorbells: u64, events: u64) -> Option<ShadowDoorbells> {
        let page = |addr| self.memory.map().view(addr, PAGE as usize, DmaRights::ReadWrite);
        Some(ShadowDoorbells { doorbells: page(doorbells)?, events: page(events)? })
    }

    /// Transfers data to the host.
    fn send(&mut self, sqe: &Sqe, bytes: &[u8]) -> AdminResult {
        if let Some(capsules) = &mut self.capsules {
            capsules.send(bytes)?;
            return Ok(AdminOutcome::Done(0));
        }
        self.walk(sqe, bytes.len())?;
        let mut rest = bytes;
        for segment in &self.segments {
            let Some(span) = self.memory.table().resolve_region(*segment) else {
                return refuse(NvmeStatus::DATA_TRANSFER_ERROR);
            };
            let (now, later) = rest.split_at(span.len());
            span.copy_from_slice(now);
            rest = later;
        }
        Ok(AdminOutcome::Done(0))
    }

    /// Transfers data from the host.
    fn receive(&mut self, sqe: &Sqe, bytes: &mut [u8]) -> Result<(), NvmeStatus> {
        if let Some(capsules) = &self.capsules {
            return capsules.receive(bytes);
        }
        self.walk(sqe, bytes.len())?;
        let mut rest = bytes;
        for segment in &self.segments {
            let Some(span) = self.memory.table().resolve_region(*segment) else {
                return refuse(NvmeStatus::DATA_TRANSFER_ERROR);
            };
            let (now, later) = rest.split_at_mut(span.len());
            span.copy_to_slice(now);
            rest = later;
        }
        Ok(())
    }

    fn walk(&mut self, sqe: &Sqe, bytes: usize) -> Result<(), NvmeStatus> {
        self.walker.walk(self.memory.map(), sqe, bytes as u64, &mut self.segments)
    }
}
