//! An invalid vfio-user client: each message gets its errno or closes the connection, and the next client is served.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use blkyard_mq::Op;
use blkyard_nvme::{Psdt, Sqe, admin, feature, io};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{
    DmaMapFlags, DmaMapRequest, DmaUnmapRequest, HEADER_BYTES, IrqAction, IrqData, IrqRange, IrqSetRequest,
    RegionAccess, RegionWrite, VfioRequest, irq_index,
};
use common::{AnyDevice, Gate, NvmeWorld, RawClient, Seen};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const ENOENT: u32 = 2;
const EEXIST: u32 = 17;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOPNOTSUPP: u32 = 95;

fn world() -> NvmeWorld {
    NvmeWorld::new(&AnyDevice::ram(0), 2, 1)
}

fn file(bytes: u64) -> OwnedFd {
    let file = memfd_create("host", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

fn read(region: u32, offset: u64, count: u32) -> VfioRequest<'static> {
    VfioRequest::RegionRead(RegionAccess { offset, region, count })
}

fn map(address: u64, size: u64, offset: u64) -> VfioRequest<'static> {
    let flags = DmaMapFlags::READ | DmaMapFlags::WRITE;
    VfioRequest::DmaMap(DmaMapRequest { flags, offset, address, size })
}

fn unmap(address: u64, size: u64) -> VfioRequest<'static> {
    VfioRequest::DmaUnmap(DmaUnmapRequest::One { address, size })
}

/// Checks that the session continues: the version register says NVMe 2.0.
fn assert_served(client: &mut RawClient) {
    let version = client.call(&read(0, 8, 4), &[]).unwrap();
    assert_eq!(version[16..], [0, 0, 2, 0]);
}

#[test]
fn streams_that_make_no_sense_end_the_session_and_the_next_client_is_served() {
    let world = world();
    let header = |size: u32, flags: u32| {
        let mut bytes = [0; HEADER_BYTES];
        bytes[2] = 4;
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
        bytes
    };
    for (what, bytes) in [
        ("shorter than its header", header(15, 0)),
        ("size zero", header(0, 0)),
        ("longer than is taken", header(u32::MAX, 0)),
        ("undefined type", header(16, 2)),
        ("reserved flag", header(16, 1 << 6)),
        ("a reply to nothing", header(16, 1)),
        ("an error to nothing", header(16, 1 | 1 << 5)),
    ] {
        let client = RawClient::greeted(&world.path);
        client.send(&bytes, &[]);
        assert!(client.is_closed(), "{what}");
    }
    let client = RawClient::greeted(&world.path);
    let null = std::fs::File::open("/dev/null").unwrap();
    client.send(&header(16, 0), &[null.as_fd(); 40]);
    assert!(client.is_closed(), "more descriptors than it was told");
    assert_served(&mut RawClient::greeted(&world.path));
    world.stop();
}

#[test]
fn nothing_is_said_before_the_version_and_only_one_version_is_agreed_on() {
    let world = world();
    let mut client = RawClient::connect(&world.path);
    assert_eq!(client.call(&VfioRequest::DeviceGetInfo, &[]), Err(EINVAL));
    assert!(client.is_closed());
    let mut client = RawClient::connect(&world.path);
    assert_eq!(client.call(&RawClient::version(1, 0), &[]), Err(EINVAL));
    assert!(client.is_closed());
    let mut client = RawClient::connect(&world.path);
    assert_eq!(client.call_raw(1, b"\0\0\x01\0{\"capabilities\":", &[]), Err(EINVAL), "no NUL at the end");
    assert!(client.is_closed());
    let mut client = RawClient::connect(&world.path);
    let version = client.call(&RawClient::version(0, 7), &[]).unwrap();
    assert_eq!(version[..4], [0, 0, 1, 0], "the minor version that is served");
    assert_eq!(client.call(&RawClient::version(0, 1), &[]), Err(EINVAL));
    assert_served(&mut client);
    world.stop();
}

#[test]
fn the_version_reply_is_within_the_limits_of_qemu() {
    let world = world();
    let mut client = RawClient::connect(&world.path);
    let version = client.call(&RawClient::version(0, 1), &[]).unwrap();
    let (end, json) = version[4..].split_last().unwrap();
    assert_eq!(*end, 0);
    let text = std::str::from_utf8(json).unwrap();
    let number = |name: &str| -> u64 {
        let (_, value) = text.split_once(&format!("\"{name}\":")).unwrap();
        value.split_once([',', '}']).unwrap().0.parse().unwrap()
    };
    // VFIO_USER_MAX_MAX_FDS, VFIO_USER_MAX_MAX_XFER and VFIO_USER_DEF_MAP_MAX: QEMU refuses a server with more.
    for (name, most) in [("max_msg_fds", 16), ("max_data_xfer_size", 64 << 20), ("max_dma_maps", 65535)] {
        assert!((1..=most).contains(&number(name)), "{name} of {text}");
    }
    world.stop();
}

