//! Admin commands of the controller: each valid one with its result, each invalid one with its exact status.

use blkyard_mq::Status;
use blkyard_nvme::registers::{CAP, CC, CSTS, ControllerConfig};
use blkyard_nvme::{
    ControllerOptions, ControllerQueueReply, ControllerRequest, IDENTIFY_BYTES, IdentifyController, IdentifyNamespace,
    NamespaceTable, NvmLimits, NvmeNamespace, NvmeStatus, Psdt, ServedNamespace, Sqe, admin, cns, feature, io,
};

use crate::machine::{MDTS_BYTES, Machine, PAGE, UNMAPPED, info, map_of, namespaces, result};

const INVALID_FIELD: NvmeStatus = NvmeStatus::INVALID_FIELD;
const ALL: u32 = u32::MAX;

fn page(machine: &mut Machine, sqe: Sqe) -> Result<[u8; IDENTIFY_BYTES], NvmeStatus> {
    machine.admin_read(sqe, IDENTIFY_BYTES).map(|bytes| bytes.try_into().unwrap())
}

fn identify(machine: &mut Machine, cns: u8, nsid: u32) -> Result<[u8; IDENTIFY_BYTES], NvmeStatus> {
    page(machine, Sqe::identify(cns, nsid, 0, 0))
}

fn log(machine: &mut Machine, id: u8, bytes: u32) -> Vec<u8> {
    machine.admin_read(Sqe::get_log_page(id, ALL, 0, bytes / 4, 0), bytes as usize).unwrap()
}

fn set(fid: u8, value: u32) -> Sqe {
    Sqe::feature(admin::SET_FEATURES, fid, value)
}

