//! Goals and their verdicts, and the post's claims with whether they are reproduced.

use std::borrow::Cow;

use serde::Serialize;

/// What became of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GoalVerdict {
    Met,
    /// It follows from how the model is made, and counts neither as met nor as missed.
    ByConstruction,
    /// The limit lies within the noise of the runs.
    Undecided,
    Missed,
}

impl GoalVerdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            GoalVerdict::Met => "met",
            GoalVerdict::ByConstruction => "by construction",
            GoalVerdict::Undecided => "undecided",
            GoalVerdict::Missed => "MISSED",
        }
    }

    /// Exit code of `--check` for all goals of a study: 1 if one is missed, else 3 if one is undecided.
    pub(crate) fn exit_code(verdicts: impl IntoIterator<Item = GoalVerdict>) -> u8 {
        match verdicts.into_iter().max() {
            Some(GoalVerdict::Missed) => 1,
            Some(GoalVerdict::Undecided) => 3,
            Some(GoalVerdict::Met | GoalVerdict::ByConstruction) | None => 0,
        }
    }
}

/// A goal with the value reached.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) limit: f64,
    /// Where the value was found.
    pub(crate) at: String,
    pub(crate) verdict: GoalVerdict,
}

impl Goal {
    pub(crate) fn new(what: String, value: f64, limit: f64, at: String, is_met: bool) -> Goal {
        let verdict = if is_met { GoalVerdict::Met } else { GoalVerdict::Missed };
        Goal { what, value, limit, at, verdict }
    }

    #[cfg(test)]
    pub(crate) fn is_met(&self) -> bool {
        self.verdict == GoalVerdict::Met
    }
}

/// A claim of the post's.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PostClaim {
    pub(crate) what: String,
    pub(crate) found: String,
    pub(crate) verdict: ClaimVerdict,
    /// Reason, or a remark.
    pub(crate) reason: Cow<'static, str>,
}

/// Whether a run shows what a post claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ClaimVerdict {
    Reproduced,
    NotReproduced,
    /// Runs differ.
    Undecided,
    /// It cannot be shown on this model, or is no figure.
    NotApplicable,
}

impl ClaimVerdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            ClaimVerdict::Reproduced => "reproduced",
            ClaimVerdict::NotReproduced => "not reproduced",
            ClaimVerdict::Undecided => "undecided",
            ClaimVerdict::NotApplicable => "not applicable",
        }
    }
}

impl From<GoalVerdict> for ClaimVerdict {
    fn from(verdict: GoalVerdict) -> ClaimVerdict {
        match verdict {
            GoalVerdict::Met => ClaimVerdict::Reproduced,
            GoalVerdict::Missed => ClaimVerdict::NotReproduced,
            GoalVerdict::Undecided => ClaimVerdict::Undecided,
            GoalVerdict::ByConstruction => ClaimVerdict::NotApplicable,
        }
    }
}

/// A figure without noise.
impl From<bool> for ClaimVerdict {
    fn from(is_reproduced: bool) -> ClaimVerdict {
        if is_reproduced { ClaimVerdict::Reproduced } else { ClaimVerdict::NotReproduced }
    }
}

#[cfg(test)]
mod tests {
    use super::GoalVerdict::{ByConstruction, Met, Missed, Undecided};
    use super::*;

    #[test]
    fn an_undecided_goal_neither_passes_nor_fails_a_check() {
        assert_eq!(GoalVerdict::exit_code([]), 0);
        assert_eq!(GoalVerdict::exit_code([Met, ByConstruction]), 0);
        assert_eq!(GoalVerdict::exit_code([Undecided, Met]), 3);
        assert_eq!(GoalVerdict::exit_code([Met, Missed, Undecided]), 1);
    }
}
