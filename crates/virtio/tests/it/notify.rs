//! A driver and a device that sleep whenever they may: in any order of turns, neither sleeps without end. Our own
//! driver, in either format, and the reference driver.
//!
//! The real rings on both sides, one call at a time, in every order of the first turns. `notify_model` in the crate
//! covers the accesses within a call: both formats publish and arm by a store and a load of two words each, all
//! sequentially consistent.

use blkyard_virtio::driver::Buffer;
use blkyard_virtio::driver_model::{ModelBuffer as GuestBuffer, ModelGuest, blk_header};
use blkyard_virtio::{DeviceRing, Features};

use crate::common::Device;
use crate::driver_common::{Rig, formats};

const REQUESTS: u32 = 3;
/// Turns whose every order is tried.
const TURNS: u32 = 14;

/// A driver's ring and a device's.
trait Rings {
    /// Requests that may be in flight.
    fn size(&self) -> u32;
    fn offer(&mut self, number: u32);
    /// Whether the device is to be kicked.
    fn publish(&mut self) -> bool;
    /// Whether a request came back.
    fn poll(&mut self) -> bool;
    /// Whether one did before the device heard that the driver sleeps.
    fn arm(&mut self) -> bool;
    fn disarm(&mut self);
    /// Does a request, if there is one.
    fn serve(&mut self) -> bool;
    fn device(&mut self) -> &mut DeviceRing;
}

/// Our driver.
struct Ours {
    rig: Rig,
    buffers: Vec<Buffer>,
}

impl Ours {
    fn new(features: Features, size: u16) -> Ours {
        let packed = features.contains(Features::RING_PACKED);
        // Indexes and laps wrap on the way.
        let rig = Rig::new(features, size, if packed { size - 1 } else { 65534 });
        let buffers = rig.buffers(0, &[], &[1]);
        Ours { rig, buffers }
    }
}

impl Rings for Ours {
    fn size(&self) -> u32 {
        self.rig.driver.size().into()
    }

    fn offer(&mut self, number: u32) {
        let token = number as u16 % self.rig.driver.size();
        self.rig.driver.add(token, &self.buffers).unwrap();
    }

    fn publish(&mut self) -> bool {
        self.rig.driver.publish()
    }

    fn poll(&mut self) -> bool {
        self.rig.driver.poll().unwrap().is_some()
    }

    fn arm(&mut self) -> bool {
        self.rig.driver.arm()
    }

    fn disarm(&mut self) {
        self.rig.driver.disarm();
    }

    fn serve(&mut self) -> bool {
        let Some((head, _)) = self.rig.fetch() else { return false };
        self.rig.device.complete(head, 1);
        true
    }

    fn device(&mut self) -> &mut DeviceRing {
        &mut self.rig.device
    }
}

/// The reference driver.
struct Reference {
    guest: ModelGuest,
    device: Device,
    head: u16,
}

impl Reference {
    fn new(event_idx: bool) -> Reference {
        let mut guest = ModelGuest::new(1, 0x1000, event_idx);
        // Both indexes wrap on the way.
        guest.start_at(65534);
        let header = guest.alloc(16, 16);
        guest.write(header, &blk_header(4, 0));
        let status = guest.alloc(1, 1);
        let table = guest.alloc(32, 16);
        let buffers = [
            GuestBuffer { addr: header, len: 16, writable: false },
            GuestBuffer { addr: status, len: 1, writable: true },
        ];
        let head = guest.chain_indirect(table, &buffers).unwrap();
        let device = Device::new(&guest, true);
        Reference { guest, device, head }
    }
}

impl Rings for Reference {
    fn size(&self) -> u32 {
        1
    }

    fn offer(&mut self, _number: u32) {
        self.guest.offer(self.head);
    }

    fn publish(&mut self) -> bool {
        self.guest.publish()
    }

    fn poll(&mut self) -> bool {
        self.guest.poll().is_some()
    }