fn get(fid: u8, select: u32, value: u32) -> Sqe {
    let mut sqe = Sqe::feature(admin::GET_FEATURES, fid, value);
    sqe.0[5] |= u64::from(select) << 8;
    sqe
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn identify_data_describes_controller_and_namespaces() {
    let mut machine = Machine::enabled();
    let controller = IdentifyController::parse(&identify(&mut machine, cns::CONTROLLER, 0).unwrap());
    assert_eq!((&controller.serial[..4], &controller.model[..12]), (&b"S1  "[..], &b"test model  "[..]));
    assert_eq!(controller.subsystem[..20], *b"nqn.2026-11.test:1\0\0");
    assert_eq!((controller.transfer_bytes_max(0), controller.controller_id), (Some(u64::from(MDTS_BYTES)), 7));
    assert!(controller.has_sgl() && controller.has_shadow_doorbells());
    assert_eq!((controller.sq_entry_shifts, controller.cq_entry_shifts, controller.namespaces), (0x66, 0x44, 8));
    assert_eq!((controller.version, controller.controller_type, controller.write_cache), (0x2_0000, 1, 7));
    for (nsid, block, read_only) in [(1, 512, false), (2, 4096, false), (4, 512, true)] {
        let namespace = IdentifyNamespace::parse(&identify(&mut machine, cns::NAMESPACE, nsid).unwrap());
        assert_eq!(namespace.nguid, [nsid as u8; 16]);
        let (_, info) = NvmeNamespace::new(nsid, &controller, &namespace, &NvmLimits::default()).unwrap();
        assert_eq!((info.capacity_sectors, info.limits.logical_block_bytes), (2048, block));
        assert_eq!((info.read_only, info.volatile_cache), (read_only, true));
        assert!(info.limits.discard_sectors_max > 0 && info.limits.write_zeroes_sectors_max > 0);
        let descriptors = identify(&mut machine, cns::NAMESPACE_IDS, nsid).unwrap();
        assert_eq!(descriptors[..4], [2, 16, 0, 0], "NGUID");
        assert_eq!(descriptors[20..26], [4, 1, 0, 0, 0, 0], "CSI, and the end");
        let independent = identify(&mut machine, cns::INDEPENDENT_NAMESPACE, nsid).unwrap();
        assert_eq!((independent[8], independent[14]), (u8::from(read_only), 1));
    }
    for (after, want) in [(0, &[1, 2, 4][..]), (1, &[2, 4]), (3, &[4]), (4, &[]), (u32::MAX - 2, &[])] {
        let list = identify(&mut machine, cns::ACTIVE_NAMESPACES, after).unwrap();
        let ids: Vec<_> = list.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect();
        assert_eq!((&ids[..want.len()], ids[want.len()..].iter().all(|id| *id == 0)), (want, true));
    }
    for nsid in [3, 8] {
        assert_eq!(identify(&mut machine, cns::NAMESPACE, nsid), Ok([0; IDENTIFY_BYTES]), "not active");
    }
    assert_eq!(identify(&mut machine, cns::CSI_CONTROLLER, 0), Ok([0; IDENTIFY_BYTES]));
    assert_eq!(identify(&mut machine, cns::CSI_NAMESPACE, 1), Ok([0; IDENTIFY_BYTES]));
}

#[test]
fn commands_that_no_device_supports_are_not_announced() {
    let mut machine = Machine::enabled();
    for (discard, zeroes) in [(0, 0), (1 << 20, 0), (0, 1 << 20)] {
        let mut info = info(512, false);
        (info.limits.discard_sectors_max, info.limits.write_zeroes_sectors_max) = (discard, zeroes);
        let mut table = NamespaceTable::new(8);
        table.set(1, ServedNamespace::new(1, 0, &info));
        machine.controller.set_namespaces(table);
        let controller = IdentifyController::parse(&identify(&mut machine, cns::CONTROLLER, 0).unwrap());
        assert_eq!([2, 3].map(|bit| controller.nvm_commands >> bit & 1 != 0), [discard > 0, zeroes > 0], "ONCS");
        let effects = log(&mut machine, 5, 4096);
        let has = |opcode: u8| effects[1024 + usize::from(opcode) * 4] != 0;
        assert_eq!([io::DSM, io::WRITE_ZEROES, io::WRITE].map(has), [discard > 0, zeroes > 0, true], "effects log");
        let namespace = IdentifyNamespace::parse(&identify(&mut machine, cns::NAMESPACE, 1).unwrap());
        let (_, info) = NvmeNamespace::new(1, &controller, &namespace, &NvmLimits::default()).unwrap();
        let limits = [info.limits.discard_sectors_max, info.limits.write_zeroes_sectors_max];
        assert_eq!(limits.map(|sectors| sectors > 0), [discard > 0, zeroes > 0], "as a host sees it");
    }
}

#[test]
fn a_shutdown_may_take_as_long_as_a_reset() {
    let mut machine = Machine::enabled();
    let controller = IdentifyController::parse(&identify(&mut machine, cns::CONTROLLER, 0).unwrap());
    let ready_500ms = machine.read32(CAP) >> 24;
    assert_eq!((controller.shutdown_us, ready_500ms), (60_000_000, 120));
}

#[test]
fn each_identify_that_makes_no_sense_gets_its_status() {
    let mut machine = Machine::enabled();
    let namespace = NvmeStatus::INVALID_NAMESPACE;
    for (what, nsid, csi, status) in [
        (cns::NAMESPACE, 0, 0, namespace),
        (cns::NAMESPACE, 9, 0, namespace),
        (cns::NAMESPACE, ALL, 0, namespace),
        (cns::CSI_NAMESPACE, 9, 0, namespace),
        (cns::INDEPENDENT_NAMESPACE, ALL, 0, namespace),
        (cns::ACTIVE_NAMESPACES, ALL, 0, namespace),
        (cns::ACTIVE_NAMESPACES, ALL - 1, 0, namespace),
        (cns::NAMESPACE_IDS, 0, 0, namespace),
        (cns::NAMESPACE_IDS, ALL, 0, namespace),
        (cns::NAMESPACE_IDS, 3, 0, INVALID_FIELD),
        (cns::CSI_NAMESPACE, 1, 2, INVALID_FIELD),
        (cns::CSI_CONTROLLER, 0, 1, INVALID_FIELD),
        (0x04, 1, 0, INVALID_FIELD),
        (0xff, 1, 0, INVALID_FIELD),
    ] {
        assert_eq!(page(&mut machine, Sqe::identify(what, nsid, 0, csi)), Err(status), "{what:#x} {nsid}");
    }
    let data = machine.pages(2);
    let identify = Sqe::identify(cns::CONTROLLER, 0, 0, 0);
    for (pointer, status) in [
        ([data + 2, data + PAGE], NvmeStatus::INVALID_PRP_OFFSET),
        ([data + 4, data + PAGE + 4], NvmeStatus::INVALID_PRP_OFFSET),
        ([data + 4, 0], NvmeStatus::DATA_TRANSFER_ERROR),
        ([UNMAPPED, 0], NvmeStatus::DATA_TRANSFER_ERROR),
        ([!0xfff, 0], NvmeStatus::DATA_TRANSFER_ERROR),
        ([0, 0], NvmeStatus::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(machine.admin(identify.with_data(Psdt::Prp, pointer)), Err(status), "{pointer:x?}");
    }
    // Data over two pages that lie apart.
    let other = machine.pages(2) + PAGE;
    machine.admin(identify.with_data(Psdt::Prp, [data + 0xff0, other])).unwrap();
    assert_eq!(
        (machine.get(data + 0xff0 + 4, 2), machine.get(other + 0x24 - 0x10, 1)),
        (b"S1".to_vec(), b" ".to_vec())
    );
    // SGLs are invalid for admin commands over shared memory, and so are fused commands.
    for psdt in [Psdt::Sgl, Psdt::SglMetadata] {
        assert_eq!(machine.admin(identify.with_data(psdt, [data, 4096])), Err(INVALID_FIELD));
    }
    let mut fused = identify.with_data(Psdt::Prp, [data, 0]);
    fused.0[0] |= 1 << 8;
    assert_eq!(machine.admin(fused), Err(INVALID_FIELD));
}

#[test]
fn commands_that_are_not_supported_are_invalid_opcodes() {
    let mut machine = Machine::enabled();
    let before = u64_at(&log(&mut machine, 2, 512), 176);
    // Namespace management and attachment, firmware, self-test, format, security, sanitize, vendor, reserved.
    let opcodes = [0x0d, 0x15, 0x10, 0x11, 0x14, admin::FORMAT, 0x81, 0x82, 0x84, 0xc0, 0x03, 0x7f, 0xff];
    for opcode in opcodes {
        let cid = machine.start_admin(Sqe::new(opcode, 1));
        let all = machine.admin_completions();
        assert_eq!(result(all[0]), Err(NvmeStatus::INVALID_OPCODE), "{opcode:#x}");
        // The error log points to byte 0 of the command.
        assert!(all[0].status().is_final() && all[0].status().has_more());
        let errors = log(&mut machine, 1, 64);
        assert_eq!((errors[8..10].to_vec(), errors[10..12].to_vec()), (vec![0; 2], cid.to_le_bytes().to_vec()));
        assert_eq!(u16::from_le_bytes([errors[12], errors[13]]) >> 1, all[0].status().0);
        assert_eq!((errors[14], errors[15]), (0, 0), "the opcode");
    }
    assert_eq!(u64_at(&log(&mut machine, 2, 512), 176) - before, opcodes.len() as u64);
    let effects = log(&mut machine, 5, 4096);
    assert!(opcodes.iter().all(|opcode| effects[usize::from(*opcode) * 4] == 0));
    assert!([admin::IDENTIFY, admin::ABORT].iter().all(|opcode| effects[usize::from(*opcode) * 4] & 1 == 1));
    assert_eq!((effects[1024 + 4] & 3, effects[1024 + 8] & 3), (3, 1), "write and read");
}

#[test]
fn log_pages_are_read_in_parts_and_not_beyond() {
    let mut machine = Machine::enabled();
    let whole = log(&mut machine, 5, 4096);
    let part = machine.admin_read(Sqe::get_log_page(5, 0, 0, 3, 1024), 12).unwrap();
    assert_eq!(part, whole[1024..1036]);
    let firmware = log(&mut machine, 3, 512);
    assert_eq!((firmware[0], &firmware[8..16]), (1, &b"1.0     "[..]));
    assert_eq!(log(&mut machine, 0, 1024)[5 * 4], 1, "supported log pages");
    assert_eq!(log(&mut machine, 0x12, 1024)[7 * 4], 1, "features");
    // An offset at the end of the page reads as zeros; a larger offset is invalid.
    assert_eq!(machine.admin_read(Sqe::get_log_page(2, ALL, 0, 4, 512), 16), Ok(vec![0; 16]));
    let index = {
        let mut sqe = Sqe::get_log_page(2, ALL, 0, 1, 0);
        sqe.0[7] |= 1 << 23;
        sqe
    };
    for (name, sqe, status) in [
        ("no such page", Sqe::get_log_page(0x0c, ALL, 0, 1, 0), NvmeStatus::INVALID_LOG_PAGE),
        ("vendor page", Sqe::get_log_page(0xca, ALL, 0, 1, 0), NvmeStatus::INVALID_LOG_PAGE),
        ("offset not in dwords", Sqe::get_log_page(2, ALL, 0, 1, 2), INVALID_FIELD),
        ("offset behind the end", Sqe::get_log_page(2, ALL, 0, 1, 516), INVALID_FIELD),
        ("offset of 64 bits", Sqe::get_log_page(2, ALL, 0, 1, 1 << 63), INVALID_FIELD),
        ("offset that wraps", Sqe::get_log_page(2, ALL, 0, 2, !3), INVALID_FIELD),
        ("longer than MDTS", Sqe::get_log_page(2, ALL, 0, MDTS_BYTES / 4 + 1, 0), INVALID_FIELD),
        ("as long as it gets", Sqe::get_log_page(2, ALL, 0, 0, 0), INVALID_FIELD),
        ("SMART of a namespace", Sqe::get_log_page(2, 1, 0, 1, 0), INVALID_FIELD),
        ("offset as an index", index, INVALID_FIELD),
    ] {
        assert_eq!(machine.admin_read(sqe, 4), Err(status), "{name}");
    }
}

#[test]
fn queues_that_cannot_be_created_get_their_status() {
    let mut machine = Machine::enabled();
    let ring = machine.page();
    let bits = |sqe: Sqe, clear: u64, set: u64| {
        let mut sqe = sqe;
        sqe.0[5] = sqe.0[5] & !clear | set;
        sqe
    };
    let cq = |qid, entries| Sqe::create_cq(qid, entries, ring, Some(1));
    let sq = |qid, entries, cqid| Sqe::create_sq(qid, entries, ring, cqid);
    let (qid, size) = (NvmeStatus::INVALID_QID, NvmeStatus::INVALID_QUEUE_SIZE);
    machine.queue_pair(1, 8);
    for (name, sqe, status) in [
        ("completion queue 0", cq(0, 8), qid),
        ("completion queue in use", cq(1, 8), qid),
        ("completion queue beyond those granted", cq(9, 8), qid),
        ("completion queue 65535", cq(65535, 8), qid),
        ("completion queue of one entry", cq(2, 1), size),
        ("completion queue of more than MQES", cq(2, 65), size),
        ("completion queue of 65536", cq(2, 65536), size),
        ("completion queue in pieces", bits(cq(2, 8), 1 << 32, 0), INVALID_FIELD),
        ("vector that does not exist", Sqe::create_cq(2, 8, ring, Some(5)), NvmeStatus::INVALID_VECTOR),
        ("vector 65535", Sqe::create_cq(2, 8, ring, Some(65535)), NvmeStatus::INVALID_VECTOR),
        ("ring not aligned", Sqe::create_cq(2, 8, ring + 16, Some(1)), NvmeStatus::INVALID_PRP_OFFSET),
        ("ring not mapped", Sqe::create_cq(2, 8, UNMAPPED, Some(1)), NvmeStatus::DATA_TRANSFER_ERROR),
        ("ring at zero", Sqe::create_cq(2, 8, 0, Some(1)), NvmeStatus::DATA_TRANSFER_ERROR),
        ("ring at the end", Sqe::create_cq(2, 8, !0xfff, Some(1)), NvmeStatus::DATA_TRANSFER_ERROR),
        ("submission queue 0", sq(0, 8, 1), qid),
        ("submission queue in use", sq(1, 8, 1), qid),
        ("submission queue beyond those granted", sq(9, 8, 1), qid),
        ("submission queue of one entry", sq(2, 1, 1), size),
        ("submission queue of more than MQES", sq(2, 65, 1), size),
        ("completing to the admin queue", sq(2, 8, 0), qid),
        ("completing beyond those granted", sq(2, 8, 9), qid),
        ("completing to a queue that is not there", sq(2, 8, 2), NvmeStatus::INVALID_CQ),
        ("submission queue in pieces", bits(sq(2, 8, 1), 1 << 32, 0), INVALID_FIELD),
        ("submission ring not aligned", Sqe::create_sq(2, 8, ring + 64, 1), NvmeStatus::INVALID_PRP_OFFSET),
        ("submission ring not mapped", Sqe::create_sq(2, 8, UNMAPPED, 1), NvmeStatus::DATA_TRANSFER_ERROR),
        ("delete admin submission queue", Sqe::delete_queue(admin::DELETE_SQ, 0), qid),
        ("delete admin completion queue", Sqe::delete_queue(admin::DELETE_CQ, 0), qid),
        ("delete a submission queue that is not there", Sqe::delete_queue(admin::DELETE_SQ, 2), qid),
        ("delete submission queue 65535", Sqe::delete_queue(admin::DELETE_SQ, 65535), qid),
        ("delete a completion queue that is not there", Sqe::delete_queue(admin::DELETE_CQ, 2), qid),
        ("delete completion queue 65535", Sqe::delete_queue(admin::DELETE_CQ, 65535), qid),
        (
            "delete a completion queue in use",
            Sqe::delete_queue(admin::DELETE_CQ, 1),
            NvmeStatus::INVALID_QUEUE_DELETION,
        ),
    ] {
        assert_eq!(machine.admin(sqe), Err(status), "{name}");
    }
    // Without an interrupt the vector is ignored.
    assert_eq!(machine.admin(bits(cq(2, 8), 2 << 32, 0xffff << 48)), Ok(0));
    assert_eq!(machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), Ok(0));
    assert_eq!(machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), Err(qid), "deleted twice");
    assert_eq!(machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 1)), Ok(0));
    assert_eq!(machine.queues.len(), 1);
    machine.queue_pair(1, 64);
}

