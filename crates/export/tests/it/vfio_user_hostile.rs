//! An invalid vfio-user client: each message gets its errno or closes the connection, and the next client is served.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Release, SeqCst};
use std::time::{Duration, Instant};

use blkyard_export::NvmeDoorbells;
use blkyard_mem::{EXPORT_BYTES_MAX, Region, View};
use blkyard_mq::Op;
use blkyard_nvme::{Psdt, Sqe, admin, feature, io};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{
    DmaUnmapRequest, HEADER_BYTES, IrqAction, IrqData, IrqRange, IrqSetRequest, RegionAccess, RegionWrite, VfioRequest,
    irq_index,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl, ftruncate};

use crate::common::nvme::{file, map, read};
use crate::common::{AdminHost, AnyDevice, Gate, NvmeWorld, PATIENCE, RawClient, Seen};

const EEXIST: u32 = 17;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOPNOTSUPP: u32 = 95;

fn world() -> NvmeWorld {
    NvmeWorld::new(&AnyDevice::ram(0), 2, 1)
}

fn unmap(address: u64, size: u64) -> VfioRequest<'static> {
    VfioRequest::DmaUnmap(DmaUnmapRequest::Range { address, size })
}

/// Checks that the session continues: the version register says NVMe 2.0.
pub(crate) fn assert_served(client: &mut RawClient) {
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
    // Errors of the link are not reported: QEMU warns of an interrupt type that is known but not there.
    for index in [irq_index::ERR, 5, u32::MAX] {
        assert_eq!(client.call(&VfioRequest::DeviceGetIrqInfo { index }, &[]), Err(EINVAL), "interrupt {index}");
    }
    for (region, offset, count) in [
        (7, 4095, 2),
        (7, 4096, 1),
        (7, u64::MAX, 1),
        (7, 1, 4096),
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
    let write = RegionWrite { access: RegionAccess { region: 7, offset: 4095, count: 2 }, data: [0; 8] };
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
        ("its first half", unmap(0x10000, 0x1000), EINVAL),
        ("its second half and more", unmap(0x11000, 0x2000), EINVAL),
        ("the middle of all around it", unmap(0x11000, 1), EINVAL),
        ("a range of nothing", unmap(0x10000, 0), EINVAL),
        ("a range that wraps", unmap(0x10000, u64::MAX), EINVAL),
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
    for offset in [0x1000, 0x1008, 0x1040, 0x1080, 0x1ffc] {
        client.call(&write(offset, &[0xff; 4]), &[]).unwrap();
    }
    assert_eq!(client.call(&VfioRequest::DeviceReset, &[]), Ok(vec![]));
    assert_eq!(client.call(&read(0, 0x1c, 4), &[]).unwrap()[16], 0);
    assert_eq!(client.call(&read(0, 0x24, 4), &[]).unwrap()[16..], [0; 4], "AQA");
    world.stop();
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
fn a_client_that_fills_its_eventfd_does_not_hold_up_its_export() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let range = IrqRange { index: irq_index::MSIX, start: 0, count: 1 };
    let set = |data| VfioRequest::DeviceSetIrqs(IrqSetRequest { range, action: IrqAction::Trigger, data });
    client.call(&set(IrqData::SetEventfds), &[event.as_fd()]).unwrap();
    let trigger = set(IrqData::All).encode(1, false);
    let [ends, begins, is_full] = [(); 3].map(|()| AtomicBool::new(false));
    let drain = || {
        fcntl_setfl(&event, OFlags::NONBLOCK).unwrap();
        let _ = rustix::io::read(&event, &mut [0; 8]);
    };
    std::thread::scope(|scope| {
        let _end = crate::common::Ends(&ends);
        scope.spawn(|| {
            let mut delay = 0_u32;
            loop {
                while !begins.swap(false, SeqCst) {
                    if ends.load(SeqCst) {
                        return;
                    }
                    std::thread::yield_now();
                }
                // Full and blocking, at any time between a poll and a write of the server.
                delay = (delay * 5 + 7) % 4096;
                (0..delay * 4).for_each(|_| std::hint::spin_loop());
                fcntl_setfl(&event, OFlags::empty()).unwrap();
                let _ = rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes());
                is_full.store(true, SeqCst);
            }
        });
        let until = Instant::now() + Duration::from_secs(3);
        let mut is_answered = true;
        while is_answered && Instant::now() < until {
            begins.store(true, SeqCst);
            client.send(&trigger, &[]);
            is_answered = client.is_readable(Duration::from_secs(20));
            // A write that waits is released, also that of the attacker.
            while !is_full.swap(false, SeqCst) {
                drain();
                std::thread::yield_now();
            }
            drain();
            client.receive().unwrap().1.unwrap();
        }
        assert!(is_answered, "the export waits for the client's eventfd");
    });
    assert_served(&mut client);
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
    host.write(0x1080, &[1, 0, 0, 0]);
    crate::common::until("the write is in flight", || gate.held() == 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Time for a flush that does not wait for the write.
            std::thread::sleep(Duration::from_millis(100));
            gate.set_shut(false);
        });
        let index = host.tail;
        host.admin(Sqe::feature(admin::SET_FEATURES, feature::WRITE_CACHE, 0));
        crate::common::until("the cache is disabled", || host.status(1, index) == Some(0));
    });
    assert_eq!(host.status(3, 0), Some(0), "the write is complete");
    let seen = gate.seen();
    let at = |what: fn(&Seen) -> bool| seen.iter().position(what).unwrap();
    let (written, flushed) =
        (at(|seen| matches!(seen, Seen::Ended(Op::Write, _))), at(|seen| matches!(seen, Seen::Taken(Op::Flush, ..))));
    assert!(written < flushed, "{seen:?}");
    world.stop();
}

