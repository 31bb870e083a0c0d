//! Capabilities of a controller: its options, the capability registers, and its identify data.

use std::sync::Arc;

use super::NamespaceTable;
use super::events::{ANA_NOTICES, REQUESTS_MAX};
use super::logs::ERRORS_MAX;
use crate::cross_reset::CROSS_RESET_NOTICES;
use crate::registers::{self, Capabilities};
use crate::{
    AnaGroups, ControllerInstance, DiscoveryLog, IDENTIFY_BYTES, IdentifyController, NvmeStatus, PAGE, SQE_BYTES, Sqe,
    admin, cns,
};

/// Version 2.0.
pub(crate) const VERSION: u32 = 2 << 16;
/// Maximum concurrent Abort commands.
pub(crate) const ABORTS_MAX: usize = 4;
/// Warning temperature, K. There is no sensor.
pub(crate) const WARNING_KELVIN: u16 = 343;
const CRITICAL_KELVIN: u16 = 353;
/// Granularity of the keep-alive timer, 100 ms: a second.
const KEEP_ALIVE_UNITS: u16 = 10;

/// Maximum concurrent resets of other controllers: paths of one host that are lost at the same time.
pub(crate) const CROSS_RESETS_MAX: usize = 4;
/// Time for commands of a lost association to end, ms: what a device takes that works.
const QUIESCE_MS: u16 = 5000;

/// ONCS: Dataset Management.
pub(crate) const ONCS_DSM: u16 = 1 << 2;
/// ONCS: Write Zeroes.
pub(crate) const ONCS_WRITE_ZEROES: u16 = 1 << 3;

/// All admin commands, of which Doorbell Buffer Config and Cross-Controller Reset are optional.
const ADMIN_COMMANDS: [u8; 13] = [
    admin::DELETE_SQ,
    admin::CREATE_SQ,
    admin::GET_LOG_PAGE,
    admin::DELETE_CQ,
    admin::CREATE_CQ,
    admin::IDENTIFY,
    admin::ABORT,
    admin::SET_FEATURES,
    admin::GET_FEATURES,
    admin::ASYNC_EVENT,
    admin::KEEP_ALIVE,
    admin::CROSS_CONTROLLER_RESET,
    admin::DOORBELL_BUFFER,
];

/// Options of a controller.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// PCI vendor id, and subsystem vendor id; zero for a controller without a PCI function.
    pub vendor: u16,
    /// Serial number, ASCII.
    pub serial: String,
    /// Model number, ASCII.
    pub model: String,
    /// Firmware revision, ASCII.
    pub firmware: String,
    /// NQN of the subsystem.
    pub subsystem: String,
    /// Controller identifier (CNTLID).
    pub controller_id: u16,
    /// Maximum I/O submission queues, and maximum I/O completion queues.
    pub io_queues: u16,
    /// Maximum entries of an I/O queue.
    pub queue_entries: u16,
    /// Maximum commands in flight of an I/O completion queue.
    pub depth: u16,
    /// Interrupt vectors. Vector 0 is that of the admin queue.
    pub vectors: u16,
    /// Maximum transfer, bytes: a page times a power of two.
    pub transfer_bytes: u32,
    /// Distance of doorbells: 4 bytes shifted by this (CAP.DSTRD). All doorbells fit a page.
    pub doorbell_stride: u8,
    /// Whether hosts can set up shadow doorbells (Doorbell Buffer Config).
    pub has_shadow: bool,
    /// Unset for a controller with queues in memory.
    pub fabrics: Option<FabricsOptions>,
}

/// Options of a controller whose queues are connections.
#[derive(Clone, Debug, Default)]
pub struct FabricsOptions {
    /// Maximum in-capsule data of an I/O command, bytes.
    pub in_capsule: u32,
    /// The log of a discovery controller; unset for an I/O controller.
    pub discovery: Option<Arc<DiscoveryLog>>,
    /// Its life, for an I/O controller that other ones of its subsystem can have reset, as it can them; otherwise
    /// unset.
    pub instance: Option<ControllerInstance>,
}

impl Default for ControllerOptions {
    fn default() -> ControllerOptions {
        ControllerOptions {
            vendor: 0,
            serial: String::new(),
            model: "blkyard".to_owned(),
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            subsystem: String::new(),
            controller_id: 0,
            io_queues: 16,
            queue_entries: 1024,
            depth: 128,
            vectors: 17,
            transfer_bytes: 128 << 10,
            doorbell_stride: 0,
            has_shadow: true,
            fabrics: None,
        }
    }
}

impl ControllerOptions {
    /// Maximum I/O queues: all doorbells, including the admin queue's, fit a shadow doorbell page.
    pub const IO_QUEUES_MAX: u16 = (PAGE / 8) as u16 - 1;
    /// Upper bound of the maximum transfer, bytes.
    pub const TRANSFER_BYTES_MAX: u32 = 4 << 20;

