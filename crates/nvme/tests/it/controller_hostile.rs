//! A hostile host against the controller: the classes of faults that broke other implementations, each vector with its
//! exact status, and random registers and rings.

use blkyard_mq::{Bio, Op, Status};
use blkyard_nvme::registers::{ACQ, AQA, ASQ, CC, ControllerConfig};
use blkyard_nvme::{NamespaceTable, NextBio, NvmeStatus, Psdt, ServedNamespace, Sqe, admin, cns, feature, io};
use proptest::prelude::*;

use crate::machine::{
    BASE, DEVICE_BYTES, MDTS_BYTES, MEMORY_BYTES, Machine, PAGE, RawQueue, UNMAPPED, info, map_of, namespaces, result,
    unmapped,
};

const END: u64 = BASE + MEMORY_BYTES as u64;
const INVALID_FIELD: NvmeStatus = NvmeStatus::INVALID_FIELD;
const TRANSFER: NvmeStatus = NvmeStatus::DATA_TRANSFER_ERROR;
const OFFSET: NvmeStatus = NvmeStatus::INVALID_PRP_OFFSET;
const RANGE: NvmeStatus = NvmeStatus::LBA_OUT_OF_RANGE;

/// SGL descriptors: data block, segment, last segment.
const fn sgl(kind: u64, addr: u64, len: u64) -> [u64; 2] {
    [addr, len | kind << 56]
}

fn prp(opcode: u8, blocks: u32, pointer: [u64; 2]) -> Sqe {
    Sqe::with_blocks(opcode, 1, 0, blocks, 0).with_data(Psdt::Prp, pointer)
}

fn with_sgl(opcode: u8, blocks: u32, descriptor: [u64; 2]) -> Sqe {
    Sqe::with_blocks(opcode, 1, 0, blocks, 0).with_data(Psdt::Sgl, descriptor)
}

/// After each hostile command a valid one works, here and on another queue.
fn check(machine: &mut Machine, hostile: &mut RawQueue, neighbour: &mut RawQueue, name: &str) {
    let flush = Sqe::new(io::FLUSH, 1);
    assert_eq!(machine.io(hostile, flush), Ok(0), "{name}: the queue itself");
    assert_eq!(machine.io(neighbour, flush), Ok(0), "{name}: another queue");
    assert!(machine.status().ready && !machine.status().fatal, "{name}");
}

