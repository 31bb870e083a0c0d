//! Random numbers from a seed: the same seed gives the same run.
//!
//! Integers only, so that rounding is the same on all machines. Not for secrets.

/// A pseudo-random generator (splitmix64, by Vigna).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Any seed will do.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Any number.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let n = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        n ^ n >> 31
    }

    /// A number below `bound`; the bias is one in 2^64 / bound.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// A number around zero with this standard deviation, nearly normal: the sum of twelve even ones, so never further
    /// off than six deviations.
    #[inline]
    pub fn normal(&mut self, sigma: u64) -> i64 {
        // Each half of a draw is even over 2^32, with deviation 2^32 / sqrt(12): twelve have 2^32.
        let sum: u64 = (0..6).map(|_| self.draw()).map(|draw| (draw >> 32) + (draw & 0xffff_ffff)).sum();
        let centred = i128::from(sum) - (6 << 32);
        ((centred * i128::from(sigma)) >> 32) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_is_one_sequence() {
        let draws = |seed| (0..100).map(|_| 0).scan(Rng::new(seed), |rng, _: i32| Some(rng.draw())).collect::<Vec<_>>();
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        // The first draw of splitmix64 from zero, as published.
        assert_eq!(Rng::new(0).draw(), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn the_normal_has_its_mean_and_deviation() {
        let mut rng = Rng::new(1);
        let draws: Vec<f64> = (0..100_000).map(|_| rng.normal(400) as f64).collect();
        let mean = draws.iter().sum::<f64>() / 1e5;
        let deviation = (draws.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / 1e5).sqrt();
        assert!(mean.abs() < 5.0 && (deviation - 400.0).abs() < 5.0, "{mean} {deviation}");
        assert!(draws.iter().all(|n| n.abs() <= 2400.0));
        assert_eq!(rng.normal(0), 0);
    }

    #[test]
    fn below_is_below_and_reaches_all() {
        let mut rng = Rng::new(3);
        let mut seen = [0_u32; 7];
        (0..7000).for_each(|_| seen[rng.below(7) as usize] += 1);
        assert!(seen.iter().all(|count| (850..1150).contains(count)), "{seen:?}");
    }
}
