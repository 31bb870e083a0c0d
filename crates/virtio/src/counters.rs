//! Counters of refused requests and of violations.
//!
//! Written by the one owner of a queue, read by any thread at any time; a reader may see a count one late. Counters
//! belong to a queue, not to a ring, so that they outlive a guest's reset.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{DeviceFault, Violation};
use crate::{ChainFault, Refusal, RequestFault, RingFault};

/// Makes an enum of reasons, each with a name for display, and the list of them all.
macro_rules! reasons {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// Every reason.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// In words.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::error::Error for $name {}
    };
}
pub(crate) use reasons;

/// How often each reason was met on one queue.
#[derive(Debug)]
pub struct Refusals {
    ring: [AtomicU64; RingFault::ALL.len()],
    chain: [AtomicU64; ChainFault::ALL.len()],
    request: [AtomicU64; RequestFault::ALL.len()],
}

impl Default for Refusals {
    fn default() -> Self {
        Refusals {
            ring: [const { AtomicU64::new(0) }; _],
            chain: [const { AtomicU64::new(0) }; _],
            request: [const { AtomicU64::new(0) }; _],
        }
    }
}

impl Refusals {
    /// The ring is broken.
    pub fn ring_fault(&self, fault: &RingFault) {
        bump(&self.ring[*fault as usize]);
    }

    /// A request was refused.
    pub fn request(&self, reason: &Refusal) {
        match reason {
            Refusal::Chain(fault) => bump(&self.chain[*fault as usize]),
            Refusal::Request(fault) => bump(&self.request[*fault as usize]),
        }
    }

    /// All counts with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let ring = RingFault::ALL.iter().map(|fault| fault.name()).zip(self.ring.iter().map(load));
        let chain = ChainFault::ALL.iter().map(|fault| fault.name()).zip(self.chain.iter().map(load));
        let request = RequestFault::ALL.iter().map(|fault| fault.name()).zip(self.request.iter().map(load));
        ring.chain(chain).chain(request)
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        self.iter().map(|(_, count)| count).sum()
    }
}

/// A driver's counters of its device's violations.
#[derive(Debug)]
pub struct Violations {
    ring: [AtomicU64; DeviceFault::ALL.len()],
    request: [AtomicU64; Violation::ALL.len()],
}

impl Default for Violations {
    fn default() -> Self {
        Violations { ring: [const { AtomicU64::new(0) }; _], request: [const { AtomicU64::new(0) }; _] }
    }
}

impl Violations {
    /// The device broke a ring.
    pub fn ring_fault(&self, fault: DeviceFault) {
        bump(&self.ring[fault as usize]);
    }

    /// A request failed with an undefined status.
    pub fn request(&self, violation: Violation) {
        bump(&self.request[violation as usize]);
    }

    /// All counts with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let ring = DeviceFault::ALL.iter().map(|fault| fault.name()).zip(self.ring.iter().map(load));
        ring.chain(Violation::ALL.iter().map(|violation| violation.name()).zip(self.request.iter().map(load)))
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        self.iter().map(|(_, count)| count).sum()
    }
}

/// One writer: a plain load and store, without the price of a locked add.
fn bump(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_name_and_a_count_of_its_own() {
        let refusals = Refusals::default();
        RingFault::ALL.iter().for_each(|fault| refusals.ring_fault(fault));
        ChainFault::ALL.iter().for_each(|fault| refusals.request(&Refusal::Chain(*fault)));
        RequestFault::ALL.iter().for_each(|fault| refusals.request(&Refusal::Request(*fault)));
        assert!(refusals.iter().all(|(_, count)| count == 1));
        let violations = Violations::default();
        DeviceFault::ALL.iter().for_each(|fault| violations.ring_fault(*fault));
        Violation::ALL.iter().for_each(|violation| violations.request(*violation));
        assert!(violations.iter().all(|(_, count)| count == 1));
        let names: std::collections::HashSet<_> = violations.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len() as u64, violations.total());
        let names: std::collections::HashSet<_> = refusals.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len() as u64, refusals.total());
    }
}
