//! Memory that a vfio-user client maps for reading or writing only, and memory of the server that a client maps for
//! DMA: each command gets its status, and memory without the permission keeps its bytes.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::time::Instant;

use blkyard_export::NvmeDoorbells;
use blkyard_mem::{Region, View};
use blkyard_nvme::{NvmeStatus, Psdt, Sqe, cns, io};
use blkyard_wire::vfio_user::{DmaMapFlags, VfioRequest};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create, openat};

use crate::common::nvme::{file, map, map_for, read};
use crate::common::{AdminHost, AnyDevice, Ends, NvmeWorld, PATIENCE, RawClient, until};
use crate::vfio_user_hostile::{assert_served, doorbell_file};
use crate::vfio_user_maps::{IoHost, UNMAPPED, page};

/// Memory that the server may read, write, or neither.
const READABLE: u64 = 0x100_0000;
const WRITABLE: u64 = 0x200_0000;
const NEITHER: u64 = 0x300_0000;
const OK: NvmeStatus = NvmeStatus::SUCCESS;
/// Flag of a status: there is more in the error log.
const MORE: u16 = 1 << 13;

/// A host with a mapping of each kind, and the files of these. Each file has two pages.
fn host_with_rights(world: &NvmeWorld) -> (IoHost, [File; 3]) {
    let mut host = IoHost::new(world);
    let files = [(); 3].map(|()| File::from(file(0x2000)));
    let flags = [DmaMapFlags::READ, DmaMapFlags::WRITE, DmaMapFlags::empty()];
    for ((address, flags), file) in [READABLE, WRITABLE, NEITHER].into_iter().zip(flags).zip(&files) {
        host.host.client.call(&map_for(flags, address, 0x2000, 0), &[file.as_fd()]).unwrap();
    }
    (host, files)
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; 0x2000];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A command for blocks of data with these pointers.
fn blocks(opcode: u8, count: u32, data: [u64; 2]) -> Sqe {
    Sqe::with_blocks(opcode, 1, 0, count, 0).with_data(Psdt::Prp, data)
}

#[test]
fn data_is_moved_in_the_direction_that_its_memory_allows() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let (mut host, [readable, writable, neither]) = host_with_rights(&world);
    readable.write_all_at(&[7; 0x2000], 0).unwrap();
    let (write, load, compare) = (io::WRITE, io::READ, io::COMPARE);
    for (opcode, data, status) in [
        (write, READABLE, OK),
        (compare, READABLE, OK),
        (load, READABLE, UNMAPPED),
        (load, WRITABLE, OK),
        // What would be written is something else than the disk has.
        (write, WRITABLE + 0x1000, UNMAPPED),
        (compare, WRITABLE, UNMAPPED),
        (write, NEITHER, UNMAPPED),
        (load, NEITHER, UNMAPPED),
        (compare, NEITHER, UNMAPPED),
        (compare, READABLE, OK),
    ] {
        assert_eq!(host.io(opcode, 1, data), status, "opcode {opcode:#x} at {data:#x}");
    }
    // Data of which a part may not be accessed, at its start or end.
    for (opcode, data, status) in [
        (load, [page(5), READABLE], UNMAPPED),
        (load, [READABLE + 0x1000, page(5)], UNMAPPED),
        (load, [page(5), WRITABLE + 0x1000], OK),
        (write, [page(5), WRITABLE], UNMAPPED),
        (write, [READABLE, READABLE + 0x1000], OK),
    ] {
        assert_eq!(host.run(blocks(opcode, 16, data)), status, "opcode {opcode:#x} at {data:x?}");
    }
    // A list of pages is read by the server in any direction, and so are the ranges of a deallocation.
    let list: Vec<u8> = [6, 7].iter().flat_map(|number| page(*number).to_le_bytes()).collect();
    let range: Vec<u8> = [8_u64 << 32, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    for (address, file, status) in [(READABLE, &readable, OK), (WRITABLE, &writable, UNMAPPED)] {
        file.write_all_at(&list, 0).unwrap();
        assert_eq!(host.run(blocks(load, 24, [page(5), address])), status, "a list at {address:#x}");
        file.write_all_at(&range, 0).unwrap();
        let deallocate = Sqe::deallocate(1, 1).with_data(Psdt::Prp, [address, 0]);
        assert_eq!(host.run(deallocate), status, "ranges at {address:#x}");
    }
    let expected = [&range[..], &[7; 0x2000 - 16]].concat();
    assert!(bytes_of(&readable) == expected, "read-only memory was written");
    assert_eq!(bytes_of(&neither), [0; 0x2000]);
    drop(host);
    world.stop();
}

