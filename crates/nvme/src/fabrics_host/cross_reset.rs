//! Cross-controller reset, host side: of this association's controller when it is lost, and by it of others.
//!
//! The controller of a lost association is known by its [instance](ControllerInstance), taken before the next Connect.
//! A second loss before the first is fenced has no reset: its proof would have to be that of both.
//!
//! A controller that is asked answers at once whether the reset is complete. If not, its log is read when a notice
//! comes, and besides after pauses that double: a target may send no notice.

use blkyard_mq::FenceEvidence;

use super::admin::FabricsData;
use super::host::{ADMIN_NS, FabricsHost, FabricsHostEvent, FabricsPurpose};
use crate::cross_reset::{IMMEDIATE, REMOVE_COMPLETED};
use crate::host::ControllerState;
use crate::{
    CROSS_RESET_LOG, CROSS_RESET_LOG_BYTES, ControllerInstance, CrossResetEntry, CrossResetState, NvmeStatus, Sqe,
};

/// First and longest pause between two reads of the log, ns.
const LOG_NS: [u64; 2] = [20_000_000, 1_000_000_000];

/// Resets of other controllers that this one was asked for.
#[derive(Debug, Default)]
pub(super) struct RunningCrossResets {
    /// With those whose command was answered: they are in the log.
    running: Vec<(ControllerInstance, bool)>,
    /// Time of the next read of the log, and pause before the one after it.
    next: Option<(u64, u64)>,
    pub(super) wants_log: bool,
    is_reading: bool,
}

impl RunningCrossResets {
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.next.filter(|_| !self.is_reading).map(|(due_ns, _)| due_ns)
    }
}

impl FabricsHost {
    /// Has the controller of this association reset another one. It ends with [`FabricsHostEvent::OtherReset`]. False
    /// if the controller cannot at present, or never.
    pub fn reset_other(&mut self, instance: ControllerInstance, now_ns: u64) -> bool {
        let room = usize::from(self.identify.cross_resets);
        let is_known = self.cross_resets.running.iter().any(|(known, _)| *known == instance);
        if self.state != ControllerState::Live || self.cross_resets.running.len() >= room || is_known {
            return false;
        }
        let purpose = FabricsPurpose::CrossReset(instance);
        let deadline_ns = now_ns.saturating_add(ADMIN_NS);
        let is_sent = self.submit(instance.reset_command(), FabricsData::None, purpose, deadline_ns);
        if is_sent {
            self.cross_resets.running.push((instance, false));
        }
        is_sent
    }

    /// Another controller has reset this one: associations with it execute no command any more. Without effect if it is
    /// not [wanted](FabricsHost::wants_reset).
    pub fn was_reset(&mut self, instance: ControllerInstance) {
        if let Some((association, _)) = self.lost.filter(|_| self.lost_instance == Some(instance)) {
            self.fence(association, FenceEvidence::CrossControllerReset);
        }
    }

    /// The controller of a lost association that may still execute commands: another association with the subsystem is
    /// to [reset](FabricsHost::reset_other) it; then call [`FabricsHost::was_reset`]. `None` if none is lost, or only
    /// time can fence it.
    pub fn wants_reset(&self) -> Option<ControllerInstance> {
        self.lost_instance
    }

    /// Whether no lost association may still execute commands.
    pub fn is_fenced(&self) -> bool {
        self.lost.is_none()
    }

    /// Notes the loss of an association with I/O.
    pub(super) fn note_lost(&mut self) {
        let silence_ns = self.own_silence_ns();
        let instance =
            ControllerInstance::of(&self.identify).filter(|instance| Some(instance.id) == self.controller_id);
        if self.lost.is_some() {
            (self.lost_instance, self.lost_silence_ns) = (None, self.lost_silence_ns.max(silence_ns));
        } else {
            (self.lost_instance, self.lost_silence_ns) = (instance, silence_ns);
        }
        self.lost = Some((self.association, None));
    }

    pub(super) fn cross_reset_answered(
        &mut self,
        instance: ControllerInstance,
        status: NvmeStatus,
        result: u64,
        now_ns: u64,
    ) {
        if !status.is_success() || result & IMMEDIATE != 0 {
            return self.end_cross_reset(instance, status.is_success());
        }
        if let Some((_, is_logged)) = self.cross_resets.running.iter_mut().find(|(known, _)| *known == instance) {
            *is_logged = true;
            self.cross_resets.next = Some((now_ns.saturating_add(LOG_NS[0]), LOG_NS[0]));
        }
    }

    /// Reads the log, if that is due.
    pub(super) fn read_cross_reset_log(&mut self, now_ns: u64) {
        let is_due = self.cross_resets.wants_log || self.cross_resets.due_ns().is_some_and(|due_ns| now_ns >= due_ns);
        if !is_due || self.cross_resets.is_reading {
            return;
        }
        let bytes = CROSS_RESET_LOG_BYTES as u32;
        let sqe = Sqe::get_log_page(CROSS_RESET_LOG, 0, REMOVE_COMPLETED, bytes / 4, 0);
        let deadline_ns = now_ns.saturating_add(ADMIN_NS);
        if self.submit(sqe, FabricsData::Read(bytes), FabricsPurpose::CrossResetLog, deadline_ns) {
            (self.cross_resets.wants_log, self.cross_resets.is_reading) = (false, true);
        }
    }

    pub(super) fn cross_reset_log_read(&mut self, slot: u16, status: NvmeStatus, now_ns: u64) {
        self.cross_resets.is_reading = false;
        let page = self.admin.as_ref().filter(|_| status.is_success()).map(|admin| admin.data(slot));
        let entries = page.map_or_else(Vec::new, |page| CrossResetEntry::parse(&page));
        let logged = self.cross_resets.running.iter().filter(|(_, is_logged)| *is_logged);
        for instance in logged.map(|(instance, _)| *instance).collect::<Vec<_>>() {
            let is_its = |entry: &&CrossResetEntry| entry.id == instance.id && entry.uniquifier == instance.uniquifier;
            // The newest, if the controller had the same uniquifier before.
            match entries.iter().rfind(is_its).map(|entry| entry.state) {
                Some(CrossResetState::Running) => {}
                Some(state) => self.end_cross_reset(instance, state == CrossResetState::Succeeded),
                None => self.end_cross_reset(instance, false),
            }
        }
        if let Some((due_ns, pause_ns)) = &mut self.cross_resets.next {
            *pause_ns = pause_ns.saturating_mul(2).min(LOG_NS[1]);
            *due_ns = now_ns.saturating_add(*pause_ns);
        }
    }

    fn end_cross_reset(&mut self, instance: ControllerInstance, is_reset: bool) {
        let Some(place) = self.cross_resets.running.iter().position(|(known, _)| *known == instance) else { return };
        self.cross_resets.running.remove(place);
        if !self.cross_resets.running.iter().any(|(_, is_logged)| *is_logged) {
            self.cross_resets.next = None;
        }
        self.events.push_back(FabricsHostEvent::OtherReset(instance, is_reset));
    }

    /// The association ends, or is lost: what was asked of it has failed.
    pub(super) fn fail_cross_resets(&mut self) {
        for (instance, _) in std::mem::take(&mut self.cross_resets).running {
            self.events.push_back(FabricsHostEvent::OtherReset(instance, false));
        }
    }
}