#[test]
fn queues_are_created_only_with_entry_sizes_in_cc() {
    let mut machine = Machine::enabled();
    let ring = machine.page();
    for (sq, cq) in [(0, 4), (5, 4), (7, 4), (6, 0), (6, 3), (6, 5)] {
        machine.write32(CC, ControllerConfig { sq_entry_shift: sq, cq_entry_shift: cq, ..Machine::config() }.bits());
        let status = machine.admin(Sqe::create_cq(1, 8, ring, None));
        if cq == 4 {
            assert_eq!(status, Ok(0));
            let status = machine.admin(Sqe::create_sq(1, 8, ring, 1));
            assert_eq!(status, Err(NvmeStatus::INVALID_QUEUE_SIZE), "{sq}");
            machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 1)).unwrap();
        } else {
            assert_eq!(status, Err(NvmeStatus::INVALID_QUEUE_SIZE), "{cq}");
        }
    }
}

#[test]
fn the_number_of_queues_is_granted_once() {
    let mut machine = Machine::enabled();
    assert_eq!(machine.admin(get(feature::QUEUES, 0, 0)), Ok(7 | 7 << 16));
    for wanted in [0xffff, 0xffff << 16, u32::MAX] {
        assert_eq!(machine.admin(set(feature::QUEUES, wanted)), Err(INVALID_FIELD));
    }
    assert_eq!(machine.admin(set(feature::QUEUES, 0x63 | 0xfffe << 16)), Ok(7 | 7 << 16));
    assert_eq!(machine.admin(set(feature::QUEUES, 1 | 2 << 16)), Ok(1 | 2 << 16));
    assert_eq!(machine.admin(get(feature::QUEUES, 0, 0)), Ok(1 | 2 << 16));
    let ring = machine.page();
    assert_eq!(machine.admin(Sqe::create_cq(4, 8, ring, None)), Err(NvmeStatus::INVALID_QID));
    assert_eq!(machine.admin(Sqe::create_cq(3, 8, ring, None)), Ok(0));
    assert_eq!(machine.admin(Sqe::create_sq(3, 8, ring, 3)), Err(NvmeStatus::INVALID_QID));
    assert_eq!(machine.admin(set(feature::QUEUES, 3)), Err(NvmeStatus::COMMAND_SEQUENCE), "a queue exists");
    machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 3)).unwrap();
    let again = machine.admin(set(feature::QUEUES, 3 | 3 << 16));
    assert_eq!(again, Err(NvmeStatus::COMMAND_SEQUENCE), "a queue existed since the reset");
}

