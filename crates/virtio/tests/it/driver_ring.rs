//! The driver's side of a ring against our device's: each chain comes out unchanged and returns once, in both formats,
//! at all index positions.

use std::collections::HashMap;

use blkyard_virtio::driver::{Buffer, NoRoom, UsedChain};
use blkyard_virtio::{ChainHead, Features};
use proptest::prelude::*;

use crate::driver_common::{ROWS, Rig, formats};

/// A rig and its expected content.
struct Pair {
    rig: Rig,
    size: u16,
    indirect: bool,
    /// Chains not yet published, published, and with the device, by token.
    added: Vec<(u16, Vec<Buffer>)>,
    offered: Vec<(u16, Vec<Buffer>)>,
    fetched: Vec<(ChainHead, u16, u32)>,
    /// Completed and not seen by the driver yet, in order; how many of them are published.
    completed: Vec<UsedChain>,
    visible: usize,
    /// Descriptors of each chain in flight, by token; and all together.
    descriptors: HashMap<u16, u16>,
    taken: u16,
    free: Vec<u16>,
}

impl Pair {
    fn new(features: Features, size: u16, start: u16) -> Pair {
        Pair {
            rig: Rig::new(features, size, start),
            size,
            indirect: features.contains(Features::INDIRECT_DESC),
            added: vec![],
            offered: vec![],
            fetched: vec![],
            completed: vec![],
            visible: 0,
            descriptors: HashMap::new(),
            taken: 0,
            free: (0..size).collect(),
        }
    }

    /// Adds a chain of so many readable and writable buffers, if there is a token.
    fn add(&mut self, readable: u16, writable: u16) {
        let Some(&token) = self.free.last() else { return };
        let most = if self.indirect { ROWS } else { self.size.min(ROWS) };
        let readable = readable.min(most);
        let writable = writable.min(most - readable).max(u16::from(readable == 0));
        let lens = |count: u16| -> Vec<u32> { (0..count).map(|n| 1 + u32::from(token) % 7 + u32::from(n)).collect() };
        let buffers = self.rig.buffers(usize::from(token) * 60 % 60_000, &lens(readable), &lens(writable));
        let takes = if self.indirect { 1 } else { readable + writable };
        let fits = takes + self.taken <= self.size;
        let outcome = self.rig.driver.add(token, &buffers);
        assert_eq!(outcome, if fits { Ok(()) } else { Err(NoRoom) });
        if fits {
            self.free.pop();
            self.taken += takes;
            self.descriptors.insert(token, takes);
            self.added.push((token, buffers));
        }
        assert_eq!(usize::from(self.rig.driver.in_flight()), self.descriptors.len());
    }

    fn publish(&mut self) {
        let _ = self.rig.driver.publish();
        self.offered.append(&mut self.added);
    }

    /// The device fetches all there is.
    fn fetch(&mut self) {
        for (token, buffers) in self.offered.drain(..) {
            let (head, seen) = self.rig.fetch().expect("it was offered");
            assert_eq!(seen, buffers);
            let writable = buffers.iter().filter(|buffer| buffer.writable).map(|buffer| buffer.len).sum();
            self.fetched.push((head, token, writable));
        }
        assert!(self.rig.fetch().is_none());
    }

    /// The device completes any one.
    fn complete(&mut self, pick: usize) {
        if self.fetched.is_empty() {
            return;
        }
        let (head, token, writable) = self.fetched.swap_remove(pick % self.fetched.len());
        let written = (pick as u32).min(writable);
        self.rig.device.complete(head, written);
        self.completed.push(UsedChain { token, written });
    }

    fn answer(&mut self) {
        let _ = self.rig.device.publish();
        self.visible = self.completed.len();
    }

    /// The driver takes all it can see.
    fn poll(&mut self) {
        for used in self.completed.drain(..std::mem::take(&mut self.visible)) {
            assert_eq!(self.rig.driver.poll(), Ok(Some(used)));
            self.taken -= self.descriptors.remove(&used.token).expect("it was in flight");
            self.free.push(used.token);
        }
        assert_eq!(self.rig.driver.poll(), Ok(None));
    }

