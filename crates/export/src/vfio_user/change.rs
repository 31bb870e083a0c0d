//! Changes of a controller that need a silent device: of its memory, a reset of the function, and the end of its
//! session.
//!
//! Queues drain, the change is made, and the queues continue. A device that hangs can delay that without limit: it may
//! still access the memory of the client, so nothing is unmapped or released before its requests have ended. The
//! control path does not wait for them. It looks at the queues periodically, handles other messages meanwhile, and logs
//! a long wait. Queues stay stopped until the change is made.
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

/// A change that needs a silent device.
#[derive(Debug)]
pub(super) enum FunctionChange {
    /// Other DMA mappings.
    Memory(DmaSlots),
    /// The power-on state, except for memory and eventfds.
    Reset,
    /// The end of the session.
    End,
}

impl FunctionChange {
    fn name(&self) -> &'static str {
        match self {
            FunctionChange::Memory(_) => "a change of the client's memory",
            FunctionChange::Reset => "a reset by the client",
            FunctionChange::End => "the end of the session",
        }
    }
}

/// A change that waits for the device.
#[derive(Debug)]
pub(super) struct PendingChange {
    change: FunctionChange,
    /// Time since which queues drain.
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

    /// Makes the pending change if the queues are drained by then, or waits without limit. Returns whether none is
    /// pending.
    pub(super) fn advance_change(
        &mut self,
        config: &VfioUserExport,
        until: Option<Instant>,
    ) -> Result<bool, VfioSessionError> {
        if self.change.is_none() {
            return Ok(true);
        }
        self.take_replies();
        let is_silent = self.suspend_until(config, until)?;
        self.updated = Instant::now();
        let (log, updated) = (&self.log, self.updated);
        if !is_silent {
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
        let Some(PendingChange { change, since, is_logged }) = self.change.take() else { return Ok(true) };
        if is_logged {
            let waited = (updated - since).as_secs_f64();
            log.info(format_args!("{} continues: requests in flight ended after {waited:.1} s", change.name()));
        }
        match change {
            FunctionChange::Memory(dma) => self.replace_memory(config, dma)?,
            FunctionChange::Reset => self.restart(config)?,
            FunctionChange::End => {}
        }
        Ok(true)
    }

    /// Whether a change waits for the device.
    pub(crate) fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// The pending change, and for how long it has waited.
    pub(crate) fn pending_change(&self) -> Option<(&'static str, Duration)> {
        self.change.as_ref().map(|pending| (pending.change.name(), pending.since.elapsed()))
    }
}