#[test]
fn features_have_values_defaults_and_capabilities() {
    let mut machine = Machine::enabled();
    for (fid, value, default) in [
        (feature::ARBITRATION, 0x0102_0307, 0),
        (feature::POWER, 0, 0),
        (feature::ERROR_RECOVERY, 0x55, 0),
        (feature::WRITE_CACHE, 0, 1),
        (feature::COALESCING, 0x0a0b, 0),
        (feature::WRITE_ATOMICITY, 1, 0),
        (feature::ASYNC_EVENTS, 0x1ff, 0),
        (feature::KEEP_ALIVE, 5000, 0),
    ] {
        let of_namespace = fid == feature::ERROR_RECOVERY;
        let nsid = u64::from(of_namespace);
        let with = |mut sqe: Sqe| {
            sqe.0[0] |= nsid << 32;
            sqe
        };
        assert_eq!(machine.admin(with(get(fid, 0, 0))), Ok(default), "{fid:#x}");
        assert_eq!(machine.admin(with(set(fid, value))), Ok(0), "{fid:#x}");
        assert_eq!(machine.admin(with(get(fid, 0, 0))), Ok(u64::from(value)), "{fid:#x}");
        for select in [1, 2] {
            assert_eq!(machine.admin(with(get(fid, select, 0))), Ok(default), "{fid:#x}: nothing is saved");
        }
        assert_eq!(machine.admin(with(get(fid, 3, 0))), Ok(4 | u64::from(of_namespace) << 1), "{fid:#x}");
    }
    // Temperature thresholds: over and under, of the composite temperature.
    assert_eq!(machine.admin(set(feature::TEMPERATURE, 350)), Ok(0));
    assert_eq!(machine.admin(set(feature::TEMPERATURE, 1 << 20 | 0x118)), Ok(0));
    assert_eq!(machine.admin(get(feature::TEMPERATURE, 0, 0)), Ok(350));
    assert_eq!(machine.admin(get(feature::TEMPERATURE, 0, 1 << 20)), Ok(0x118));
    assert_eq!(machine.admin(set(feature::VECTOR, 3 | 1 << 16)), Ok(0));
    assert_eq!(machine.admin(get(feature::VECTOR, 0, 3)), Ok(3 | 1 << 16));
    assert_eq!(machine.admin(get(feature::VECTOR, 0, 4)), Ok(4));
}