/// A file may be longer than its memory. Without addresses no other client could be served, and the process aborted.
#[test]
fn client_takes_no_more_addresses_than_an_export_has() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let half = EXPORT_BYTES_MAX / 2;
    let memory = file(4 * half);
    let mut ask = |address, size| client.call(&map(address, size, 0), &[memory.as_fd()]).map(drop);
    assert_eq!(ask(0, 3 * half), Err(ENOSPC));
    assert_eq!([ask(0, half), ask(half, half)], [Ok(()); 2]);
    assert_eq!(ask(2 * half, 0x1000), Err(ENOSPC));
    // Memory that is not mapped takes none.
    client.call(&map(2 * half, half, 0), &[]).unwrap();
    client.call(&VfioRequest::DmaUnmap(DmaUnmapRequest::Range { address: half, size: half }), &[]).unwrap();
    client.call(&map(half, 0x1000, 0), &[memory.as_fd()]).unwrap();
    drop(client);
    world.stop();
}

#[test]
fn a_silent_host_loses_its_controller_in_time() {
    let world = world();
    let mut host = AdminHost::enable(&world);
    assert_eq!(host.admin(Sqe::feature(admin::SET_FEATURES, feature::KEEP_ALIVE, 1000)), Some(0));
    let status = |host: &mut AdminHost| host.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16];
    assert_eq!(status(&mut host), 1, "CSTS.RDY");
    // A read of a register does not judge the timer.
    crate::common::until("the timer expires", || status(&mut host) & 2 == 2);
    world.stop();
}

/// The doorbells that a client has mapped.
fn shared_doorbells(client: &mut RawClient) -> View {
    let file = doorbell_file(client);
    View::new(Region::map_file(file.as_fd(), 0x1000, 0x1000).unwrap(), 0, 0x1000, 4096).unwrap()
}

/// The file that holds the doorbells, from offset 1000h on.
pub(crate) fn doorbell_file(client: &mut RawClient) -> OwnedFd {
    let info = |argsz| VfioRequest::DeviceGetRegionInfo { argsz, index: 0 };
    let cut = client.call(&info(32), &[]).unwrap();
    let word = |bytes: &[u8], at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!((cut.len(), word(&cut, 0), word(&cut, 12)), (32, 64, 0), "it does not fit");
    assert_eq!(word(&cut, 4) & 8, 0, "QEMU refuses capabilities without an offset");
    assert!(client.take_descriptor().is_none());
    let whole = client.call(&info(64), &[]).unwrap();
    assert_eq!((whole.len(), word(&whole, 0), word(&whole, 4), word(&whole, 12)), (64, 64, 15, 32));
    // One area, at the doorbells.
    assert_eq!((word(&whole, 40), word(&whole, 48), word(&whole, 56)), (1, 0x1000, 0x1000));
    client.take_descriptor().expect("the file comes with it")
}