#[test]
fn lengths_are_checked_before_anything_is_made_of_them() {
    let mut machine = Machine::enabled();
    let (mut queue, mut neighbour) = (machine.queue_pair(1, 8), machine.queue_pair(2, 8));
    let (data, list) = (machine.pages(32), machine.page());
    let blocks = |count| MDTS_BYTES / 512 + count;
    let segment = |kind, len| sgl(kind, list, len);
    machine.put_words(list, &[data, 512, data + PAGE, u64::from(u32::MAX)]);
    let dsm = |ranges, pointer| Sqe::deallocate(1, ranges).with_data(Psdt::Prp, pointer);
    for (name, sqe, status) in [
        ("one block more than MDTS", prp(io::READ, blocks(1), [data, data]), INVALID_FIELD),
        ("65536 blocks", prp(io::WRITE, 65536, [data, data]), RANGE),
        ("compare of more than MDTS", prp(io::COMPARE, blocks(1), [data, data]), INVALID_FIELD),
        ("data block of 4 GiB", with_sgl(io::READ, 1, sgl(0, data, 0xffff_fffc)), NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("data block too short", with_sgl(io::READ, 2, sgl(0, data, 512)), NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("data block of nothing", with_sgl(io::READ, 1, sgl(0, data, 0)), NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("segment of 4 GiB", with_sgl(io::READ, 1, segment(0x20, 0xffff_fff0)), NvmeStatus::INVALID_SGL_COUNT),
        ("last segment of 4 GiB", with_sgl(io::WRITE, 1, segment(0x30, 0xffff_fff0)), NvmeStatus::INVALID_SGL_COUNT),
        ("segment of nothing", with_sgl(io::READ, 1, segment(0x20, 0)), NvmeStatus::INVALID_SGL_SEGMENT),
        ("segment of half a descriptor", with_sgl(io::READ, 1, segment(0x30, 24)), NvmeStatus::INVALID_SGL_SEGMENT),
        ("sum that wraps", with_sgl(io::READ, 2, segment(0x30, 32)), NvmeStatus::INVALID_SGL_GRANULARITY),
        ("ranges over the end of memory", dsm(256, [END - 4, 0]), TRANSFER),
        ("over the end of the namespace", Sqe::with_blocks(io::VERIFY, 1, 2047, 2, 0), RANGE),
        ("range that wraps", Sqe::with_blocks(io::WRITE_ZEROES, 1, u64::MAX, 65536, 0), RANGE),
        ("list of ranges that wraps", dsm(2, [!3, 0]), TRANSFER),
    ] {
        assert_eq!(machine.io(&mut queue, sqe), Err(status), "{name}");
        check(&mut machine, &mut queue, &mut neighbour, name);
    }
}

#[test]
fn pointers_lead_nowhere_but_to_memory_that_is_mapped() {
    let mut machine = Machine::enabled();
    let (mut queue, mut neighbour) = (machine.queue_pair(1, 8), machine.queue_pair(2, 8));
    let (data, list, next) = (machine.pages(4), machine.page(), machine.page());
    // A list that fills its page from 0xff0 on: one pointer and a link, which is not aligned.
    machine.put_words(list + 0xff0, &[data, next + 8]);
    machine.put_words(list, &[data, data + PAGE + 8, data]);
    // Circular segments.
    machine.put_words(next, &[next, 16 | 0x20 << 56]);
    machine.put_words(next + 0x100, &[data, 512, next, 32 | 0x20 << 56]);
    machine.put_words(next + 0x200, &[next, 16 | 0x20 << 56, data, 512]);
    machine.put_words(next + 0x300, &[data, 512, data, 512 | 0x40 << 56]);
    for (name, sqe, status) in [
        ("PRP 1 not in dwords", prp(io::READ, 1, [data + 1, 0]), OFFSET),
        ("PRP 1 at zero", prp(io::WRITE, 1, [0, 0]), TRANSFER),
        ("PRP 1 not mapped", prp(io::READ, 1, [UNMAPPED, 0]), TRANSFER),
        ("PRP 1 at the end of memory", prp(io::READ, 1, [END, 0]), TRANSFER),
        ("PRP 1 before memory", prp(io::READ, 1, [BASE - PAGE, 0]), TRANSFER),
        ("PRP 1 at the last address", prp(io::READ, 1, [!3, 0]), TRANSFER),
        ("PRP 2 at zero", prp(io::READ, 16, [data, 0]), TRANSFER),
        ("PRP 2 not aligned", prp(io::READ, 16, [data, data + PAGE + 4]), OFFSET),
        ("PRP 2 not mapped", prp(io::COMPARE, 16, [data, UNMAPPED]), TRANSFER),
        ("list not in quadwords", prp(io::READ, 24, [data, list + 4]), OFFSET),
        ("list not mapped", prp(io::READ, 24, [data, UNMAPPED]), TRANSFER),
        ("list with an unaligned pointer", prp(io::READ, 24, [data, list]), OFFSET),
        ("list past its page", prp(io::READ, 32, [data, list + 0xff0]), OFFSET),
        ("list at the last address", prp(io::READ, 24, [data, !7]), TRANSFER),
        ("segments in a circle", with_sgl(io::READ, 1, sgl(0x20, next, 16)), NvmeStatus::INVALID_SGL_COUNT),
        (
            "segments in a circle with data",
            with_sgl(io::READ, 9, sgl(0x20, next + 0x100, 32)),
            NvmeStatus::INVALID_SGL_COUNT,
        ),
        ("segment before the end", with_sgl(io::READ, 1, sgl(0x20, next + 0x200, 32)), NvmeStatus::INVALID_SGL_COUNT),
        ("last segment with a segment", with_sgl(io::READ, 1, sgl(0x30, next, 16)), NvmeStatus::INVALID_SGL_SEGMENT),
        ("keyed descriptor", with_sgl(io::READ, 2, sgl(0x30, next + 0x300, 32)), NvmeStatus::INVALID_SGL_TYPE),
        ("bit bucket", with_sgl(io::READ, 1, sgl(0x10, data, 512)), NvmeStatus::INVALID_SGL_TYPE),
        ("offset in place of an address", with_sgl(io::READ, 1, sgl(0x01, 0, 512)), NvmeStatus::INVALID_SGL_TYPE),
        ("data block not mapped", with_sgl(io::READ, 1, sgl(0, UNMAPPED, 512)), TRANSFER),
        ("data block over the end", with_sgl(io::READ, 2, sgl(0, END - 512, 1024)), TRANSFER),
        ("data block that wraps", with_sgl(io::READ, 2, sgl(0, !0x1ff, 1024)), TRANSFER),
        ("data block not in dwords", with_sgl(io::READ, 1, sgl(0, data + 2, 512)), NvmeStatus::INVALID_SGL_GRANULARITY),
        ("segment not mapped", with_sgl(io::READ, 1, sgl(0x30, UNMAPPED, 16)), TRANSFER),
    ] {
        machine.seen.clear();
        assert_eq!(machine.io(&mut queue, sqe), Err(status), "{name}");
        assert!(machine.seen.is_empty(), "{name}: no device is asked");
        check(&mut machine, &mut queue, &mut neighbour, name);
    }
}

#[test]
fn numbers_of_the_host_are_no_index() {
    let mut machine = Machine::enabled();
    let (mut queue, mut neighbour) = (machine.queue_pair(1, 8), machine.queue_pair(2, 8));
    let ring = machine.page();
    let abort = |sqid, cid| Sqe::abort(sqid, cid);
    for (name, sqe, wanted) in [
        ("abort in queue 65535", abort(65535, 65535), Ok(1)),
        ("abort in queue 9", abort(9, 0), Ok(1)),
        ("abort of no command", abort(1, 65535), Ok(1)),
        ("abort of no admin command", abort(0, 65535), Ok(1)),
        ("delete queue 65535", Sqe::delete_queue(admin::DELETE_SQ, 65535), Err(NvmeStatus::INVALID_QID)),
        ("delete completion queue 9", Sqe::delete_queue(admin::DELETE_CQ, 9), Err(NvmeStatus::INVALID_QID)),
        ("create queue 65535", Sqe::create_cq(65535, 8, ring, None), Err(NvmeStatus::INVALID_QID)),
        ("create for completion queue 65535", Sqe::create_sq(3, 8, ring, 65535), Err(NvmeStatus::INVALID_QID)),
        ("vector 65535", Sqe::create_cq(3, 8, ring, Some(65535)), Err(NvmeStatus::INVALID_VECTOR)),
        ("feature 255", Sqe::feature(admin::GET_FEATURES, 255, 0), Err(INVALID_FIELD)),
        ("log page 255", Sqe::get_log_page(255, u32::MAX, 0, 1, 0), Err(NvmeStatus::INVALID_LOG_PAGE)),
        ("identify 255", Sqe::identify(255, u32::MAX, 65535, 255), Err(INVALID_FIELD)),
    ] {
        assert_eq!(machine.admin(sqe), wanted, "{name}");
        check(&mut machine, &mut queue, &mut neighbour, name);
    }
    for nsid in [0, 9, 1 << 16, 1 << 31, u32::MAX] {
        let sqe = Sqe::with_blocks(io::READ, nsid, 0, 1, 0);
        assert_eq!(machine.io(&mut queue, sqe), Err(NvmeStatus::INVALID_NAMESPACE), "{nsid:#x}");
    }
    // Doorbells of queues that do not exist.
    for number in [3, 8, 9, 255, 511] {
        assert_eq!((machine.ring_tail(number, 1), machine.ring_head(number, 1)), (None, None));
    }
    check(&mut machine, &mut queue, &mut neighbour, "doorbells");
}

#[test]
fn a_broken_doorbell_stops_its_ring_and_no_other() {
    for value in [8, 9, 0x8000, 0x1_0000, 0x1_0001, u32::MAX] {
        let mut machine = Machine::enabled();
        let mut hostile = machine.queue(1, 1, 8);
        let mut sharing = machine.queue(3, 1, 8);
        let mut neighbour = machine.queue_pair(2, 8);
        sharing.cq = hostile.cq;
        machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
        machine.ring_tail(1, value);
        let event = machine.admin_completions();
        assert_eq!((event.len(), result(event[0])), (1, Ok(0x01_01_00)), "{value:#x}");
        machine.seen.clear();
        let cid = machine.cid();
        machine.push(&mut hostile, Sqe::new(io::FLUSH, 1), cid);
        machine.run();
        assert!(machine.seen.is_empty(), "{value:#x}: nothing is fetched any more");
        assert_eq!(machine.io(&mut sharing, Sqe::new(io::FLUSH, 1)), Ok(0));
        assert_eq!(machine.io(&mut neighbour, Sqe::new(io::FLUSH, 1)), Ok(0));
        // The queue can be deleted and created again.
        assert_eq!(machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), Ok(0));
        let sq = machine.page();
        assert_eq!(machine.admin(Sqe::create_sq(1, 8, sq, 1)), Ok(0));
        let mut again = RawQueue { sqid: 1, sq, ..sharing };
        again.tail = 0;
        assert_eq!(machine.io(&mut again, Sqe::new(io::FLUSH, 1)), Ok(0));
    }
    // A head beyond the completed entries stops the completion queue.
    for value in [3, 8, u32::MAX] {
        let mut machine = Machine::enabled();
        let mut hostile = machine.queue_pair(1, 8);
        let mut neighbour = machine.queue_pair(2, 8);
        machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
        assert_eq!(machine.io(&mut hostile, Sqe::new(io::FLUSH, 1)), Ok(0));
        machine.ring_head(1, value);
        let event = machine.admin_completions();
        assert_eq!((event.len(), result(event[0])), (1, Ok(0x01_01_00)), "{value:#x}");
        let cid = machine.cid();
        machine.push(&mut hostile, Sqe::new(io::FLUSH, 1), cid);
        machine.run();
        assert_eq!(machine.take(&mut hostile), []);
        assert_eq!(machine.io(&mut neighbour, Sqe::new(io::FLUSH, 1)), Ok(0));
    }
    // Admin queue: no command is processed before a reset.
    let mut machine = Machine::enabled();
    machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    machine.run();
    machine.ring_tail(0, 32);
    assert_eq!(result(machine.admin_completions()[0]), Ok(0x01_01_00), "the event is told");
    machine.start_admin(Sqe::identify(cns::CONTROLLER, 0, 0, 0));
    assert_eq!(machine.admin_completions(), []);
    machine.write32(CC, 0);
    machine.run();
    machine.enable();
    assert_eq!(machine.admin(Sqe::abort(1, 1)), Ok(1));
}

#[test]
fn each_command_with_a_cid_in_use_is_counted_and_interrupts() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    machine.is_held = true;
    machine.push(&mut queue, Sqe::new(io::FLUSH, 1), 9);
    machine.run();
    for _ in 0..3 {
        machine.push(&mut queue, Sqe::new(io::FLUSH, 1), 9);
    }
    let owned = machine.queues.get_mut(&1).unwrap();
    let mut bio = Bio::with_capacity(owned.segments_max());
    for number in 0..3 {
        assert_eq!(owned.fetch(&mut bio), NextBio::Without, "{number}: one in each call");
        assert_eq!(owned.publish(), Some(1), "{number}");
    }
    assert_eq!(owned.fetch(&mut bio), NextBio::Unavailable);
    let refused = machine.take(&mut queue);
    assert_eq!(refused.iter().map(|cqe| result(*cqe)).collect::<Vec<_>>(), [Err(NvmeStatus::CID_CONFLICT); 3]);
    machine.is_held = false;
    machine.run();
    assert_eq!(machine.take(&mut queue).len(), 1, "the first command stays");
}

#[test]
fn states_are_not_entered_twice_or_early() {
    let mut machine = Machine::new();
    // Doorbells, polls and shutdown before the controller is enabled.
    for number in 0..8 {
        machine.controller.write_register(0x1000 + 4 * number, 4, 1).unwrap();
    }
    machine.run();
    assert_eq!(machine.read32(CC), 0);
    machine.enable();
    let (mut queue, mut neighbour) = (machine.queue_pair(1, 8), machine.queue_pair(2, 8));
    // Enabled again with other addresses, which take effect at the next enable.
    machine.write64(ASQ, UNMAPPED);
    machine.write64(ACQ, UNMAPPED);
    machine.write32(AQA, 0);
    machine.write32(CC, Machine::config().bits());
    check(&mut machine, &mut queue, &mut neighbour, "enabled twice");
    assert_eq!(machine.admin(Sqe::abort(1, 1)), Ok(1));
    let ring = machine.page();
    for (name, sqe, status) in [
        ("completion queue twice", Sqe::create_cq(1, 8, ring, None), NvmeStatus::INVALID_QID),
        ("submission queue twice", Sqe::create_sq(1, 8, ring, 1), NvmeStatus::INVALID_QID),
        ("submission queue first", Sqe::create_sq(3, 8, ring, 3), NvmeStatus::INVALID_CQ),
        (
            "delete the completion queue first",
            Sqe::delete_queue(admin::DELETE_CQ, 1),
            NvmeStatus::INVALID_QUEUE_DELETION,
        ),
        (
            "queues when there are some",
            Sqe::feature(admin::SET_FEATURES, feature::QUEUES, 0),
            NvmeStatus::COMMAND_SEQUENCE,
        ),
    ] {
        assert_eq!(machine.admin(sqe), Err(status), "{name}");
        check(&mut machine, &mut queue, &mut neighbour, name);
    }
    let (doorbells, events) = (machine.page(), machine.page());
    for round in 0..3 {
        // The host keeps using the registers: the controller must not sleep waiting for shadow doorbells.
        assert_eq!(machine.admin(Sqe::doorbell_buffer(doorbells, events)), Ok(0), "{round}");
    }
    // Repeated resets, with a shutdown in between.
    for _ in 0..3 {
        machine.write32(CC, 0);
        machine.write32(CC, ControllerConfig { shutdown: 1, ..ControllerConfig::default() }.bits());
        machine.write32(CC, 0);
    }
    machine.run();
    assert!(!machine.status().ready && machine.queues.is_empty());
    machine.enable();
    machine.queue_pair(1, 8);
}

#[test]
fn the_geometry_of_one_namespace_is_not_used_for_another() {
    let mut machine = Machine::enabled();
    let (mut queue, mut neighbour) = (machine.queue_pair(1, 8), machine.queue_pair(2, 8));
    let data = machine.pages(4);
    let sectors = DEVICE_BYTES as u64 / 512;
    let read = |nsid, slba, blocks| {
        Sqe::with_blocks(io::READ, nsid, slba, blocks, 0).with_data(Psdt::Prp, [data, data + PAGE])
    };
    for (name, sqe, wanted) in [
        ("last sector", read(1, sectors - 1, 1), Ok(0)),
        ("behind it", read(1, sectors, 1), Err(RANGE)),
        ("last block of 4096", read(2, sectors / 8 - 1, 1), Ok(0)),
        ("behind it", read(2, sectors / 8, 1), Err(RANGE)),
        ("a sector number for blocks of 4096", read(2, sectors - 1, 1), Err(RANGE)),
        ("as many blocks of 4096 as MDTS has sectors", read(2, 0, 128), Err(INVALID_FIELD)),
    ] {
        assert_eq!(machine.io(&mut queue, sqe), wanted, "{name}");
        check(&mut machine, &mut queue, &mut neighbour, name);
    }
    // The format changes while a command for the old one is in flight or waits.
    machine.is_held = true;
    machine.seen.clear();
    let sqes = [
        Sqe::with_blocks(io::COMPARE, 1, 0, 2, 0).with_data(Psdt::Prp, [data, 0]),
        Sqe::with_blocks(io::COMPARE, 1, 8, 2, 0).with_data(Psdt::Prp, [data, data + PAGE]),
    ];
    for sqe in sqes {
        let cid = machine.cid();
        machine.push(&mut queue, sqe, cid);
    }
    machine.run();
    let mut table = NamespaceTable::new(8);
    table.set(1, ServedNamespace::new(1, 0, &info(4096, false)));
    machine.controller.set_namespaces(table);
    machine.run();
    machine.is_held = false;
    machine.run();
    assert_eq!(machine.take(&mut queue).len(), 2);
    assert_eq!(machine.seen, [(Op::Read, 0, 0, 0, 2), (Op::Read, 0, 0, 64, 16)], "each with the format of its time");
}

#[test]
fn what_changes_after_it_was_fetched_comes_too_late() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let (data, list) = (machine.pages(4), machine.page());
    let mut turned = |machine: &mut Machine, sqe| {
        machine.is_held = true;
        machine.seen.clear();
        let cid = machine.cid();
        let at = queue.sq + u64::from(queue.tail) * 64;
        machine.push(&mut queue, sqe, cid);
        for _ in 0..2 {
            machine.turn();
        }
        // Command, list and ranges change while they are in use.
        machine.put_words(at, &[u64::MAX; 8]);
        machine.put_words(list, &[u64::MAX; 16]);
        machine.is_held = false;
        machine.run();
        let all = machine.take(&mut queue);
        assert_eq!((all.len(), all[0].cid(), result(all[0])), (1, cid, Ok(0)));
        machine.seen.clone()
    };
    machine.put_words(list, &[data, data + PAGE]);
    assert_eq!(turned(&mut machine, prp(io::READ, 24, [data + 2 * PAGE, list])), [(Op::Read, 0, 0, 0, 24)]);
    machine.put_words(list, &[data, 512, data + PAGE, 512]);
    assert_eq!(turned(&mut machine, with_sgl(io::READ, 2, sgl(0x30, list, 32))), [(Op::Read, 0, 0, 0, 2)]);
    machine.put_words(list, &[4 << 32, 10, 4 << 32, 20]);
    let dsm = Sqe::deallocate(1, 2).with_data(Psdt::Prp, [list, 0]);
    let mut discards = turned(&mut machine, dsm);
    discards.sort_by_key(|(.., sector, _)| *sector);
    assert_eq!(discards, [(Op::Discard, 0, 0, 10, 4), (Op::Discard, 0, 0, 20, 4)]);
}

