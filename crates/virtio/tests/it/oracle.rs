//! The ring against a foreign one: the `virtio-queue` crate on the same bytes.
//!
//! Both walk the same descriptor tables, valid ones and garbage. Intended differences are listed here: we refuse as a
//! whole a chain that it truncates, and refuse some chains that it accepts.

use blkyard_mem::Segment;
use blkyard_virtio::driver_model::{Descriptor, GUEST_BASE, ModelBuffer, ModelGuest};
use blkyard_virtio::{Chain, ChainFault, RingFault};
use proptest::prelude::*;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const SIZE: u16 = 8;
/// Ring, then a page of buffers and a page with a table.
const HEAP: u64 = GUEST_BASE + 0x3000;
const TABLE: u64 = HEAP + 0x1000;
const BYTES: usize = 0x5000;

/// One chain, as the oracle sees it.
struct Seen {
    head: u16,
    /// Address, length, whether writable.
    buffers: Vec<(u64, u32, bool)>,
}

/// Copies the guest's memory for the oracle and lets it fetch available chains. `None` if it refuses the ring.
fn ask_oracle(guest: &ModelGuest, next_avail: u16) -> Option<Vec<Seen>> {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(GUEST_BASE), BYTES)]).unwrap();
    memory.write_slice(&guest.read(GUEST_BASE, BYTES), GuestAddress(GUEST_BASE)).unwrap();
    let mut queue = Queue::new(SIZE).unwrap();
    let [desc, avail, used] = guest.addrs();
    queue.try_set_desc_table_address(GuestAddress(desc)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(avail)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(used)).unwrap();
    queue.set_event_idx(true);
    queue.set_next_avail(next_avail);
    queue.set_ready(true);
    let chains = queue.iter(&memory).ok()?;
    Some(
        chains
            .map(|chain| Seen {
                head: chain.head_index(),
                buffers: chain.map(|desc| (desc.addr().0, desc.len(), desc.is_write_only())).collect(),
            })
            .collect(),
    )
}

fn is_mapped(addr: u64, len: u32) -> bool {
    addr.checked_sub(GUEST_BASE).is_some_and(|at| at.checked_add(u64::from(len)).is_some_and(|end| end <= BYTES as u64))
}