#[test]
fn any_value_of_a_shared_doorbell_stops_at_most_its_queue() {
    let world = NvmeWorld::with(&AnyDevice::ram(0), 2, 1, NvmeDoorbells::Shared);
    let mut host = AdminHost::enable(&world);
    let doorbells = shared_doorbells(&mut host.client);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    host.put(2, 0, Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
    doorbells.store_u32(0x80, 1, Release);
    crate::common::until("the read is complete", || host.status(3, 0) == Some(0));
    for value in [8, 0xffff, u32::MAX] {
        (0x80 / 4..1024).for_each(|number| doorbells.store_u32(number * 4, value, Release));
        assert_served(&mut host.client);
    }
    // A queue is created anew after one whose doorbell was invalid.
    assert_eq!(host.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), Some(0));
    assert_eq!(host.admin(Sqe::delete_queue(admin::DELETE_CQ, 1)), Some(0));
    doorbells.store_u32(0, u32::MAX, Release);
    crate::common::until("the invalid tail of the admin queue is seen", || {
        host.write(0x1000, &[0; 4]);
        host.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16] == 1
    });
    assert_eq!(host.client.call(&VfioRequest::DeviceReset, &[]), Ok(vec![]));
    assert_served(&mut host.client);
    world.stop();
}

#[test]
fn a_host_that_adds_admin_commands_without_end_is_answered() {
    let world = NvmeWorld::with(&AnyDevice::ram(0), 2, 1, NvmeDoorbells::Shared);
    let mut host = AdminHost::enable(&world);
    let doorbells = shared_doorbells(&mut host.client);
    for index in 0..8 {
        host.put(0, index, Sqe::new(admin::KEEP_ALIVE, 0).with_cid(index as u16));
    }
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = crate::common::Ends(&ends);
        scope.spawn(|| {
            // Each command is announced and its completion accepted, whether it is there or not.
            let mut tail = 0;
            while !ends.load(SeqCst) {
                tail = (tail + 1) % 8;
                doorbells.store_u32(0, tail, Release);
                doorbells.store_u32(0x40, tail, Release);
            }
        });
        for _ in 0..100 {
            assert_served(&mut host.client);
        }
    });
    world.stop();
}

/// QEMU does this with a guest's memory when the guest moves a BAR or changes the memory below 1 MiB.
#[test]
fn a_range_is_unmapped_with_all_mappings_in_it() {
    let world = world();
    let mut client = RawClient::greeted(&world.path);
    let memory = file(0x4000);
    let fds = [memory.as_fd()];
    let (top, all) = (0xfef0_0000, 0x1_0000_0000);
    for _ in 0..2 {
        for address in [0x10000, 0x11000, 0x2_0000, all - 0x1000, !0x1fff] {
            assert_eq!(client.call(&map(address, 0x1000, 0), &fds), Ok(vec![]), "{address:#x}");
        }
        // QEMU asks for these when a guest turns on its IOMMU.
        for (address, size) in [(all, all), (0, 0x18000), (0, 0x18000), (0x18000, top - 0x18000), (top, !top + 1)] {
            assert_eq!(client.call(&unmap(address, size), &[]).map(|unmapped| unmapped.len()), Ok(24), "{address:#x}");
        }
    }
    crate::common::until("no mapping is left", || world.server().status().session().unwrap().dma_maps == 0);
    world.stop();
}

#[test]
fn memory_of_live_rings_is_unmapped_and_mapped_again() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let mut host = AdminHost::enable(&world);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    for index in 0..4 {
        host.put(2, index, Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
        host.write(0x1080, &(index + 1).to_le_bytes());
        crate::common::until("the read is complete", || host.status(3, index) == Some(0));
        host.client.call(&unmap(AdminHost::BASE, 0x10000), &[]).unwrap();
        assert_eq!(host.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16], 1, "CSTS.RDY, and no error");
        host.client.call(&map(AdminHost::BASE, 0x10000, 0), &[host.memory.as_fd()]).unwrap();
        assert_eq!(host.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Some(0));
    }
    host.client.call(&unmap(AdminHost::BASE, 0x10000), &[]).unwrap();
    host.write(0x1080, &[5, 0, 0, 0]);
    assert_eq!(host.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16] & 2, 2, "CSTS.CFS: a fetch from it");
    world.stop();
}

