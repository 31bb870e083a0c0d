//! Changes of a controller that a client learns of by a reply: of its memory, a reset of the function, and the end of
//! its session.
//!
//! A reset and the end need a silent device: queues drain, and stay stopped until the change is made. Memory changes
//! while queues run, in two steps. First they learn of the new addresses, and tell when no request of theirs names
//! memory that has none any more; then such memory is unmapped ([ADR 63]).
//!
//! A device that hangs can delay a change without limit: it may still access the memory of the client, so nothing is
//! unmapped or released before its requests have ended. The control path does not wait for them. It looks at the queues
//! periodically, handles other messages meanwhile, and logs a long wait.
//!
//! [ADR 63]: ../../../../docs/adr/0063-queues-run-while-their-memory-changes.md
//!
//! Owned by the session with its [`NvmeFunction`].

use std::time::{Duration, Instant};

use super::VfioUserExport;
use super::device::{DRAIN_WAIT, NvmeFunction};
use super::memory::DmaSlots;
use super::session::VfioSessionError;

/// Time after which a wait is logged: far above the latency of a healthy device, below the 5 s after which QEMU gives
/// up a message.
const LOG_AFTER: Duration = Duration::from_secs(2);

/// A change that a client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FunctionChange {
    /// Other DMA mappings, which the controller has already.
    Memory,
    /// The power-on state, except for memory and eventfds.
    Reset,
    /// The end of the session.
    End,
}

impl FunctionChange {
    fn name(self) -> &'static str {
        match self {
            FunctionChange::Memory => "a change of the client's memory",
            FunctionChange::Reset => "a reset by the client",
            FunctionChange::End => "the end of the session",
        }
    }
}

/// A change that waits for requests in flight.
#[derive(Debug)]
pub(super) struct PendingChange {
    change: FunctionChange,
    /// Time of its begin.
    pub(super) since: Instant,
    is_logged: bool,
}

impl NvmeFunction {
    /// Begins a change. Returns whether it is made: queues that drain within a moment are waited for.
    pub(super) fn begin_change(
        &mut self,
        config: &VfioUserExport,
        change: FunctionChange,
    ) -> Result<bool, VfioSessionError> {
        let now = Instant::now();
        self.change = Some(PendingChange { change, since: now, is_logged: false });
        self.advance_change(config, Some(now + DRAIN_WAIT))
    }

    /// Begins the end of the session, or continues with it; a change that is not made yet is dropped. Returns whether
    /// the device is silent.
    pub(super) fn advance_end(&mut self, config: &VfioUserExport) -> Result<bool, VfioSessionError> {
        match &mut self.change {
            Some(pending) => {
                pending.change = FunctionChange::End;
                self.advance_change(config, Some(Instant::now()))
            }
            None => self.begin_change(config, FunctionChange::End),
        }
    }

    /// Whether the end of the session waits for the device.
    pub(super) fn is_ending(&self) -> bool {
        self.change.as_ref().is_some_and(|pending| pending.change == FunctionChange::End)
    }

    /// Begins a change of memory.
    pub(super) fn change_memory(&mut self, config: &VfioUserExport, dma: DmaSlots) -> Result<(), VfioSessionError> {
        let is_same = self.dma.is_same(&dma);
        self.dma = dma;
        if !is_same {
            self.publish_memory(config)?;
            self.begin_change(config, FunctionChange::Memory)?;
        }
        Ok(())
    }

    /// Makes the pending change if that is possible by then, or waits without limit. Returns whether none is pending.
    pub(super) fn advance_change(
        &mut self,
        config: &VfioUserExport,
        until: Option<Instant>,
    ) -> Result<bool, VfioSessionError> {
        let Some(&PendingChange { change, .. }) = self.change.as_ref() else { return Ok(true) };
        self.take_replies();
        // Without a limit queues are drained for a change of memory, too: then none of their requests is in flight.
        let is_silent =
            if change == FunctionChange::Memory && until.is_some() { true } else { self.suspend_until(config, until)? };
        let is_ready = is_silent && (change != FunctionChange::Memory || self.is_memory_changed(config)?);
        self.updated = Instant::now();
        let (log, updated) = (&self.log, self.updated);
        if !is_ready {
            let late = self.change.as_mut().filter(|pending| !pending.is_logged && pending.since + LOG_AFTER < updated);
            if let Some(pending) = late {
                pending.is_logged = true;
                log.warn(format_args!(
                    "{} waits: requests in flight do not end, and their device may still access the client's memory; \
                     see blkyard inspect, and resume or restart what serves the device",
                    pending.change.name()
                ));
            }
            return Ok(false);
        }
        let Some(PendingChange { since, is_logged, .. }) = self.change.take() else { return Ok(true) };
        if is_logged {
            let waited = (updated - since).as_secs_f64();
            log.info(format_args!("{} continues: requests in flight ended after {waited:.1} s", change.name()));
        }
        if change == FunctionChange::Reset {
            self.restart(config)?;
        }
        Ok(true)
    }

    /// Whether each queue knows the new addresses, and none has memory that has lost its own.
    fn is_memory_changed(&mut self, config: &VfioUserExport) -> Result<bool, VfioSessionError> {
        self.update(config)?;
        // No request names that memory any more.
        if !self.controller.is_remapping() && self.dma.remove_leaving() {
            self.publish_memory(config)?;
        }
        Ok(!self.controller.is_remapping())
    }

    /// Whether a change is not made yet.
    pub(crate) fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Whether queues are to stay stopped.
    pub(super) fn is_halted(&self) -> bool {
        self.change.as_ref().is_some_and(|pending| pending.change != FunctionChange::Memory)
    }

    /// The pending change, and for how long it has waited.
    pub(crate) fn pending_change(&self) -> Option<(&'static str, Duration)> {
        self.change.as_ref().map(|pending| (pending.change.name(), pending.since.elapsed()))
    }
}
