//! A device that is killed before any of its stores, and the one after it as well: the driver gets a used element for each
//! chain, and no second one, and chains are taken up again in the order they were offered.
//!
//! Built with `--cfg kill` only: see `blkyard_mem::kill`.
#![cfg(kill)]
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blkyard_mem::{Region, kill};
use blkyard_virtio::driver_model::{Buffer, GUEST_BASE, Guest};
use blkyard_virtio::{Chain, DeviceRing, GuestMemory, Head, Inflight, SplitRing, inflight_bytes};

/// Chains in one story.
const CHAINS: u32 = 7;

/// How a device goes about its work.
#[derive(Clone, Copy, Debug)]
struct Habit {
    size: u16,
    start: u16,
    /// Chains fetched at a time, at most.
    fetches: usize,
    /// Those fetched last are completed first.
    reverse: bool,
    /// So many are kept for the next batch.
    keeps: usize,
    /// Fetches once more between completing and publishing.
    fetches_between: bool,
}

/// What outlives a device: its driver, and the memory.
struct World {
    guest: Guest,
    record: Arc<Region>,
    habit: Habit,
    offered: u32,
    /// The number of the chain that begins at a head, while it is out.
    out: BTreeMap<u32, u32>,
    used: BTreeSet<u32>,
}

impl World {
    fn new(habit: Habit) -> World {
        let mut guest = Guest::new(habit.size, 0x1000, false);
        guest.start_at(habit.start);
        let record = Region::anonymous(inflight_bytes(habit.size)).unwrap();
        World { guest, record, habit, offered: 0, out: BTreeMap::new(), used: BTreeSet::new() }
    }

    /// The driver takes what is used, and offers as much as there is room for.
    fn drive(&mut self) {
        while let Some((head, len)) = self.guest.poll() {
            let number = self.out.remove(&head).unwrap_or_else(|| panic!("{head} is used and was not out"));
            assert_eq!(len, number, "the used element of another chain");
            assert!(self.used.insert(number));
        }
        while self.offered < CHAINS
            && let Some(head) = self.guest.chain(&[Buffer { addr: GUEST_BASE, len: 1, writable: true }])
        {
            self.out.insert(head.into(), self.offered);
            self.guest.offer(head);
            self.offered += 1;
        }
        let _ = self.guest.publish();
    }

    /// A device from its set-up until all is used.
    fn live(&mut self) {
        let mut device = Device::new(self);
        // More rounds than any habit needs.
        for _ in 0..10 * CHAINS {
            kill::spared(|| self.drive());
            if self.used.len() == CHAINS as usize {
                return;
            }
            device.turn(self);
        }
        panic!("chains are lost: {:?} are used of {CHAINS}", self.used);
    }
}

struct Device {
    ring: SplitRing,
    memory: Arc<GuestMemory>,
    chain: Chain,
    held: Vec<(u32, Head)>,
    /// The number of the chain fetched last.
    last: Option<u32>,
}

impl Device {
    fn new(world: &World) -> Device {
        let record = Inflight::new(Arc::clone(&world.record), 0, world.record.len()).unwrap();
        let DeviceRing::Split(mut ring) = world.guest.device(false) else { unreachable!() };
        ring.track(record).unwrap();
        let memory = Arc::clone(world.guest.memory());
        Device { ring, memory, chain: Chain::new(4), held: Vec::new(), last: None }
    }

    fn fetch(&mut self, world: &World, most: usize) {
        for _ in 0..most {
            let Some(head) = self.ring.fetch(&self.memory, &mut self.chain).unwrap() else { break };
            let number = world.out[&u32::from(head.id())];
            assert!(self.last.replace(number) < Some(number), "{number} comes late");
            self.held.push((number, head));
        }
    }

    fn turn(&mut self, world: &World) {
        let habit = world.habit;
        self.fetch(world, habit.fetches);
        let keeps = habit.keeps.min(self.held.len().saturating_sub(1));
        let mut done = self.held.split_off(keeps);
        if habit.reverse {
            done.reverse();
        }
        for (number, head) in done {
            self.ring.complete(head, number);
            if habit.fetches_between {
                self.fetch(world, 1);
            }
        }
        let _ = self.ring.publish();
    }
}

/// Every habit that makes a difference.
fn habits() -> impl Iterator<Item = Habit> {
    let sizes = [(1, 0), (2, 65535), (4, 65533)].into_iter();
    sizes.flat_map(|(size, start)| {
        [(1, false, 0, false), (4, true, 0, false), (2, true, 1, true), (3, false, 2, true)].map(
            |(fetches, reverse, keeps, fetches_between)| Habit {
                size,
                start,
                fetches,
                reverse,
                keeps,
                fetches_between,
            },
        )
    })
}

#[test]
fn killed_before_any_store_and_again_before_any_store_of_the_next_life() {
    let mut stories = 0;
    for habit in habits() {
        for first in 0.. {
            let mut died = true;
            for second in 0.. {
                let mut world = World::new(habit);
                died = kill::after(first, || world.live()).is_none();
                let died_again = died && kill::after(second, || world.live()).is_none();
                if died_again {
                    world.live();
                }
                assert_eq!(world.used.len(), CHAINS as usize, "{habit:?}, killed before {first} and {second}");
                stories += 1;
                if !died_again {
                    break;
                }
            }
            if !died {
                break;
            }
        }
    }
    assert!(stories > 10_000, "{stories} stories only: are stores counted?");
}

#[test]
fn a_device_that_is_killed_again_and_again_gets_on_as_long_as_it_publishes_now_and_then() {
    for habit in habits() {
        // Long enough for a batch of any habit after the longest set-up.
        let mut world = World::new(habit);
        let lives = (0..10_000_u64)
            .map(|life| 20 + life % 23)
            .take_while(|stores| kill::after(*stores, || world.live()).is_none());
        assert!(lives.count() < 9_999, "{habit:?}");
        assert_eq!(world.used.len(), CHAINS as usize);
    }
}