#[test]
fn each_feature_command_that_makes_no_sense_gets_its_status() {
    let mut machine = Machine::enabled();
    let with = |mut sqe: Sqe, nsid: u64, dword10: u64| {
        sqe.0[0] |= nsid << 32;
        sqe.0[5] |= dword10;
        sqe
    };
    for (name, sqe, status) in [
        ("no such feature", set(0x77, 0), INVALID_FIELD),
        ("get no such feature", get(0x77, 0, 0), INVALID_FIELD),
        ("feature 0", get(0, 0, 0), INVALID_FIELD),
        ("autonomous power states", set(feature::AUTONOMOUS_POWER, 0), INVALID_FIELD),
        ("host memory buffer", set(feature::HOST_MEMORY, 0), INVALID_FIELD),
        ("save", with(set(feature::COALESCING, 1), 0, 1 << 31), NvmeStatus::FEATURE_NOT_SAVEABLE),
        ("reserved select", get(feature::COALESCING, 4, 0), INVALID_FIELD),
        ("of a namespace", with(set(feature::COALESCING, 1), 1, 0), NvmeStatus::FEATURE_NOT_NAMESPACE),
        ("of no namespace", with(set(feature::COALESCING, 1), 9, 0), NvmeStatus::INVALID_NAMESPACE),
        ("of the namespace that there is not", set(feature::ERROR_RECOVERY, 1), NvmeStatus::INVALID_NAMESPACE),
        ("errors for deallocated blocks", with(set(feature::ERROR_RECOVERY, 1 << 16), 1, 0), INVALID_FIELD),
        ("power state that does not exist", set(feature::POWER, 1), INVALID_FIELD),
        ("temperature sensor 1", set(feature::TEMPERATURE, 1 << 16), INVALID_FIELD),
        ("reserved threshold", set(feature::TEMPERATURE, 2 << 20), INVALID_FIELD),
        ("vector that does not exist", set(feature::VECTOR, 5), INVALID_FIELD),
        ("get a vector that does not exist", get(feature::VECTOR, 0, 0xffff), INVALID_FIELD),
        ("event that does not exist", set(feature::ASYNC_EVENTS, 1 << 31), INVALID_FIELD),
    ] {
        assert_eq!(machine.admin(sqe), Err(status), "{name}");
    }
    let pointer = set(feature::TIMESTAMP, 0).with_data(Psdt::Prp, [UNMAPPED, 0]);
    assert_eq!(machine.admin(pointer), Err(NvmeStatus::DATA_TRANSFER_ERROR));
}

#[test]
fn the_timestamp_goes_on_with_time() {
    let mut machine = Machine::enabled();
    let data = machine.page();
    machine.now_ns = 3_000_000_000;
    let read = |machine: &mut Machine| u64_at(&machine.admin_read(get(feature::TIMESTAMP, 0, 0), 8).unwrap(), 0);
    assert_eq!(read(&mut machine), 3000 - 1 + 1, "since the controller began, and nobody set it");
    machine.put(data, &0x0123_4567_89ab_u64.to_le_bytes());
    machine.admin(set(feature::TIMESTAMP, 0).with_data(Psdt::Prp, [data, 0])).unwrap();
    machine.now_ns += 1_500_000_000;
    assert_eq!(read(&mut machine), (0x0123_4567_89ab + 1500) | 1 << 49);
}

#[test]
fn a_host_that_stops_keeping_alive_is_fatal() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    assert_eq!(machine.controller.deadline_ns(), None);
    machine.admin(set(feature::KEEP_ALIVE, 2000)).unwrap();
    let start = machine.now_ns;
    assert_eq!(machine.controller.deadline_ns(), Some(start + 2_000_000_000));
    machine.now_ns += 1_900_000_000;
    assert_eq!(machine.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Ok(0));
    machine.now_ns += 1_900_000_000;
    machine.run();
    assert!(!machine.status().fatal);
    machine.now_ns += 100_000_000;
    machine.run();
    assert!(machine.status().fatal && machine.queues.is_empty());
    let cid = machine.cid();
    machine.push(&mut queue, Sqe::new(io::FLUSH, 1), cid);
    machine.run();
    assert_eq!(machine.take(&mut queue), [], "no command is processed");
    machine.write32(CC, 0);
    machine.run();
    assert_eq!(machine.read32(CSTS), 0);
    machine.enable();
    machine.now_ns += 1 << 40;
    machine.run();
    assert!(!machine.status().fatal, "the timer is off again");
}

#[test]
fn a_keep_alive_in_the_ring_is_in_time() {
    let mut machine = Machine::enabled();
    machine.admin(set(feature::KEEP_ALIVE, 2000)).unwrap();
    // The owner was busy elsewhere.
    machine.now_ns += 5_000_000_000;
    assert_eq!(machine.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Ok(0));
    assert!(!machine.status().fatal);
    assert_eq!(machine.controller.deadline_ns(), Some(machine.now_ns + 2_000_000_000));
    // Another command is none, and its completion is still signalled.
    machine.now_ns += 2_000_000_000;
    machine.start_admin(Sqe::abort(1, 1));
    machine.vectors.clear();
    assert_eq!(machine.admin_completions().len(), 1);
    assert!(machine.status().fatal && machine.vectors == [0]);
}

#[test]
fn a_disabled_write_cache_flushes_first_and_makes_writes_durable() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.page();
    let write = Sqe::with_blocks(io::WRITE, 1, 0, 1, 0).with_data(Psdt::Prp, [data, 0]);
    let flags = |machine: &mut Machine| machine.seen.drain(..).map(|(_, flags, ..)| flags).collect::<Vec<_>>();
    machine.io(&mut queue, write).unwrap();
    assert_eq!(flags(&mut machine), [0]);
    machine.is_flush_held = true;
    machine.start_admin(set(feature::WRITE_CACHE, 0));
    assert_eq!(machine.admin_completions(), [], "it is flushed first");
    let number = machine.flushes[0];
    assert!(machine.controller.awaits_flush(number));
    machine.is_flush_held = false;
    assert_eq!(machine.admin_completions().len(), 1);
    assert!(!machine.controller.awaits_flush(number));
    machine.io(&mut queue, write).unwrap();
    let mut later = machine.queue_pair(2, 8);
    machine.io(&mut later, write).unwrap();
    machine.admin(set(feature::WRITE_CACHE, 1)).unwrap();
    machine.io(&mut queue, write).unwrap();
    assert_eq!(flags(&mut machine), [1, 1, 0], "FUA");

    let mut none = namespaces();
    [1, 2, 4].into_iter().for_each(|nsid| none.set(nsid, None));
    machine.controller.set_namespaces(none);
    machine.run();
    assert_eq!(machine.admin(get(feature::WRITE_CACHE, 0, 0)), Err(INVALID_FIELD), "there is no cache");
    assert_eq!(machine.io(&mut queue, write), Err(INVALID_FIELD), "and no namespace");
}