#[test]
fn rings_and_admin_data_are_where_the_rights_allow_them() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let (mut host, [readable, writable, _]) = host_with_rights(&world);
    // With an entry of the error log.
    let unmapped = Some(UNMAPPED.0 | MORE);
    let admin = &mut host.host;
    let identify = |data: u64| Sqe::identify(cns::CONTROLLER, 0, 0, 0).with_data(Psdt::Prp, [data, 0]);
    // Two commands were run for the first queue: of a ring of 8 entries, five are left.
    for (what, sqe, status) in [
        ("identify data in read-only memory", identify(READABLE), unmapped),
        ("identify data in write-only memory", identify(WRITABLE), Some(0)),
        ("a completion ring in read-only memory", Sqe::create_cq(2, 8, READABLE, None), unmapped),
        ("a completion ring in write-only memory", Sqe::create_cq(2, 8, WRITABLE + 0x1000, None), Some(0)),
        ("a submission ring in write-only memory", Sqe::create_sq(2, 8, WRITABLE, 2), unmapped),
    ] {
        assert_eq!(admin.admin(sqe), status, "{what}");
    }
    assert_eq!(bytes_of(&readable), [0; 0x2000]);
    assert_eq!(bytes_of(&writable)[..2], [0x58, 0x4e], "the vendor of the controller");
    drop(host);
    until("the session ends", || world.server().status().session().is_none());

    // Both rings where they belong, and I/O.
    let (mut host, [readable, writable, _]) = host_with_rights(&world);
    let admin = &mut host.host;
    assert_eq!(admin.admin(Sqe::create_cq(2, 8, WRITABLE, None)), Some(0));
    assert_eq!(admin.admin(Sqe::create_sq(2, 8, READABLE, 2)), Some(0));
    let sqe: Vec<u8> = blocks(io::READ, 1, [page(4), 0]).0.iter().flat_map(|word| word.to_le_bytes()).collect();
    readable.write_all_at(&sqe, 0).unwrap();
    admin.write(0x1100, &1_u32.to_le_bytes());
    until("the read is complete", || bytes_of(&writable)[14..16] == [1, 0]);
    // Shadow doorbells are read and written.
    for pages in [[READABLE + 0x1000, page(8)], [page(8), WRITABLE + 0x1000]] {
        assert_eq!(
            admin.admin(Sqe::doorbell_buffer(pages[0], pages[1])),
            Some(NvmeStatus::INVALID_FIELD.with_dnr().0 | MORE)
        );
    }
    assert_served(&mut admin.client);
    drop(host);
    world.stop();
}

/// The addresses of a command's data change all the time: each is read once, and what was checked is what is used.
#[test]
fn addresses_that_change_while_they_are_read_reach_no_read_only_memory() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let (mut host, [readable, ..]) = host_with_rights(&world);
    host.host.memory.write_all_at(&[9; 0x2000], 0x4000).unwrap();
    assert_eq!(host.run(blocks(io::WRITE, 16, [page(4), page(5)])), OK);
    // The second pointer of each entry of the submission ring, and the second one of the list in page 6.
    let entries: Vec<u64> = (0..64).map(|entry| 0x2000 + entry * 64 + 32).collect();
    host.host.memory.write_all_at(&page(4).to_le_bytes(), 0x6000).unwrap();
    for (changing, sqe) in [
        (&entries[..], blocks(io::READ, 16, [page(4), page(5)])),
        (&[0x6008], blocks(io::READ, 24, [page(4), page(6)])),
    ] {
        let memory = host.host.memory.try_clone().unwrap();
        let (mut done, mut refused, ends) = (0, 0, AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _end = Ends(&ends);
            scope.spawn(|| {
                let mut address = page(5);
                while !ends.load(SeqCst) {
                    address ^= page(5) ^ READABLE;
                    changing.iter().for_each(|at| memory.write_all_at(&address.to_le_bytes(), *at).unwrap());
                }
            });
            let limit = Instant::now() + PATIENCE;
            while done + refused < 3000 || done.min(refused) < 20 {
                assert!(Instant::now() < limit, "{done} commands were done and {refused} refused");
                match host.run(sqe) {
                    OK => done += 1,
                    UNMAPPED => refused += 1,
                    other => panic!("{other:?}"),
                }
            }
        });
    }
    assert_eq!(bytes_of(&readable), [0; 0x2000], "read-only memory was written");
    drop(host);
    world.stop();
}