#[test]
fn unknown_commands_and_those_of_a_server_are_refused() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    for command in [0, 14, 16, 17, 18, u16::MAX] {
        assert_eq!(client.call_raw(command, &[0; 16], &[]), Err(EOPNOTSUPP), "{command}");
    }
    for command in [11, 12] {
        assert_eq!(client.call_raw(command, &[0; 16], &[]), Err(EOPNOTSUPP), "{command}");
    }
    assert_eq!(client.call_raw(4, &[16, 0, 0], &[]), Err(EINVAL), "shorter than its structure");
    assert_eq!(client.call_raw(13, &[0], &[]), Err(EINVAL), "longer than its structure");
    assert_served(&mut client);
    world.stop();
}

#[test]
fn accesses_outside_regions_are_refused() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let info = |index| VfioRequest::DeviceGetRegionInfo { argsz: 32, index };
    for index in [9, 10, u32::MAX] {
        assert_eq!(client.call(&info(index), &[]), Err(EINVAL), "region {index}");
    }
    for index in [5, u32::MAX] {
        assert_eq!(client.call(&VfioRequest::DeviceGetIrqInfo { index }, &[]), Err(EINVAL), "interrupt {index}");
    }
    for (region, offset, count) in [
        (7, 255, 2),
        (7, 256, 1),
        (7, u64::MAX, 1),
        (7, 0, 4096),
        (4, 4095, 2),
        (1, 0, 4),
        (6, 0, 1),
        (9, 0, 1),
        (u32::MAX, 0, 1),
        (0, 0x2000, 4),
        (0, u64::MAX - 3, 4),
        (0, 0, 3),
        (0, 0, 16),
        (0, 2, 4),
        (0, 0, 4097),
        (0, 0, u32::MAX),
        (0, 0, 0),
    ] {
        assert_eq!(client.call(&read(region, offset, count), &[]), Err(EINVAL), "{region} {offset:#x} {count}");
        let access = RegionAccess { region, offset, count };
        if count < 4096 {
            let bytes = vec![0xff; count as usize];
            let answer = client.call(&VfioRequest::RegionWrite(access, &bytes), &[]);
            assert_eq!(answer, Err(EINVAL), "write {region} {offset:#x} {count}");
        }
    }
    let write = RegionWrite { access: RegionAccess { region: 7, offset: 255, count: 2 }, data: [0; 8] };
    assert_eq!(client.call(&VfioRequest::RegionWriteMulti(vec![write]), &[]), Err(EINVAL));
    assert_eq!(client.call_raw(15, &u64::MAX.to_ne_bytes(), &[]), Err(EINVAL), "more writes than came");
    assert_served(&mut client);
    world.stop();
}

#[test]
fn memory_is_mapped_in_whole_pages_of_files_and_never_twice() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let memory = file(0x4000);
    let fds = [memory.as_fd()];
    assert_eq!(client.call(&map(0x10000, 0x2000, 0), &fds), Ok(vec![]));
    for (what, request, errno) in [
        ("address within a page", map(0x20800, 0x1000, 0), EINVAL),
        ("part of a page", map(0x20000, 0x800, 0), EINVAL),
        ("offset within a page", map(0x20000, 0x1000, 0x10), EINVAL),
        ("nothing", map(0x20000, 0, 0), EINVAL),
        ("beyond the end of the file", map(0x20000, 0x1000, 0x4000), EINVAL),
        ("an offset that wraps", map(0x20000, 0x1000, !0xfff), EINVAL),
        ("an address that wraps", map(!0xfff, 0x2000, 0), EINVAL),
        ("the same again", map(0x10000, 0x2000, 0), EEXIST),
        ("its second half", map(0x11000, 0x2000, 0), EEXIST),
        ("all around it", map(0xf000, 0x4000, 0), EEXIST),
        ("no mapping", unmap(0x20000, 0x1000), ENOENT),
        ("its first half", unmap(0x10000, 0x1000), ENOENT),
    ] {
        let fds = if matches!(request, VfioRequest::DmaMap(_)) { &fds[..] } else { &[] };
        assert_eq!(client.call(&request, fds), Err(errno), "{what}");
    }
    let (pipe, _end) = std::io::pipe().unwrap();
    assert_eq!(client.call(&map(0x20000, 0x1000, 0), &[pipe.as_fd()]), Err(EINVAL), "a pipe");
    assert_eq!(client.call(&map(0x20000, 0x1000, 0), &[fds[0], fds[0]]), Err(EINVAL), "two descriptors");
    assert_eq!(client.call(&map(0x20000, 0x1000, 0), &[]), Ok(vec![]), "not reached, but not refused");
    assert_eq!(client.call(&unmap(0x20000, 0x1000), &[]).map(|unmapped| unmapped.len()), Ok(24));
    // One mapping exists.
    for number in 1..128 {
        assert_eq!(client.call(&map(0x10_0000 + number * 0x1000, 0x1000, 0), &fds), Ok(vec![]), "{number}");
    }
    assert_eq!(client.call(&map(0x80_0000, 0x1000, 0), &fds), Err(ENOSPC));
    assert_eq!(client.call(&VfioRequest::DmaUnmap(DmaUnmapRequest::All), &[]).map(drop), Ok(()));
    assert_eq!(client.call(&map(0x80_0000, 0x1000, 0), &fds), Ok(vec![]));
    assert_served(&mut client);
    world.stop();
}

