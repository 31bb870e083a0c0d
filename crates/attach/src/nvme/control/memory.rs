//! Memory of queues as the controller reaches it: mapped as it comes, given up as it goes.
//!
//! Called by the control thread. What the transport maps, and how, is its own matter.

use std::time::{Duration, Instant};

use super::NvmeControl;
use crate::nvme::NvmeTransport;
use crate::nvme::queue_use::{AddressOf, QueueUse, Unreached};

/// How often memory of others that is pinned is looked at: pages that a balloon takes are rarely in use again sooner.
const MEMORY_INTERVAL: Duration = Duration::from_millis(200);

impl<T: NvmeTransport> NvmeControl<T> {
    /// Tells a queue where the controller finds its memory, or a part of it.
    pub(super) fn announce(&mut self, number: usize, tell: fn(&mut QueueUse, &AddressOf<'_>) -> Unreached) {
        let Some(session) = self.session.as_mut().filter(|session| session.is_served) else { return };
        let transport = session.host.transport();
        transport.sync_dma();
        if transport.failure().is_some() {
            // Announced in the next session.
            return;
        }
        let queue = &mut self.queues[number];
        let told = tell(queue, &|region, offset| transport.dma_addr(region, offset));
        let Unreached { regions, all, tables } = told;
        let mut unreached = if regions < all { regions.saturating_sub(queue.private_regions()) } else { regions };
        if unreached > 0 {
            unreached = unreached.saturating_sub(queue.dropped_regions(&self.parts.domain.regions()));
        }
        if unreached > 0
            && let Some(held_back) = self.pass()
        {
            tracing::error!(
                "{}: the controller reaches {unreached} of {all} memory regions of a queue not: I/O in them fails; back \
                 the memory with a shared file (memfd), or use fewer regions{held_back}",
                self.name()
            );
        }
        if tables > 0
            && let Some(held_back) = self.pass()
        {
            tracing::warn!(
                "{}: the controller has no room for the address tables of {tables} registered buffers: I/O in them \
                 works, at the cost of unregistered I/O; use fewer memory regions, or fewer and larger buffers{held_back}",
                self.name()
            );
        }
    }

    /// Maps new memory. Queues with unreached memory are told again, since the controller may have room for it now.
    pub(super) fn sync_dma(&mut self) {
        let changes = self.parts.domain.changes();
        let Some(session) = self.session.as_mut().filter(|session| session.dma_seen != changes) else { return };
        session.dma_seen = changes;
        session.host.transport().sync_dma();
        for number in 0..self.queues.len() {
            if self.queues[number].is_partly_unreached() {
                self.announce(number, QueueUse::announce_memory);
            }
        }
    }

    /// Gives up memory of others of which pages were given back. Its I/O fails, which loses less than data that go to
    /// the former pages.
    pub(super) fn watch_memory(&mut self) {
        let Some(due) = self.memory_due() else { return };
        let now = self.now();
        let Some(session) = self.session.as_mut().filter(|_| due <= now) else { return };
        let transport = session.host.transport();
        self.memory_seen = now;
        let bytes = transport.unmap_returned();
        if bytes == 0 {
            return;
        }
        tracing::error!(
            "{}: a front-end has given pages back to its host, in {bytes} bytes that are pinned for the controller: all \
             I/O there fails from now on; start it anew without a balloon, reports of free pages and memory that can be \
             unplugged, or serve the namespace by the kernel's driver, as file:/dev/nvmeXnY",
            self.name()
        );
        (0..self.queues.len()).for_each(|number| self.announce(number, QueueUse::announce_memory));
    }

    /// When [`NvmeControl::watch_memory`] is to look next, if there is anything to look at.
    pub(super) fn memory_due(&mut self) -> Option<Instant> {
        let session = self.session.as_mut().filter(|session| session.is_served)?;
        let is_watched = session.host.transport().watches_memory();
        is_watched.then(|| self.memory_seen + MEMORY_INTERVAL)
    }
}
