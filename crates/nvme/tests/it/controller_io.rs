//! I/O queues of the controller: the effect of every command, shared completion queues, and the fate of I/O in flight.

use blkyard_mem::{CountingAllocator, Region};
use blkyard_mq::{Bio, Op, Status};
use blkyard_nvme::registers::CC;
use blkyard_nvme::{ControllerQueueReply, Cqe, NextBio, NvmeStatus, Psdt, SQE_BYTES, Sqe, admin, control, feature, io};

use crate::machine::{BASE, Machine, PAGE, RawQueue, map_of, map_with, namespaces, result, unmapped};

fn blocks(opcode: u8, nsid: u32, slba: u64, blocks: u32, addr: u64) -> Sqe {
    Sqe::with_blocks(opcode, nsid, slba, blocks, 0).with_data(Psdt::Prp, [addr, addr + PAGE])
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ seed).collect()
}

/// Sends commands without waiting; returns their cids.
fn push_all(machine: &mut Machine, queue: &mut RawQueue, sqes: &[Sqe]) -> Vec<u16> {
    let mut cids = vec![];
    for sqe in sqes {
        let cid = machine.cid();
        machine.push(queue, *sqe, cid);
        cids.push(cid);
    }
    cids
}

fn cids(all: &[Cqe]) -> Vec<u16> {
    all.iter().map(|cqe| cqe.cid()).collect()
}

#[test]
fn data_is_written_read_compared_and_verified() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let (data, back) = (machine.pages(2), machine.pages(2));
    for (nsid, count, block) in [(1, 10, 512), (2, 2, 4096)] {
        let bytes = pattern(nsid as u8, count as usize * block);
        machine.put(data, &bytes);
        assert_eq!(machine.io(&mut queue, blocks(io::WRITE, nsid, 3, count, data)), Ok(0));
        assert_eq!(machine.io(&mut queue, blocks(io::READ, nsid, 3, count, back)), Ok(0));
        assert_eq!(machine.get(back, bytes.len()), bytes);
        assert_eq!(machine.io(&mut queue, blocks(io::COMPARE, nsid, 3, count, data)), Ok(0));
        assert_eq!(machine.io(&mut queue, blocks(io::VERIFY, nsid, 3, count, 0)), Ok(0));
        // One byte differs: the first, the last, one between.
        for at in [0, bytes.len() - 1, 700] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            machine.put(back, &other);
            let compared = machine.io(&mut queue, blocks(io::COMPARE, nsid, 3, count, back));
            assert_eq!(compared, Err(NvmeStatus::COMPARE_FAILURE), "byte {at}");
        }
    }
    assert_ne!(machine.get(data, 512), pattern(1, 512), "the host's data is what it was");
}

#[test]
fn each_command_becomes_its_bios() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.pages(16);
    let mut one = |sqe: Sqe| {
        assert_eq!(machine.io(&mut queue, sqe), Ok(0));
        std::mem::take(&mut machine.seen)
    };
    let with = |opcode, control| Sqe::with_blocks(opcode, 2, 1, 2, control).with_data(Psdt::Prp, [data, data + PAGE]);
    assert_eq!(one(with(io::READ, control::FUA)), [(Op::Read, 0, 1, 8, 16)]);
    assert_eq!(one(with(io::WRITE, 0)), [(Op::Write, 0, 1, 8, 16)]);
    assert_eq!(one(with(io::WRITE, control::FUA)), [(Op::Write, 1, 1, 8, 16)]);
    assert_eq!(one(with(io::WRITE_ZEROES, 0)), [(Op::WriteZeroes, 2, 1, 8, 16)]);
    assert_eq!(one(with(io::WRITE_ZEROES, control::DEAC)), [(Op::WriteZeroes, 0, 1, 8, 16)]);
    assert_eq!(one(Sqe::new(io::FLUSH, 2)), [(Op::Flush, 0, 1, 0, 0)]);
    let all = one(Sqe::new(io::FLUSH, u32::MAX));
    assert_eq!(all, [(Op::Flush, 0, 0, 0, 0), (Op::Flush, 0, 1, 0, 0), (Op::Flush, 0, 2, 0, 0)]);
    // Verified in parts of MDTS, 128 sectors.
    let parts = one(Sqe::with_blocks(io::VERIFY, 1, 7, 300, 0));
    assert_eq!(parts, [(Op::Read, 0, 0, 7, 128), (Op::Read, 0, 0, 135, 128), (Op::Read, 0, 0, 263, 44)]);
    assert_eq!(one(with(io::COMPARE, 0)), [(Op::Read, 0, 1, 8, 16)]);
}

