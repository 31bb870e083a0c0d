//! A device that lies: impossible writes are found, break the ring permanently, and do no harm.

use blkyard_virtio::Features;
use blkyard_virtio::driver::DeviceFault::{self, *};
use proptest::prelude::*;

use crate::driver_common::{Rig, formats};

const DESC: usize = 0;
const USED: usize = 2;
const PACKED: Features = Features::RING_PACKED;
const SPLIT: Features = Features::VERSION_1;

/// A ring of four with tokens 1 and 2 in flight, one writable byte each; token 0 has come back.
fn rig(features: Features) -> Rig {
    let mut rig = Rig::fresh(features | Features::INDIRECT_DESC, 4);
    let buffers = rig.buffers(0, &[16], &[1]);
    (0..3).for_each(|token| rig.driver.add(token, &buffers).unwrap());
    let _ = rig.driver.publish();
    let (head, _) = rig.fetch().unwrap();
    rig.device.complete(head, 1);
    let _ = rig.device.publish();
    assert_eq!(rig.driver.poll().unwrap().unwrap().token, 0);
    rig
}

/// A used element in the second slot of a split ring, and the index.
fn lie_split(rig: &Rig, id: u32, len: u32, index: u16) {
    rig.put_u32(USED, 4 + 8, id);
    rig.put_u32(USED, 4 + 12, len);
    rig.put_u16(USED, 2, index);
}

/// A used descriptor in the second slot of a packed ring.
fn lie_packed(rig: &Rig, id: u16, len: u32, flags: u16) {
    rig.put_u32(DESC, 16 + 8, len);
    rig.put_u16(DESC, 16 + 12, id);
    rig.put_u16(DESC, 16 + 14, flags);
}

fn expect(mut rig: Rig, want: DeviceFault, name: &str) {
    assert_eq!(rig.driver.poll(), Err(want), "{name}");
    assert_eq!((rig.driver.fault(), rig.driver.in_flight()), (Some(want), 2), "{name}");
    // The truth comes too late. A lie in a packed ring may have written over it.
    while let Ok(Some(head)) = rig.device.fetch(&rig.memory, &mut rig.chain) {
        rig.device.complete(head, 1);
    }
    let _ = rig.device.publish();
    assert_eq!(rig.driver.poll(), Err(want), "{name}");
    let buffers = rig.buffers(0, &[16], &[1]);
    rig.driver.add(3, &buffers).unwrap();
    let _ = rig.driver.publish();
    assert_eq!(rig.driver.poll(), Err(want), "{name}");
}

#[test]
fn lies_in_a_used_ring_are_found() {
    let table: &[(&str, u32, u32, u16, DeviceFault)] = &[
        ("one more than is in flight", 1, 0, 4, UsedJumped),
        ("far ahead", 1, 0, 0x8000, UsedJumped),
        ("back", 1, 0, 0, UsedJumped),
        ("the first id outside", 4, 0, 2, IdOutOfRange),
        ("an id whose lower half is right", 0x1_0001, 0, 2, IdOutOfRange),
        ("the largest id", u32::MAX, 0, 2, IdOutOfRange),
        ("an id that came back already", 0, 0, 2, IdNotInFlight),
        ("an id never given", 3, 0, 2, IdNotInFlight),
        ("one byte more than there is", 1, 2, 2, LengthTooLong),
        ("as many as can be said", 2, u32::MAX, 2, LengthTooLong),
    ];
    for (name, id, len, index, want) in table {
        let rig = rig(SPLIT);
        lie_split(&rig, *id, *len, *index);
        expect(rig, *want, name);
    }
}

