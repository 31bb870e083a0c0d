//! States of a controller as its host sees it, and which may follow which.

/// A state, by the names of Linux's driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ControllerState {
    /// Not brought up yet.
    #[default]
    New,
    /// In use.
    Live,
    /// Being disabled, to be enabled again.
    Resetting,
    /// Being brought up.
    Connecting,
    /// Being disabled for good.
    Deleting,
    /// Disabled for good, and wanted no more.
    DeletingNoIo,
    /// Disabled for good: it has failed.
    Dead,
}

impl ControllerState {
    /// Every state.
    pub const ALL: [ControllerState; 7] = [
        ControllerState::New,
        ControllerState::Live,
        ControllerState::Resetting,
        ControllerState::Connecting,
        ControllerState::Deleting,
        ControllerState::DeletingNoIo,
        ControllerState::Dead,
    ];

    /// Whether the other state may follow this one.
    pub fn may_become(self, next: ControllerState) -> bool {
        use ControllerState::{Connecting, Dead, Deleting, DeletingNoIo, Live, New, Resetting};
        matches!(
            (self, next),
            (Connecting, Live)
                | (New | Live, Resetting)
                | (New | Resetting, Connecting)
                | (Live | Resetting | Connecting, Deleting)
                | (Deleting | Dead, DeletingNoIo)
                | (Deleting, Dead)
        )
    }

    /// Changes to the next state. Returns whether that was allowed; if not, nothing changes.
    pub fn change(&mut self, next: ControllerState) -> bool {
        let may = self.may_become(next);
        if may {
            *self = next;
        }
        may
    }

    /// Whether no command will ever be sent again.
    pub fn is_terminal(self) -> bool {
        matches!(self, ControllerState::Deleting | ControllerState::DeletingNoIo | ControllerState::Dead)
    }
}

#[cfg(test)]
mod tests {
    use super::ControllerState::{self, Connecting, Dead, Deleting, DeletingNoIo, Live, New, Resetting};

    /// All pairs, by the table of Linux's driver.
    #[test]
    fn only_legal_transitions_happen() {
        let before = |next| match next {
            New => &[][..],
            Live => &[Connecting],
            Resetting => &[New, Live],
            Connecting => &[New, Resetting],
            Deleting => &[Live, Resetting, Connecting],
            DeletingNoIo => &[Deleting, Dead],
            Dead => &[Deleting],
        };
        for state in ControllerState::ALL {
            for next in ControllerState::ALL {
                let mut now = state;
                assert_eq!(now.change(next), before(next).contains(&state), "{state:?} to {next:?}");
                assert_eq!(now, if before(next).contains(&state) { next } else { state });
            }
        }
    }
}
