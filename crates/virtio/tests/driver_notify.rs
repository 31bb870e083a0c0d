//! A driver and a device that sleep whenever they may: in whatever order they take their turns, neither sleeps for
//! ever, in either format.
//!
//! The real rings on both sides, one call at a time, in every order of the first turns. What happens within a call,
//! between one access and the next, is the business of `notify_model` in the crate: both formats publish and arm as it
//! has it, a store and a load of two words each, all sequentially consistent.
#![forbid(unsafe_code)]

#[path = "common/driver/mod.rs"]
mod driver_common;

use blkyard_virtio::Features;
use blkyard_virtio::driver::{Buffer, DriverRing};
use driver_common::{Rig, formats};

const REQUESTS: u32 = 3;
/// Turns whose every order is tried.
const TURNS: u32 = 14;

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

struct Pair {
    rig: Rig,
    buffers: Vec<Buffer>,
    delayed: bool,
    offered: u32,
    polled: u32,
    driver: DriverState,
    device: DeviceState,
    kick: bool,
    call: bool,
}

impl Pair {
    fn new(features: Features, size: u16, delayed: bool) -> Pair {
        let packed = features.contains(Features::RING_PACKED);
        // Indexes and laps wrap on the way.
        let mut rig = Rig::new(features, size, if packed { size - 1 } else { 65534 });
        let buffers = rig.buffers(0, &[], &[1]);
        rig.device.disable_notify();
        rig.driver.disarm();
        let (driver, device) = (DriverState::Offer, DeviceState::Work);
        Pair { rig, buffers, delayed, offered: 0, polled: 0, driver, device, kick: false, call: false }
    }

    /// One call of the driver; false if it sleeps and nobody called.
    fn drive(&mut self) -> bool {
        let room = self.offered - self.polled < u32::from(self.rig.driver.size());
        self.driver = match self.driver {
            DriverState::Offer if room && self.offered < REQUESTS => {
                let token = self.offered as u16 % self.rig.driver.size();
                self.rig.driver.add(token, &self.buffers).unwrap();
                self.offered += 1;
                DriverState::Publish
            }
            DriverState::Offer => DriverState::Poll,
            DriverState::Publish => {
                self.kick |= self.rig.driver.publish();
                DriverState::Poll
            }
            DriverState::Poll => match self.rig.driver.poll().unwrap() {
                Some(_) => {
                    self.polled += 1;
                    DriverState::Offer
                }
                None if room && self.offered < REQUESTS => DriverState::Offer,
                None => DriverState::Arm,
            },
            DriverState::Arm => {
                let arm = if self.delayed { DriverRing::arm_delayed } else { DriverRing::arm };
                if arm(&mut self.rig.driver) { DriverState::Poll } else { DriverState::Asleep }
            }
            DriverState::Asleep if std::mem::take(&mut self.call) => {
                self.rig.driver.disarm();
                DriverState::Poll
            }
            DriverState::Asleep => return false,
        };
        true
    }

    /// One call of the device; false if it sleeps and nobody kicked.
    fn serve(&mut self) -> bool {
        self.device = match self.device {
            DeviceState::Work => match self.rig.fetch() {
                Some((head, _)) => {
                    self.rig.device.complete(head, 1);
                    DeviceState::Publish
                }
                None => DeviceState::Arm,
            },
            DeviceState::Publish => {
                self.call |= self.rig.device.publish();
                DeviceState::Work
            }
            DeviceState::Arm if self.rig.device.enable_notify() => DeviceState::Work,
            DeviceState::Arm => DeviceState::Asleep,
            DeviceState::Asleep if std::mem::take(&mut self.kick) => {
                self.rig.device.disable_notify();
                DeviceState::Work
            }
            DeviceState::Asleep => return false,
        };
        true
    }
}

#[test]
fn neither_side_sleeps_while_the_other_waits_for_it() {
    for features in formats().filter(|features| !features.contains(Features::INDIRECT_DESC)) {
        for (size, delayed) in [(1, false), (2, false), (2, true)] {
            for order in 0_u32..1 << TURNS {
                let mut pair = Pair::new(features, size, delayed);
                for turn in 0..TURNS {
                    let _ = if order >> turn & 1 == 0 { pair.drive() } else { pair.serve() };
                }
                let mut rounds = 0;
                while pair.drive() | pair.serve() {
                    rounds += 1;
                    assert!(rounds < 100, "{features:?}, order {order:b} does not come to rest");
                }
                assert_eq!(pair.polled, REQUESTS, "{features:?}, ring of {size}, order {order:b}: both sleep");
            }
        }
    }
}