/// Enables or disables the write cache; to disable it flushes it.
fn set_write_cache(host: &mut AdminHost, value: u32) {
    host.admin(Sqe::feature(admin::SET_FEATURES, feature::WRITE_CACHE, value));
}

/// Whether this process, and so the server, has mapped the host's memory.
fn is_mapped(host: &AdminHost) -> bool {
    let inode = host.memory.metadata().unwrap().ino().to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.contains("memfd:host") && line.split_whitespace().nth(4) == Some(&inode))
}

#[test]
fn unmapped_memory_is_released_before_the_reply() {
    let gate = Gate::open();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    gate.set_shut(true);
    // Two flushes.
    [0, 1, 0].into_iter().for_each(|value| set_write_cache(&mut host, value));
    crate::common::until("the first is in flight", || gate.held() == 1);
    assert!(is_mapped(&host));
    let is_answered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = crate::common::Ends(&is_answered);
        scope.spawn(|| {
            while !is_answered.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(100));
                gate.admit(1);
            }
        });
        host.client.call(&unmap(AdminHost::BASE, 0x10000), &[]).unwrap();
        assert!(!is_mapped(&host), "a queue keeps it");
    });
    gate.set_shut(false);
    host.client.call(&map(AdminHost::BASE, 0x10000, 0), &[host.memory.as_fd()]).unwrap();
    crate::common::until("the flushes are answered", || host.status(1, 4) == Some(0));
    assert_eq!(host.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Some(0));
    host.put(2, 0, Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
    host.write(0x1080, &[1, 0, 0, 0]);
    crate::common::until("the read is complete", || host.status(3, 0) == Some(0));
    world.stop();
}

#[test]
fn a_queue_created_after_a_reset_is_not_stopped_by_that_reset() {
    let gate = Gate::open();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    gate.set_shut(true);
    set_write_cache(&mut host, 0);
    crate::common::until("the flush is in flight", || gate.held() == 1);
    host.admin(Sqe::delete_queue(admin::DELETE_CQ, 1));
    // A second flush, for which nobody waits after the reset.
    set_write_cache(&mut host, 1);
    set_write_cache(&mut host, 0);
    host.write(0x14, &[0, 0, 0x46, 0]);
    gate.admit(1);
    crate::common::until("the reset ends", || host.csts() == 0);
    host.memory.write_all_at(&[0; 0x4000], 0).unwrap();
    host.tail = 0;
    host.write(0x14, &[1, 0, 0x46, 0]);
    assert_eq!(host.csts(), 1);
    // The flush from before the reset may have to end first.
    host.admin(Sqe::create_cq(1, 8, page(3), None));
    crate::common::until("the queue is created", || host.status(1, 0) == Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    gate.set_shut(false);
    host.put(2, 0, Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
    host.write(0x1080, &[1, 0, 0, 0]);
    crate::common::until("the read is complete", || host.status(3, 0) == Some(0));
    let seen = gate.seen();
    let flushes = seen.iter().filter(|seen| matches!(seen, Seen::Taken(Op::Flush, ..))).count();
    assert_eq!(flushes, 1, "{seen:?}");
    world.stop();
}

#[test]
fn an_eventfd_set_while_its_queue_is_stopped_is_signalled() {
    let gate = Gate::open();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), Some(1))), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    host.put(2, 0, Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
    host.write(0x1080, &[1, 0, 0, 0]);
    crate::common::until("the read is complete", || host.status(3, 0) == Some(0));
    gate.set_shut(true);
    set_write_cache(&mut host, 0);
    crate::common::until("the queue is stopped for the flush", || gate.held() == 1);
    let event = EventFd::new().unwrap();
    let range = IrqRange { index: irq_index::MSIX, start: 1, count: 1 };
    let set =
        VfioRequest::DeviceSetIrqs(IrqSetRequest { range, action: IrqAction::Trigger, data: IrqData::SetEventfds });
    host.client.call(&set, &[event.as_fd()]).unwrap();
    gate.set_shut(false);
    crate::common::until("the completion before the eventfd is signalled", || event.take());
    world.stop();
}

#[test]
fn memory_truncated_under_the_admin_queue_ends_the_session() {
    let world = world();
    let host = AdminHost::enable(&world);
    host.memory.set_len(0).unwrap();
    let doorbell = RegionAccess { offset: 0x1000, region: 0, count: 4 };
    host.client.send(&VfioRequest::RegionWrite(doorbell, &[1, 0, 0, 0]).encode(1, false), &[]);
    assert!(host.client.is_closed());
    assert_served(&mut RawClient::greeted(&world.path));
    world.stop();
}