#[test]
fn a_flush_is_obsolete_after_a_reset() {
    let mut machine = Machine::enabled();
    machine.is_flush_held = true;
    machine.start_admin(set(feature::WRITE_CACHE, 0));
    machine.run();
    let number = machine.flushes[0];
    assert!(machine.controller.awaits_flush(number));
    machine.write32(CC, 0);
    assert!(!machine.controller.awaits_flush(number));
}

#[test]
fn a_write_cache_that_cannot_be_flushed_stays_enabled() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.page();
    let write = Sqe::with_blocks(io::WRITE, 1, 0, 1, 0).with_data(Psdt::Prp, [data, 0]);
    let fail = |machine: &mut Machine, place| {
        let number = machine.flushes.remove(place);
        machine.controller.flush_failed(number);
        machine.admin_completions().iter().map(|cqe| result(*cqe)).collect::<Vec<_>>()
    };
    machine.is_flush_held = true;
    // The second waits for the flush of the first.
    for _ in 0..2 {
        machine.start_admin(set(feature::WRITE_CACHE, 0));
    }
    assert_eq!((machine.admin_completions(), machine.flushes.len()), (vec![], 1));
    assert_eq!(fail(&mut machine, 0), [Err(NvmeStatus::INTERNAL); 2]);
    assert_eq!(machine.admin(get(feature::WRITE_CACHE, 0, 0)), Ok(1));
    // Of two that are apart the later one decides.
    for value in [0, 1, 0] {
        machine.start_admin(set(feature::WRITE_CACHE, value));
    }
    assert_eq!((machine.admin_completions().len(), machine.flushes.len()), (1, 2));
    assert_eq!(fail(&mut machine, 0), [Err(NvmeStatus::INTERNAL)]);
    assert_eq!(machine.admin(get(feature::WRITE_CACHE, 0, 0)), Ok(0));
    assert_eq!(fail(&mut machine, 0), [Err(NvmeStatus::INTERNAL)]);
    assert_eq!(machine.admin(get(feature::WRITE_CACHE, 0, 0)), Ok(1));
    machine.seen.clear();
    machine.io(&mut queue, write).unwrap();
    assert_eq!(machine.seen[0].1, 0, "without FUA");
    machine.is_flush_held = false;
    assert_eq!(machine.admin(set(feature::WRITE_CACHE, 0)), Ok(0));
    assert_eq!(machine.admin(set(feature::WRITE_CACHE, 0)), Ok(0), "again");
}

