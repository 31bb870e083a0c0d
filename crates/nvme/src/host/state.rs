//! States of a controller on its host's side, and the valid transitions.

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
    /// Being disabled permanently.
    Deleting,
    /// Disabled permanently after its removal.
    DeletingNoIo,
    /// Disabled permanently after a failure.
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

    /// Whether a transition to the other state is valid.
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

    /// Whether it is disabled permanently, or being disabled.
    pub fn is_ending(self) -> bool {
        matches!(self, ControllerState::Deleting | ControllerState::DeletingNoIo | ControllerState::Dead)
    }

    /// Changes to the next state. Returns whether the transition is valid; otherwise the state stays.
    pub fn change(&mut self, next: ControllerState) -> bool {
        let may = self.may_become(next);
        if may {
            *self = next;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::ControllerState::{self, Connecting, Dead, Deleting, DeletingNoIo, Live, New, Resetting};

    /// All pairs, from the table of Linux's driver.
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