#[test]
fn no_error_is_cleaned_up_twice() {
    // A reset, a shutdown or a fatal error in any order, while commands of all kinds wait.
    type Step = fn(&mut Machine);
    let reset: Step = |machine| {
        machine.write32(CC, 0);
    };
    let shutdown: Step = |machine| {
        machine.write32(CC, ControllerConfig { shutdown: 2, ..Machine::config() }.bits());
    };
    let unmapped: Step = |machine| machine.controller.set_memory(&unmapped(&machine.region.clone()));
    let mapped: Step = |machine| machine.controller.set_memory(&map_of(&machine.region.clone()));
    let turn: Step = |machine| {
        machine.turn();
    };
    let release: Step = |machine| {
        machine.release();
    };
    for steps in [
        &[reset, reset][..],
        &[reset, turn, reset, release],
        &[shutdown, reset],
        &[shutdown, turn, reset],
        &[shutdown, release, turn, turn, reset],
        &[unmapped, reset],
        &[unmapped, turn, mapped, reset],
        &[mapped, reset],
        &[mapped, turn, shutdown, turn, reset],
        &[mapped, mapped, release, turn, mapped, reset],
        &[shutdown, unmapped, turn, reset, mapped],
        &[reset, mapped, turn],
    ] {
        let mut machine = Machine::enabled();
        let mut queue = machine.queue_pair(1, 8);
        machine.queue(3, 1, 8);
        machine.queue_pair(2, 8);
        let data = machine.pages(2);
        machine.is_held = true;
        machine.is_flush_held = true;
        let compare = prp(io::COMPARE, 1, [data, 0]);
        for sqe in [compare, compare, Sqe::with_blocks(io::VERIFY, 1, 0, 2048, 0)] {
            let cid = machine.cid();
            machine.push(&mut queue, sqe, cid);
        }
        machine.run();
        machine.start_admin(Sqe::delete_queue(admin::DELETE_SQ, 1));
        machine.start_admin(Sqe::feature(admin::SET_FEATURES, feature::WRITE_CACHE, 0));
        machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
        machine.run();
        steps.iter().for_each(|step| step(&mut machine));
        machine.controller.set_memory(&map_of(&machine.region.clone()));
        (machine.is_held, machine.is_flush_held) = (false, false);
        machine.run();
        assert!(!machine.status().ready && !machine.status().fatal && machine.queues.is_empty());
        assert!(!machine.controller.is_remapping());
        machine.enable();
        let mut queue = machine.queue_pair(1, 8);
        assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0));
    }
}

