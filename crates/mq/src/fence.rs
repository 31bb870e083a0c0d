//! Fencing: the proof that a path executes no earlier write any more, before the write is sent on another path.
//!
//! A path that is lost may leave commands behind: the device may still execute a write that was never answered. If that
//! write is sent on another path and acknowledged there, and the old command is executed after a newer write to the
//! same sectors, the newer data is lost. So a write that the device may still execute is an [`UnfencedBio`], which
//! returns its bio only for a [`Fenced`] of the path that it was sent on.
//!
//! | bio | may be sent on another path |
//! |---|---|
//! | the driver never took it, or the device answered it ([`Retry::Elsewhere`]) | at once |
//! | a read or a flush without answer | at once: executed twice it changes nothing |
//! | a write, discard or write-zeroes without answer | once its path is fenced |
//!
//! This module holds no state of paths: who owns a path counts its generations and creates the proof.

use crate::{Bio, Retry};

/// A path of a device, from one connect to the loss of the connection. The owner of the path counts the generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PathGeneration {
    /// Number of the path at its device.
    pub path: u32,
    /// Number of its connects so far.
    pub generation: u32,
}

/// Evidence that a device executes no command of a path any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FenceEvidence {
    /// The target has acknowledged the end of the association: a later Connect of the same host to the same controller,
    /// a shutdown, or CSTS.RDY is zero.
    AssociationEnded,
    /// Another controller of the subsystem has reset this one (cross-controller reset).
    CrossControllerReset,
    /// Every buffer has come back from the kernel, and the keep-alive timeout and the quiesce time have elapsed since
    /// the last byte was sent.
    QuiesceElapsed,
}

/// Proof that a device executes no command any more that a path sent up to a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced {
    through: PathGeneration,
    evidence: FenceEvidence,
}

impl Fenced {
    /// The transport of the path has this evidence for all its commands, of this generation and earlier ones.
    pub fn new(through: PathGeneration, evidence: FenceEvidence) -> Fenced {
        Fenced { through, evidence }
    }

    /// Last generation of the path that it covers.
    pub fn through(&self) -> PathGeneration {
        self.through
    }

    /// What it rests on, for messages.
    pub fn evidence(&self) -> FenceEvidence {
        self.evidence
    }

    /// Whether it covers commands of this generation.
    pub fn covers(&self, sent: PathGeneration) -> bool {
        self.through.path == sent.path && sent.generation <= self.through.generation
    }
}

/// A bio that a device may still execute. It has no other way out than [`UnfencedBio::release`].
#[derive(Debug)]
#[must_use = "dropping it loses a bio"]
pub struct UnfencedBio {
    bio: Box<Bio>,
    sent: PathGeneration,
}

impl UnfencedBio {
    /// The bio, for a proof that covers it; otherwise itself again.
    pub fn release(self, proof: &Fenced) -> Result<Box<Bio>, UnfencedBio> {
        if proof.covers(self.sent) { Ok(self.bio) } else { Err(self) }
    }

    /// The bio, to be ended: its submitter learns that the outcome is unknown. It must not be submitted again.
    pub fn fail(self, status: crate::Status) -> Box<Bio> {
        let mut bio = self.bio;
        bio.status = status;
        bio
    }

    /// Path and generation that it was sent on.
    pub fn sent(&self) -> PathGeneration {
        self.sent
    }

    /// The bio, for inspection.
    pub fn bio(&self) -> &Bio {
        &self.bio
    }
}

/// A bio that was taken from a path before it ended.
#[derive(Debug)]
#[must_use = "dropping it loses a bio"]
pub enum TakenBio {
    /// May be submitted on any path at once.
    Free(Box<Bio>),
    /// May be submitted again once the path is fenced.
    Unfenced(UnfencedBio),
}

impl TakenBio {
    /// A bio of a path; `may_execute` if the device was sent it and has not answered.
    pub(crate) fn new(bio: Box<Bio>, may_execute: bool, sent: PathGeneration) -> TakenBio {
        if may_execute && bio.op.is_write() {
            TakenBio::Unfenced(UnfencedBio { bio, sent })
        } else {
            TakenBio::Free(bio)
        }
    }

    /// A bio that a path has ended, if its [status](Retry) is worth an attempt on another path; otherwise it is given
    /// back, to be ended.
    pub fn of_ended(bio: Box<Bio>, sent: PathGeneration) -> Result<TakenBio, Box<Bio>> {
        match bio.status.retry() {
            Retry::Never | Retry::Later => Err(bio),
            Retry::Elsewhere => Ok(TakenBio::new(bio, false, sent)),
            Retry::ElsewhereFenced => Ok(TakenBio::new(bio, true, sent)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Op, Status};

    const SENT: PathGeneration = PathGeneration { path: 3, generation: 7 };

    fn ended(op: Op, status: Status) -> Result<TakenBio, Box<Bio>> {
        TakenBio::of_ended(Box::new(Bio { op, status, ..Bio::default() }), SENT)
    }

    fn proof(path: u32, generation: u32) -> Fenced {
        Fenced::new(PathGeneration { path, generation }, FenceEvidence::QuiesceElapsed)
    }

    #[test]
    fn an_unanswered_write_leaves_only_for_a_proof_of_its_path_and_generation() {
        for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
            let Ok(TakenBio::Unfenced(mut bio)) = ended(op, Status::Timeout) else { panic!("{op:?} was free") };
            for (path, generation) in [(3, 6), (2, 7), (4, 9)] {
                bio = bio.release(&proof(path, generation)).unwrap_err();
            }
            assert_eq!(bio.release(&proof(3, 7)).unwrap().op, op);
        }
        let Ok(TakenBio::Unfenced(bio)) = ended(Op::Write, Status::Offline) else { panic!("a write was free") };
        assert!(bio.release(&proof(3, 8)).is_ok(), "a later generation covers earlier ones");
    }

    #[test]
    fn reads_flushes_and_answered_writes_are_free() {
        for (op, status) in [
            (Op::Read, Status::Timeout),
            (Op::Flush, Status::Offline),
            (Op::Write, Status::Path),
            (Op::Read, Status::Path),
        ] {
            assert!(matches!(ended(op, status), Ok(TakenBio::Free(_))), "{op:?} {status}");
        }
    }

    #[test]
    fn what_no_path_can_do_better_is_ended() {
        for status in
            [Status::Ok, Status::Medium, Status::NoSpace, Status::Invalid, Status::NotSupported, Status::Again]
        {
            assert!(ended(Op::Write, status).is_err(), "{status}");
        }
    }
}