#[test]
fn ranges_are_deallocated_or_none_is() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let list = machine.page();
    let dsm = |ranges| Sqe::deallocate(1, ranges).with_data(Psdt::Prp, [list, 0]);
    machine.put_words(list, &[4 << 32, 10, 0, 20, 1 << 32, 2047]);
    assert_eq!(machine.io(&mut queue, dsm(3)), Ok(0));
    let mut seen = std::mem::take(&mut machine.seen);
    seen.sort_by_key(|(.., sector, _)| *sector);
    assert_eq!(seen, [(Op::Discard, 0, 0, 10, 4), (Op::Discard, 0, 0, 2047, 1)]);
    machine.put_words(list + 32, &[2 << 32, 2047]);
    assert_eq!(machine.io(&mut queue, dsm(3)), Err(NvmeStatus::LBA_OUT_OF_RANGE));
    assert!(machine.seen.is_empty());
    assert_eq!(machine.io(&mut queue, dsm(2)), Ok(0));
    // 256 ranges, but only 16 bios.
    let words: Vec<u64> = (0..256).flat_map(|at| [1 << 32, at]).collect();
    machine.put_words(list, &words);
    machine.seen.clear();
    assert_eq!(machine.io(&mut queue, dsm(256)), Ok(0));
    assert_eq!(machine.seen.len(), 256);
    machine.answer = Status::Io;
    assert_eq!(machine.io(&mut queue, dsm(256)), Err(NvmeStatus::INTERNAL));
}

#[test]
fn a_failure_of_the_device_has_its_status() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.pages(2);
    for (answer, read, write) in [
        (Status::Medium, NvmeStatus::UNRECOVERED_READ, NvmeStatus::WRITE_FAULT),
        (Status::NoSpace, NvmeStatus::CAPACITY_EXCEEDED, NvmeStatus::CAPACITY_EXCEEDED),
        (Status::Offline, NvmeStatus::NAMESPACE_NOT_READY, NvmeStatus::NAMESPACE_NOT_READY),
        (Status::Io, NvmeStatus::INTERNAL, NvmeStatus::INTERNAL),
    ] {
        machine.answer = answer;
        for opcode in [io::READ, io::COMPARE, io::VERIFY] {
            assert_eq!(machine.io(&mut queue, blocks(opcode, 1, 0, 1, data)), Err(read), "{opcode} {answer}");
        }
        for opcode in [io::WRITE, io::WRITE_ZEROES] {
            assert_eq!(machine.io(&mut queue, blocks(opcode, 1, 0, 1, data)), Err(write), "{opcode} {answer}");
        }
    }
}

#[test]
fn submission_queues_of_a_completion_queue_have_their_turn_each() {
    let mut machine = Machine::enabled();
    let mut first = machine.queue(1, 1, 32);
    let mut second = machine.queue(2, 1, 32);
    let mut third = machine.queue(5, 1, 32);
    let flush = Sqe::new(io::FLUSH, 1);
    push_all(&mut machine, &mut first, &[flush; 6]);
    push_all(&mut machine, &mut second, &[flush; 3]);
    push_all(&mut machine, &mut third, &[flush; 1]);
    machine.run();
    let all = machine.take(&mut first);
    // One command of each non-empty queue per round, in any order within the round.
    let mut order: Vec<_> = all.iter().map(|cqe| cqe.sq_id()).collect();
    for round in [0..3, 3..5, 5..7] {
        order[round].sort_unstable();
    }
    assert_eq!(order, [1, 2, 5, 1, 2, 1, 2, 1, 1, 1]);
    // Each completion has the head of its own submission queue.
    let heads: Vec<_> = all.iter().filter(|cqe| cqe.sq_id() == 2).map(|cqe| cqe.sq_head()).collect();
    assert!(heads.iter().all(|head| (1..=3).contains(head)), "{heads:?}");
    assert!(machine.vectors.contains(&1));
}

