//! Bring-up of an association: from a connected stream to a live controller, command by command.
//!
//! Connect, authentication, CAP, CC.EN, CSTS.RDY, Identify Controller, limits, number of queues, events, ANA log,
//! namespaces. For the discovery service its log in place of all behind Identify. I/O queues connect once the
//! association is live.

use std::sync::Arc;

use super::admin::{ADMIN_ENTRIES, FabricsAdmin, FabricsData, LOG_BYTES_MAX};
use super::error::FabricsHostError;
use super::host::{ADMIN_NS, FabricsHost, FabricsHostEvent, FabricsPhase, FabricsPurpose};
use crate::ana::{ANA_LOG, AnaLog};
use crate::auth::{AUTH_MESSAGE_BYTES_MAX, AuthHost, AuthStep};
use crate::cross_reset::CROSS_RESET_NOTICES;
use crate::discovery::{DISCOVERY_ENTRY_BYTES, DISCOVERY_LOG, DiscoveredLog, DiscoveryEntry, DiscoveryHeader};
use crate::fabrics::{
    ANY_CONTROLLER, CONNECT_AUTHENTICATION, CONNECT_BYTES, CONNECT_SECURE_CHANNEL, ConnectCommand, ConnectData,
    FabricsCommand, PropertySize,
};
use crate::host::enable::timeout_ns;
use crate::host::negotiate::{granted, queues_dword, split};
use crate::host::scan::{Scan, ScannedNamespace};
use crate::host::watch::KeepAlive;
use crate::host::{ControllerState, NvmLimits};
use crate::registers::{CAP, CC, CSTS, Capabilities, ControllerConfig, ControllerStatus, SHUTDOWN_COMPLETE};
use crate::{IdentifyController, NvmeStatus, SQE_BYTES, Sqe, admin, cns, feature};

/// Notices to enable if supported: namespaces, ANA, cross-controller resets, the discovery log.
const NOTICES: u32 = 1 << 8 | 1 << 11 | CROSS_RESET_NOTICES | 1 << 31;
/// Interval of reads of CSTS, ns.
const STATUS_NS: u64 = 10_000_000;
/// Time for a shutdown if the controller names none (RTD3E), ns; and the longest.
const SHUTDOWN_NS: u64 = 5_000_000_000;
const SHUTDOWN_MAX_NS: u64 = 60_000_000_000;
/// CAP.CSS: sets selected by CSI; none.
const CSS_BY_CSI: u8 = 1 << 6;
const CSS_NONE: u8 = 1 << 7;
/// CMIC: asymmetric access is reported.
const HAS_ANA: u8 = 1 << 3;

/// A command of the bring-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FabricsStep {
    Connect,
    AuthSend,
    AuthReceive,
    Capabilities,
    Enable,
    Ready,
    Identify,
    NvmLimits,
    QueueCount,
    Events,
    Ana,
    Scan,
    DiscoveryHeader,
    /// From this entry on.
    DiscoveryEntries(u64),
    /// The header again: the log has not changed meanwhile.
    DiscoveryCheck,
}

impl FabricsStep {
    pub(super) fn name(self) -> &'static str {
        match self {
            FabricsStep::Connect => "Connect",
            FabricsStep::AuthSend => "Authentication Send",
            FabricsStep::AuthReceive => "Authentication Receive",
            FabricsStep::Capabilities => "Property Get (capabilities)",
            FabricsStep::Enable => "Property Set (enable)",
            FabricsStep::Ready => "Property Get (status)",
            FabricsStep::Identify => "Identify (controller)",
            FabricsStep::NvmLimits => "Identify (NVM command set)",
            FabricsStep::QueueCount => "Set Features (number of queues)",
            FabricsStep::Events => "Set Features (asynchronous events)",
            FabricsStep::Ana => "Get Log Page (ANA)",
            FabricsStep::Scan => "Identify (namespaces)",
            FabricsStep::DiscoveryHeader | FabricsStep::DiscoveryEntries(_) | FabricsStep::DiscoveryCheck => {
                "Get Log Page (discovery)"
            }
        }
    }
}