/// An action of a random host.
#[derive(Clone, Debug)]
enum Deed {
    Register(u64, usize, u64),
    Config(u32),
    /// Random words in any entry, without a doorbell.
    Sqe(u16, u16, Vec<u64>),
    /// The next command of a queue, with a correct doorbell.
    Push(u16, Vec<u64>),
    /// Reads the completions of a queue.
    Take(u16),
    /// Enables a disabled controller and creates the queues.
    Revive,
    Tail(u16, u32),
    Head(u16, u32),
    Memory(u64, u64),
    Release(bool),
    Answer(bool),
    Map(bool),
    Namespaces(bool),
    Pass(u64),
    Turns(u8),
}

fn addr() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (0..64_u64).prop_map(|page| BASE + page * PAGE),
        2 => (0..64_u64, 0..4096_u64).prop_map(|(page, at)| BASE + page * PAGE + at),
        1 => prop_oneof![Just(0), Just(END - PAGE), Just(END), Just(!0xfff), Just(UNMAPPED)],
    ]
}

/// An admin command with small numbers, so that it is often valid.
fn admin_sqe() -> impl Strategy<Value = Vec<u64>> {
    let opcode = prop_oneof![0..0x20_u64, Just(0x7c), Just(0x80)];
    (opcode, 0..6_u64, 0..40_u64, addr(), addr(), 0..12_u64, 0..12_u64, any::<u64>()).prop_map(
        |(opcode, nsid, cid, first, second, low, high, rest)| {
            let nsid = if nsid == 5 { u64::from(u32::MAX) } else { nsid };
            let word5 = low | (rest & 0x1f) << 16 | high << 48 | (rest >> 8 & 7) << 32;
            vec![opcode | cid << 16 | nsid << 32, 0, 0, first, second, word5, rest >> 16 & 0x3f, 0]
        },
    )
}