#[test]
fn interrupts_that_do_not_exist_and_descriptors_that_are_none_are_refused() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let event = EventFd::new().unwrap();
    let set = |index, start, count, action, data| {
        VfioRequest::DeviceSetIrqs(IrqSetRequest { range: IrqRange { index, start, count }, action, data })
    };
    let msix = irq_index::MSIX;
    let (trigger, eventfds) = (IrqAction::Trigger, IrqData::SetEventfds);
    let plain = file(0x1000);
    assert_eq!(client.call(&set(msix, 0, 3, trigger, eventfds), &[event.as_fd(); 3]), Ok(vec![]));
    for (what, request, fds) in [
        ("a fourth vector", set(msix, 3, 1, trigger, eventfds), vec![event.as_fd()]),
        ("a range that wraps", set(msix, u32::MAX, 2, trigger, eventfds), vec![event.as_fd(); 2]),
        ("the interrupt line", set(irq_index::INTX, 0, 1, trigger, eventfds), vec![event.as_fd()]),
        ("no such type", set(7, 0, 1, trigger, eventfds), vec![event.as_fd()]),
        ("a mask", set(msix, 0, 1, IrqAction::Mask, IrqData::All), vec![]),
        ("an unmask", set(msix, 0, 1, IrqAction::Unmask, IrqData::All), vec![]),
        ("no eventfd", set(msix, 0, 1, trigger, eventfds), vec![plain.as_fd()]),
        ("fewer descriptors than vectors", set(msix, 0, 3, trigger, eventfds), vec![event.as_fd(); 2]),
    ] {
        assert_eq!(client.call(&request, &fds), Err(EINVAL), "{what}");
    }
    assert!(!event.take());
    assert_eq!(client.call(&set(msix, 1, 1, trigger, IrqData::All), &[]), Ok(vec![]));
    assert!(event.take(), "what was set before stays");
    assert_eq!(client.call(&set(msix, 0, 0, trigger, IrqData::All), &[]), Ok(vec![]));
    assert_eq!(client.call(&set(msix, 0, 3, trigger, IrqData::Some(&[1; 3])), &[]), Ok(vec![]));
    assert!(!event.take(), "disabled");
    assert_served(&mut client);
    world.stop();
}

#[test]
fn a_controller_enabled_on_memory_that_is_not_there_fails_and_is_reset() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let write = |offset, bytes: &'static [u8]| {
        VfioRequest::RegionWrite(RegionAccess { offset, region: 0, count: bytes.len() as u32 }, bytes)
    };
    for request in [
        write(0x24, &[7, 0, 7, 0]),
        write(0x28, &[0, 0, 1, 0, 0, 0, 0, 0]),
        write(0x30, &[0, 0x10, 1, 0, 0, 0, 0, 0]),
        write(0x14, &[1, 0, 0x46, 0]),
    ] {
        client.call(&request, &[]).unwrap();
    }
    assert_eq!(client.call(&read(0, 0x1c, 4), &[]).unwrap()[16], 2, "CSTS.CFS");
    // Doorbells of queues that do not exist, while the controller is not ready.
    for offset in [0x1000, 0x1008, 0x1010, 0x1ffc] {
        client.call(&write(offset, &[0xff; 4]), &[]).unwrap();
    }
    assert_eq!(client.call(&VfioRequest::DeviceReset, &[]), Ok(vec![]));
    assert_eq!(client.call(&read(0, 0x1c, 4), &[]).unwrap()[16], 0);
    assert_eq!(client.call(&read(0, 0x24, 4), &[]).unwrap()[16..], [0; 4], "AQA");
    world.stop();
}

