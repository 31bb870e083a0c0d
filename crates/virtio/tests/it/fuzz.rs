//! Arbitrary bytes in all of the guest's memory: no panic, no unbounded work, and each offered slot gives one chain or
//! breaks the ring.

use blkyard_virtio::driver_model::{Descriptor, GUEST_BASE, ModelGuest};
use proptest::prelude::*;

use crate::common::{Device, Outcome};

const BYTES: u64 = 0x5000;

/// Bytes as they come.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 256)
}

/// A descriptor into the little memory there is, so that most of them lead somewhere.
fn descriptor() -> impl Strategy<Value = [u8; 16]> {
    (0_u64..BYTES / 16, 0_u32..2100, 0_u16..8, 0_u16..10).prop_map(|(at, len, flags, next)| {
        Descriptor { addr: GUEST_BASE + at * 16, len: len.next_multiple_of(8), flags, next }.to_bytes()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn any_memory_is_survived(
        places in prop::collection::vec((0_u64..BYTES / 16, prop_oneof![
            1 => noise(),
            4 => prop::collection::vec(descriptor(), 1..16).prop_map(|rows| rows.concat()),
        ]), 1..12),
        indexes in prop::collection::vec(any::<u16>(), 1..6),
        size_log in 0_u32..5,
        event_idx in any::<bool>(), indirect in any::<bool>(),
    ) {
        let size = 1_u16 << size_log;
        let guest = ModelGuest::new(size, 0x2000, event_idx);
        let mut device = Device::new(&guest, indirect);
        for index in indexes {
            for (at, bytes) in &places {
                let len = bytes.len().min((BYTES - at * 16) as usize);
                guest.write(GUEST_BASE + at * 16, &bytes[..len]);
            }
            // Near its current position, so that there is a chain to fetch.
            let avail = device.ring.base().next_avail().wrapping_add(index % (size + 2));
            guest.write(guest.addrs()[1] + 2, &avail.to_le_bytes());
            let before = device.ring.base().next_avail();
            let mut fetched = 0_u16;
            let fault = loop {
                match device.step() {
                    Ok(Some(outcome)) => check(&outcome)?,
                    Ok(None) => break None,
                    Err(fault) => break Some(fault),
                }
                fetched += 1;
                prop_assert!(fetched <= size, "more chains than the ring holds");
            };
            prop_assert_eq!(device.ring.base().next_avail().wrapping_sub(before), fetched);
            prop_assert_eq!(device.ring.in_flight(), 0);
            let _ = device.ring.publish();
            device.ring.enable_notify();
            device.ring.disable_notify();
            if fault.is_some() {
                prop_assert_eq!(device.ring.fault(), fault);
                prop_assert_eq!(device.step().map(|_| ()), Err(fault.unwrap()));
                return Ok(());
            }
        }
    }
}

/// An accepted I/O is consistent.
fn check(outcome: &Outcome) -> Result<(), TestCaseError> {
    if let Outcome::Io { op, sector, sectors, segments, .. } = outcome {
        prop_assert!(sector.checked_add(u64::from(*sectors)).is_some());
        if op.has_data() {
            let bytes: u64 = segments.iter().map(|segment| u64::from(segment.len)).sum();
            prop_assert_eq!(bytes, u64::from(*sectors) * 512);
            prop_assert!(bytes > 0 && segments.len() <= usize::from(crate::common::SEGMENTS));
            prop_assert!(segments.iter().all(|s| s.len > 0 && s.offset + u64::from(s.len) <= BYTES + 0x1000));
        }
    }
    Ok(())
}
