//! The interface of the policies.

use std::fmt;
use std::str::FromStr;

use blkyard_mq::{OpClass, TrackerConfig};

use crate::{Adaptive, LatencyPolicy, NumaPolicy, PathSet, QueueDepth, RoundRobin};

/// Properties of an I/O that a choice may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathIo {
    /// Kind of operation.
    pub class: OpClass,
    /// Length of its data.
    pub bytes: u32,
    /// NUMA node of the submitting lane.
    pub node: u16,
}

/// Why a path was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChoiceReason {
    /// There is no other candidate.
    OnlyPath,
    /// The policy's own rule.
    Best,
    /// The path has not been measured yet.
    Unmeasured,
    /// The path was not used for long: one I/O measures it.
    Probe,
}

impl ChoiceReason {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ChoiceReason::OnlyPath => "only path",
            ChoiceReason::Best => "best",
            ChoiceReason::Unmeasured => "unmeasured",
            ChoiceReason::Probe => "probe",
        }
    }
}

/// A path that was chosen for an I/O. Its owner keeps it until the I/O ends, and gives it back to the policy.
#[derive(Debug)]
#[must_use = "the policy counts this I/O until it is told of its end"]
pub struct PathChoice {
    /// Index of the path.
    pub path: usize,
    /// Why.
    pub reason: ChoiceReason,
    /// Time of the choice.
    pub start_ns: u64,
    pub(crate) node: u16,
    /// Class of the I/O in the policy's statistics.
    pub(crate) class: u8,
    /// Share of the path's load that this I/O is, and the load that it met.
    pub(crate) weight: f32,
    pub(crate) load: f32,
}

impl PathChoice {
    pub(crate) fn new(path: usize, reason: ChoiceReason, io: &PathIo, now_ns: u64) -> PathChoice {
        PathChoice { path, reason, start_ns: now_ns, node: io.node, class: 0, weight: 0.0, load: 0.0 }
    }
}

/// A rule that chooses a path for each I/O. One lane owns it.
pub trait PathPolicy: fmt::Debug + Send {
    /// Chooses a path for an I/O that is submitted now. `None` if no path is usable.
    fn choose(&mut self, paths: &PathSet, io: &PathIo, now_ns: u64) -> Option<PathChoice>;

    /// The I/O has completed on its path.
    fn complete(&mut self, choice: PathChoice, now_ns: u64);

    /// The I/O has ended without a result of the path: it was requeued, or the path was lost. No latency is recorded.
    fn abandon(&mut self, choice: PathChoice);
}

/// The policies, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// The nearest path.
    Numa,
    /// The next path.
    RoundRobin,
    /// The path with the fewest I/Os in flight.
    QueueDepth,
    /// The path with the lowest mean latency, as posted.
    Latency,
    /// The path with the lowest expected cost.
    #[default]
    Adaptive,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 5] =
        [PolicyKind::Numa, PolicyKind::RoundRobin, PolicyKind::QueueDepth, PolicyKind::Latency, PolicyKind::Adaptive];

    /// Its name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Numa => "numa",
            PolicyKind::RoundRobin => "round-robin",
            PolicyKind::QueueDepth => "queue-depth",
            PolicyKind::Latency => "latency",
            PolicyKind::Adaptive => "adaptive",
        }
    }

    /// A policy of this kind for one lane. `latency` has trackers of these settings.
    pub fn build(self, tracker: TrackerConfig) -> Box<dyn PathPolicy> {
        match self {
            PolicyKind::Numa => Box::new(NumaPolicy::default()),
            PolicyKind::RoundRobin => Box::new(RoundRobin::default()),
            PolicyKind::QueueDepth => Box::new(QueueDepth::default()),
            PolicyKind::Latency => Box::new(LatencyPolicy::new(tracker)),
            PolicyKind::Adaptive => Box::new(Adaptive::default()),
        }
    }
}

/// A name that no policy has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPolicy(String);

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = PolicyKind::ALL.map(PolicyKind::name).join(", ");
        write!(f, "policy={}: unknown path policy; use one of {names}", self.0)
    }
}

impl std::error::Error for UnknownPolicy {}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<PolicyKind, UnknownPolicy> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownPolicy(name.into()))
    }
}