/// An I/O command with small numbers.
fn io_sqe() -> impl Strategy<Value = Vec<u64>> {
    let opcode = prop_oneof![
        8 => prop::sample::select(&[io::FLUSH, io::WRITE, io::READ, io::COMPARE, io::WRITE_ZEROES, io::DSM, io::VERIFY][..]),
        1 => any::<u8>(),
    ];
    let nsid = prop_oneof![8 => prop::sample::select(&[1, 2, 4][..]), 1 => 0..6_u32, 1 => Just(u32::MAX)];
    let sgl = (addr(), 0..40_u64, prop::sample::select(&[0, 0, 0x20, 0x30, 0x40, 1][..]));
    let pointer = prop_oneof![
        4 => (addr(), addr()).prop_map(|(first, second)| (0, [first, second])),
        1 => sgl.prop_map(|(addr, len, kind)| (0x40, [addr, (len * 16) | (kind << 56)])),
        1 => (addr(), 1..32_u64).prop_map(|(addr, blocks)| (0x40, [addr, blocks * 512])),
    ];
    (opcode, nsid, 0..60_u64, pointer, 0..2100_u64, prop_oneof![0..40_u64, any::<u16>().prop_map(u64::from)]).prop_map(
        |(opcode, nsid, cid, (psdt, [first, second]), slba, blocks)| {
            // Dword 11 of Dataset Management: deallocate.
            let word5 = if opcode == io::DSM { slba & 0xff | 4 << 32 } else { slba };
            let word0 = u64::from(opcode) | psdt << 8 | cid << 16 | u64::from(nsid) << 32;
            vec![word0, 0, 0, first, second, word5, blocks, 0]
        },
    )
}