/// A host with an admin queue and nothing else: its memory is a file, mapped at [`AdminHost::BASE`].
struct AdminHost {
    client: RawClient,
    memory: std::fs::File,
    tail: u32,
}

impl AdminHost {
    const BASE: u64 = 0x10000;

    /// An enabled controller; the rings are the first two pages of the memory.
    fn enable(world: &NvmeWorld) -> AdminHost {
        let mut client = RawClient::greeted(&world.path);
        let memory = file(0x10000);
        client.call(&map(AdminHost::BASE, 0x10000, 0), &[memory.as_fd()]).unwrap();
        let mut host = AdminHost { client, memory: memory.into(), tail: 0 };
        host.write(0x24, &[7, 0, 7, 0]);
        host.write(0x28, &AdminHost::BASE.to_le_bytes());
        host.write(0x30, &(AdminHost::BASE + 0x1000).to_le_bytes());
        host.write(0x14, &[1, 0, 0x46, 0]);
        assert_eq!(host.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16], 1, "CSTS.RDY");
        host
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let access = RegionAccess { offset, region: 0, count: bytes.len() as u32 };
        self.client.call(&VfioRequest::RegionWrite(access, bytes), &[]).unwrap();
    }

    /// Puts a command into a submission ring in a page of the memory.
    fn put(&self, page: u64, index: u32, sqe: Sqe) {
        let bytes: Vec<u8> = sqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.write_all_at(&bytes, page * 0x1000 + u64::from(index) * 64).unwrap();
    }

    /// Status of a completion ring's entry in its first round; unset if it is not there.
    fn status(&self, page: u64, index: u32) -> Option<u16> {
        let mut bytes = [0; 2];
        self.memory.read_exact_at(&mut bytes, page * 0x1000 + u64::from(index) * 16 + 14).unwrap();
        let word = u16::from_le_bytes(bytes);
        (word & 1 != 0).then_some(word >> 1)
    }

    /// Sends an admin command: it is carried out when this returns. Seven at most.
    fn admin(&mut self, sqe: Sqe) -> Option<u16> {
        let index = self.tail;
        self.put(0, index, sqe.with_cid(index as u16));
        self.tail += 1;
        self.write(0x1000, &self.tail.to_le_bytes());
        self.status(1, index)
    }
}

#[test]
fn an_admin_interrupt_waits_for_its_eventfd() {
    let world = world();
    let mut host = AdminHost::enable(&world);
    assert_eq!(host.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Some(0));
    let event = EventFd::new().unwrap();
    let range = IrqRange { index: irq_index::MSIX, start: 0, count: 1 };
    let set =
        VfioRequest::DeviceSetIrqs(IrqSetRequest { range, action: IrqAction::Trigger, data: IrqData::SetEventfds });
    host.client.call(&set, &[event.as_fd()]).unwrap();
    assert!(event.take(), "the completion came before the eventfd");
    host.client.call(&set, &[event.as_fd()]).unwrap();
    assert!(!event.take(), "once");
    world.stop();
}

#[test]
fn a_write_in_flight_is_flushed_when_the_cache_is_disabled() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    host.put(2, 0, Sqe::with_blocks(io::WRITE, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
    host.write(0x1008, &[1, 0, 0, 0]);
    common::until("the write is in flight", || gate.held() == 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Time for a flush that does not wait for the write.
            std::thread::sleep(Duration::from_millis(100));
            gate.set_shut(false);
        });
        assert_eq!(host.admin(Sqe::feature(admin::SET_FEATURES, feature::WRITE_CACHE, 0)), Some(0));
    });
    assert_eq!(host.status(3, 0), Some(0), "the write is complete");
    let seen = gate.seen();
    let at = |what: fn(&Seen) -> bool| seen.iter().position(what).unwrap();
    let (written, flushed) =
        (at(|seen| matches!(seen, Seen::Ended(Op::Write, _))), at(|seen| matches!(seen, Seen::Taken(Op::Flush, ..))));
    assert!(written < flushed, "{seen:?}");
    world.stop();
}

#[test]
fn a_client_that_stops_within_a_message_or_never_reads_does_not_hold_up_the_end() {
    let world = world();
    let client = RawClient::greeted(&world.path);
    client.send(&[0; HEADER_BYTES - 1], &[]);
    world.stop();
    assert!(client.is_closed());
    let world = self::world();
    let client = RawClient::greeted(&world.path);
    // Until replies fill the socket, and then commands.
    let request = read(7, 0, 256).encode(1, false);
    for _ in 0..100_000 {
        if !client.try_send(&request) {
            break;
        }
    }
    world.stop();
}