#[test]
fn the_same_cid_in_two_submission_queues_is_two_commands() {
    let mut machine = Machine::enabled();
    let mut first = machine.queue(1, 1, 8);
    let mut second = machine.queue(2, 1, 8);
    machine.is_held = true;
    let flush = Sqe::new(io::FLUSH, 1);
    machine.push(&mut first, flush, 7);
    machine.push(&mut second, flush, 7);
    machine.push(&mut second, flush, 7);
    machine.run();
    let conflict = machine.take(&mut first);
    assert_eq!((conflict.len(), conflict[0].sq_id(), conflict[0].cid()), (1, 2, 7));
    assert_eq!(result(conflict[0]), Err(NvmeStatus::CID_CONFLICT));
    machine.is_held = false;
    machine.run();
    let mut queues: Vec<_> = machine.take(&mut first).iter().map(|cqe| cqe.sq_id()).collect();
    queues.sort_unstable();
    assert_eq!(queues, [1, 2]);
}

#[test]
fn a_full_completion_queue_holds_back_all_its_submission_queues() {
    let mut machine = Machine::enabled();
    let mut first = machine.queue(1, 1, 4);
    let (sq, flush) = (machine.page(), Sqe::new(io::FLUSH, 1));
    machine.admin(Sqe::create_sq(2, 64, sq, 1)).unwrap();
    let mut second = RawQueue { sqid: 2, sq, sq_entries: 64, ..first };
    machine.is_held = true;
    push_all(&mut machine, &mut first, &[flush; 3]);
    push_all(&mut machine, &mut second, &[flush; 60]);
    machine.run();
    assert_eq!((machine.held.len(), machine.queues[&1].in_flight()), (3, 3), "as many as completions have room");
    machine.is_held = false;
    machine.run();
    assert_eq!(machine.seen.len(), 3, "none before the host has read");
    let mut seen = 0;
    for _ in 0..63 {
        seen += machine.take(&mut first).len();
        machine.run();
    }
    assert_eq!((seen, machine.seen.len()), (63, 63));
}

#[test]
fn interrupts_are_those_that_the_host_asked_for() {
    let mut machine = Machine::enabled();
    let mut with = machine.queue_pair(1, 8);
    let (sq, cq) = (machine.page(), machine.page());
    machine.admin(Sqe::create_cq(2, 8, cq, None)).unwrap();
    machine.admin(Sqe::create_sq(2, 8, sq, 2)).unwrap();
    let mut polled = RawQueue { sqid: 2, cqid: 2, sq, cq, ..with };
    machine.vectors.clear();
    machine.io(&mut polled, Sqe::new(io::FLUSH, 1)).unwrap();
    assert_eq!(machine.vectors, [0_u16; 0]);
    machine.io(&mut with, Sqe::new(io::FLUSH, 1)).unwrap();
    assert_eq!(machine.vectors, [1]);
    // A refused command is a completion, too, and so is a conflicting one.
    machine.io(&mut with, Sqe::new(0x7f, 1)).unwrap_err();
    assert_eq!(machine.vectors, [1, 1]);
    machine.admin(Sqe::abort(9, 9)).unwrap();
    assert_eq!(machine.vectors, [1, 1, 0]);
}