#[test]
fn events_wait_for_requests_and_for_their_log_page() {
    let mut machine = Machine::enabled();
    let request = Sqe::new(admin::ASYNC_EVENT, 0);
    let mut cids: Vec<_> = (0..4).map(|_| machine.start_admin(request)).collect();
    assert_eq!(machine.admin_completions(), []);
    assert_eq!(machine.admin(request), Err(NvmeStatus::ASYNC_EVENT_LIMIT));
    // Notices that were not enabled are not reported.
    let mut table = namespaces();
    table.set(2, None);
    machine.controller.set_namespaces(table.clone());
    assert_eq!(machine.admin_completions(), []);
    machine.admin(set(feature::ASYNC_EVENTS, 1 << 8)).unwrap();
    table.set(4, None);
    machine.controller.set_namespaces(table.clone());
    let all = machine.admin_completions();
    assert_eq!((all.len(), all[0].cid(), result(all[0])), (1, cids.remove(0), Ok(0x04_00_02)));
    // The same event is masked until the page is read.
    machine.controller.set_namespaces(namespaces());
    assert_eq!(machine.admin_completions(), []);
    assert_eq!(log(&mut machine, 4, 16), [2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(machine.admin_completions(), [], "the page that was read says it");
    table.set(1, None);
    machine.controller.set_namespaces(table);
    assert_eq!(machine.admin_completions()[0].cid(), cids[0], "told again");
}

#[test]
fn a_log_page_read_with_retain_keeps_its_events() {
    let mut machine = Machine::enabled();
    machine.admin(set(feature::ASYNC_EVENTS, 1 << 8)).unwrap();
    let mut table = namespaces();
    table.set(2, None);
    machine.controller.set_namespaces(table);
    let mut retain = Sqe::get_log_page(4, ALL, 0, 4, 0);
    retain.0[5] |= 1 << 15;
    for _ in 0..2 {
        assert_eq!(machine.admin_read(retain, 16).unwrap()[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
    }
    machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    assert_eq!(result(machine.admin_completions()[0]), Ok(0x04_00_02));
    assert_eq!(log(&mut machine, 4, 16)[..4], [2, 0, 0, 0]);
    assert_eq!(log(&mut machine, 4, 16), [0; 16], "it was read");
}

#[test]
fn a_wrong_doorbell_is_an_error_event() {
    let mut machine = Machine::enabled();
    machine.queue_pair(1, 8);
    machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    machine.ring_tail(2, 1);
    assert_eq!(result(machine.admin_completions()[0]), Ok(0x01_00_00), "register of no queue");
    machine.ring_tail(1, 8);
    assert_eq!(machine.admin_completions(), [], "errors are masked");
    let errors = log(&mut machine, 1, 64);
    assert_eq!((errors[8], errors[10], errors[11]), (1, 0xff, 0xff), "of submission queue 1, not of a command");
    assert_eq!(machine.admin_completions(), []);
    machine.queue_pair(3, 8);
    machine.ring_tail(3, u32::MAX);
    assert_eq!(result(machine.admin_completions()[0]), Ok(0x01_01_00), "a value outside the ring");
}

#[test]
fn shadow_doorbells_are_set_up_checked_and_lost_with_a_reset() {
    let mut machine = Machine::enabled();
    let (doorbells, events) = (machine.page(), machine.page());
    for (sqe, name) in [
        (Sqe::doorbell_buffer(doorbells + 4, events), "not aligned"),
        (Sqe::doorbell_buffer(doorbells, events + 8), "events not aligned"),
        (Sqe::doorbell_buffer(doorbells, doorbells), "the same page"),
        (Sqe::doorbell_buffer(UNMAPPED, events), "not mapped"),
        (Sqe::doorbell_buffer(doorbells, 0), "at zero"),
        (Sqe::doorbell_buffer(!0xfff, events), "at the end"),
    ] {
        assert_eq!(machine.admin(sqe), Err(INVALID_FIELD), "{name}");
    }
    let mut queue = machine.queue_pair(1, 8);
    assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0), "by registers");
    machine.zero(doorbells, 2 * PAGE as usize);
    assert_eq!(machine.admin(Sqe::doorbell_buffer(doorbells, events)), Ok(0));
    assert_eq!((machine.load32(doorbells + 8), machine.load32(doorbells + 12)), (1, 1), "goes on where it was");
    // The shadow doorbell alone suffices: the controller is awake or is notified.
    let cid = machine.cid();
    machine.put_words(queue.sq + 64, &Sqe::new(io::FLUSH, 1).with_cid(cid).0);
    machine.store32(doorbells + 8, 2);
    machine.run();
    assert_eq!(machine.take(&mut queue).len(), 1);
    machine.store32(doorbells + 12, u32::from(queue.head));
    assert_eq!(machine.load32(events + 8), 2, "it asks to be told from there on");
    // Doorbell Buffer Config a second time, at another address.
    let (other, other_events) = (machine.page(), machine.page());
    assert_eq!(machine.admin(Sqe::doorbell_buffer(other, other_events)), Ok(0));
    assert_eq!(machine.load32(other + 8), 2);
    machine.write32(CC, 0);
    machine.run();
    machine.enable();
    let mut queue = machine.queue_pair(1, 8);
    machine.store32(other + 8, 7);
    assert_eq!(machine.io(&mut queue, Sqe::new(io::FLUSH, 1)), Ok(0), "by registers again");
}

#[test]
fn a_doorbell_write_for_a_head_is_requested_only_without_room() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let (doorbells, events) = (machine.page(), machine.page());
    assert_eq!(machine.admin(Sqe::doorbell_buffer(doorbells, events)), Ok(0));
    let before = machine.load32(events + 12);
    let sq = queue.sq;
    let flush = |machine: &mut Machine, number: u64| {
        let cid = machine.cid();
        machine.put_words(sq + (number - 1) % 8 * 64, &Sqe::new(io::FLUSH, 1).with_cid(cid).0);
        machine.store32(doorbells + 8, (number % 8) as u32);
        machine.run();
    };
    for number in 1..=20 {
        flush(&mut machine, number);
        assert_eq!(machine.take(&mut queue).len(), 1);
        machine.store32(doorbells + 12, u32::from(queue.head));
        assert_eq!(machine.load32(events + 12), before, "completion {number}");
    }
    for number in 21..=28 {
        flush(&mut machine, number);
    }
    assert_eq!(machine.load32(events + 12), u32::from(queue.head), "the ring is full");
    assert_eq!(machine.take(&mut queue).len(), 7);
    machine.store32(doorbells + 12, u32::from(queue.head));
    machine.run();
    assert_eq!(machine.take(&mut queue).len(), 1);
}

/// Carries out what the admin side asks of queues; each is dropped with its last answer, and what comes later is lost.
fn obey(machine: &mut Machine) {
    while let Some(ControllerRequest::Queue(cqid, command)) = machine.controller.take_request() {
        let Some(queue) = machine.queues.get_mut(&cqid) else { continue };
        queue.handle(command);
        let replies: Vec<_> = std::iter::from_fn(|| queue.take_reply()).collect();
        for reply in replies {
            machine.controller.reply(cqid, reply);
            if matches!(reply, ControllerQueueReply::Deleted | ControllerQueueReply::Stopped) {
                machine.queues.remove(&cqid);
            }
        }
    }
}

#[test]
fn nothing_waits_for_an_answer_of_a_queue_that_is_deleted() {
    let deleting = || {
        let mut machine = Machine::enabled();
        machine.queue_pair(1, 8);
        machine.queue_pair(2, 8);
        machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)).unwrap();
        machine.start_admin(Sqe::delete_queue(admin::DELETE_CQ, 1));
        machine
    };
    // Shadow doorbells in one batch with the deletion.
    let mut machine = deleting();
    let (doorbells, events) = (machine.page(), machine.page());
    machine.start_admin(Sqe::doorbell_buffer(doorbells, events));
    machine.controller.poll(machine.now_ns);
    obey(&mut machine);
    assert_eq!(machine.admin_completions().iter().map(|cqe| result(*cqe)).collect::<Vec<_>>(), [Ok(0); 2]);
    // A reset after it.
    let mut machine = deleting();
    machine.controller.poll(machine.now_ns);
    machine.write32(CC, 0);
    obey(&mut machine);
    assert!(!machine.status().ready && machine.queues.is_empty());
    // Other memory after it.
    let mut machine = deleting();
    machine.controller.poll(machine.now_ns);
    machine.controller.set_memory(&map_of(&machine.region.clone()));
    assert!(machine.controller.is_remapping());
    obey(&mut machine);
    assert!(!machine.controller.is_remapping());
}

