//! Instructions of the modes' steps, from the counted sections of `measure.rs`.

use serde::Serialize;

use super::instructions::SectionCount;
use super::mode_rig::{PHASES, RIGS};

/// Batches whose instructions are counted.
pub(crate) const COUNTED_BATCHES: [usize; 3] = [1, 16, 128];

/// Instructions of one mode's steps for each I/O, in batches of one size.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepInstruction {
    pub(crate) mode: &'static str,
    /// Whether there is an id for every bio.
    pub(crate) within: bool,
    pub(crate) batch: usize,
    pub(crate) collect: f64,
    pub(crate) submit: f64,
    /// The helper's service, where the mode has one.
    pub(crate) pass: Option<f64>,
}

/// Of all modes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepInstructions(pub(crate) Vec<StepInstruction>);

impl StepInstructions {
    /// Differences between the phases that were counted.
    pub(crate) fn new(sections: &[SectionCount]) -> StepInstructions {
        let steps = RIGS.into_iter().flat_map(|(mode, within)| {
            COUNTED_BATCHES.into_iter().filter_map(move |batch| {
                let of = |phase: &str| {
                    let label = format!("{mode} {within} {batch} {phase}");
                    sections.iter().find(|section| section.label == label).map(SectionCount::per_io)
                };
                let [posts, reaps, turns, passes] = PHASES.map(of);
                let collect = reaps? - posts?;
                let (submit, pass) = (turns? - reaps?, passes.zip(reaps).map(|(passes, reaps)| passes - reaps));
                Some(StepInstruction { mode, within, batch, collect, submit, pass })
            })
        });
        StepInstructions(steps.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_was_not_counted_has_no_row() {
        let section = |label: &str, instructions| SectionCount { label: label.into(), instructions, ios: 10 };
        let counted =
            [section("mq true 1 posts", 100), section("mq true 1 reaps", 300), section("mq true 1 turns", 900)];
        let StepInstructions(steps) = StepInstructions::new(&counted);
        let [StepInstruction { mode: "mq", within: true, batch: 1, collect, submit, pass: None }] = steps[..] else {
            panic!("{steps:?}");
        };
        assert_eq!((collect as u64, submit as u64), (20, 60));
    }
}
