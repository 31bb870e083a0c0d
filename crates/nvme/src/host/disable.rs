//! Disables a controller and proves that it is silent: that it will not access the memory of its queues any more.
//!
//! It is silent when its orderly shutdown is complete (CSTS.SHST), when CSTS.RDY reads zero after CC.EN was cleared,
//! after a reset of the whole device, or when it is gone and its transport knows that it cannot return. Until then,
//! memory known to the controller must not be reused.
//!
//! A shutdown leaves CC.EN set: clearing it resets the controller, which may then write its media again.

use crate::host::enable::{capabilities, timeout_ns};
use crate::host::{ControllerTransport, DeviceGone, HostStep, NvmeHostError};
use crate::registers::{CC, ControllerConfig};

/// Polling interval of a changing register, ns.
const REGISTER_POLL_NS: u64 = 1_000_000;
/// CC.SHN: normal shutdown.
const SHUTDOWN_NORMAL: u8 = 1;
/// CSTS.SHST: shutdown complete.
const SHUTDOWN_COMPLETE: u8 = 2;

/// Proof that a controller is silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// An orderly shutdown is complete. The controller processes nothing before it is reset.
    ShutDown,
    /// CSTS.RDY is zero, or the device was reset.
    Disabled,
    /// The controller is gone.
    Gone,
}

#[derive(Debug)]
enum DisableState {
    Start,
    Shutdown { until_ns: u64 },
    Clear,
    Idle { since_ns: u64, until_ns: u64 },
    Done(Silence),
}

/// The disable sequence.
#[derive(Debug)]
pub struct Disable {
    /// Time limit of an orderly shutdown, ns; unset for none.
    shutdown_ns: Option<u64>,
    state: DisableState,
    was_reset: bool,
}

impl Disable {
    /// A sequence that clears CC.EN or, with a time limit in ns, shuts the controller down. If the shutdown takes
    /// longer, CC.EN is cleared as well.
    pub fn new(shutdown_ns: Option<u64>) -> Disable {
        Disable { shutdown_ns, state: DisableState::Start, was_reset: false }
    }

    /// The proof of silence, once there is one.
    pub fn silence(&self) -> Option<Silence> {
        match self.state {
            DisableState::Done(silence) => Some(silence),
            _ => None,
        }
    }

    /// Whether the controller was found to be gone.
    pub fn is_gone(&self) -> bool {
        self.silence() == Some(Silence::Gone)
    }

    /// Whether the whole device had to be reset.
    pub fn was_reset(&self) -> bool {
        self.was_reset
    }

    /// Executes all possible steps. The sequence is complete if the controller is gone for certain. After a failure the
    /// controller may still access memory; the next call restarts the sequence.
    pub fn advance<T: ControllerTransport + ?Sized>(&mut self, transport: &mut T, now_ns: u64) -> HostStep {
        let gone = match self.steps(transport, now_ns) {
            Ok(step) => return step,
            Err(gone) => gone,
        };
        if transport.is_silent_when_gone() {
            self.state = DisableState::Done(Silence::Gone);
            return HostStep::Done;
        }
        self.state = DisableState::Start;
        HostStep::Failed(gone.into())
    }

    fn steps<T: ControllerTransport + ?Sized>(
        &mut self,
        transport: &mut T,
        now_ns: u64,
    ) -> Result<HostStep, DeviceGone> {
        loop {
            match self.state {
                DisableState::Start => {
                    let status = transport.status()?;
                    let config = ControllerConfig::from_bits(transport.read32(CC)?);
                    self.state = match self.shutdown_ns.filter(|_| status.ready && config.enabled) {
                        Some(shutdown_ns) => {
                            let config = ControllerConfig { shutdown: SHUTDOWN_NORMAL, ..config };
                            transport.write32(CC, config.bits())?;
                            DisableState::Shutdown { until_ns: now_ns.saturating_add(shutdown_ns) }
                        }
                        None => DisableState::Clear,
                    };
                }
                DisableState::Shutdown { until_ns } => {
                    let status = transport.status()?;
                    if status.shutdown == SHUTDOWN_COMPLETE {
                        self.state = DisableState::Done(Silence::ShutDown);
                    } else if now_ns < until_ns {
                        return Ok(poll_at(now_ns, until_ns));
                    } else {
                        self.state = DisableState::Clear;
                    }
                }
                DisableState::Clear => {
                    let timeout_ns = timeout_ns(capabilities(transport)?);
                    let config = ControllerConfig::from_bits(transport.read32(CC)?);
                    if config.enabled {
                        let config = ControllerConfig { enabled: false, shutdown: 0, ..config };
                        transport.write32(CC, config.bits())?;
                    }
                    self.state = DisableState::Idle { since_ns: now_ns, until_ns: now_ns.saturating_add(timeout_ns) };
                }
                DisableState::Idle { since_ns, until_ns } => {
                    if !transport.status()?.ready {
                        self.state = DisableState::Done(Silence::Disabled);
                    } else if now_ns < until_ns {
                        return Ok(poll_at(now_ns, until_ns));
                    } else if !self.was_reset && transport.reset_function() {
                        self.was_reset = true;
                        // Read again, to notice a device that is gone after the reset.
                        self.state = DisableState::Clear;
                    } else {
                        self.state = DisableState::Start;
                        return Ok(HostStep::Failed(NvmeHostError::NotIdle((now_ns - since_ns) / 1_000_000)));
                    }
                }
                DisableState::Done(_) => return Ok(HostStep::Done),
            }
        }
    }
}

/// Time of the next register read, at the latest at the end of the wait.
pub(crate) fn poll_at(now_ns: u64, until_ns: u64) -> HostStep {
    HostStep::Wait { deadline_ns: now_ns.saturating_add(REGISTER_POLL_NS).min(until_ns) }
}
