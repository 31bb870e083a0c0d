//! The spin window that would have been cheapest for a lane's last pauses.
//!
//! Busy-polling burns a CPU. Sleeping costs two passages through the kernel, and the submitter waits for the wake-up.
//! A lane without history polls for as long as a sleep would have cost, and then sleeps: it never pays more than twice
//! the optimum. A lane learns the distance between pieces of work, including a sleep between them, so that work every
//! 50 us counts as 50 us whether the lane slept or not. It has four polling times, from a short one for answers that
//! follow at once to the whole window, and takes the one that would have been cheapest for its last pauses.

/// Lengths of the spin window, in parts of the whole; a sleep costs as much as the whole.
const LOOKS: [u64; 4] = [1, 4, 8, WHOLE];
const WHOLE: u64 = 16;
/// Number of pauses in an evaluation; earlier ones lose half of their weight each time.
const PAUSES: u32 = 32;

/// History of a lane's pauses.
#[derive(Debug)]
pub(super) struct Pauses {
    /// The whole window.
    spin_ns: u64,
    /// Current spin window.
    look_ns: u64,
    /// Pauses by the shortest window that sees their end, and last those that outlast all. The first window is not
    /// counted: all others include it.
    counts: [u32; LOOKS.len()],
    /// Pauses since the last evaluation.
    new: u32,
}

impl Pauses {
    /// Without history.
    pub(super) fn new(spin_ns: u64) -> Pauses {
        Pauses { spin_ns, look_ns: spin_ns, counts: [0; LOOKS.len()], new: 0 }
    }

    /// The spin window, ns.
    #[inline]
    pub(super) fn look_ns(&self) -> u64 {
        self.look_ns
    }

    /// A pause of this length has ended.
    #[inline]
    pub(super) fn ended(&mut self, pause_ns: u64) {
        if pause_ns > self.spin_ns / WHOLE {
            self.count(pause_ns);
        }
    }

    fn count(&mut self, pause_ns: u64) {
        let part_ns = self.spin_ns / WHOLE;
        let seen_by = LOOKS[1..].iter().position(|look| pause_ns <= look * part_ns).unwrap_or(LOOKS.len() - 1);
        self.counts[seen_by] += 1;
        self.new += 1;
        if self.new == PAUSES {
            self.new = 0;
            let cheapest = (0..LOOKS.len()).min_by_key(|&look| self.cost(look)).unwrap_or(0);
            self.look_ns = if cheapest == LOOKS.len() - 1 { self.spin_ns } else { LOOKS[cheapest] * part_ns };
            self.counts = self.counts.map(|pauses| pauses / 2);
        }
    }

    /// Cost of these pauses with this window.
    fn cost(&self, look: usize) -> u64 {
        let (seen, slept) = self.counts.split_at(look);
        let looked: u64 = seen.iter().zip(&LOOKS[1..]).map(|(&pauses, look)| u64::from(pauses) * look).sum();
        looked + slept.iter().map(|&pauses| u64::from(pauses) * (LOOKS[look] + WHOLE)).sum::<u64>()
    }
}