#[test]
fn a_submission_queue_is_deleted_when_its_commands_are_complete() {
    let mut machine = Machine::enabled();
    let mut first = machine.queue(1, 1, 8);
    let mut second = machine.queue(2, 1, 8);
    machine.is_held = true;
    let flush = Sqe::new(io::FLUSH, 1);
    let cids_first = push_all(&mut machine, &mut first, &[flush; 2]);
    push_all(&mut machine, &mut second, &[flush; 2]);
    machine.run();
    let delete = machine.start_admin(Sqe::delete_queue(admin::DELETE_SQ, 1));
    assert_eq!(machine.admin_completions(), [], "I/O is in flight");
    // Later commands are not fetched.
    push_all(&mut machine, &mut first, &[flush; 2]);
    machine.run();
    assert_eq!(machine.held.len(), 4);
    assert_eq!(machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), Err(NvmeStatus::INVALID_QID), "twice");
    let inuse = machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 1));
    assert_eq!(inuse, Err(NvmeStatus::INVALID_QUEUE_DELETION));
    machine.is_held = false;
    assert_eq!(cids(&machine.admin_completions()), [delete]);
    let all = machine.take(&mut first);
    let of_first: Vec<_> = all.iter().filter(|cqe| cqe.sq_id() == 1).map(|cqe| cqe.cid()).collect();
    assert_eq!((all.len(), of_first), (4, cids_first), "its commands are complete before");
    (second.cq, second.head, second.phase) = (first.cq, first.head, first.phase);
    assert_eq!(machine.io(&mut second, flush), Ok(0), "the other goes on");
    machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 2)).unwrap();
    machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 1)).unwrap();
    assert!(machine.queues.is_empty());
}

#[test]
fn commands_of_several_bios_can_be_aborted_between_them() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    machine.is_held = true;
    // At most 16 bios: the rest of the 2048 blocks waits.
    let verify = push_all(&mut machine, &mut queue, &[Sqe::with_blocks(io::VERIFY, 1, 0, 2048, 0)])[0];
    machine.turn();
    let abort = machine.start_admin(Sqe::abort(1, verify));
    machine.turn();
    assert_eq!(machine.admin_completions(), [], "some of it is in flight");
    let bios = machine.held.len();
    assert!((1..16).contains(&bios));
    machine.is_held = false;
    let admin = machine.admin_completions();
    assert_eq!((cids(&admin), result(admin[0])), (vec![abort], Ok(0)), "aborted");
    let all = machine.take(&mut queue);
    assert_eq!((cids(&all), result(all[0])), (vec![verify], Err(NvmeStatus::ABORT_REQUESTED)));
    assert_eq!(machine.seen.len(), bios, "the rest was not done");
    // A Compare that waits for another Compare.
    machine.is_held = true;
    let data = machine.pages(2);
    let compare = blocks(io::COMPARE, 1, 0, 1, data);
    let both = push_all(&mut machine, &mut queue, &[compare; 2]);
    machine.run();
    assert_eq!(machine.held.len(), 1);
    assert_eq!(machine.admin(Sqe::abort(1, both[1])), Ok(0));
    assert_eq!(result(machine.take(&mut queue)[0]), Err(NvmeStatus::ABORT_REQUESTED));
    assert_eq!(machine.admin(Sqe::abort(1, both[0])), Ok(1), "with the device");
    machine.is_held = false;
    machine.run();
    assert_eq!(cids(&machine.take(&mut queue)), both[..1]);
}

