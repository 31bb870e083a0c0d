//! The rings of one export, as seen by the control path: when they run, and how they drain.
//!
//! ```text
//!                    size, addresses, kick descriptor, enabled
//!   stopped ───────────────────────────────────────────────────▶ running
//!      ▲                                                            │
//!      └── disabled, stopped, or before a change: drains first ─────┘
//! ```
//!
//! Messages are not interpreted here.

use std::sync::Arc;

use blkyard_sys::EventFd;
use blkyard_virtio::{Features, RingBase, RingLayout};
use vhost::vhost_user::{Error, Result};

use super::{Backend, QUEUE_SIZE_MAX};
use crate::core::{LaneGone, Suspension};
use crate::vhost_user::advice;
use crate::vhost_user::memory::{Memory, MemoryError, check_bytes};
use crate::vhost_user::virtqueue::{DiskView, VirtqueueSetup};

/// Notification mode of a ring.
#[derive(Default)]
pub(super) enum Kick {
    /// Unset: the ring is stopped.
    #[default]
    Unknown,
    /// No kick descriptor: the ring is polled.
    Polled,
    /// Kick descriptor.
    Rung(Arc<EventFd>),
}

/// A front-end's settings of a ring.
#[derive(Default)]
pub(super) struct Vring {
    pub(super) size: u16,
    /// Front-end addresses: descriptors, available ring or driver's area, used ring or device's area.
    pub(super) addresses: Option<[u64; 3]>,
    /// Position of the ring; its start if unset.
    pub(super) base: Option<RingBase>,
    /// Guest address of the used ring, if writes to the ring are logged.
    pub(super) log_at: Option<u64>,
    pub(super) kick: Kick,
    pub(super) call: Option<Arc<EventFd>>,
    pub(super) error: Option<Arc<EventFd>>,
    pub(super) enabled: bool,
    pub(super) running: bool,
}

impl Vring {
    /// Position of the ring.
    pub(super) fn base(&self, features: Features) -> RingBase {
        self.base.unwrap_or(RingBase::start(features))
    }

    /// Sets the ring format, for which an index of the other format is invalid, and optionally the size.
    pub(super) fn change_format(&mut self, features: Features) {
        self.base = None;
        if !may_have_size(features, self.size) {
            self.size = 0;
        }
    }
}

/// Whether a ring of this format may have this size.
pub(super) fn may_have_size(features: Features, size: u16) -> bool {
    (1..=QUEUE_SIZE_MAX).contains(&size) && (features.contains(Features::RING_PACKED) || size.is_power_of_two())
}

impl Backend {
    pub(super) fn lost_lane(&mut self, index: usize, gone: &LaneGone) -> Error {
        tracing::error!("{}: queue {index}: {gone}", self.config.name);
        self.lane_gone = true;
        Error::BackendInternalError
    }

    pub(super) fn suspend(&mut self, index: usize) -> Result<()> {
        self.suspend_these(&[index])
    }

    /// Suspends every running ring; returns their indexes.
    pub(super) fn suspend_all(&mut self) -> Result<Vec<usize>> {
        let running: Vec<usize> = (0..self.vrings.len()).filter(|index| self.vrings[*index].running).collect();
        self.suspend_these(&running)?;
        Ok(running)
    }

    /// Suspends the running ones of these rings concurrently. The end of one ring's lane does not affect the others.
    fn suspend_these(&mut self, indexes: &[usize]) -> Result<()> {
        let running = indexes.iter().copied().filter(|index| self.vrings[*index].running);
        let asked: Vec<_> = running.map(|index| (index, self.config.queues[index].suspend())).collect();
        let mut outcome = Ok(());
        for (index, asked) in asked {
            self.vrings[index].running = false;
            match asked.and_then(Suspension::wait) {
                Ok(base) => self.vrings[index].base = base.or(self.vrings[index].base),
                Err(gone) => outcome = Err(self.lost_lane(index, &gone)),
            }
        }
        outcome
    }

    /// Changes settings of a ring. A running ring continues with the new settings.
    pub(super) fn change_vring(&mut self, index: u32, change: impl FnOnce(&mut Vring)) -> Result<()> {
        let runs = self.vring(index)?.running;
        let index = index as usize;
        self.suspend(index)?;
        change(&mut self.vrings[index]);
        if runs { self.run_if_ready(index) } else { Ok(()) }
    }

    /// Starts a ring that is enabled and completely configured.
    pub(super) fn run_if_ready(&mut self, index: usize) -> Result<()> {
        let vring = &self.vrings[index];
        let kick = match &vring.kick {
            Kick::Unknown => return Ok(()),
            Kick::Polled => None,
            Kick::Rung(event) => Some(Arc::clone(event)),
        };
        let (Some(addresses), true, false) = (vring.addresses, vring.enabled && vring.size > 0, vring.running) else {
            return Ok(());
        };
        let memory = self.memory.snapshot().map_err(|error| self.refuse("the memory table", error))?;
        let layout = RingLayout::locate(&memory, self.features, vring.size, addresses)
            .map_err(|error| self.refuse("a ring", advice::no_ring(&self.memory, error)))?;
        // With lost kicks the guest would wait without end, so this is logged.
        if !std::mem::replace(&mut self.memory_seen, true) && self.memory.is_blank() {
            self.lines.warn(advice::blank_memory());
        }
        let vring = &self.vrings[index];
        let setup = VirtqueueSetup {
            name: format!("queue {index}"),
            log: Arc::clone(&self.lines),
            layout,
            size: vring.size,
            base: vring.base(self.features),
            notes: self.notes(vring, addresses, &memory),
            record: self.records.as_ref().and_then(|records| records.part(self.features, index)),
            kick,
            call: vring.call.clone(),
            error: vring.error.clone(),
            disk: DiskView { features: self.features, write_back: Arc::clone(&self.write_back) },
            connection: Arc::clone(&self.connection),
            memory,
        };
        match self.config.queues[index].run(setup) {
            Ok(Ok(())) => {
                self.vrings[index].running = true;
                tracing::debug!("{}: queue {index} runs", self.config.name);
                Ok(())
            }
            Ok(Err(why)) => Err(self.refuse("a ring", why)),
            Err(gone) => Err(self.lost_lane(index, &gone)),
        }
    }

    /// Replaces the memory under all running rings.
    pub(super) fn change_memory(
        &mut self,
        change: impl FnOnce(&Memory) -> std::result::Result<Memory, MemoryError>,
    ) -> Result<()> {
        let others = [self.log_bytes(), self.record_bytes()];
        let memory = change(&self.memory).and_then(|memory| {
            check_bytes(&[memory.extent().1, others[0], others[1]])?;
            memory.snapshot().map(|_| memory)
        });
        let memory = memory.map_err(|error| self.refuse("the memory", error))?;
        let running = self.suspend_all()?;
        self.mappings.iter_mut().for_each(|mapping| mapping.replace(memory.regions()));
        self.memory = memory;
        running.into_iter().try_for_each(|index| self.run_if_ready(index))
    }
}