/// Such a file cannot be mapped for writing, whatever the permissions are that come with it.
#[test]
fn a_file_that_may_only_be_read_is_accepted_and_not_used() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), 2, 1);
    let mut host = IoHost::new(&world);
    let memory = file(0x1000);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    let opened = openat(rustix::fs::CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let sealed = memfd_create("host", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, 0x1000).unwrap();
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    for file in [opened.as_fd(), sealed.as_fd()] {
        let mut call = |request: VfioRequest<'_>, files: &[BorrowedFd<'_>]| host.host.client.call(&request, files);
        assert_eq!(call(map(READABLE, 0x1000, 0), &[file]), Err(22), "it may not be written");
        assert_eq!(call(map_for(DmaMapFlags::READ, READABLE, 0x1000, 0), &[file]), Ok(vec![]));
        assert_eq!([io::WRITE, io::READ].map(|opcode| host.io(opcode, 1, READABLE)), [UNMAPPED; 2]);
        let unmap = blkyard_wire::vfio_user::DmaUnmapRequest::Range { address: READABLE, size: 0x1000 };
        host.host.client.call(&VfioRequest::DmaUnmap(unmap), &[]).unwrap();
    }
    drop(host);
    world.stop();
}

/// Address of the server's own registers, as the client maps them: the doorbells are its second page.
const OWN: u64 = 0x400_0000;