impl FabricsHost {
    /// Begins the next association.
    pub(super) fn connect(&mut self, now_ns: u64) {
        if self.state == ControllerState::Resetting {
            self.state.change(ControllerState::Connecting);
        }
        match FabricsAdmin::new(self.config.header_digest, self.config.data_digest) {
            Ok(admin) => {
                self.memory = admin.memory().clone();
                self.admin = Some(admin);
            }
            Err(_) => return self.give_up(FabricsHostError::Memory, now_ns),
        }
        self.association += 1;
        self.auth = None;
        self.has_stream = true;
        self.phase = FabricsPhase::Open { until_ns: now_ns.saturating_add(self.config.connect_ns) };
        self.events.push_back(FabricsHostEvent::Open(self.association));
    }

    /// Name of the present step of a bring-up.
    pub(super) fn step_name(&self) -> &'static str {
        match self.phase {
            FabricsPhase::Setup(step) => step.name(),
            FabricsPhase::Ready { .. } => FabricsStep::Ready.name(),
            _ => "the connection",
        }
    }

    /// The stream is connected: the admin queue sends its initialization, and Connect behind it.
    pub(super) fn stream_opened(&mut self, now_ns: u64) {
        self.bring_up_until_ns = Some(now_ns.saturating_add(self.config.bring_up_ns));
        let data = ConnectData {
            host_id: self.config.host_id,
            controller_id: self.controller_id.filter(|_| self.asks_for_same).unwrap_or(ANY_CONTROLLER),
            subsystem: self.config.subsystem.clone(),
            host: self.config.host.clone(),
        };
        let mut bytes = [0; CONNECT_BYTES];
        data.write(&mut bytes);
        let keep_alive_ms = self.config.keep_alive_ms;
        let command = ConnectCommand { qid: 0, sq_size: ADMIN_ENTRIES - 1, no_flow_control: false, keep_alive_ms };
        let sqe = FabricsCommand::Connect(command).sqe();
        let purpose = FabricsPurpose::Setup(FabricsStep::Connect);
        let deadline_ns = now_ns.saturating_add(self.config.connect_ns);
        self.submit(sqe, FabricsData::Write(&bytes), purpose, deadline_ns);
    }

    /// The connection is initialized.
    pub(super) fn stream_started(&mut self, _now_ns: u64) {
        if matches!(self.phase, FabricsPhase::Open { .. }) {
            self.phase = FabricsPhase::Setup(FabricsStep::Connect);
        }
    }

    /// Sends the command of a step; steps that do not apply are skipped.
    fn set_up(&mut self, step: FabricsStep, now_ns: u64) {
        self.phase = FabricsPhase::Setup(step);
        let get = |size, offset: usize| FabricsCommand::PropertyGet { size, offset: offset as u32 }.sqe();
        let (sqe, data) = match step {
            FabricsStep::Connect | FabricsStep::AuthSend | FabricsStep::AuthReceive => return,
            FabricsStep::Capabilities => (get(PropertySize::Eight, CAP), FabricsData::None),
            FabricsStep::Enable => {
                let by_csi = self.capabilities.command_sets & CSS_BY_CSI != 0;
                let config = ControllerConfig {
                    enabled: true,
                    command_set: if by_csi { 6 } else { 0 },
                    sq_entry_shift: 6,
                    cq_entry_shift: 4,
                    ..ControllerConfig::default()
                };
                (set_property(CC, config.bits()), FabricsData::None)
            }
            FabricsStep::Ready => (get(PropertySize::Four, CSTS), FabricsData::None),
            FabricsStep::Identify => (Sqe::identify(cns::CONTROLLER, 0, 0, 0), FabricsData::Read(4096)),
            FabricsStep::NvmLimits => (Sqe::identify(cns::CSI_CONTROLLER, 0, 0, 0), FabricsData::Read(4096)),
            FabricsStep::QueueCount => {
                let dword = queues_dword(self.config.queues.total());
                (Sqe::feature(admin::SET_FEATURES, feature::QUEUES, dword), FabricsData::None)
            }
            FabricsStep::Events => match self.identify.async_events & NOTICES {
                0 => return self.set_up(FabricsStep::Ana, now_ns),
                notices => (Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, notices), FabricsData::None),
            },
            FabricsStep::Ana => {
                self.ana = None;
                if !self.read_ana(now_ns) {
                    self.set_up(FabricsStep::Scan, now_ns);
                }
                return;
            }
            FabricsStep::Scan => {
                self.scan = Some(Scan::new(self.config.scope, self.namespaces.clone()));
                return self.go_on_scanning(now_ns);
            }
            FabricsStep::DiscoveryHeader | FabricsStep::DiscoveryCheck => {
                let dwords = DISCOVERY_ENTRY_BYTES as u32 / 4;
                return self.read_log(Sqe::get_log_page(DISCOVERY_LOG, 0, 0, dwords, 0), dwords * 4, step, now_ns);
            }
            FabricsStep::DiscoveryEntries(from) => {
                let bytes = self.entries_at_once(from) as u32 * DISCOVERY_ENTRY_BYTES as u32;
                let offset = (from + 1) * DISCOVERY_ENTRY_BYTES as u64;
                let sqe = Sqe::get_log_page(DISCOVERY_LOG, 0, 0, bytes / 4, offset);
                return self.read_log(sqe, bytes, step, now_ns);
            }
        };
        if !self.submit(sqe, data, FabricsPurpose::Setup(step), now_ns.saturating_add(ADMIN_NS)) {
            self.lose(FabricsHostError::Timeout(step.name()), now_ns);
        }
    }

    fn read_log(&mut self, sqe: Sqe, bytes: u32, step: FabricsStep, now_ns: u64) {
        let purpose = FabricsPurpose::Setup(step);
        let deadline_ns = now_ns.saturating_add(ADMIN_NS);
        if !self.admin.as_mut().is_some_and(|admin| admin.submit_log(sqe, bytes, purpose, deadline_ns)) {
            self.lose(FabricsHostError::Timeout(step.name()), now_ns);
        }
    }

    /// Handles the completion of a step's command.
    pub(super) fn setup_completed(
        &mut self,
        step: FabricsStep,
        slot: u16,
        status: NvmeStatus,
        result: u64,
        now_ns: u64,
    ) {
        let is_due = match self.phase {
            FabricsPhase::Setup(current) => current == step,
            FabricsPhase::Ready { .. } => step == FabricsStep::Ready,
            _ => false,
        };
        if !is_due {
            // The bring-up was given up meanwhile.
            return;
        }
        let is_optional = matches!(step, FabricsStep::NvmLimits | FabricsStep::Events | FabricsStep::QueueCount);
        if !status.is_success() && !is_optional {
            return self.refused(step, status, now_ns);
        }
        match step {
            FabricsStep::Connect => self.admin_connected(result, now_ns),
            FabricsStep::AuthSend | FabricsStep::AuthReceive => {
                let (Some((auth, _)), Some(admin)) = (&mut self.auth, &self.admin) else { return };
                let is_sent = step == FabricsStep::AuthSend;
                let next = if is_sent { auth.sent() } else { auth.received(&admin.data(slot)[..]) };
                self.authenticate(&next, now_ns);
            }
            FabricsStep::Capabilities => {
                self.capabilities = Capabilities::from_bits(result);
                if self.capabilities.command_sets & CSS_NONE != 0 && !self.config.is_discovery() {
                    return self.give_up(FabricsHostError::NoCommandSet, now_ns);
                }
                self.set_up(FabricsStep::Enable, now_ns);
            }
            FabricsStep::Enable => {
                let ready_ns = timeout_ns(self.capabilities);
                let until_ns = now_ns.saturating_add(ready_ns);
                self.bring_up_until_ns.iter_mut().for_each(|until_ns| *until_ns = until_ns.saturating_add(ready_ns));
                self.phase = FabricsPhase::Ready { at_ns: now_ns, until_ns };
            }
            FabricsStep::Ready => self.ready_read(result, now_ns),
            FabricsStep::Identify => {
                if let Some(admin) = &self.admin {
                    self.identify = IdentifyController::parse(&admin.data(slot));
                }
                // All controllers over fabrics take SGLs, and nothing else.
                self.identify.sgl |= 1;
                self.identified(now_ns);
            }
            FabricsStep::NvmLimits => {
                let data = self.admin.as_ref().filter(|_| status.is_success()).map(|admin| admin.data(slot));
                self.nvm_limits = data.map_or_else(NvmLimits::default, |data| NvmLimits::parse(&data));
                self.set_up(FabricsStep::QueueCount, now_ns);
            }
            FabricsStep::QueueCount => {
                let asked = self.config.queues.total();
                let queues = if status.is_success() { granted(result, asked) } else { 0 };
                self.counts = split(queues, 0, self.config.queues);
                self.set_up(FabricsStep::Events, now_ns);
            }
            FabricsStep::Events => self.set_up(FabricsStep::Ana, now_ns),
            FabricsStep::DiscoveryHeader | FabricsStep::DiscoveryCheck => self.log_header(step, now_ns),
            FabricsStep::DiscoveryEntries(from) => self.log_entries(from, now_ns),
            FabricsStep::Ana | FabricsStep::Scan => {}
        }
    }

    fn refused(&mut self, step: FabricsStep, status: NvmeStatus, now_ns: u64) {
        if step == FabricsStep::Connect && std::mem::take(&mut self.asks_for_same) {
            // Targets that choose the controller refuse a Connect that names one: the next attempt does not, and
            // follows at once.
            self.loss.attempts = 0;
            return self.lose_and_retry(FabricsHostError::Command { command: step.name(), status }, now_ns, 0);
        }
        self.lose(FabricsHostError::Command { command: step.name(), status }, now_ns);
    }

    fn admin_connected(&mut self, result: u64, now_ns: u64) {
        if result & CONNECT_SECURE_CHANNEL != 0 {
            return self.give_up(FabricsHostError::SecureChannel, now_ns);
        }
        let auth = self.authentication(0);
        match AuthHost::after_connect(auth.as_ref(), result & CONNECT_AUTHENTICATION != 0) {
            Ok(Some(first)) => {
                self.auth = auth.map(|auth| (auth, result));
                self.authenticate(&AuthStep::Send(first), now_ns);
            }
            Ok(None) => self.admitted(result, now_ns),
            Err(error) => self.give_up(FabricsHostError::Authentication(error), now_ns),
        }
    }

    /// The authentication of a queue of the present association. `None` if this host has no secret.
    pub(super) fn authentication(&self, qid: u16) -> Option<AuthHost> {
        let auth = self.config.auth.as_ref()?;
        let (host, subsystem) = (self.config.host.clone(), self.config.subsystem.clone());
        let number = self.association << 16 | u64::from(qid);
        Some(AuthHost::new(host, subsystem, Arc::clone(&auth.secrets), &auth.seed, number))
    }

    /// Does the next step of the authentication.
    fn authenticate(&mut self, next: &AuthStep, now_ns: u64) {
        let bytes_max = AUTH_MESSAGE_BYTES_MAX as u32;
        let (step, sqe, data) = match next {
            AuthStep::Send(message) => {
                let sqe = FabricsCommand::AuthSend(message.len() as u32).sqe();
                (FabricsStep::AuthSend, sqe, FabricsData::Write(message))
            }
            AuthStep::Receive => {
                let sqe = FabricsCommand::AuthReceive(bytes_max).sqe();
                (FabricsStep::AuthReceive, sqe, FabricsData::Read(bytes_max))
            }
            AuthStep::Done => {
                if let Some((_, result)) = self.auth.take() {
                    self.admitted(result, now_ns);
                }
                return;
            }
            AuthStep::Failed(error) => return self.give_up(FabricsHostError::Authentication(*error), now_ns),
        };
        self.phase = FabricsPhase::Setup(step);
        let deadline_ns = now_ns.saturating_add(self.config.connect_ns);
        if !self.submit(sqe, data, FabricsPurpose::Setup(step), deadline_ns) {
            self.lose(FabricsHostError::Timeout(step.name()), now_ns);
        }
    }

    /// The controller has accepted this host, and has ended an earlier association with the same controller.
    fn admitted(&mut self, result: u64, now_ns: u64) {
        let id = result as u16;
        if self.asks_for_same && self.controller_id == Some(id) {
            // A controller has one association: the one before has ended.
            self.fence_ended(self.association - 1);
        } else if self.controller_id != Some(id) && self.lost.is_some() {
            self.is_lost_elsewhere = true;
        }
        self.controller_id = Some(id);
        self.asks_for_same = true;
        self.set_up(FabricsStep::Capabilities, now_ns);
    }

    /// Sends a read of CSTS while the controller becomes ready.
    pub(super) fn look_at_ready(&mut self, until_ns: u64, now_ns: u64) {
        // Until its answer.
        self.phase = FabricsPhase::Ready { at_ns: until_ns.saturating_add(ADMIN_NS), until_ns };
        let sqe = FabricsCommand::PropertyGet { size: PropertySize::Four, offset: CSTS as u32 }.sqe();
        let purpose = FabricsPurpose::Setup(FabricsStep::Ready);
        if !self.submit(sqe, FabricsData::None, purpose, now_ns.saturating_add(ADMIN_NS)) {
            self.lose(FabricsHostError::Timeout(FabricsStep::Ready.name()), now_ns);
        }
    }

    fn ready_read(&mut self, result: u64, now_ns: u64) {
        let FabricsPhase::Ready { until_ns, .. } = self.phase else { return };
        match ControllerStatus::from_bits(result as u32) {
            Some(status) if status.fatal => self.lose(FabricsHostError::Fatal, now_ns),
            Some(status) if status.ready => {
                let unused_ns = until_ns.saturating_sub(now_ns);
                self.bring_up_until_ns.iter_mut().for_each(|until_ns| *until_ns = until_ns.saturating_sub(unused_ns));
                self.set_up(FabricsStep::Identify, now_ns);
            }
            Some(_) if now_ns < until_ns => {
                let at_ns = now_ns.saturating_add(STATUS_NS).min(until_ns);
                self.phase = FabricsPhase::Ready { at_ns, until_ns };
            }
            _ => self.lose(FabricsHostError::Timeout(FabricsStep::Enable.name()), now_ns),
        }
    }

    fn identified(&mut self, now_ns: u64) {
        if self.config.keep_alive_ms > 0 {
            let is_by_traffic = self.identify.keeps_alive_by_traffic();
            let timeout_ns = u64::from(self.config.keep_alive_ms) * 1_000_000;
            self.keep_alive = Some(KeepAlive::new(timeout_ns, is_by_traffic, now_ns));
        }
        if self.config.is_discovery() {
            return self.set_up(FabricsStep::DiscoveryHeader, now_ns);
        }
        let capsule = self.identify.command_capsule.saturating_mul(16);
        if capsule < SQE_BYTES as u32 {
            return self.lose(FabricsHostError::Capsule(capsule), now_ns);
        }
        self.set_up(FabricsStep::NvmLimits, now_ns);
    }

    /// Starts to read the ANA log. False if there is none, or it is too long, or it is being read.
    pub(super) fn read_ana(&mut self, now_ns: u64) -> bool {
        let identify = &self.identify;
        let namespaces = if identify.namespaces_max > 0 { identify.namespaces_max } else { identify.namespaces };
        let bytes = AnaLog::bytes_max(identify.ana_groups, namespaces);
        if identify.multipath & HAS_ANA == 0 || bytes > self.log_bytes_max() {
            return false;
        }
        let sqe = Sqe::get_log_page(ANA_LOG, 0, 0, bytes as u32 / 4, 0);
        let deadline_ns = now_ns.saturating_add(ADMIN_NS);
        self.admin.as_mut().is_some_and(|admin| admin.submit_log(sqe, bytes as u32, FabricsPurpose::Ana, deadline_ns))
    }

    /// The ANA log was read, on the way up or later.
    pub(super) fn ana_read(&mut self, status: NvmeStatus, now_ns: u64) {
        let is_setup = self.phase == FabricsPhase::Setup(FabricsStep::Ana);
        let log = self.admin.as_ref().filter(|_| status.is_success()).map(|admin| admin.log(LOG_BYTES_MAX));
        let Some(log) = log.and_then(|log| AnaLog::parse(&log)) else {
            let error = if status.is_success() {
                FabricsHostError::Malformed("ANA log")
            } else {
                FabricsHostError::Command { command: FabricsStep::Ana.name(), status }
            };
            return self.lose(error, now_ns);
        };
        let transition_ns = 2_000_000_000 * u64::from(self.identify.ana_transition_s.max(1));
        self.ana_until_ns = match (log.is_changing(), self.ana_until_ns) {
            (false, _) => None,
            (true, Some(until_ns)) => Some(until_ns),
            (true, None) => Some(now_ns.saturating_add(transition_ns)),
        };
        let is_same = self.ana.as_ref() == Some(&log);
        self.ana = Some(log);
        if is_setup {
            self.set_up(FabricsStep::Scan, now_ns);
        } else if !is_same {
            self.events.push_back(FabricsHostEvent::AnaChanged);
        }
    }

    /// Sends the next command of a scan, or ends the scan.
    pub(super) fn go_on_scanning(&mut self, now_ns: u64) {
        let Some(scan) = &self.scan else { return };
        if let Some(step) = scan.step() {
            let deadline_ns = now_ns.saturating_add(ADMIN_NS);
            if !self.submit(step.sqe(), FabricsData::Read(4096), FabricsPurpose::Scan(step), deadline_ns) {
                if self.state == ControllerState::Connecting {
                    return self.lose(FabricsHostError::Timeout(FabricsStep::Scan.name()), now_ns);
                }
                // All slots are in use: the command is sent later.
                (self.scan, self.wants_scan) = (None, true);
            }
            return;
        }
        let (found, active) = self.scan.take().map_or_else(Default::default, Scan::into_found);
        let is_same = found.len() == self.namespaces.len()
            && found.iter().zip(&self.namespaces).all(|(new, old)| ScannedNamespace::is_same(new, old));
        (self.namespaces, self.active) = (found, active);
        if !is_same {
            self.events.push_back(FabricsHostEvent::NamespacesChanged);
        }
        if self.phase == FabricsPhase::Setup(FabricsStep::Scan) {
            self.live(now_ns);
        }
    }

    pub(super) fn scan_completed(&mut self, slot: u16, status: NvmeStatus, now_ns: u64) {
        let (Some(scan), Some(admin)) = (&mut self.scan, &self.admin) else { return };
        scan.completed(status, &admin.data(slot), &self.identify, &self.nvm_limits);
        self.go_on_scanning(now_ns);
    }

    fn log_header(&mut self, step: FabricsStep, now_ns: u64) {
        let bytes = self.admin.as_ref().map_or_else(Vec::new, |admin| admin.log(DISCOVERY_ENTRY_BYTES as u32));
        let Some(header) = DiscoveryHeader::parse(&bytes) else {
            return self.lose(FabricsHostError::Malformed("discovery log"), now_ns);
        };
        let known = self.log.replace((header.generation, header.entries));
        if step == FabricsStep::DiscoveryCheck && known == self.log {
            self.log = None;
            let (entries, others) = std::mem::take(&mut self.discovered);
            let log = DiscoveredLog { generation: header.generation, entries, others };
            self.events.push_back(FabricsHostEvent::Discovered(log));
            return self.live(now_ns);
        }
        self.discovered = (Vec::new(), 0);
        // A log that changes all the time is not read for ever.
        self.log_reads += 1;
        if self.log_reads > LOG_READS_MAX {
            return self.lose(FabricsHostError::Timeout("reading a discovery log that changes"), now_ns);
        }
        let next = if header.entries == 0 { FabricsStep::DiscoveryCheck } else { FabricsStep::DiscoveryEntries(0) };
        self.set_up(next, now_ns);
    }

    /// Entries of the discovery log to be read at once, from this one on.
    fn entries_at_once(&self, from: u64) -> u64 {
        let bytes_max = self.log_bytes_max() / DISCOVERY_ENTRY_BYTES as u64;
        self.log.map_or(0, |(_, entries)| entries.saturating_sub(from)).min(bytes_max)
    }

    /// Bytes of a log page that one command reads at most.
    fn log_bytes_max(&self) -> u64 {
        self.identify.transfer_bytes_max(0).unwrap_or(u64::MAX).min(LOG_BYTES_MAX.into())
    }

    fn log_entries(&mut self, from: u64, now_ns: u64) {
        let (Some((_, entries)), Some(admin)) = (self.log, &self.admin) else { return };
        let count = self.entries_at_once(from);
        let bytes = admin.log(count as u32 * DISCOVERY_ENTRY_BYTES as u32);
        for entry in bytes.as_chunks().0 {
            match DiscoveryEntry::parse(entry) {
                Ok(entry) => self.discovered.0.push(entry),
                Err(_) => self.discovered.1 += 1,
            }
        }
        let next = from + count;
        let is_last = next >= entries;
        self.set_up(if is_last { FabricsStep::DiscoveryCheck } else { FabricsStep::DiscoveryEntries(next) }, now_ns);
    }

    /// Ends the bring-up.
    fn live(&mut self, now_ns: u64) {
        (self.phase, self.bring_up_until_ns) = (FabricsPhase::Idle, None);
        self.state.change(ControllerState::Live);
        self.error = None;
        self.wants_event = true;
        self.events.push_back(FabricsHostEvent::Live);
        self.log_reads = 0;
        self.connect_queues(now_ns);
    }

    /// Begins the shutdown of a live controller, once its queues are told to close.
    pub(super) fn shut_down(&mut self, now_ns: u64) {
        self.close_queues();
        // Their log is not read any more.
        self.fail_cross_resets();
        let bits =
            ControllerConfig { enabled: true, shutdown: 1, sq_entry_shift: 6, cq_entry_shift: 4, ..Default::default() };
        let named_ns = u64::from(self.identify.shutdown_us) * 1000;
        let time_ns = if named_ns > 0 { named_ns.min(SHUTDOWN_MAX_NS) } else { SHUTDOWN_NS };
        let until_ns = now_ns.saturating_add(time_ns);
        self.phase = FabricsPhase::Shutdown { at_ns: until_ns, until_ns };
        if !self.submit(set_property(CC, bits.bits()), FabricsData::None, FabricsPurpose::Shutdown, until_ns) {
            self.close_all(now_ns);
        }
    }

    /// The shutdown was accepted, or its progress was read.
    pub(super) fn shutdown_completed(&mut self, status: NvmeStatus, result: u64, now_ns: u64) {
        let FabricsPhase::Shutdown { until_ns, .. } = self.phase else { return };
        let progress = ControllerStatus::from_bits(result as u32).filter(|_| self.reads_shutdown);
        if progress.is_some_and(|progress| progress.shutdown == SHUTDOWN_COMPLETE) {
            self.fence_ended(self.association);
            return self.close_all(now_ns);
        }
        if !status.is_success() {
            return self.close_all(now_ns);
        }
        let pause_ns = if self.reads_shutdown { STATUS_NS } else { 0 };
        self.phase = FabricsPhase::Shutdown { at_ns: now_ns.saturating_add(pause_ns).min(until_ns), until_ns };
    }

    /// Reads the progress of the shutdown, or gives it up.
    pub(super) fn look_at_shutdown(&mut self, until_ns: u64, now_ns: u64) {
        if now_ns >= until_ns {
            return self.close_all(now_ns);
        }
        self.reads_shutdown = true;
        self.phase = FabricsPhase::Shutdown { at_ns: until_ns, until_ns };
        let sqe = FabricsCommand::PropertyGet { size: PropertySize::Four, offset: CSTS as u32 }.sqe();
        if !self.submit(sqe, FabricsData::None, FabricsPurpose::Shutdown, until_ns) {
            self.close_all(now_ns);
        }
    }
}

/// Reads of a discovery log from its start before it is given up.
const LOG_READS_MAX: u32 = 8;

fn set_property(offset: usize, value: u32) -> Sqe {
    FabricsCommand::PropertySet { size: PropertySize::Four, offset: offset as u32, value: value.into() }.sqe()
}