#[test]
fn lies_in_a_packed_ring_are_found() {
    const BOTH: u16 = 1 << 15 | 1 << 7;
    const WRITE: u16 = 2;
    let table: &[(&str, u16, u32, u16, DeviceFault)] = &[
        ("flags of the lap before, used", 1, 0, 0, FlagsNonsense),
        ("flags of the lap before, available", 1, 0, 1 << 15, FlagsNonsense),
        ("the first id outside", 4, 0, BOTH, IdOutOfRange),
        ("the largest id", u16::MAX, 0, BOTH, IdOutOfRange),
        ("an id that came back already", 0, 0, BOTH, IdNotInFlight),
        ("an id never given", 3, 0, BOTH, IdNotInFlight),
        ("one byte more than there is", 1, 2, BOTH | WRITE, LengthTooLong),
        ("as many as can be said", 2, u32::MAX, BOTH | WRITE, LengthTooLong),
    ];
    for (name, id, len, flags, want) in table {
        let rig = rig(PACKED);
        lie_packed(&rig, *id, *len, *flags);
        expect(rig, *want, name);
    }
    // Without the flag the length is undefined.
    let mut rig = rig(PACKED);
    lie_packed(&rig, 1, u32::MAX, BOTH);
    assert_eq!(rig.driver.poll().unwrap().map(|used| (used.token, used.written)), Some((1, 0)));
}

#[test]
fn an_id_given_back_twice_breaks_the_ring() {
    let mut rig = rig(SPLIT);
    rig.put_u32(USED, 4 + 16, 2);
    lie_split(&rig, 2, 1, 3);
    assert_eq!(rig.driver.poll().unwrap().unwrap().token, 2);
    assert_eq!(rig.driver.poll(), Err(IdNotInFlight));
}

#[test]
fn a_device_with_nothing_to_do_cannot_invent_anything() {
    for features in formats() {
        let mut rig = Rig::fresh(features, 4);
        if features.contains(PACKED) {
            lie_packed(&rig, 1, 0, 1 << 15 | 1 << 7);
            rig.put_u16(DESC, 14, 1 << 15 | 1 << 7);
            assert_eq!(rig.driver.poll(), Ok(None));
            assert!(!rig.driver.arm());
        } else {
            lie_split(&rig, 1, 0, 1);
            // Otherwise a driver with nothing in flight would neither sleep nor poll.
            assert!(!rig.driver.arm());
            assert_eq!(rig.driver.poll(), Err(UsedJumped));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// For any writes of the device into its parts, at any time: no token comes back that was not in flight, none
    /// twice, no length beyond the room, and no panic.
    #[test]
    fn garbage_gives_nothing_back_that_was_not_given(
        format in 0_usize..8,
        rounds in prop::collection::vec(
            (prop::collection::vec((any::<bool>(), 0_usize..64, any::<u8>()), 0..6), any::<bool>(), any::<bool>()),
            1..40),
    ) {
        let features = formats().nth(format).unwrap();
        let mut rig = Rig::fresh(features, 4);
        let buffers = rig.buffers(0, &[16], &[7]);
        let mut out = [false; 4];
        for (writes, honest, add) in rounds {
            if add
                && let Some(token) = out.iter().position(|out| !out)
                && rig.driver.add(token as u16, &buffers).is_ok()
            {
                out[token] = true;
                let _ = rig.driver.publish();
            }
            if honest && let Ok(Some(head)) = rig.device.fetch(&rig.memory, &mut rig.chain) {
                rig.device.complete(head, 7);
                let _ = rig.device.publish();
            }
            for (in_ring, at, byte) in writes {
                let part = if in_ring && features.contains(PACKED) { DESC } else { USED };
                let len = if part == DESC { 64 } else if features.contains(PACKED) { 4 } else { 38 };
                rig.part(part, at % len, 1).fill(byte);
            }
            rig.driver.arm();
            loop {
                match rig.driver.poll() {
                    Ok(Some(used)) => {
                        let was_out = std::mem::take(&mut out[usize::from(used.token)]);
                        prop_assert!(was_out && used.written <= 7);
                    }
                    Ok(None) => break,
                    Err(fault) => {
                        prop_assert_eq!(rig.driver.fault(), Some(fault));
                        break;
                    }
                }
            }
            prop_assert_eq!(usize::from(rig.driver.in_flight()), out.iter().filter(|out| **out).count());
        }
    }
}