#[test]
fn bios_that_their_owner_takes_back_are_aborted() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    machine.is_held = true;
    let flushes = push_all(&mut machine, &mut queue, &[Sqe::new(io::FLUSH, 1), Sqe::new(io::FLUSH, u32::MAX)]);
    machine.run();
    assert_eq!(machine.held.len(), 4, "of one namespace, and of three");
    let io_queue = machine.queues.get_mut(&1).unwrap();
    io_queue.abort(1, flushes[0], |_, bios| bios - 1);
    assert_eq!(
        io_queue.take_reply(),
        Some(ControllerQueueReply::AbortDone { sqid: 1, cid: flushes[0], is_aborted: false })
    );
    // Two of three are at their devices.
    io_queue.abort(1, flushes[1], |_, bios| bios - 2);
    io_queue.abort(1, flushes[1], |_, _| unreachable!("it is aborted already"));
    assert_eq!(io_queue.take_reply(), None, "both are answered at its end");
    for status in [Status::Ok, Status::Again, Status::Ok, Status::Ok] {
        let (_, bio) = machine.held.remove(0);
        io_queue.end(bio.cookie as u16, status);
    }
    assert_eq!(
        io_queue.take_reply(),
        Some(ControllerQueueReply::AbortDone { sqid: 1, cid: flushes[1], is_aborted: true })
    );
    assert_eq!(io_queue.take_reply(), None);
    let all: Vec<_> = machine.take(&mut queue).into_iter().map(|cqe| (cqe.cid(), result(cqe))).collect();
    assert_eq!(all, [(flushes[0], Ok(0)), (flushes[1], Err(NvmeStatus::ABORT_REQUESTED))]);
}

#[test]
fn compares_wait_for_each_other_and_keep_their_data_apart() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 16);
    let data = machine.pages(16);
    for block in 0..8 {
        machine.put(data + block * PAGE, &pattern(block as u8, 512));
        machine.io(&mut queue, blocks(io::WRITE, 1, block, 1, data + block * PAGE)).unwrap();
    }
    let compares: Vec<_> =
        (0..8).map(|block| blocks(io::COMPARE, 1, block, 1, data + (block ^ u64::from(block == 5)) * PAGE)).collect();
    let verify = Sqe::with_blocks(io::VERIFY, 1, 0, 500, 0);
    push_all(&mut machine, &mut queue, &compares);
    push_all(&mut machine, &mut queue, &[verify; 2]);
    machine.run();
    let all = machine.take(&mut queue);
    let failed: Vec<_> = all.iter().map(|cqe| result(*cqe).is_err()).collect();
    assert_eq!(failed, [false, false, false, false, false, true, false, false, false, false]);
}

/// The content of the host's memory.
fn snapshot(machine: &Machine) -> Vec<u8> {
    machine.get(BASE, crate::machine::MEMORY_BYTES)
}

#[test]
fn nothing_is_written_after_a_reset_is_over() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 16);
    let data = machine.pages(32);
    machine.is_held = true;
    let sqes = [
        blocks(io::READ, 1, 0, 16, data),
        blocks(io::WRITE, 1, 0, 16, data + 2 * PAGE),
        blocks(io::COMPARE, 1, 0, 1, data),
        blocks(io::COMPARE, 1, 0, 1, data),
        Sqe::with_blocks(io::VERIFY, 1, 0, 2048, 0),
    ];
    push_all(&mut machine, &mut queue, &sqes);
    machine.run();
    machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    machine.start_admin(Sqe::abort(1, 1));
    machine.run();
    let mut admin = machine.admin;
    machine.take(&mut admin);
    machine.write32(CC, 0);
    machine.run();
    assert!(machine.status().ready, "I/O is in flight: devices may write to the host's memory");
    let completions = machine.get(queue.cq, 256);
    assert!(machine.queues.contains_key(&1));
    let kept = machine.held.len();
    // One bio returns, the others stay.
    let mut held = std::mem::take(&mut machine.held);
    let rest = held.split_off(1);
    machine.held = held;
    machine.release();
    machine.held = rest;
    machine.run();
    assert!(machine.status().ready && kept > 2);
    machine.is_held = false;
    machine.run();
    assert!(!machine.status().ready && machine.queues.is_empty());
    assert_eq!(machine.get(queue.cq, 256), completions, "no completion after the reset began");
    // Doorbells, time and events from here on.
    let before = snapshot(&machine);
    for number in 0..16 {
        machine.controller.write_register(0x1000 + 4 * number, 4, 3).unwrap();
    }
    machine.controller.set_namespaces(blkyard_nvme::NamespaceTable::new(8));
    machine.now_ns += 1 << 50;
    machine.run();
    assert!(snapshot(&machine) == before);
    machine.controller.set_namespaces(namespaces());
    machine.enable();
    let mut queue = machine.queue_pair(1, 16);
    assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0));
}

