//! A driver and a device that sleep whenever they may: in whatever order they take their turns, neither sleeps for
//! ever.
//!
//! The real ring on both sides, one call at a time, in every order of the first turns. What happens within a call,
//! between one access and the next, is the business of `notify_model` in the crate.
#![forbid(unsafe_code)]

mod common;

use blkyard_virtio::driver_model::{Buffer, Guest, blk_header};
use common::Device;

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
    guest: Guest,
    device: Device,
    head: u16,
    offered: u32,
    polled: u32,
    driver_state: DriverState,
    device_state: DeviceState,
    kick: bool,
    call: bool,
}

impl Pair {
    fn new(event_idx: bool) -> Pair {
        let mut guest = Guest::new(1, 0x1000, event_idx);
        // Both indexes wrap on the way.
        guest.start_at(65534);
        let header = guest.alloc(16, 16);
        guest.write(header, &blk_header(4, 0));
        let status = guest.alloc(1, 1);
        let table = guest.alloc(32, 16);
        let buffers =
            [Buffer { addr: header, len: 16, writable: false }, Buffer { addr: status, len: 1, writable: true }];
        let head = guest.chain_indirect(table, &buffers).unwrap();
        let mut device = Device::new(&guest, true);
        device.ring.disable_notify();
        guest.disable_calls();
        let (driver_state, device_state) = (DriverState::Offer, DeviceState::Work);
        Pair { guest, device, head, offered: 0, polled: 0, driver_state, device_state, kick: false, call: false }
    }

    /// One call of the driver; false if it sleeps and nobody called.
    fn driver(&mut self) -> bool {
        self.driver_state = match self.driver_state {
            DriverState::Offer if self.offered == self.polled && self.offered < REQUESTS => {
                self.guest.offer(self.head);
                self.offered += 1;
                DriverState::Publish
            }
            DriverState::Offer => DriverState::Poll,
            DriverState::Publish => {
                self.kick |= self.guest.publish();
                DriverState::Poll
            }
            DriverState::Poll => match self.guest.poll() {
                Some(_) => {
                    self.polled += 1;
                    DriverState::Offer
                }
                None => DriverState::Arm,
            },
            DriverState::Arm if self.guest.enable_calls() => DriverState::Poll,
            DriverState::Arm => DriverState::Asleep,
            DriverState::Asleep if std::mem::take(&mut self.call) => {
                self.guest.disable_calls();
                DriverState::Poll
            }
            DriverState::Asleep => return false,
        };
        true
    }

    /// One call of the device; false if it sleeps and nobody kicked.
    fn device(&mut self) -> bool {
        self.device_state = match self.device_state {
            DeviceState::Work => match self.device.step().unwrap() {
                Some(_) => DeviceState::Publish,
                None => DeviceState::Arm,
            },
            DeviceState::Publish => {
                self.call |= self.device.ring.publish();
                DeviceState::Work
            }
            DeviceState::Arm if self.device.ring.enable_notify() => DeviceState::Work,
            DeviceState::Arm => DeviceState::Asleep,
            DeviceState::Asleep if std::mem::take(&mut self.kick) => {
                self.device.ring.disable_notify();
                DeviceState::Work
            }
            DeviceState::Asleep => return false,
        };
        true
    }
}

#[test]
fn neither_side_sleeps_while_the_other_waits_for_it() {
    for event_idx in [true, false] {
        for order in 0_u32..1 << TURNS {
            let mut pair = Pair::new(event_idx);
            for turn in 0..TURNS {
                let _ = if order >> turn & 1 == 0 { pair.driver() } else { pair.device() };
            }
            let mut rounds = 0;
            while pair.driver() | pair.device() {
                rounds += 1;
                assert!(rounds < 100, "order {order:b} does not come to rest");
            }
            assert_eq!(pair.polled, REQUESTS, "event index {event_idx}, order {order:b}: both sleep");
        }
    }
}