fn deed() -> impl Strategy<Value = Deed> {
    let register = prop_oneof![0..0x80_u64, 0x1000..0x1080_u64, 0x1ff0..0x2010_u64, any::<u64>()];
    prop_oneof![
        1 => (register, prop_oneof![Just(4), Just(8), 0..20_usize], any::<u64>())
            .prop_map(|(at, bytes, value)| Deed::Register(at, bytes, value)),
        1 => prop_oneof![Just(0), Just(Machine::config().bits()), any::<u32>(), Just(Machine::config().bits() | 1 << 14)]
            .prop_map(Deed::Config),
        10 => admin_sqe().prop_map(|words| Deed::Push(0, words)),
        48 => (1..4_u16, io_sqe()).prop_map(|(sqid, words)| Deed::Push(sqid, words)),
        24 => (0..4_u16).prop_map(Deed::Take),
        8 => Just(Deed::Revive),
        2 => (0..4_u16, 0..8_u16, prop::collection::vec(any::<u64>(), 8))
            .prop_map(|(sqid, index, words)| Deed::Sqe(sqid, index, words)),
        1 => (0..5_u16, 0..9_u32).prop_map(|(sqid, tail)| Deed::Tail(sqid, tail)),
        1 => (0..5_u16, 0..9_u32).prop_map(|(cqid, head)| Deed::Head(cqid, head)),
        3 => (addr(), prop_oneof![addr(), any::<u64>()]).prop_map(|(at, word)| Deed::Memory(at, word)),
        2 => any::<bool>().prop_map(Deed::Release),
        1 => any::<bool>().prop_map(Deed::Answer),
        1 => prop::bool::weighted(0.7).prop_map(Deed::Map),
        1 => prop::bool::weighted(0.7).prop_map(Deed::Namespaces),
        1 => (0..10_000_000_000_u64).prop_map(Deed::Pass),
        32 => (1..6_u8).prop_map(Deed::Turns),
    ]
}