/// Bytes that are lists of descriptors, near enough to right ones to reach every corner.
fn descriptor() -> impl Strategy<Value = Descriptor> {
    let addr = prop_oneof![
        6 => (0_u64..0x1000).prop_map(|at| HEAP + at),
        2 => Just(TABLE),
        1 => GUEST_BASE - 16..GUEST_BASE + BYTES as u64 + 16,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![6 => 1_u32..600, 2 => (0_u32..10).prop_map(|n| n * 16), 1 => any::<u32>()];
    let flags = prop_oneof![4 => 0_u16..4, 2 => 0_u16..8, 1 => any::<u16>()];
    let next = prop_oneof![6 => 0_u16..SIZE, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| Descriptor { addr, len, flags, next })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    /// Any bytes: the same chains with the same buffers, or a fault where the oracle stops short or is more lenient.
    #[test]
    fn garbage_is_read_alike(
        ring in prop::collection::vec(descriptor(), usize::from(SIZE)),
        table in prop::collection::vec(descriptor(), 0..10),
        heads in prop::collection::vec(0_u16..SIZE + 1, 0..10),
        start in prop_oneof![Just(0_u16), Just(65532), any::<u16>()],
    ) {
        let mut guest = ModelGuest::new(SIZE, 0x2000, true);
        guest.start_at(start);
        for (place, rows) in [(guest.addrs()[0], &ring), (TABLE, &table)] {
            rows.iter().enumerate().for_each(|(index, row)| guest.set_descriptor(place, index as u16, *row));
        }
        let mut device = guest.device(true);
        heads.iter().for_each(|head| guest.offer(*head));
        guest.publish();
        let oracle = ask_oracle(&guest, start);
        let mut chain = Chain::new(256);
        let Some(seen) = oracle else {
            prop_assert_eq!(device.fetch(guest.memory(), &mut chain), Err(RingFault::AvailJumped));
            return Ok(());
        };
        let mut offered_before = [false; SIZE as usize];
        for seen in seen {
            let fetched = device.fetch(guest.memory(), &mut chain);
            if seen.head >= SIZE {
                prop_assert_eq!(fetched, Err(RingFault::HeadOutOfRange));
                prop_assert!(seen.buffers.is_empty());
                return Ok(());
            }
            if std::mem::replace(&mut offered_before[usize::from(seen.head)], true) {
                // The oracle does not check this.
                prop_assert_eq!(fetched, Err(RingFault::HeadTwice));
                return Ok(());
            }
            prop_assert_eq!(fetched.unwrap().unwrap().id(), seen.head);
            compare(&chain, &seen)?;
        }
        prop_assert_eq!(device.fetch(guest.memory(), &mut chain), Ok(None));
    }

    /// Tidy chains: exactly the same buffers, and no fault.
    #[test]
    fn tidy_chains_are_read_alike(
        chains in prop::collection::vec(
            (prop::collection::vec((0_u32..2000, 1_u32..2000), 1..6), 0_usize..6, any::<bool>()), 1..4),
        start in any::<u16>(),
    ) {
        let mut guest = ModelGuest::new(SIZE, 0x2000, true);
        guest.start_at(start);
        let mut device = guest.device(true);
        for (at, (buffers, readable, indirect)) in chains.iter().enumerate() {
            let buffers: Vec<_> = buffers.iter().enumerate().map(|(index, (addr, len))| ModelBuffer {
                addr: HEAP + u64::from(*addr), len: *len, writable: index >= *readable,
            }).collect();
            let head = if *indirect {
                guest.chain_indirect(TABLE + at as u64 * 256, &buffers)
            } else {
                guest.chain(&buffers)
            };
            head.into_iter().for_each(|head| guest.offer(head));
        }
        guest.publish();
        let mut chain = Chain::new(16);
        for seen in ask_oracle(&guest, start).unwrap() {
            let head = device.fetch(guest.memory(), &mut chain).unwrap().unwrap();
            prop_assert_eq!(head.id(), seen.head);
            prop_assert_eq!(chain.fault(), None);
            compare(&chain, &seen)?;
        }
        prop_assert_eq!(device.fetch(guest.memory(), &mut chain), Ok(None));
    }
}

/// The chain equals the oracle's, or has a fault that explains the difference.
fn compare(chain: &Chain, seen: &Seen) -> Result<(), TestCaseError> {
    let buffers = &seen.buffers;
    let Some(fault) = chain.fault() else {
        let list = |writable| -> Vec<Segment> {
            let of_kind = buffers.iter().filter(|buffer| buffer.2 == writable);
            of_kind.map(|(addr, len, _)| Segment { region: 0, offset: addr - GUEST_BASE, len: *len }).collect()
        };
        prop_assert_eq!(chain.readable(), list(false));
        prop_assert_eq!(chain.writable(), list(true));
        let bytes: u64 = buffers.iter().map(|buffer| u64::from(buffer.1)).sum();
        prop_assert_eq!(chain.readable_bytes() + chain.writable_bytes(), bytes);
        prop_assert!(bytes > 0);
        return Ok(());
    };
    // The oracle's buffers before it stops are those we took before the fault; where the fault is visible to it, there
    // must be a sign of it.
    match fault {
        ChainFault::ZeroLength => prop_assert!(buffers.iter().any(|buffer| buffer.1 == 0)),
        ChainFault::NotMapped => prop_assert!(buffers.iter().any(|buffer| !is_mapped(buffer.0, buffer.1))),
        ChainFault::ReadableAfterWritable => {
            prop_assert!(buffers.windows(2).any(|pair| pair[0].2 && !pair[1].2));
        }
        ChainFault::TooLong => prop_assert!(false, "a chain of mapped buffers cannot be that long here"),
        ChainFault::IndirectNotNegotiated | ChainFault::TooManySegments => prop_assert!(false, "{fault:?}"),
        // It ends such chains silently, ignores the next flag of an indirect descriptor, and reads tables in part.
        ChainFault::Loop
        | ChainFault::NextOutOfRange
        | ChainFault::IndirectNested
        | ChainFault::IndirectWithNext
        | ChainFault::IndirectLength
        | ChainFault::IndirectNotMapped => {}
    }
    // It truncates a chain at 32 bits of bytes; we look for the status to the end.
    let cut_short = chain.readable_bytes() + chain.writable_bytes() > u64::from(u32::MAX);
    prop_assert!(cut_short || chain.status_at().is_none() || buffers.last().is_none_or(|last| last.2));
    Ok(())
}