/// Each use of the server's own memory, as CVE-2021-3929 made of the registers of QEMU's controller.
#[test]
fn doorbells_that_a_client_maps_for_dma_are_memory_like_any_other() {
    let world = NvmeWorld::with(&AnyDevice::ram(0), 2, 1, NvmeDoorbells::Shared);
    // A disk of bytes that are no valid doorbell.
    let mut writer = IoHost::new(&world);
    writer.host.memory.write_all_at(&[0xff; 0x1000], 0x5000).unwrap();
    assert_eq!(writer.run(blocks(io::WRITE, 8, [page(5), 0])), OK);
    drop(writer);
    let begin = || {
        until("the session ends", || world.server().status().session().is_none());
        let mut host = AdminHost::enable(&world);
        let file = doorbell_file(&mut host.client);
        host.client.call(&map(OWN, 0x2000, 0), &[file.as_fd()]).unwrap();
        let doorbells = Region::map_file(file.as_fd(), 0x1000, 0x1000).unwrap();
        (host, View::new(doorbells, 0, 0x1000, 4096).unwrap())
    };
    let create = |host: &mut AdminHost, cq: u64, sq: u64| {
        assert_eq!(host.admin(Sqe::create_cq(1, 8, cq, None)), Some(0));
        assert_eq!(host.admin(Sqe::create_sq(1, 8, sq, 1)), Some(0));
    };
    // Registers are not in the file: data in its first page changes none, and the controller goes on.
    let (mut host, _) = begin();
    create(&mut host, page(3), page(2));
    for index in 0..4 {
        host.put(2, index, blocks(io::READ, 8, [OWN, 0]));
        host.write(0x1080, &(index + 1).to_le_bytes());
        until("the read is complete", || host.status(3, index) == Some(0));
        assert_eq!(host.csts(), 1);
        assert_eq!(host.client.call(&read(0, 0x14, 4), &[]).unwrap()[16..], [1, 0, 0x46, 0], "CC");
    }
    recover(host);
    // Data over the doorbells: all of them are invalid then, those of the admin queue included.
    let (mut host, doorbells) = begin();
    create(&mut host, page(3), page(2));
    host.put(2, 0, blocks(io::READ, 8, [OWN + 0x1000, 0]));
    doorbells.store_u32(0x80, 1, Release);
    until("the doorbells are overwritten", || doorbells.load_u32(0xffc, Acquire) == u32::MAX);
    recover(host);
    // A completion ring there: its entries are doorbells of the admin queue, then of its own.
    let (mut host, doorbells) = begin();
    assert_eq!(host.admin(Sqe::create_cq(1, 64, OWN + 0x1000, None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 64, page(2), 1)), Some(0));
    (0..20).for_each(|index| host.put(2, index, blocks(io::READ, 1, [page(4), 0]).with_cid(0xff00 + index as u16)));
    doorbells.store_u32(0x80, 20, Release);
    // The phase of the first entry, and the identifier of its command.
    until("a completion is written", || doorbells.load_u32(12, Acquire) == 0x1_ff00);
    recover(host);
    // A submission ring there, whose commands are what doorbells happen to be; and a list of pages.
    let (mut host, doorbells) = begin();
    create(&mut host, page(3), OWN + 0x1000);
    for tail in 1..8 {
        doorbells.store_u32(0x80, tail, Release);
    }
    until("a command is complete", || host.status(3, 0).is_some());
    recover(host);
    let (mut host, doorbells) = begin();
    create(&mut host, page(3), page(2));
    host.put(2, 0, blocks(io::READ, 24, [page(4), OWN + 0x1000]));
    doorbells.store_u32(0x80, 1, Release);
    until("the read is refused", || host.status(3, 0).is_some_and(|status| status != 0));
    recover(host);
    // Shadow doorbells in the doorbells themselves.
    for pages in [[OWN + 0x1000, OWN], [OWN, OWN + 0x1000], [OWN + 0x1000; 2]] {
        let (mut host, _) = begin();
        create(&mut host, page(3), page(2));
        let _ = host.admin(Sqe::doorbell_buffer(pages[0], pages[1]));
        recover(host);
    }
    // The rings of the admin queue.
    for (asq, acq) in [(OWN + 0x1000, OWN), (OWN, OWN + 0x1000), (OWN + 0x1000, OWN + 0x1000)] {
        let (mut host, doorbells) = begin();
        host.client.call(&VfioRequest::DeviceReset, &[]).unwrap();
        host.write(0x24, &[7, 0, 7, 0]);
        host.write(0x28, &asq.to_le_bytes());
        host.write(0x30, &acq.to_le_bytes());
        host.write(0x14, &[1, 0, 0x46, 0]);
        for tail in 1..7_u32 {
            doorbells.store_u32(0, tail, Release);
            host.csts();
        }
        recover(host);
    }
    world.stop();
}

/// Resets the controller, after which it works; and the next client has one, too.
fn recover(mut host: AdminHost) {
    assert_served(&mut host.client);
    assert_eq!(host.client.call(&VfioRequest::DeviceReset, &[]), Ok(vec![]));
    host.memory.write_all_at(&[0; 0x4000], 0).unwrap();
    for (offset, bytes) in [
        (0x24, &[7, 0, 7, 0][..]),
        (0x28, &AdminHost::BASE.to_le_bytes()),
        (0x30, &(AdminHost::BASE + 0x1000).to_le_bytes()),
        (0x14, &[1, 0, 0x46, 0]),
    ] {
        host.write(offset, bytes);
    }
    assert_eq!(host.csts(), 1, "the controller is enabled after its reset");
    host.tail = 0;
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    host.put(2, 0, blocks(io::READ, 1, [page(4), 0]));
    host.write(0x1080, &[1, 0, 0, 0]);
    until("the read is complete", || host.status(3, 0) == Some(0));
}

/// The memory cannot be cut short under the server.
#[test]
fn the_file_of_the_doorbells_keeps_its_size() {
    let world = NvmeWorld::with(&AnyDevice::ram(0), 2, 1, NvmeDoorbells::Shared);
    let mut client = RawClient::greeted(&world.path);
    let file = doorbell_file(&mut client);
    for size in [0, 0x1000, 0x10_0000] {
        assert_eq!(rustix::fs::ftruncate(&file, size), Err(rustix::io::Errno::PERM));
    }
    let seal = fcntl_add_seals(&file, SealFlags::FUTURE_WRITE);
    assert_eq!(seal, Err(rustix::io::Errno::PERM), "it cannot be sealed against the server");
    assert_served(&mut client);
    world.stop();
}
