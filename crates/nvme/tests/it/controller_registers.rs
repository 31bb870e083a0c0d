//! Registers of the controller: every access has a defined result, and enable, reset and shutdown follow the
//! specification.

use blkyard_nvme::registers::{
    ACQ, AQA, ASQ, CAP, CC, CRTO, CSTS, Capabilities, ControllerConfig, INTMC, INTMS, NSSR, NSSR_RESET, VS,
};
use blkyard_nvme::{NvmeStatus, RegisterFault, Sqe, admin, cns, feature, io};

use crate::machine::{BASE, MEMORY_BYTES, Machine, PAGE, UNMAPPED, result};

#[test]
fn capabilities_are_those_of_the_options() {
    let machine = Machine::new();
    let cap = Capabilities::from_bits(machine.controller.read_register(CAP as u64, 8).unwrap());
    assert_eq!((cap.queue_entries_max, cap.contiguous_queues, cap.doorbell_stride), (64, true, 0));
    assert_eq!((cap.command_sets, cap.page_min, cap.page_max, cap.ready_modes), (1, 0, 0, 1));
    assert!(cap.timeout_500ms > 0 && !cap.subsystem_reset && !cap.memory_buffer);
    assert_eq!(machine.read32(VS), 0x0002_0000);
    assert_eq!(machine.read32(CRTO) & 0xffff, u32::from(cap.timeout_500ms));
}

#[test]
fn each_access_of_any_size_and_place_has_its_result() {
    let mut machine = Machine::new();
    let controller = &machine.controller;
    let read = |offset, bytes| controller.read_register(offset, bytes);
    let cap = read(0, 8).unwrap();
    assert_eq!((read(0, 4), read(4, 4)), (Ok(cap & 0xffff_ffff), Ok(cap >> 32)));
    assert_eq!((read(0, 1), read(2, 2), read(7, 1)), (Ok(cap & 0xff), Ok(cap >> 16 & 0xffff), Ok(cap >> 56)));
    for bytes in [0, 3, 5, 6, 7, 9, 16] {
        assert_eq!(read(0, bytes), Err(RegisterFault::Size(bytes)));
    }
    for (offset, bytes) in [(1, 2), (2, 4), (4, 8), (0x1002, 4), (0x1001, 2)] {
        assert_eq!(read(offset, bytes), Err(RegisterFault::Unaligned(offset)));
    }
    // Reserved, not supported, and doorbells: zero.
    for offset in [0x40, 0x60, 0x6c, 0x70, 0xe00, 0xff8, 0x1000, 0x1ffc] {
        assert_eq!(read(offset, 4), Ok(0), "{offset:#x}");
    }
    let end = controller.register_bytes() as u64;
    assert_eq!(end, 0x2000);
    for offset in [end, end + 8, 1 << 32, u64::MAX - 7] {
        assert_eq!(read(offset, 8), Err(RegisterFault::Outside(offset)));
    }
    let controller = &mut machine.controller;
    for bytes in [0, 1, 2, 3, 16] {
        assert_eq!(controller.write_register(AQA as u64, bytes, 1), Err(RegisterFault::Size(bytes)));
    }
    assert_eq!(controller.write_register(0x2a, 4, 1), Err(RegisterFault::Unaligned(0x2a)));
    assert_eq!(controller.write_register(end, 4, 1), Err(RegisterFault::Outside(end)));
    assert_eq!(controller.write_register(0x1000, 8, 1), Err(RegisterFault::Size(8)), "doorbells are 32 bits");
    // Read-only, reserved and not supported: no effect.
    let before: Vec<_> = (0..0x70).step_by(4).map(|at| controller.read_register(at, 4).unwrap()).collect();
    for offset in [CAP, CAP + 4, VS, INTMS, INTMC, 0x18, CSTS, 0x38, 0x40, CRTO, 0x6c, 0x70, 0xffc] {
        assert_eq!(controller.write_register(offset as u64, 4, u64::MAX), Ok(None));
    }
    controller.write_register(NSSR as u64, 4, u64::from(NSSR_RESET)).unwrap();
    let after: Vec<_> = (0..0x70).step_by(4).map(|at| controller.read_register(at, 4).unwrap()).collect();
    assert_eq!(before, after);
}

#[test]
fn queue_addresses_are_written_whole_or_by_halves() {
    let mut machine = Machine::new();
    machine.write64(ASQ, 0x1234_5678_9abc_d000);
    machine.write32(ACQ, 0x9abc_d000);
    machine.write32(ACQ + 4, 0x1234_5678);
    assert_eq!((machine.read32(ASQ), machine.read32(ASQ + 4)), (0x9abc_d000, 0x1234_5678));
    assert_eq!(machine.controller.read_register(ACQ as u64, 8), Ok(0x1234_5678_9abc_d000));
    machine.write32(AQA, u32::MAX);
    assert_eq!(machine.read32(AQA), 0x0fff_0fff, "reserved bits read as zero");
}