    /// The greatest doorbell stride, up to a cache line for each doorbell, with which those of this number of I/O
    /// queues and of the admin queue fit a page: the shadow doorbells do, and hosts such as SPDK map a single page.
    ///
    /// A polled doorbell in the line of others moves with each write of one of them.
    pub fn widest_stride(io_queues: u16) -> u8 {
        const LINE_STRIDE: u8 = 4;
        let fits = |stride: &u8| registers::sq_doorbell(io_queues + 1, *stride) <= PAGE as usize;
        (0..=LINE_STRIDE).rev().find(fits).unwrap_or(0)
    }

    /// # Panics
    /// If a number is out of range; options come from the caller.
    pub(crate) fn check(&self) {
        let pages = u64::from(self.transfer_bytes) / PAGE;
        assert!(
            (1..=ControllerOptions::IO_QUEUES_MAX).contains(&self.io_queues)
                && (2..=1 << 15).contains(&self.queue_entries)
                && self.doorbell_stride < 16
                && registers::sq_doorbell(self.io_queues + 1, self.doorbell_stride) <= PAGE as usize
                && self.depth > 0
                && self.vectors > 0
                && self.transfer_bytes <= ControllerOptions::TRANSFER_BYTES_MAX
                && u64::from(self.transfer_bytes).is_multiple_of(PAGE)
                && pages.is_power_of_two()
                && pages > 1,
            "{self:?}"
        );
    }

    /// Opcodes of the supported admin commands, without fabrics commands.
    pub(crate) fn admin_opcodes(&self) -> impl Iterator<Item = u8> {
        let (has_rings, has_shadow, is_discovery) = (self.fabrics.is_none(), self.has_shadow, self.is_discovery());
        let has_instance = self.instance().is_some();
        ADMIN_COMMANDS.into_iter().filter(move |opcode| match *opcode {
            admin::CREATE_CQ | admin::CREATE_SQ | admin::DELETE_CQ | admin::DELETE_SQ => has_rings,
            admin::DOORBELL_BUFFER => has_rings && has_shadow,
            admin::ABORT => !is_discovery,
            admin::CROSS_CONTROLLER_RESET => has_instance,
            _ => true,
        })
    }

    /// Whether it is a discovery controller.
    pub(crate) fn is_discovery(&self) -> bool {
        self.discovery().is_some()
    }

    /// The log of a discovery controller.
    pub(crate) fn discovery(&self) -> Option<&Arc<DiscoveryLog>> {
        self.fabrics.as_ref()?.discovery.as_ref()
    }

    /// Its life, if it takes part in cross-controller resets.
    pub(crate) fn instance(&self) -> Option<ControllerInstance> {
        self.fabrics.as_ref().filter(|fabrics| fabrics.discovery.is_none())?.instance
    }

    /// CAP.
    pub(crate) fn capabilities(&self) -> Capabilities {
        Capabilities {
            queue_entries_max: u32::from(self.queue_entries),
            contiguous_queues: true,
            // A reset waits for the device's I/O in flight.
            timeout_500ms: READY_500MS,
            // The NVM command set.
            command_sets: 1,
            // Ready with media.
            ready_modes: 1,
            doorbell_stride: self.doorbell_stride,
            ..Capabilities::default()
        }
    }

    /// Identify data of the controller.
    pub(crate) fn identify(&self, table: &NamespaceTable) -> IdentifyController {
        let namespaces = table.identifiers();
        let has_cache = table.iter().any(|namespace| namespace.has_cache);
        let pages = u64::from(self.transfer_bytes) / PAGE;
        let data = IdentifyController {
            vendor: self.vendor,
            subsystem_vendor: self.vendor,
            serial: padded(&self.serial),
            model: padded(&self.model),
            firmware: padded(&self.firmware),
            subsystem: terminated(&self.subsystem),
            mdts: pages.ilog2() as u8,
            controller_id: self.controller_id,
            version: VERSION,
            // Namespace attribute notices.
            async_events: 1 << 8,
            // An I/O controller.
            controller_type: 1,
            // Doorbell Buffer Config.
            admin_commands: u16::from(self.has_shadow) << 8,
            // A shutdown waits for the device as a reset does. Unset, it would be at the host's discretion, and Linux
            // gives it 5 s.
            shutdown_us: u32::from(READY_500MS) * 500_000,
            abort_limit: ABORTS_MAX as u8 - 1,
            async_event_limit: REQUESTS_MAX as u8 - 1,
            // One slot, read-only.
            firmware_updates: 1 | 1 << 1,
            log_attributes: 1 << 1 | 1 << 2 | 1 << 5,
            error_log_entries: ERRORS_MAX as u8 - 1,
            warning_kelvin: WARNING_KELVIN,
            critical_kelvin: CRITICAL_KELVIN,
            keep_alive: KEEP_ALIVE_UNITS,
            sq_entry_shifts: 0x66,
            cq_entry_shifts: 0x44,
            namespaces,
            namespaces_max: namespaces,
            nvm_commands: nvm_commands(table),
            // A Flush may be for all namespaces.
            write_cache: 3 << 1 | u8::from(has_cache),
            // SGLs, in dwords.
            sgl: 2,
            ..IdentifyController::default()
        };
        self.identify_fabrics(with_ana(data, table))
    }