#[test]
fn commands_go_on_while_memory_changes() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.pages(2);
    machine.is_held = true;
    for held in 1..4 {
        push_all(&mut machine, &mut queue, &[blocks(io::READ, 1, 0, 1, data)]);
        machine.run();
        assert_eq!(machine.held.len(), held, "commands are fetched meanwhile");
        let map = map_of(&machine.region);
        machine.controller.set_memory(&map);
        machine.run();
        assert!(!machine.controller.is_remapping(), "no memory has lost its address");
    }
    machine.is_held = false;
    machine.run();
    assert_eq!(machine.take(&mut queue).len(), 3);
    assert_eq!(machine.admin(Sqe::abort(9, 9)), Ok(1), "the admin queue goes on");
}

#[test]
fn memory_is_left_once_no_bio_names_it() {
    const OTHER: u64 = 1 << 40;
    for opcode in [io::READ, io::WRITE, io::COMPARE] {
        let mut machine = Machine::enabled();
        let mut queue = machine.queue_pair(1, 8);
        let data = machine.pages(2);
        let other = Region::anonymous(0x2000).unwrap();
        let maps = [Some(OTHER), None].map(|addr| map_with(&machine.region, &other, addr));
        machine.controller.set_memory(&maps[0]);
        machine.run();
        machine.is_held = true;
        push_all(&mut machine, &mut queue, &[blocks(opcode, 1, 0, 1, OTHER)]);
        machine.run();
        for _ in 0..2 {
            machine.controller.set_memory(&maps[1]);
            machine.run();
            assert!(machine.controller.is_remapping(), "a bio names it");
        }
        let before = machine.held.len();
        push_all(&mut machine, &mut queue, &[blocks(io::READ, 1, 0, 1, data), blocks(io::READ, 1, 0, 1, OTHER)]);
        machine.run();
        assert_eq!(machine.held.len(), before + 1, "commands with other memory go on");
        let refused: Vec<_> = machine.take(&mut queue).iter().map(|cqe| cqe.status()).collect();
        assert_eq!(refused, [NvmeStatus::DATA_TRANSFER_ERROR.with_dnr()]);
        // The later command does not hold it up.
        let (later, first) = machine.held.drain(..).partition(|(_, bio)| bio.segments[0].region == 0);
        machine.held = first;
        machine.release();
        machine.held = later;
        machine.run();
        assert!(!machine.controller.is_remapping());
        machine.is_held = false;
        machine.run();
        assert!(machine.take(&mut queue).iter().all(|cqe| cqe.status().is_success()));
    }
}

/// Use of memory that the host has unmapped.
fn unmap(machine: &mut Machine) {
    machine.controller.set_memory(&unmapped(&machine.region.clone()));
    machine.run();
    assert!(!machine.controller.is_remapping(), "the memory is no longer used");
}

fn map_again(machine: &mut Machine) {
    machine.controller.set_memory(&map_of(&machine.region.clone()));
    machine.run();
}