#[test]
fn what_cannot_be_enabled_is_fatal_until_a_reset() {
    let good = Machine::config();
    let end = BASE + MEMORY_BYTES as u64;
    let with = |change: fn(&mut ControllerConfig)| {
        let mut config = good;
        change(&mut config);
        config
    };
    let admin = Machine::new().admin;
    let (sq, cq, aqa) = (admin.sq, admin.cq, 31 | 31 << 16);
    let vectors = [
        ("command set", with(|config| config.command_set = 6), sq, cq, aqa),
        ("admin only", with(|config| config.command_set = 7), sq, cq, aqa),
        ("page size", with(|config| config.page = 1), sq, cq, aqa),
        ("arbitration", with(|config| config.arbitration = 1), sq, cq, aqa),
        ("submission queue of one entry", good, sq, cq, 31 << 16),
        ("completion queue of one entry", good, sq, cq, 31),
        ("submission queue not aligned", good, sq + 8, cq, aqa),
        ("completion queue not aligned", good, sq, cq + 64, aqa),
        ("no submission queue", good, 0, cq, aqa),
        ("submission queue not mapped", good, UNMAPPED, cq, aqa),
        ("completion queue not mapped", good, sq, UNMAPPED, aqa),
        ("submission queue at the last page", good, !0xfff, cq, aqa),
        ("submission queue over the end", good, end - PAGE, cq, 127 | 31 << 16),
        ("completion queue over the end", good, sq, end - PAGE, 31 | 0xfff << 16),
    ];
    for (name, config, sq, cq, aqa) in vectors {
        let mut machine = Machine::new();
        machine.write32(AQA, aqa);
        machine.write64(ASQ, sq);
        machine.write64(ACQ, cq);
        machine.write32(CC, config.bits());
        assert!(machine.status().fatal && !machine.status().ready, "{name}");
        // No command is processed, and doorbell writes have no effect.
        assert_eq!(machine.ring_tail(0, 1), None, "{name}");
        machine.run();
        machine.write32(CC, 0);
        assert_eq!(machine.read32(CSTS), 0, "{name}");
        machine.enable();
    }
}

#[test]
fn a_reset_keeps_the_admin_queue_registers_and_nothing_else() {
    let mut machine = Machine::enabled();
    let set = |fid, value| Sqe::feature(admin::SET_FEATURES, fid, value);
    let get = |fid| Sqe::feature(admin::GET_FEATURES, fid, 0);
    assert_eq!(machine.admin(set(feature::COALESCING, 0x1234)), Ok(0));
    let mut queue = machine.queue_pair(1, 8);
    assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0));
    let [sq, cq] = [ASQ, ACQ].map(|at| machine.controller.read_register(at as u64, 8).unwrap());
    machine.write32(CC, 0);
    machine.run();
    assert_eq!((machine.read32(CC), machine.read32(CSTS)), (0, 0));
    assert_eq!(machine.read32(AQA), 31 | 31 << 16);
    assert_eq!([ASQ, ACQ].map(|at| machine.controller.read_register(at as u64, 8).unwrap()), [sq, cq]);
    assert!(machine.queues.is_empty(), "the queues are gone");
    assert_eq!(machine.ring_tail(1, 1), None);
    machine.enable();
    assert_eq!(machine.admin(get(feature::COALESCING)), Ok(0), "features have their defaults");
    machine.queue_pair(1, 8);
}

#[test]
fn doorbells_say_whose_queue_they_are() {
    let mut machine = Machine::new();
    assert_eq!(machine.ring_tail(0, 1), None, "not enabled");
    machine.enable();
    machine.queue(1, 1, 8);
    machine.queue(2, 2, 8);
    machine.queue(5, 1, 8);
    assert_eq!((machine.ring_tail(0, 5), machine.ring_head(0, 5)), (Some(0), Some(0)));
    assert_eq!((machine.ring_tail(2, 0), machine.ring_head(2, 0)), (Some(2), Some(2)));
    assert_eq!((machine.ring_tail(5, 0), machine.ring_head(5, 0)), (Some(1), None));
    assert_eq!((machine.ring_tail(8, 0), machine.ring_tail(511, 0)), (None, None));
}