/// Creates queues 1 to 3 if the controller accepts commands.
fn create(machine: &mut Machine, queues: &mut [RawQueue; 4]) {
    for qid in 1..4 {
        // Ring addresses known to other actions.
        let (sq, cq) = (BASE + u64::from(qid) * PAGE, BASE + (8 + u64::from(qid)) * PAGE);
        machine.zero(cq, PAGE as usize);
        machine.start_admin(Sqe::create_cq(qid, 8, cq, Some(1)));
        machine.start_admin(Sqe::create_sq(qid, 8, sq, qid));
        (0..8).for_each(|_| {
            machine.turn();
        });
        let mut admin = machine.admin;
        machine.take(&mut admin);
        machine.admin = admin;
        queues[usize::from(qid)] =
            RawQueue { sqid: qid, cqid: qid, sq, cq, sq_entries: 8, cq_entries: 8, tail: 0, head: 0, phase: true };
    }
}

fn perform(machine: &mut Machine, queues: &mut [RawQueue; 4], deed: &Deed) {
    match deed {
        Deed::Push(0, words) => {
            let words: [u64; 8] = words.as_slice().try_into().unwrap();
            machine.start_admin(Sqe(words));
        }
        Deed::Push(sqid, words) => {
            let words: [u64; 8] = words.as_slice().try_into().unwrap();
            let sqe = Sqe(words);
            machine.push(&mut queues[usize::from(*sqid)], sqe, sqe.cid());
        }
        Deed::Take(0) => {
            let mut admin = machine.admin;
            machine.take(&mut admin);
            machine.admin = admin;
        }
        Deed::Take(cqid) => {
            machine.take(&mut queues[usize::from(*cqid)]);
        }
        Deed::Revive => {
            if !machine.status().ready || machine.status().fatal {
                machine.controller.set_memory(&map_of(&machine.region.clone()));
                machine.write32(CC, 0);
                (machine.is_held, machine.is_flush_held) = (false, false);
                (0..20).for_each(|_| {
                    machine.turn();
                });
                if !machine.status().ready {
                    machine.enable();
                    create(machine, queues);
                }
            }
        }
        Deed::Register(at, bytes, value) => {
            let _ = machine.controller.read_register(*at, *bytes);
            let _ = machine.controller.write_register(*at, *bytes, *value);
        }
        Deed::Config(value) => {
            machine.write32(CC, *value);
        }
        Deed::Sqe(sqid, index, words) => {
            let at = if *sqid == 0 { machine.admin.sq } else { BASE + u64::from(*sqid) * PAGE };
            machine.put_words(at + u64::from(*index) * 64, words);
        }
        Deed::Tail(sqid, tail) => {
            machine.ring_tail(*sqid, *tail);
        }
        Deed::Head(cqid, head) => {
            machine.ring_head(*cqid, *head);
        }
        Deed::Memory(at, word) => {
            let at = at & !7;
            if (BASE..END - 8).contains(&at) {
                machine.put_words(at, &[*word]);
            }
        }
        Deed::Release(is_held) => {
            machine.is_held = *is_held;
            machine.is_flush_held = *is_held;
        }
        Deed::Answer(is_ok) => machine.answer = if *is_ok { Status::Ok } else { Status::Medium },
        Deed::Map(is_mapped) => {
            let map = if *is_mapped { map_of(&machine.region) } else { unmapped(&machine.region) };
            machine.controller.set_memory(&map);
        }
        Deed::Namespaces(has) => {
            machine.controller.set_namespaces(if *has { namespaces() } else { NamespaceTable::new(3) });
        }
        Deed::Pass(ns) => machine.now_ns += ns,
        Deed::Turns(turns) => (0..*turns).for_each(|_| {
            machine.turn();
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// For any behaviour of a host, no code panics, no memory outside the mapped range is accessed, and the controller
    /// works after a reset.
    #[test]
    fn any_host_is_survived(deeds in prop::collection::vec(deed(), 1..200)) {
        let mut machine = Machine::enabled();
        let mut queues = [machine.admin; 4];
        create(&mut machine, &mut queues);
        for deed in &deeds {
            perform(&mut machine, &mut queues, deed);
        }
        machine.controller.set_memory(&map_of(&machine.region.clone()));
        machine.controller.set_namespaces(namespaces());
        (machine.is_held, machine.is_flush_held, machine.answer) = (false, false, Status::Ok);
        machine.write32(CC, 0);
        // Waits for commands at other devices.
        for _ in 0..20_000 {
            if !machine.turn() {
                break;
            }
        }
        prop_assert!(!machine.status().ready && machine.queues.is_empty());
        prop_assert!(machine.guards_are_whole());
        machine.enable();
        let mut queue = machine.queue_pair(1, 8);
        let data = machine.pages(2);
        machine.put(data, &[7; 512]);
        prop_assert_eq!(machine.io(&mut queue, prp(io::WRITE, 1, [data, 0])), Ok(0));
        prop_assert_eq!(machine.io(&mut queue, prp(io::READ, 1, [data + PAGE, 0])), Ok(0));
        prop_assert_eq!(machine.get(data + PAGE, 512), vec![7; 512]);
    }
}