#[test]
fn smart_counts_what_was_done() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    let data = machine.pages(4);
    let pointer = [data, data + PAGE];
    for _ in 0..3 {
        machine.io(&mut queue, Sqe::with_blocks(io::READ, 1, 0, 16, 0).with_data(Psdt::Prp, pointer)).unwrap();
    }
    machine.io(&mut queue, Sqe::with_blocks(io::WRITE, 2, 0, 2, 0).with_data(Psdt::Prp, pointer)).unwrap();
    machine.io(&mut queue, Sqe::with_blocks(io::VERIFY, 1, 0, 16, 0)).unwrap();
    machine.answer = Status::Medium;
    let read = Sqe::with_blocks(io::READ, 1, 5, 1, 0).with_data(Psdt::Prp, pointer);
    assert_eq!(machine.io(&mut queue, read), Err(NvmeStatus::UNRECOVERED_READ));
    let write = Sqe::with_blocks(io::WRITE, 1, 6, 1, 0).with_data(Psdt::Prp, pointer);
    assert_eq!(machine.io(&mut queue, write), Err(NvmeStatus::WRITE_FAULT));
    let check = |machine: &mut Machine| {
        let smart = log(machine, 2, 512);
        assert_eq!((smart[0], smart[3]), (0, 100), "no warning, all spare");
        assert_eq!([32, 48, 64, 80, 160, 176].map(|at| u64_at(&smart, at)), [1, 1, 4, 1, 2, 2]);
    };
    check(&mut machine);
    let errors = log(&mut machine, 1, 192);
    assert_eq!((u64_at(&errors, 0), u64_at(&errors, 64), u64_at(&errors, 128)), (2, 1, 0), "the latest one first");
    assert_eq!((u64_at(&errors, 16), u64_at(&errors, 64 + 16), errors[24]), (6, 5, 1), "blocks and namespace");
    machine.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)).unwrap();
    machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 1)).unwrap();
    check(&mut machine);
}

#[test]
fn aborts_are_counted_and_limited() {
    let mut machine = Machine::enabled();
    let mut queue = machine.queue_pair(1, 8);
    assert_eq!(machine.admin(Sqe::abort(1, 5)), Ok(1), "no such command");
    assert_eq!(machine.admin(Sqe::abort(2, 5)), Ok(1), "no such queue");
    assert_eq!(machine.admin(Sqe::abort(65535, 65535)), Ok(1), "nor this one");
    assert_eq!(machine.admin(Sqe::abort(0, 5)), Ok(1), "nor an admin command");
    // A pending event request can be aborted.
    let request = machine.start_admin(Sqe::new(admin::ASYNC_EVENT, 0));
    assert_eq!(machine.admin_completions(), []);
    let abort = machine.start_admin(Sqe::abort(0, request));
    let all = machine.admin_completions();
    assert_eq!([all[0].cid(), all[1].cid()], [request, abort]);
    assert_eq!((result(all[0]), result(all[1])), (Err(NvmeStatus::ABORT_REQUESTED), Ok(0)));
    // A command at a device continues, and does not delay the completion of the abort.
    machine.is_held = true;
    let cid = machine.cid();
    machine.push(&mut queue, Sqe::new(io::FLUSH, 1), cid);
    machine.run();
    assert_eq!(machine.admin(Sqe::abort(1, cid)), Ok(1));
    machine.is_held = false;
    machine.run();
    assert_eq!(result(machine.take(&mut queue)[0]), Ok(0));
    // Five concurrent aborts without answers: one too many.
    let cids: Vec<_> = (0..5).map(|_| machine.start_admin(Sqe::abort(1, 9))).collect();
    let all = machine.admin_completions();
    let limit: Vec<_> = all.iter().filter(|cqe| result(**cqe) == Err(NvmeStatus::ABORT_LIMIT)).collect();
    assert_eq!((all.len(), limit.len(), limit[0].cid()), (5, 1, cids[4]));
}

#[test]
fn shadow_doorbells_are_refused_if_they_are_not_offered() {
    let mut machine = Machine::with(ControllerOptions { has_shadow: false, ..crate::machine::options() });
    machine.enable();
    let identify = IdentifyController::parse(&identify(&mut machine, cns::CONTROLLER, 0).unwrap());
    assert!(!identify.has_shadow_doorbells());
    let (doorbells, events) = (machine.page(), machine.page());
    assert_eq!(machine.admin(Sqe::doorbell_buffer(doorbells, events)), Err(NvmeStatus::INVALID_OPCODE));
    let effects = machine.admin_read(Sqe::get_log_page(5, u32::MAX, 0, 1024, 0), 4096).unwrap();
    assert_eq!((effects[usize::from(admin::DOORBELL_BUFFER) * 4], effects[usize::from(admin::ABORT) * 4]), (0, 1));
}

#[test]
fn a_queue_that_cannot_be_served_is_refused() {
    let mut machine = Machine::enabled();
    let (sq, cq) = (machine.page(), machine.page());
    machine.refuses_queues = true;
    assert_eq!(machine.admin(Sqe::create_cq(1, 8, cq, None)), Err(NvmeStatus::INTERNAL));
    assert_eq!(machine.admin(Sqe::create_sq(1, 8, sq, 1)), Err(NvmeStatus::INVALID_CQ));
    assert_eq!(machine.admin(Sqe::delete_queue(admin::DELETE_CQ, 1)), Err(NvmeStatus::INVALID_QID));
    // A submission queue, and a deletion, before the completion queue is known to be served.
    machine.refuses_queues = false;
    machine.start_admin(Sqe::create_cq(1, 8, cq, None));
    machine.start_admin(Sqe::create_sq(1, 8, sq, 1));
    machine.start_admin(Sqe::delete_queue(admin::DELETE_CQ, 1));
    let all: Vec<_> = machine.admin_completions().into_iter().map(result).collect();
    assert_eq!(all, [Err(NvmeStatus::INVALID_CQ), Err(NvmeStatus::INVALID_QID), Ok(0)]);
    assert_eq!(machine.admin(Sqe::create_sq(1, 8, sq, 1)), Ok(0));
}