#[test]
fn rings_continue_when_they_are_mapped_again() {
    for has_shadow in [false, true] {
        let mut machine = Machine::enabled();
        let mut queue = machine.queue_pair(1, 8);
        let mut other = machine.queue(2, 1, 8);
        let data = machine.pages(2);
        let (doorbells, events) = (machine.page(), machine.page());
        if has_shadow {
            assert_eq!(machine.admin(Sqe::doorbell_buffer(doorbells, events)), Ok(0));
        }
        let ring = |machine: &mut Machine, queue: &RawQueue| {
            if has_shadow {
                machine.store32(doorbells + u64::from(queue.sqid) * 8, queue.tail.into());
            } else {
                machine.ring_tail(queue.sqid, queue.tail.into());
            }
        };
        let put = |machine: &mut Machine, queue: &mut RawQueue, sqe: Sqe| {
            let cid = machine.cid();
            machine.put_words(queue.sq + u64::from(queue.tail) * SQE_BYTES as u64, &sqe.with_cid(cid).0);
            queue.tail = (queue.tail + 1) % queue.sq_entries;
            cid
        };
        let pair = |machine: &mut Machine, queue: &mut RawQueue, seed: u8| {
            machine.put(data, &pattern(seed, 512));
            for opcode in [io::WRITE, io::COMPARE] {
                let cid = put(machine, queue, blocks(opcode, 1, 8, 1, data));
                ring(machine, queue);
                machine.run();
                let all = take_all(machine, queue, has_shadow.then_some(doorbells));
                assert_eq!(cids(&all), [cid]);
                assert!(all[0].status().is_success());
            }
        };
        pair(&mut machine, &mut queue, 1);
        for round in 0..5 {
            unmap(&mut machine);
            assert!(machine.status().ready && !machine.status().fatal, "round {round}");
            machine.controller.set_namespaces(namespaces());
            machine.now_ns += 1;
            machine.run();
            map_again(&mut machine);
            pair(&mut machine, &mut queue, 10 + round);
            (other.cq, other.head) = (queue.cq, queue.head);
            other.phase = queue.phase;
            pair(&mut machine, &mut other, 20 + round);
            (queue.head, queue.phase) = (other.head, other.phase);
            assert_eq!(machine.admin(Sqe::abort(9, 9)), Ok(1), "the admin queue continues");
        }
        // Commands that were announced before are fetched afterwards.
        let early: Vec<_> = (0..3).map(|at| put(&mut machine, &mut queue, blocks(io::READ, 1, at, 1, data))).collect();
        ring(&mut machine, &queue);
        machine.controller.set_memory(&unmapped(&machine.region.clone()));
        machine.run();
        assert!(machine.held.is_empty() && !machine.status().fatal);
        map_again(&mut machine);
        assert_eq!(cids(&take_all(&mut machine, &mut queue, has_shadow.then_some(doorbells))), early);
    }
}

/// Takes the completions of a queue, and writes its head to its shadow doorbell, if any.
fn take_all(machine: &mut Machine, queue: &mut RawQueue, doorbells: Option<u64>) -> Vec<Cqe> {
    let all = machine.take(queue);
    if let Some(doorbells) = doorbells {
        machine.store32(doorbells + u64::from(queue.cqid) * 8 + 4, queue.head.into());
    }
    all
}

#[test]
fn completions_and_events_wait_until_their_ring_is_mapped() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.pages(2);
    assert_eq!(machine.admin(Sqe::feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, 1 << 8)), Ok(0));
    let event = machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    // A Compare that waits for another, so that it can be aborted while the rings are not mapped.
    machine.is_held = true;
    let compares = push_all(&mut machine, &mut queue, &[blocks(io::COMPARE, 1, 0, 1, data); 2]);
    machine.run();
    machine.is_flush_held = true;
    let flushed = machine.start_admin(Sqe::feature(admin::SET_FEATURES, feature::WRITE_CACHE, 0));
    let aborted = machine.start_admin(Sqe::abort(1, compares[1]));
    machine.controller.poll(machine.now_ns);
    machine.is_held = false;
    machine.release();
    unmap(&mut machine);
    machine.vectors.clear();
    let before = machine.get(BASE, 64 * PAGE as usize);
    machine.controller.set_namespaces(blkyard_nvme::NamespaceTable::new(8));
    machine.is_flush_held = false;
    machine.run();
    assert!(!machine.status().fatal && machine.vectors.is_empty());
    assert!(machine.get(BASE, 64 * PAGE as usize) == before, "unmapped memory was written");
    map_again(&mut machine);
    assert_eq!(machine.take(&mut queue).len(), 2);
    let mut told = cids(&machine.admin_completions());
    told.sort_unstable();
    assert_eq!(told, [event, flushed, aborted]);
    assert!(machine.vectors.contains(&0), "the admin queue interrupts");
}