    /// The same, as a controller over fabrics is.
    fn identify_fabrics(&self, data: IdentifyController) -> IdentifyController {
        let Some(FabricsOptions { in_capsule, discovery, .. }) = &self.fabrics else { return data };
        let is_discovery = discovery.is_some();
        let resets = |instance: ControllerInstance| (instance.uniquifier, instance.random, CROSS_RESETS_MAX as u8);
        let (uniquifier, random, cross_resets) = self.instance().map_or((0, 0, 0), resets);
        let notices = if cross_resets > 0 { CROSS_RESET_NOTICES } else { 0 };
        IdentifyController {
            uniquifier,
            random,
            cross_resets,
            quiesce_ms: QUIESCE_MS,
            // Several controllers.
            multipath: data.multipath | 2,
            // The log of a discovery controller does not change.
            async_events: if is_discovery { 0 } else { data.async_events | notices },
            controller_type: if is_discovery { 2 } else { 1 },
            admin_commands: 0,
            commands_max: self.queue_entries,
            namespaces: if is_discovery { 0 } else { data.namespaces },
            namespaces_max: if is_discovery { 0 } else { data.namespaces_max },
            // Neither Compare nor Verify.
            nvm_commands: if is_discovery { 0 } else { data.nvm_commands & !(1 | 1 << 7) },
            write_cache: if is_discovery { 0 } else { data.write_cache },
            // In the capsule, and by the transport.
            sgl: data.sgl | 1 << 20,
            command_capsule: (SQE_BYTES as u32 + in_capsule) / 16,
            response_capsule: 1,
            sgl_descriptors_max: 1,
            ..data
        }
    }
}

/// The same, with asymmetric access if the namespaces have that.
fn with_ana(data: IdentifyController, table: &NamespaceTable) -> IdentifyController {
    if table.ana().is_none() {
        return data;
    }
    IdentifyController {
        // Several ports, asymmetric access.
        multipath: 1 | 1 << 3,
        async_events: data.async_events | ANA_NOTICES,
        ana_transition_s: AnaGroups::TRANSITION_S,
        // All five states; the group of a namespace does not change.
        ana: 0x1f | 1 << 6,
        ana_group_max: AnaGroups::GROUPS_MAX,
        ana_groups: AnaGroups::GROUPS_MAX,
        ..data
    }
}

/// Optional NVM commands (ONCS): those that any namespace's device supports.
pub(crate) fn nvm_commands(table: &NamespaceTable) -> u16 {
    let deallocates = table.iter().any(|namespace| namespace.can_deallocate);
    let writes_zeroes = table.iter().any(|namespace| namespace.can_write_zeroes);
    // Compare, select of features, Timestamp, Verify.
    let always = 1 | 1 << 4 | 1 << 6 | 1 << 7;
    always | if deallocates { ONCS_DSM } else { 0 } | if writes_zeroes { ONCS_WRITE_ZEROES } else { 0 }
}

/// CAP.TO and CRTO, in 500 ms: long enough for a device that recovers.
pub(crate) const READY_500MS: u8 = 120;

/// Refuses an Identify command for a command set other than NVM.
pub(crate) fn check_command_set(sqe: &Sqe) -> Result<(), NvmeStatus> {
    let has_set = matches!(sqe.dword(10) as u8, cns::CSI_NAMESPACE | cns::CSI_CONTROLLER);
    if has_set && sqe.dword(11) >> 24 != 0 { Err(NvmeStatus::INVALID_FIELD.with_dnr()) } else { Ok(()) }
}

/// Identify data of the controller for the NVM command set (CNS 06h): no limits besides MDTS.
pub(crate) fn identify_nvm(bytes: &mut [u8; IDENTIFY_BYTES]) {
    bytes.fill(0);
}

/// ASCII, padded with blanks, truncated to fit. Other characters become question marks.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [b' '; N];
    for (byte, character) in bytes.iter_mut().zip(text.chars()) {
        *byte = if character.is_ascii_graphic() || character == ' ' { character as u8 } else { b'?' };
    }
    bytes
}

/// UTF-8, ended by a zero byte, truncated to fit.
fn terminated<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let end = text.floor_char_boundary(N - 1);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}
