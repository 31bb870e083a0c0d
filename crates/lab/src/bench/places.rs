//! The next request: its position and direction.
//!
//! Pure arithmetic from a seed; the same seed gives the same sequence. Bios and time are unknown here.

/// A fast pseudo-random generator (xorshift64*); not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct FastRng(u64);

impl FastRng {
    /// Any seed will do: it is stirred first (splitmix64).
    pub(crate) fn new(seed: u64) -> FastRng {
        FastRng(stir(seed).max(1))
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, all but evenly: the bias is one in 2^64 / bound.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// Makes neighbouring numbers unlike each other.
pub(crate) fn stir(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

/// In which order the blocks of a slice come.
#[derive(Clone, Debug)]
pub(crate) enum BlockOrder {
    /// One after another, round and round.
    Sequential { next: u64 },
    /// Anywhere, again and again.
    Random(FastRng),
    /// Random, with each block once before any repeats: data to be verified is written once.
    Shuffled { walk: BlockWalk },
}

impl BlockOrder {
    pub(crate) fn new(random: bool, once: bool, seed: u64, blocks: u64) -> BlockOrder {
        match (random, once) {
            (false, _) => BlockOrder::Sequential { next: 0 },
            (true, false) => BlockOrder::Random(FastRng::new(seed)),
            (true, true) => BlockOrder::Shuffled { walk: BlockWalk::new(seed, blocks) },
        }
    }

    /// The next block, counted from the start of the slice of `blocks`.
    #[inline]
    pub(crate) fn next(&mut self, blocks: u64) -> u64 {
        match self {
            BlockOrder::Sequential { next } => {
                let block = *next;
                *next = if block + 1 == blocks { 0 } else { block + 1 };
                block
            }
            BlockOrder::Random(rng) => rng.below(blocks),
            BlockOrder::Shuffled { walk } => walk.next(blocks),
        }
    }
}

/// A walk over all numbers below a bound in a seeded order: a linear congruential generator of full period over the
/// next power of two, skipping numbers beyond the bound, with mixed bits so that neighbours are apart.
#[derive(Clone, Debug)]
pub(crate) struct BlockWalk {
    state: u64,
    mask: u64,
    step: u64,
    turn: u32,
}

impl BlockWalk {
    fn new(seed: u64, blocks: u64) -> BlockWalk {
        let mask = blocks.next_power_of_two() - 1;
        // Odd increment, multiplier one more than a multiple of four: the full period (Hull and Dobell).
        BlockWalk { state: stir(seed) & mask, mask, step: stir(seed ^ 1) | 1, turn: mask.count_ones().div_ceil(2) }
    }

    #[inline]
    fn next(&mut self, blocks: u64) -> u64 {
        loop {
            self.state = self.state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(self.step) & self.mask;
            // The lower bits of a congruence repeat soon: the upper ones are mixed in. Both steps can be undone, so
            // numbers that differ stay different.
            let mixed = (self.state ^ self.state >> self.turn).wrapping_mul(0x9e37_79b9_7f4a_7c15) & self.mask;
            let block = mixed ^ mixed >> self.turn;
            if block < blocks {
                return block;
            }
        }
    }
}

/// Reads or writes, by percentage.
#[derive(Clone, Debug)]
pub(crate) struct Mix {
    rng: FastRng,
    read_percent: u64,
}

impl Mix {
    pub(crate) fn new(seed: u64, read_percent: u32) -> Mix {
        Mix { rng: FastRng::new(seed ^ 0x006d_6978), read_percent: read_percent.into() }
    }

    #[inline]
    pub(crate) fn next_is_read(&mut self) -> bool {
        self.rng.below(100) < self.read_percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffled_order_visits_every_block_once() {
        for blocks in [1, 2, 3, 7, 64, 100, 1000, 4097] {
            for seed in 0..5 {
                let mut order = BlockOrder::new(true, true, seed, blocks);
                let mut seen = vec![false; blocks as usize];
                (0..blocks).for_each(|_| seen[order.next(blocks) as usize] = true);
                assert!(seen.iter().all(|seen| *seen), "{blocks} blocks, seed {seed}");
            }
        }
    }

    #[test]
    fn a_shuffled_order_is_no_procession() {
        let mut order = BlockOrder::new(true, true, 7, 10_000);
        let places: Vec<_> = (0..1000).map(|_| order.next(10_000)).collect();
        let far = places.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) > 1000).count();
        assert!(far > 700, "{far} of 999 steps go far");
    }

    #[test]
    fn random_places_are_spread_evenly() {
        let mut order = BlockOrder::new(true, false, 1, 10);
        let mut counts = [0_u32; 10];
        (0..100_000).for_each(|_| counts[order.next(10) as usize] += 1);
        assert!(counts.iter().all(|count| (9500..10_500).contains(count)), "{counts:?}");
        let mut mix = Mix::new(1, 70);
        let reads = (0..100_000).filter(|_| mix.next_is_read()).count();
        assert!((69_000..71_000).contains(&reads), "{reads}");
    }

    #[test]
    fn a_sequence_goes_round() {
        let mut order = BlockOrder::new(false, true, 1, 3);
        assert_eq!([(); 5].map(|()| order.next(3)), [0, 1, 2, 0, 1]);
    }
}