#[test]
fn a_doorbell_of_an_unmapped_ring_is_a_fatal_error() {
    for sqid in [0, 1] {
        let mut machine = Machine::enabled();
        machine.queue_pair(1, 8);
        unmap(&mut machine);
        // The head of a completion queue makes the controller access nothing.
        machine.ring_head(1, 0);
        machine.run();
        assert!(!machine.status().fatal);
        machine.ring_tail(sqid, 1);
        machine.run();
        assert!(machine.status().fatal && machine.queues.is_empty(), "queue {sqid}");
        machine.controller.set_memory(&map_of(&machine.region.clone()));
        machine.write32(CC, 0);
        machine.run();
        machine.enable();
        let mut queue = machine.queue_pair(1, 8);
        assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0));
    }
}

#[test]
fn namespaces_that_go_and_come_are_served_or_not() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.pages(2);
    let read = |nsid| blocks(io::READ, nsid, 0, 1, data);
    let mut table = namespaces();
    let second = table.find(2).unwrap().clone();
    table.set(2, None);
    machine.controller.set_namespaces(table.clone());
    machine.run();
    assert_eq!(machine.io(&mut queue, read(2)), Err(NvmeStatus::INVALID_FIELD), "not active");
    assert_eq!(machine.io(&mut queue, read(9)), Err(NvmeStatus::INVALID_NAMESPACE), "not valid");
    assert_eq!(machine.io(&mut queue, read(1)), Ok(0));
    table.set(2, Some(second));
    machine.controller.set_namespaces(table);
    machine.run();
    assert_eq!(machine.io(&mut queue, read(2)), Ok(0));
    for opcode in [io::WRITE, io::WRITE_ZEROES, io::DSM] {
        let mut sqe = blocks(opcode, 4, 0, 1, data);
        if opcode == io::DSM {
            sqe = Sqe::deallocate(4, 1).with_data(Psdt::Prp, [data, 0]);
        }
        assert_eq!(machine.io(&mut queue, sqe), Err(NvmeStatus::WRITE_PROTECTED), "{opcode}");
    }
    assert_eq!(machine.io(&mut queue, read(4)), Ok(0));
}

#[test]
fn nothing_is_allocated_per_command() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 32);
    let data = machine.pages(4);
    machine.put_words(data, &[4 << 32, 10, 4 << 32, 20]);
    let sqes = [
        blocks(io::READ, 1, 0, 8, data + PAGE),
        blocks(io::WRITE, 1, 0, 8, data + PAGE),
        blocks(io::COMPARE, 1, 0, 8, data + PAGE),
        Sqe::with_blocks(io::VERIFY, 1, 0, 300, 0),
        Sqe::deallocate(1, 2).with_data(Psdt::Prp, [data, 0]),
        Sqe::new(io::FLUSH, u32::MAX),
        Sqe::new(0x7f, 1),
    ];
    let mut io_queue = machine.queues.remove(&1).unwrap();
    let mut bio = Bio::with_capacity(io_queue.segments_max());
    for round in 0..20 {
        for (number, sqe) in sqes.iter().enumerate() {
            let at = queue.sq + u64::from(queue.tail) * SQE_BYTES as u64;
            machine.put_words(at, &sqe.with_cid(number as u16).0);
            queue.tail = (queue.tail + 1) % queue.sq_entries;
        }
        machine.ring_tail(1, u32::from(queue.tail));
        let before = CountingAllocator::count();
        for _ in 0..40 {
            for _ in 0..8 {
                match io_queue.fetch(&mut bio) {
                    NextBio::Bio(token) => io_queue.end(token, Status::Ok),
                    NextBio::Without => {}
                    NextBio::Unavailable => break,
                }
            }
            let _ = io_queue.publish();
            while io_queue.take_reply().is_some() {}
            if !io_queue.arm() {
                break;
            }
        }
        assert_eq!(CountingAllocator::count(), before, "round {round}");
        assert_eq!((io_queue.in_flight(), machine.take(&mut queue).len()), (0, sqes.len()), "round {round}");
    }
}
