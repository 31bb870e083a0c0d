//! Enables a controller: the register sequence from any state to CSTS.RDY = 1 with an admin queue.
//!
//! An enabled controller is disabled first. Each wait has the controller's time limit (CAP.TO, CRTO.CRWMT). If a
//! controller does not become idle or ready in time, the whole device is reset once, and the sequence restarts.

use crate::host::disable::{Disable, poll_at};
use crate::host::{ControllerTransport, DeviceGone, HostStep, NvmeHostError};
use crate::registers::{
    ACQ, AQA, ASQ, CAP, CC, CRTO, CSTS, Capabilities, ControllerConfig, ControllerStatus, SUBSYSTEM_RESET,
    admin_queue_attributes,
};
use crate::{PAGE, QueueRings};

/// Unit of CAP.TO and CRTO, ns.
pub(crate) const TIMEOUT_UNIT_NS: u64 = 500_000_000;
/// CAP.CSS: sets selected by CSI.
const CSS_BY_CSI: u8 = 1 << 6;
/// CAP.CSS: no I/O command set.
const CSS_NONE: u8 = 1 << 7;

/// The rings of the admin queue at their controller addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminRings {
    /// Address of the submission ring, page-aligned.
    pub sq_addr: u64,
    /// Address of the completion ring, page-aligned.
    pub cq_addr: u64,
    /// Entries of each.
    pub entries: u16,
}

#[derive(Debug)]
enum EnableState {
    Disable(Disable),
    Start,
    Ready { since_ns: u64, until_ns: u64 },
    Done,
}

/// The enable sequence.
#[derive(Debug)]
pub struct Enable {
    rings: AdminRings,
    state: EnableState,
    capabilities: Capabilities,
    /// Whether the device was already reset once.
    was_reset: bool,
}

impl Enable {
    /// A sequence for this admin queue.
    pub fn new(rings: AdminRings) -> Enable {
        let state = EnableState::Disable(Disable::new(None));
        Enable { rings, state, capabilities: Capabilities::default(), was_reset: false }
    }

    /// The last value of CAP, read after the command set was selected.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Executes all possible steps.
    pub fn advance<T: ControllerTransport + ?Sized>(&mut self, transport: &mut T, now_ns: u64) -> HostStep {
        loop {
            match &mut self.state {
                EnableState::Disable(disable) => match disable.advance(transport, now_ns) {
                    HostStep::Done if disable.is_gone() => return HostStep::Failed(DeviceGone.into()),
                    HostStep::Done => {
                        self.was_reset |= disable.was_reset();
                        self.state = EnableState::Start;
                    }
                    other => return other,
                },
                EnableState::Start => match self.start(transport, now_ns) {
                    Ok(until_ns) => self.state = EnableState::Ready { since_ns: now_ns, until_ns },
                    Err(error) => return HostStep::Failed(error),
                },
                EnableState::Ready { since_ns, until_ns } => {
                    let (since_ns, until_ns) = (*since_ns, *until_ns);
                    let error = match transport.status() {
                        Err(gone) => return HostStep::Failed(gone.into()),
                        Ok(ControllerStatus { fatal: true, .. }) => NvmeHostError::Fatal,
                        Ok(ControllerStatus { ready: true, .. }) => {
                            self.state = EnableState::Done;
                            continue;
                        }
                        Ok(_) if now_ns < until_ns => return poll_at(now_ns, until_ns),
                        Ok(_) => NvmeHostError::NotReady((now_ns - since_ns) / 1_000_000),
                    };
                    if std::mem::replace(&mut self.was_reset, true) || !transport.reset_function() {
                        return HostStep::Failed(error);
                    }
                    self.state = EnableState::Disable(Disable::new(None));
                }
                EnableState::Done => return HostStep::Done,
            }
        }
    }

    /// Sets up the disabled controller and enables it. Returns the deadline for becoming ready.
    fn start<T: ControllerTransport + ?Sized>(&mut self, transport: &mut T, now_ns: u64) -> Result<u64, NvmeHostError> {
        let cap = capabilities(transport)?;
        check(cap)?;
        if cap.subsystem_reset && transport.status()?.subsystem_reset {
            // It survives a disabled controller, and would be taken for another reset of the subsystem.
            transport.write32(CSTS, SUBSYSTEM_RESET)?;
        }
        let AdminRings { sq_addr, cq_addr, entries } = self.rings;
        transport.write32(AQA, admin_queue_attributes(entries, entries))?;
        transport.write64(ASQ, sq_addr)?;
        transport.write64(ACQ, cq_addr)?;
        let config = ControllerConfig {
            command_set: if cap.command_sets & CSS_BY_CSI != 0 { 6 } else { 0 },
            sq_entry_shift: 6,
            cq_entry_shift: 4,
            ..ControllerConfig::default()
        };
        // Written without EN first: CAP depends on the command set.
        transport.write32(CC, config.bits())?;
        let cap = capabilities(transport)?;
        check(cap)?;
        self.capabilities = cap;
        let timeout_ns = ready_timeout_ns(cap, transport)?;
        transport.write32(CC, ControllerConfig { enabled: true, ..config }.bits())?;
        Ok(now_ns.saturating_add(timeout_ns))
    }
}

/// Reads CAP; all ones are invalid for any controller.
pub(crate) fn capabilities<T: ControllerTransport + ?Sized>(transport: &mut T) -> Result<Capabilities, DeviceGone> {
    match transport.read64(CAP)? {
        u64::MAX => Err(DeviceGone),
        bits => Ok(Capabilities::from_bits(bits)),
    }
}

/// CAP.TO: zero counts as one unit.
pub(crate) fn timeout_ns(cap: Capabilities) -> u64 {
    (u64::from(cap.timeout_500ms) + 1) * TIMEOUT_UNIT_NS
}

/// Maximum time to become ready: CRTO.CRWMT if the controller has ready modes, but at least CAP.TO, since some
/// controllers leave CRTO at zero.
fn ready_timeout_ns<T: ControllerTransport + ?Sized>(cap: Capabilities, transport: &mut T) -> Result<u64, DeviceGone> {
    if cap.ready_modes & 1 == 0 {
        return Ok(timeout_ns(cap));
    }
    let with_media = u64::from(transport.read32(CRTO)? & 0xffff);
    Ok(timeout_ns(cap).max(with_media * TIMEOUT_UNIT_NS))
}

fn check(cap: Capabilities) -> Result<(), NvmeHostError> {
    if cap.page_min > 0 {
        return Err(NvmeHostError::PageSize(PAGE << cap.page_min));
    }
    // Controllers before 1.1 set the field to zero for NVM.
    if cap.command_sets & CSS_NONE != 0 && cap.command_sets & (CSS_BY_CSI | 1) == 0 {
        return Err(NvmeHostError::NoCommandSet);
    }
    if cap.queue_entries_max < u32::from(QueueRings::ENTRIES_MIN) {
        return Err(NvmeHostError::QueueEntries(cap.queue_entries_max));
    }
    Ok(())
}