#[test]
fn a_shutdown_stops_queues_and_flushes_before_it_is_complete() {
    for shutdown in [1, 2] {
        let mut machine = Machine::enabled();
        let mut queue = machine.queue_pair(1, 8);
        machine.is_held = true;
        let cid = machine.cid();
        machine.push(&mut queue, Sqe::new(io::FLUSH, 1), cid);
        machine.run();
        machine.is_flush_held = true;
        machine.write32(CC, ControllerConfig { shutdown, ..Machine::config() }.bits());
        machine.run();
        assert_eq!((machine.status().shutdown, machine.flushes.len()), (1, 0), "I/O is in flight");
        machine.is_held = false;
        machine.run();
        assert_eq!((machine.status().shutdown, machine.flushes.len()), (1, 1), "not yet flushed");
        machine.is_flush_held = false;
        machine.run();
        assert_eq!((machine.status().shutdown, machine.status().ready), (2, true));
        assert_eq!(machine.ring_tail(0, 1), None, "no command is processed");
        machine.write32(CC, 0);
        assert_eq!(machine.read32(CSTS), 0);
        machine.enable();
        machine.queue_pair(1, 8);
    }
}

#[test]
fn a_shutdown_whose_flush_fails_completes_with_a_fatal_error() {
    let mut machine = Machine::enabled();
    machine.queue_pair(1, 8);
    machine.is_flush_held = true;
    machine.write32(CC, ControllerConfig { shutdown: 1, ..Machine::config() }.bits());
    machine.run();
    assert_eq!((machine.status().shutdown, machine.status().fatal), (1, false));
    let number = machine.flushes.remove(0);
    machine.controller.flush_failed(number);
    machine.run();
    assert_eq!((machine.status().shutdown, machine.status().fatal), (2, true));
    machine.is_flush_held = false;
    machine.write32(CC, 0);
    machine.run();
    assert_eq!(machine.read32(CSTS), 0);
    machine.enable();
    machine.queue_pair(1, 8);
}

#[test]
fn a_reset_may_come_during_a_shutdown_and_the_other_way_round() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    machine.is_held = true;
    let cid = machine.cid();
    machine.push(&mut queue, Sqe::new(io::FLUSH, 1), cid);
    machine.run();
    machine.write32(CC, ControllerConfig { shutdown: 1, ..Machine::config() }.bits());
    machine.write32(CC, 0);
    machine.run();
    assert!(machine.status().ready, "I/O is in flight");
    // A host that does not wait for the shutdown.
    machine.write32(CC, ControllerConfig { shutdown: 1, enabled: false, ..Machine::config() }.bits());
    machine.write32(CC, Machine::config().bits());
    machine.is_held = false;
    let admin = machine.admin.cq;
    machine.zero(admin, PAGE as usize);
    machine.run();
    assert!(machine.status().ready && !machine.status().fatal && machine.queues.is_empty());
    assert_eq!((machine.status().shutdown, machine.read32(CC)), (0, Machine::config().bits()));
    (machine.admin.tail, machine.admin.head, machine.admin.phase) = (0, 0, true);
    machine.queue_pair(1, 8);

    // A shutdown of a disabled controller, which is then enabled.
    let mut machine = Machine::new();
    machine.write32(CC, ControllerConfig { shutdown: 1, ..ControllerConfig::default() }.bits());
    machine.run();
    assert_eq!((machine.status().shutdown, machine.status().ready), (2, false));
    machine.enable();
    assert_eq!(machine.status().shutdown, 0);
    let mut queue = machine.queue_pair(1, 8);
    assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0));
    machine.write32(CC, 0);
    machine.run();
    assert_eq!((machine.read32(CSTS), machine.queues.len()), (0, 0), "its queues are stopped by a reset");
}

#[test]
fn an_admin_queue_of_two_entries_works_with_requests_for_events() {
    let mut machine = Machine::new();
    machine.enable();
    machine.write32(CC, 0);
    machine.write32(AQA, 1 | 1 << 16);
    let admin = machine.admin.cq;
    machine.zero(admin, PAGE as usize);
    machine.write32(CC, Machine::config().bits());
    (machine.admin.tail, machine.admin.head, machine.admin.phase) = (0, 0, true);
    (machine.admin.sq_entries, machine.admin.cq_entries) = (2, 2);
    // An event request holds no entry of the completion queue, so the next command has one.
    machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    assert_eq!(machine.admin_completions(), []);
    assert!(machine.admin_read(Sqe::identify(cns::CONTROLLER, 0, 0, 0), 4096).is_ok());
    machine.ring_tail(7, 1);
    let all = machine.admin_completions();
    assert_eq!((all.len(), result(all[0])), (1, Ok(0x01_00_00)), "the event");
    // A host that does not read its completions waits; no completion is lost.
    let first = machine.start_admin(Sqe::new(0xff, 0));
    machine.run();
    let second = machine.start_admin(Sqe::new(0xff, 0));
    machine.run();
    let mut cids = vec![];
    for _ in 0..2 {
        cids.extend(machine.admin_completions().iter().map(|cqe| {
            assert_eq!(result(*cqe), Err(NvmeStatus::INVALID_OPCODE));
            cqe.cid()
        }));
    }
    assert_eq!(cids, [first, second]);
}
