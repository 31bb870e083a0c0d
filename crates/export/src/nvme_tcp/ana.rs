//! Asymmetric access of an export: states of its groups, which other threads change while it serves.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_nvme::{AnaGroups, AnaState};
use blkyard_sys::EventFd;

/// States of the ANA groups at one port.
///
/// A state holds for the next command of each host at once. The export's control path then notifies the hosts. Nothing
/// waits for I/O in flight, so a device that hangs does not prevent a change.
#[derive(Debug)]
pub struct NvmeTcpAna {
    /// Group of each namespace, by number of its device.
    groups: Vec<u32>,
    states: Arc<AnaGroups>,
    /// Signalled after a change.
    changed: EventFd,
}

impl NvmeTcpAna {
    /// The group of each namespace, by number of its device. All groups are optimized.
    ///
    /// # Errors
    /// The system has no descriptors left.
    ///
    /// # Panics
    /// If a group is not from 1 to [`AnaGroups::GROUPS_MAX`].
    pub fn new(groups: Vec<u32>) -> io::Result<NvmeTcpAna> {
        assert!(groups.iter().all(|group| (1..=AnaGroups::GROUPS_MAX).contains(group)), "{groups:?}");
        Ok(NvmeTcpAna { groups, states: Arc::default(), changed: EventFd::new()? })
    }

    /// Group of each namespace, by number of its device.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// State of a group.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn state(&self, group: u32) -> AnaState {
        self.states.state(group)
    }

    /// Sets the state of a group, and has the hosts notified. Returns whether it is another one.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn set(&self, group: u32, state: AnaState) -> bool {
        let is_changed = self.states.set(group, state);
        if is_changed {
            self.changed.signal();
        }
        is_changed
    }

    pub(super) fn states(&self) -> &Arc<AnaGroups> {
        &self.states
    }

    /// Takes the notice of changes.
    pub(super) fn take_changed(&self) {
        self.changed.take();
    }
}

impl AsFd for NvmeTcpAna {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.changed.as_fd()
    }
}
