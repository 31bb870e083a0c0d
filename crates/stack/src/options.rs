//! Options of a world: drawn from its seed, or given. As text, `key=value`, so that a run can be printed and repeated.

use std::fmt;

use blkyard_sim::Rng;

/// A fault of the world itself, which its oracles must find. The product is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// No device, or an honest one.
    None,
    /// Paths are said to be fenced before they are.
    SkipFence,
    /// Requests in flight of a dead daemon are submitted again in another order.
    Reorder,
    /// The device ignores flushes.
    IgnoreFlush,
    /// Targets do not end associations without a sign of life, and bytes of dead ones arrive late: a proof by time is
    /// none.
    NoSilence,
    /// A daemon submits the requests of a dead one at once.
    NoPause,
    /// A target executes commands while its device has those of an association that has ended.
    NoHold,
    /// The same, and queues do not look at the keep-alive timer of their association.
    NoDeadline,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Mutation; 8] = [
        Mutation::None,
        Mutation::SkipFence,
        Mutation::Reorder,
        Mutation::IgnoreFlush,
        Mutation::NoSilence,
        Mutation::NoPause,
        Mutation::NoDeadline,
        Mutation::NoHold,
    ];

    fn name(self) -> &'static str {
        match self {
            Mutation::None => "none",
            Mutation::SkipFence => "skip-fence",
            Mutation::Reorder => "reorder",
            Mutation::IgnoreFlush => "ignore-flush",
            Mutation::NoSilence => "no-silence",
            Mutation::NoPause => "no-pause",
            Mutation::NoDeadline => "no-deadline",
            Mutation::NoHold => "no-hold",
        }
    }
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Options of a world.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct StackOptions {
            $($(#[$doc])* pub $name: u64,)*
            /// Fault of the world itself.
            pub mutation: Mutation,
        }

        impl StackOptions {
            /// Sets one of them: `key=value`.
            ///
            /// # Errors
            /// The text is no option.
            pub fn set(&mut self, option: &str) -> Result<(), String> {
                let wrong = || format!("'{option}' is no option; options: {self}");
                let (key, value) = option.split_once('=').ok_or_else(wrong)?;
                if key == "mutation" {
                    let named = Mutation::ALL.into_iter().find(|mutation| mutation.name() == value);
                    self.mutation = named.ok_or_else(wrong)?;
                    return Ok(());
                }
                let number = value.parse().map_err(|_| wrong())?;
                match key {
                    $(stringify!($name) => self.$name = number,)*
                    _ => return Err(wrong()),
                }
                Ok(())
            }
        }

        impl fmt::Display for StackOptions {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(write!(f, "{}={} ", stringify!($name), self.$name)?;)*
                write!(f, "mutation={}", self.mutation.name())
            }
        }
    };
}

options! {
    /// Paths, one or two: each a port of the target.
    paths,
    /// Rings of the guest.
    rings,
    /// Blocks of the disk, 4 KiB each.
    blocks,
    /// Blocks of a request, at most.
    blocks_max,
    /// Requests.
    ios,
    /// Whether completed writes are durable at once.
    write_through,
    /// Whether the device has FUA.
    fua,
    /// Number of the path policy.
    policy,
    /// Keep-alive timeout, ms.
    keep_alive_ms,
    /// Time of a request before its path is given up, ms.
    timeout_ms,
    /// Header and data digests.
    digests,
    /// Whether controllers of the target can have each other reset.
    resets,
    /// Faults.
    faults,
    /// Mean time between two of them, ms.
    fault_every_ms,
    /// Kinds of faults, as bits: cut, stall of a stream, of a path, hung target, hung device, killed target, power
    /// failure, killed daemon, replaced daemon.
    kinds,
    /// Whether reads are hedged.
    hedges,
}

impl StackOptions {
    /// Draws them from a seed.
    pub fn draw(seed: u64) -> StackOptions {
        let mut rng = Rng::new(seed ^ 0x5eed_57ac);
        let mut one_of = |choices: &[u64]| choices[rng.below(choices.len() as u64) as usize];
        StackOptions {
            paths: one_of(&[1, 2, 2]),
            rings: one_of(&[1, 2]),
            blocks: one_of(&[6, 12, 24]),
            blocks_max: one_of(&[1, 2, 4]),
            ios: one_of(&[100, 200, 400]),
            write_through: one_of(&[0, 0, 1]),
            fua: one_of(&[0, 1]),
            policy: one_of(&[0, 1, 2, 3, 4, 4]),
            keep_alive_ms: one_of(&[1000, 2000, 5000]),
            timeout_ms: one_of(&[1000, 5000, 30_000]),
            digests: one_of(&[0, 0, 1]),
            resets: one_of(&[0, 1, 1]),
            faults: one_of(&[4, 8, 16]),
            fault_every_ms: one_of(&[100, 500, 2000, 4000]),
            kinds: one_of(&[0x1ff, 0x1ff, 0x107, 0x0f, 0x3f, 0xbf]),
            hedges: one_of(&[0, 1]),
            mutation: Mutation::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_they_are_printed() {
        for seed in 0..20 {
            let drawn = StackOptions { mutation: Mutation::ALL[seed as usize % 8], ..StackOptions::draw(seed) };
            let mut read = StackOptions::draw(seed + 100);
            drawn.to_string().split(' ').for_each(|option| read.set(option).unwrap());
            assert_eq!(read, drawn);
        }
        assert!(StackOptions::draw(0).set("paths").is_err() && StackOptions::draw(0).set("path=1").is_err());
    }
}