    fn arm(&mut self) -> bool {
        self.guest.enable_calls()
    }

    fn disarm(&mut self) {
        self.guest.disable_calls();
    }

    fn serve(&mut self) -> bool {
        self.device.step().unwrap().is_some()
    }

    fn device(&mut self) -> &mut DeviceRing {
        &mut self.device.ring
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum DriverState {
    Offer,
    Publish,
    Poll,
    Arm,
    Asleep,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum DeviceState {
    Work,
    Publish,
    Arm,
    Asleep,
}

struct Pair<R> {
    rings: R,
    offered: u32,
    polled: u32,
    driver: DriverState,
    device: DeviceState,
    kick: bool,
    call: bool,
}

impl<R: Rings> Pair<R> {
    fn new(mut rings: R) -> Pair<R> {
        rings.device().disable_notify();
        rings.disarm();
        let (driver, device) = (DriverState::Offer, DeviceState::Work);
        Pair { rings, offered: 0, polled: 0, driver, device, kick: false, call: false }
    }

    /// One call of the driver; false if it sleeps without a call.
    fn drive(&mut self) -> bool {
        let may_offer = self.offered < REQUESTS && self.offered - self.polled < self.rings.size();
        self.driver = match self.driver {
            DriverState::Offer if may_offer => {
                self.rings.offer(self.offered);
                self.offered += 1;
                DriverState::Publish
            }
            DriverState::Offer => DriverState::Poll,
            DriverState::Publish => {
                self.kick |= self.rings.publish();
                DriverState::Poll
            }
            DriverState::Poll if self.rings.poll() => {
                self.polled += 1;
                DriverState::Offer
            }
            DriverState::Poll if may_offer => DriverState::Offer,
            DriverState::Poll => DriverState::Arm,
            DriverState::Arm if self.rings.arm() => DriverState::Poll,
            DriverState::Arm => DriverState::Asleep,
            DriverState::Asleep if std::mem::take(&mut self.call) => {
                self.rings.disarm();
                DriverState::Poll
            }
            DriverState::Asleep => return false,
        };
        true
    }

    /// One call of the device; false if it sleeps without a kick.
    fn serve(&mut self) -> bool {
        self.device = match self.device {
            DeviceState::Work if self.rings.serve() => DeviceState::Publish,
            DeviceState::Work => DeviceState::Arm,
            DeviceState::Publish => {
                self.call |= self.rings.device().publish();
                DeviceState::Work
            }
            DeviceState::Arm if self.rings.device().enable_notify() => DeviceState::Work,
            DeviceState::Arm => DeviceState::Asleep,
            DeviceState::Asleep if std::mem::take(&mut self.kick) => {
                self.rings.device().disable_notify();
                DeviceState::Work
            }
            DeviceState::Asleep => return false,
        };
        true
    }
}

/// Tries every order of the first turns.
fn in_every_order<R: Rings>(what: &str, rings: impl Fn() -> R) {
    for order in 0_u32..1 << TURNS {
        let mut pair = Pair::new(rings());
        for turn in 0..TURNS {
            let _ = if order >> turn & 1 == 0 { pair.drive() } else { pair.serve() };
        }
        let mut rounds = 0;
        while pair.drive() | pair.serve() {
            rounds += 1;
            assert!(rounds < 100, "{what}, order {order:b} does not come to rest");
        }
        assert_eq!(pair.polled, REQUESTS, "{what}, order {order:b}: both sleep");
    }
}

#[test]
fn neither_side_sleeps_while_the_other_waits_for_it() {
    for features in formats().filter(|features| !features.contains(Features::INDIRECT_DESC)) {
        for size in [1, 2] {
            in_every_order(&format!("{features:?}, ring of {size}"), || Ours::new(features, size));
        }
    }
    for event_idx in [true, false] {
        in_every_order(&format!("reference driver, event index {event_idx}"), || Reference::new(event_idx));
    }
}
