//! A device that is killed before any of its stores, and the one after it as well: the driver gets a used element for
//! each chain, and no second one, and chains are taken up again in the order they were offered.
//!
//! Built with `--cfg kill` only: see `blkyard_mem::kill`.
#![cfg(kill)]
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blkyard_mem::{Region, kill};
use blkyard_virtio::driver_model::{GUEST_BASE, ModelBuffer, ModelGuest};
use blkyard_virtio::{Chain, ChainHead, DeviceRing, Features, GuestMemory, Inflight, RingBase, inflight_bytes};

/// Chains in one story.
const CHAINS: u32 = 7;

/// Negotiated options of driver and device.
#[derive(Clone, Copy, Debug)]
struct Rings {
    features: Features,
    size: u16,
    start: u16,
}

/// How a device goes about its work.
#[derive(Clone, Copy, Debug)]
struct Habit {
    /// Chains fetched at a time, at most.
    fetches: usize,
    /// Those fetched last are completed first.
    reverse: bool,
    /// So many are kept for the next batch.
    keeps: usize,
    /// Fetches once more between completing and publishing.
    fetches_between: bool,
}

/// The relevant combinations. The next device has the next one, so each continues another's state.
const HABITS: [Habit; 4] = [
    Habit { fetches: 1, reverse: false, keeps: 0, fetches_between: false },
    Habit { fetches: 5, reverse: true, keeps: 0, fetches_between: false },
    Habit { fetches: 2, reverse: true, keeps: 1, fetches_between: true },
    Habit { fetches: 3, reverse: false, keeps: 2, fetches_between: true },
];

/// State that outlives a device: its driver, and the memory.
struct World {
    guest: ModelGuest,
    /// Where the ring began.
    base: RingBase,
    record: Arc<Region>,
    rings: Rings,
    /// Devices so far, and the options of the first.
    lives: usize,
    offered: u32,
    /// The number of the chain that begins at a head, while it is out.
    out: BTreeMap<u32, u32>,
    used: BTreeSet<u32>,
}

impl World {
    fn new(rings: Rings, first: usize) -> World {
        let mut guest = ModelGuest::with(rings.features, rings.size, 0x1000);
        guest.start_at(rings.start);
        let record = Region::anonymous(inflight_bytes(rings.features, rings.size)).unwrap();
        let base = guest.device(false).base();
        World { guest, base, record, rings, lives: first, offered: 0, out: BTreeMap::new(), used: BTreeSet::new() }
    }

    /// The driver takes used chains, and offers as many as there is room for.
    fn drive(&mut self) {
        while let Some((head, len)) = self.guest.poll() {
            let number = self.out.remove(&head).unwrap_or_else(|| panic!("{head} is used and was not out"));
            assert_eq!(len, written(self.rings, number), "the used element of another chain");
            assert!(self.used.insert(number));
        }
        while self.offered < CHAINS
            && let Some(head) = self.guest.chain(&buffers(self.rings, self.offered))
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
        self.lives += 1;
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

/// One to three descriptors, as many as the ring has.
fn buffers(rings: Rings, number: u32) -> Vec<ModelBuffer> {
    let count = (1 + number as usize % 3).min(rings.size.into());
    (0..count).map(|at| ModelBuffer { addr: GUEST_BASE, len: 1, writable: at + 1 == count }).collect()
}

/// The length reported as written: distinct for each chain, or the full room, so that one used element covers several.
fn written(rings: Rings, number: u32) -> u32 {
    if rings.features.contains(Features::IN_ORDER) && number % 4 != 3 { 1 } else { number }
}

struct Device {
    ring: DeviceRing,
    habit: Habit,
    memory: Arc<GuestMemory>,
    chain: Chain,
    held: Vec<(u32, ChainHead)>,
    /// The number of the chain fetched last.
    last: Option<u32>,
}

impl Device {
    fn new(world: &World) -> Device {
        let record = Inflight::new(Arc::clone(&world.record), 0, world.record.len()).unwrap();
        // The front-end knows where the ring began, and no more.
        let base = world.base;
        let mut ring = world.guest.device_at(false, base);
        ring.track(record).unwrap();
        let memory = Arc::clone(world.guest.memory());
        let habit = HABITS[world.lives % HABITS.len()];
        Device { ring, habit, memory, chain: Chain::new(4), held: Vec::new(), last: None }
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
        let habit = self.habit;
        self.fetch(world, habit.fetches);
        let keeps = habit.keeps.min(self.held.len().saturating_sub(1));
        let mut done = self.held.split_off(keeps);
        if habit.reverse {
            done.reverse();
        }
        for (number, head) in done {
            self.ring.complete(head, written(world.rings, number));
            if habit.fetches_between {
                self.fetch(world, 1);
            }
        }
        let _ = self.ring.publish();
    }
}

/// Every kind of ring, and a first device of every habit on each.
fn worlds() -> impl Iterator<Item = (Rings, usize)> {
    let (split, packed) = (Features::empty(), Features::RING_PACKED);
    let rings = [(split, 1, 0), (split, 2, 65535), (split, 4, 65533), (packed, 1, 0), (packed, 3, 2), (packed, 5, 9)];
    let rings = rings.into_iter().flat_map(|(format, size, start)| {
        [Features::empty(), Features::IN_ORDER].map(|order| Rings { features: format | order, size, start })
    });
    rings.flat_map(|rings| (0..HABITS.len()).map(move |first| (rings, first)))
}

#[test]
fn killed_before_any_store_and_again_before_any_store_of_the_next_life() {
    let mut stories = 0;
    for (rings, habit) in worlds() {
        for first in 0.. {
            let mut died = true;
            for second in 0.. {
                let mut world = World::new(rings, habit);
                died = kill::after(first, || world.live()).is_none();
                let died_again = died && kill::after(second, || world.live()).is_none();
                if died_again {
                    world.live();
                }
                assert_eq!(world.used.len(), CHAINS as usize, "{rings:?}, {habit}, killed before {first} and {second}");
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
    assert!(stories > 100_000, "{stories} stories only: are stores counted?");
}

#[test]
fn a_device_that_is_killed_again_and_again_gets_on_as_long_as_it_publishes_now_and_then() {
    for (rings, habit) in worlds() {
        // Long enough for a batch of any habit after the longest set-up.
        let mut world = World::new(rings, habit);
        let lives = (0..10_000_u64)
            .map(|life| 40 + life % 23)
            .take_while(|stores| kill::after(*stores, || world.live()).is_none());
        assert!(lives.count() < 9_999, "{rings:?}, {habit}");
        assert_eq!(world.used.len(), CHAINS as usize);
    }
}

/// Killed before each store of one publication: exactly the chains that the driver was not given are in the record. A
/// record that is cleared before the used index is stored loses chains; one that is never cleared repeats them.
#[test]
fn a_record_is_cleared_only_after_its_used_index() {
    for (rings, habit) in worlds() {
        for stores in 0.. {
            let mut world = World::new(rings, habit);
            let mut device = Device::new(&world);
            world.drive();
            device.fetch(&world, usize::from(rings.size));
            let fetched = device.held.len();
            assert!(fetched > 0);
            for (number, head) in device.held.drain(..) {
                device.ring.complete(head, written(rings, number));
            }
            let died = kill::after(stores, || device.ring.publish()).is_none();
            world.drive();
            // The next device is made from the memory that the dead one left.
            let left = Device::new(&world).ring.left();
            assert_eq!(world.used.len() + left, fetched, "{rings:?}: used and left, killed before store {stores}");
            if !died {
                assert_eq!(left, 0, "{rings:?}: published and still in the record");
                break;
            }
        }
    }
}