/// A client takes the end of the connection for the silence of the device, and uses its memory for other things.
#[test]
fn a_connection_ends_after_all_queues_are_silent() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    // Queue 1 has a write in flight; the rings of queue 2 are in a file of their own.
    let rings = file(0x2000);
    host.client.call(&map(0x10_0000, 0x2000, 0), &[rings.as_fd()]).unwrap();
    host.get_stuck(&gate);
    assert_eq!(host.admin(Sqe::create_cq(2, 8, 0x10_0000, None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(2, 8, 0x10_1000, 2)), Some(0));
    ftruncate(&rings, 0).unwrap();
    let doorbell = RegionAccess { offset: 0x1100, region: 0, count: 4 };
    host.client.send(&VfioRequest::RegionWrite(doorbell, &[1, 0, 0, 0]).encode(1, true), &[]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Time for a hang-up that does not wait for the write.
            std::thread::sleep(Duration::from_millis(300));
            gate.set_shut(false);
        });
        assert!(host.client.is_closed());
        assert_eq!(gate.held(), 0, "the write is in flight, and its completion to come");
    });
    let memory = |host: &AdminHost| {
        let mut bytes = vec![0; 0x10000];
        host.memory.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let before = memory(&host);
    std::thread::sleep(Duration::from_millis(200));
    assert!(memory(&host) == before, "the memory changes after the end");
    assert_served(&mut RawClient::greeted(&world.path));
    world.stop();
}

#[test]
fn a_flush_completes_while_messages_keep_coming() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::enable(&world);
    set_write_cache(&mut host, 0);
    crate::common::until("the flush is in flight", || gate.held() == 1);
    // They need no reply. The socket is filled again whenever it has room, so that it always has some.
    let messages = read(0, 8, 4).encode(1, true).repeat(256);
    while host.client.try_send(&messages) {}
    gate.set_shut(false);
    let (limit, mut sent) = (Instant::now() + PATIENCE, 0);
    while host.status(1, 0).is_none() {
        assert!(sent < 2000 && Instant::now() < limit, "the flush waits for {sent} times 256 messages");
        sent += u32::from(host.client.try_send(&messages));
    }
    assert_eq!(host.status(1, 0), Some(0));
    world.stop();
}

/// QEMU gives up a message after 5 s.
#[test]
fn a_reset_and_a_shutdown_are_answered_before_the_device() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    for (config, while_shut, afterwards) in [([0, 0, 0x46, 0], 1, 0), ([1, 0x40, 0x46, 0], 5, 9)] {
        let mut host = AdminHost::stuck(&world, &gate);
        host.write(0x14, &config);
        for _ in 0..20 {
            assert_eq!(host.csts(), while_shut, "the write is in flight");
        }
        gate.set_shut(false);
        crate::common::until("it is complete", || host.csts() == afterwards);
        assert_eq!(gate.held(), 0);
        gate.set_shut(true);
    }
    gate.set_shut(false);
    world.stop();
}

#[test]
fn the_deletion_of_a_queue_is_complete_when_its_commands_are() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::stuck(&world, &gate);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    assert_eq!(host.admin(Sqe::delete_queue(admin::DELETE_SQ, 1)), None);
    // Other commands and queues are not delayed: theirs are the next completions.
    host.admin(Sqe::abort(1, 0));
    host.admin(Sqe::create_cq(2, 8, page(6), None));
    crate::common::until("both are complete", || host.status(1, 3).is_some());
    assert_eq!([2, 3, 4].map(|index| host.status(1, index)), [Some(0), Some(0), None]);
    assert_eq!(host.status(3, 0), None, "the write is in flight");
    gate.set_shut(false);
    crate::common::until("the queue is deleted", || host.status(1, 4) == Some(0));
    assert_eq!(host.status(3, 0), Some(0), "the write was complete before");
    world.stop();
}

#[test]
fn a_client_that_leaves_during_a_reset_is_waited_for() {
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::stuck(&world, &gate);
    host.write(0x14, &[0, 0, 0x46, 0]);
    drop(host);
    gate.set_shut(false);
    let mut client = RawClient::greeted(&world.path);
    assert_served(&mut client);
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