    /// Runs until no chain is in flight.
    fn drain(&mut self) {
        self.publish();
        self.fetch();
        while !self.fetched.is_empty() {
            self.complete(0);
        }
        self.answer();
        self.poll();
        assert_eq!((self.rig.driver.in_flight(), self.rig.device.in_flight()), (0, 0));
    }
}

/// Where a ring may begin: split indexes that wrap soon, packed positions of either lap.
fn starts(features: Features, size: u16) -> Vec<u16> {
    if features.contains(Features::RING_PACKED) {
        vec![1 << 15, size - 1, (size - 1) | 1 << 15, 0, size / 2]
    } else {
        vec![0, 65535, 65533, 32767, size]
    }
}

#[test]
fn full_rings_go_round_whatever_the_size_and_wherever_the_indexes_stand() {
    for features in formats() {
        let packed = features.contains(Features::RING_PACKED);
        for size in [1, 2, 3, 4, 100, 128, 1024, 32768] {
            if !packed && !u16::is_power_of_two(size) {
                continue;
            }
            for start in starts(features, size) {
                let mut pair = Pair::new(features, size, start);
                for round in 0..if size > 128 { 2 } else { 40 } {
                    for chain in 0..size {
                        pair.add(chain % 3, (chain + round) % 4);
                    }
                    pair.drain();
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add(u16, u16),
    Publish,
    Fetch,
    Complete(usize),
    Answer,
    Poll,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u16..5, 0_u16..5).prop_map(|(readable, writable)| Step::Add(readable, writable)),
        2 => Just(Step::Publish),
        2 => Just(Step::Fetch),
        5 => any::<usize>().prop_map(Step::Complete),
        2 => Just(Step::Answer),
        2 => Just(Step::Poll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// In any order of the two sides' steps, and of the device's completions.
    #[test]
    fn what_goes_in_comes_out_and_back_once(
        format in 0_usize..8,
        size in prop_oneof![1_u16..9, Just(16), Just(100)],
        start in 0_usize..5,
        steps in prop::collection::vec(step(), 0..300),
    ) {
        let features = formats().nth(format).unwrap();
        let size = if features.contains(Features::RING_PACKED) { size } else { size.next_power_of_two() };
        let mut pair = Pair::new(features, size, starts(features, size)[start]);
        for step in steps {
            match step {
                Step::Add(readable, writable) => pair.add(readable, writable),
                Step::Publish => pair.publish(),
                Step::Fetch => pair.fetch(),
                Step::Complete(pick) => pair.complete(pick),
                Step::Answer => pair.answer(),
                Step::Poll => pair.poll(),
            }
        }
        pair.answer();
        pair.poll();
        pair.drain();
    }
}

#[test]
fn a_batch_is_one_kick_and_a_device_that_looks_by_itself_needs_none() {
    for features in formats() {
        let mut rig = Rig::fresh(features, 8);
        let buffers = rig.buffers(0, &[16], &[1]);
        let offer = |rig: &mut Rig, tokens: std::ops::Range<u16>| {
            tokens.for_each(|token| rig.driver.add(token, &buffers).unwrap());
            rig.driver.publish()
        };
        assert!(!rig.driver.publish(), "nothing to tell");
        assert!(!rig.device.enable_notify());
        assert!(offer(&mut rig, 0..2), "{features:?}");
        assert!(!rig.driver.publish(), "told once");
        rig.device.disable_notify();
        assert!(!offer(&mut rig, 2..3), "{features:?}");
        assert!(rig.device.enable_notify(), "what was offered meanwhile is there");
    }
}

#[test]
#[should_panic(expected = "token 3 is in flight")]
fn a_token_is_used_by_one_chain_at_a_time() {
    let mut rig = Rig::fresh(Features::INDIRECT_DESC, 4);
    let buffers = rig.buffers(0, &[16], &[1]);
    rig.driver.add(3, &buffers).unwrap();
    let _ = rig.driver.add(3, &buffers);
}

#[test]
#[should_panic(expected = "readable buffers, then writable ones")]
fn a_chain_out_of_order_is_not_offered() {
    let mut rig = Rig::fresh(Features::INDIRECT_DESC, 4);
    let mut buffers = rig.buffers(0, &[16], &[1]);
    buffers.reverse();
    let _ = rig.driver.add(0, &buffers);
}
