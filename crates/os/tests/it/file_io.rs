//! Data through a file device: writes reach the file, reads return its content.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use blkyard_mq::{BioFlags, BlockDevice, BufferAccess, Op, Region, RegionTable, RegisteredBuffer, Segment, Status};
use blkyard_os::{Direct, FileConfig, FixedBuffers, Mode, RingConfig, now_ns};

use crate::common::{Bench, bio, folders, image, open, pattern, range, run_once};

const MIB: u64 = 1 << 20;

#[test]
fn what_is_written_is_in_the_file_and_read_back_at_all_sizes() {
    for folder in folders() {
        for direct in [Direct::Auto, Direct::Off] {
            let path = image(&folder, 16 * MIB);
            let mut bench = Bench::new(FileConfig { direct, ..FileConfig::new(&path) }, 32);
            let block = bench.device.info().limits.logical_block_bytes;
            let mut sector = 0;
            for (seed, len) in [1, 2, 7, 8, 16, 31, 128, 255, 600].into_iter().map(|n| n * block).enumerate() {
                let data = pattern(len as usize, seed as u32);
                bench.fill(0, &data);
                bench.fill(4 * MIB, &vec![0xee; len as usize]);
                assert_eq!(bench.one(bio(Op::Write, sector, &[(0, len)])), Status::Ok);
                let mut back = vec![0; len as usize];
                fs::File::open(&path).unwrap().read_exact_at(&mut back, sector * 512).unwrap();
                assert!(back == data, "{len} bytes, written");
                assert_eq!(bench.one(bio(Op::Read, sector, &[(4 * MIB, len)])), Status::Ok);
                assert!(bench.bytes(4 * MIB, len as usize) == data, "{len} bytes, read");
                sector += u64::from(len / 512);
            }
        }
    }
}

#[test]
fn torn_requests_go_straight_from_and_to_their_pieces() {
    for folder in folders() {
        let path = image(&folder, 4 * MIB);
        let mut bench = Bench::new(FileConfig::new(&path), 8);
        let data = pattern(5 * 4096, 9);
        bench.fill(0, &data);
        // Out of order, and more pieces than one request may have.
        let torn: Vec<_> = (0..5).rev().map(|i| (i * 4096, 4096)).collect();
        assert_eq!(bench.one(bio(Op::Write, 64, &torn)), Status::Ok);
        let mut back = vec![0; data.len()];
        fs::File::open(&path).unwrap().read_exact_at(&mut back, 64 * 512).unwrap();
        for (piece, want) in back.chunks(4096).zip(data.chunks(4096).rev()) {
            assert!(piece == want);
        }
        let many: Vec<_> = (0..300).map(|i| (MIB + i * 8192, 4096)).collect();
        assert_eq!(bench.one(bio(Op::Read, 0, &many)), Status::Ok);
        assert!(bench.bytes(MIB + 8 * 8192, 4096) == back[..4096]);
        assert_eq!(bench.device.counters().bounced(), 0);
    }
}

#[test]
fn memory_that_is_not_aligned_is_copied_and_counted_and_right() {
    for folder in folders() {
        let path = image(&folder, 4 * MIB);
        let mut bench = Bench::unmerged(FileConfig::new(&path), 64);
        let aligned = match bench.device.mode() {
            Mode::Direct { memory_align, .. } => *memory_align == 1,
            Mode::Buffered { .. } => true,
        };
        let data = pattern(100 * 4096, 3);
        bench.fill(1, &data);
        // More at once than there are buffers to copy into; some in two pieces that only together make a block.
        let place = |i: u64| 1 + i * 4096;
        let writes = (0..100).map(|i| match i % 2 {
            0 => bio(Op::Write, i * 8, &[(place(i), 4096)]),
            _ => bio(Op::Write, i * 8, &[(place(i), 1000), (place(i) + 1000, 3096)]),
        });
        assert!(bench.run(writes.collect()).iter().all(|bio| bio.status.is_ok()));
        assert!(fs::read(&path).unwrap()[..data.len()] == data);
        bench.fill(0, &vec![0; MIB as usize]);
        let reads = (0..100).map(|i| bio(Op::Read, i * 8, &[(place(i), 7), (place(i) + 7, 4089)]));
        assert!(bench.run(reads.collect()).iter().all(|bio| bio.status.is_ok()));
        assert!(bench.bytes(1, data.len()) == data);
        assert_eq!(bench.device.counters().bounced(), if aligned { 0 } else { 200 });
    }
}

#[test]
fn bios_in_a_row_share_requests_and_each_has_its_data() {
    for folder in folders() {
        let path = image(&folder, 4 * MIB);
        let mut bench = Bench::new(FileConfig::new(&path), 4);
        let data = pattern(64 * 4096, 7);
        bench.fill(0, &data);
        // Memory out of order, so that no two segments are adjacent; more than are in flight at a time.
        let place = |i: u64| (i ^ 1) * 4096;
        let row = |op| (0..64).map(|i| bio(op, i * 8, &[(place(i), 4096)])).collect();
        assert!(bench.run(row(Op::Write)).iter().all(|bio| bio.status.is_ok()));
        let file = fs::read(&path).unwrap();
        assert!((0..64).all(|i| file[i * 4096..][..4096] == data[(i ^ 1) * 4096..][..4096]));
        bench.fill(0, &vec![0; MIB as usize]);
        assert!(bench.run(row(Op::Read)).iter().all(|bio| bio.status.is_ok()));
        assert!(bench.bytes(0, data.len()) == data);
        let merged: u64 = bench.queue.stats().snapshot().merged.iter().sum();
        assert!(merged > 64, "{merged} of 128 bios shared a request");
    }
}

/// One of the kernel's threads would do them one after another, while another CPU is idle.
#[test]
fn long_reads_of_a_file_in_memory_are_copied_by_several_threads() {
    let own = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
    let copiers = || {
        let threads = fs::read_dir("/proc/self/task").unwrap();
        let names = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.filter(|name| name.trim() == own).count()
    };
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = image(&folder, 32 * MIB);
    let data = pattern(32 << 20, 5);
    fs::write(&path, &data).unwrap();
    let mut bench = Bench::unmerged(FileConfig::new(&path), 32);
    // All into the same four places.
    let reads = || (0..32).map(|i| bio(Op::Read, i * 2048, &[(i % 4 * MIB, 1 << 20)])).collect();
    assert!((0..10).all(|_| bench.run(reads()).iter().all(|bio| bio.status.is_ok())));
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert!(copiers() >= cpus.min(2), "{} threads on {cpus} CPUs", copiers());
    for i in 28..32 {
        assert_eq!(bench.one(bio(Op::Read, i * 2048, &[(i % 4 * MIB, 1 << 20)])), Status::Ok);
    }
    assert!(bench.bytes(0, 4 << 20) == data[28 << 20..]);
}

/// The kernel copies data of the page cache, or of a file system in memory, when the lane enters it.
#[test]
fn what_is_copied_in_one_turn_is_bounded_in_bytes() {
    const TURN_BYTES: u64 = MIB / 2;
    for folder in folders() {
        for direct in [Direct::Auto, Direct::Off] {
            let path = image(&folder, 64 * MIB);
            let mut bench = Bench::unmerged(FileConfig { direct, ..FileConfig::new(&path) }, 64);
            bench.queue.set_turn_bytes(TURN_BYTES);
            let Bench { ring, queue, .. } = &mut bench;
            let longest = u64::from(queue.info().limits.sectors_max) * 512;
            // Many short ones are no more than a turn may have, and a few long ones are.
            for (count, bytes, turns_min) in [(64, 4096_u32, 1), (8, 8 << 20, 64 * MIB / (TURN_BYTES + longest))] {
                let sectors = u64::from(bytes) / 512;
                (0..count).for_each(|i| queue.submit(bio(Op::Read, i * sectors, &[(0, bytes)])));
                let (mut turns, mut ended) = (0, 0);
                while ended < count as usize {
                    ring.reap();
                    ended += queue.reap(ring, now_ns(), &mut |bio| assert!(bio.status.is_ok()));
                    let taken = queue.issue(ring, now_ns()) as u64;
                    let request_bytes = longest.min(bytes.into());
                    assert!(taken * request_bytes <= TURN_BYTES + longest, "{taken} requests of {request_bytes}");
                    turns += u64::from(taken > 0);
                    if queue.has_work() { ring.submit() } else { ring.sleep(Some(now_ns() + 1_000_000)) }
                }
                assert!(turns >= turns_min, "{count} of {bytes} bytes in {turns} turns");
                assert!(bytes > 4096 || turns == 1, "short ones are put off");
            }
        }
    }
}

#[test]
fn buffers_that_stand_in_for_unaligned_memory_are_emptied_in_turns() {
    const TURN_BYTES: u64 = MIB / 2;
    const BYTES: u32 = 256 << 10;
    for folder in folders() {
        let path = image(&folder, 16 * MIB);
        let mut bench = Bench::unmerged(FileConfig::new(&path), 16);
        bench.queue.set_turn_bytes(TURN_BYTES);
        let data = pattern(16 * BYTES as usize, 5);
        fs::write(&path, &data).unwrap();
        let Bench { ring, queue, device, .. } = &mut bench;
        let place = |i: u64| 1 + i * u64::from(BYTES);
        (0..16).for_each(|i| queue.submit(bio(Op::Read, i * u64::from(BYTES) / 512, &[(place(i), BYTES)])));
        let mut ended = 0;
        while ended < 16 {
            // All requests that can complete do so before the check.
            ring.sleep(Some(now_ns() + 10_000_000));
            ring.reap();
            let now_ended = queue.reap(ring, now_ns(), &mut |bio| assert!(bio.status.is_ok()));
            let most = if device.counters().bounced() > 0 { TURN_BYTES / u64::from(BYTES) } else { 16 };
            assert!(now_ended as u64 <= most, "{now_ended} at once");
            ended += now_ended;
            queue.issue(ring, now_ns());
        }
        assert!(bench.bytes(1, data.len()) == data);
    }
}

#[test]
fn a_write_from_memory_that_is_gone_fails_alone() {
    for folder in folders() {
        for direct in [Direct::Auto, Direct::Off] {
            let path = image(&folder, MIB);
            let mut bench = Bench::new(FileConfig { direct, ..FileConfig::new(&path) }, 4);
            let (memory, region) = shared(MIB);
            bench.queue.set_memory(&mut bench.ring, Arc::new(RegionTable::new(vec![region])));
            // As a hostile front-end may do. In two pieces, so that their pages are looked up for this write.
            memory.set_len(0).unwrap();
            let mut durable = bio(Op::Write, 0, &[(0, 4096), (8192, 4096)]);
            durable.flags = BioFlags::FUA;
            assert_eq!(bench.one(durable), Status::Io);
            assert_eq!(bench.one(range(Op::Flush, 0, 0, BioFlags::empty())), Status::Ok, "others can flush");
            assert!(!bench.device.sync_has_failed());
        }
    }
}

#[test]
fn flushes_and_durable_writes_are_done() {
    for folder in folders() {
        for write_through in [false, true] {
            let path = image(&folder, MIB);
            let mut bench = Bench::new(FileConfig { write_through, ..FileConfig::new(&path) }, 4);
            assert_eq!(bench.device.info().volatile_cache, !write_through);
            let mut durable = bio(Op::Write, 0, &[(0, 4096)]);
            durable.flags = BioFlags::FUA;
            bench.fill(0, &pattern(4096, 1));
            assert_eq!(bench.one(durable), Status::Ok);
            assert_eq!(bench.one(range(Op::Flush, 0, 0, BioFlags::empty())), Status::Ok);
            assert_eq!(bench.one(range(Op::WriteZeroes, 0, 8, BioFlags::FUA)), Status::Ok);
            assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
        }
    }
}

#[test]
fn trims_give_back_space_or_keep_it_and_leave_the_rest() {
    for folder in folders() {
        let path = image(&folder, 4 * MIB);
        let mut bench = Bench::new(FileConfig::new(&path), 4);
        let data = pattern(MIB as usize, 5);
        let blocks = || fs::metadata(&path).unwrap().blocks();
        let sectors = 1024;
        for (op, flags, kept) in [
            (Op::Discard, BioFlags::empty(), false),
            (Op::WriteZeroes, BioFlags::empty(), false),
            (Op::WriteZeroes, BioFlags::NO_UNMAP, true),
            (Op::WriteZeroes, BioFlags::NO_UNMAP, true),
        ] {
            bench.fill(0, &data);
            assert_eq!(bench.one(bio(Op::Write, 0, &[(0, MIB as u32)])), Status::Ok);
            assert_eq!(bench.one(range(Op::Flush, 0, 0, BioFlags::empty())), Status::Ok);
            let before = blocks();
            assert_eq!(bench.one(range(op, 512, sectors, flags)), Status::Ok, "{op:?}");
            let after = blocks();
            if kept {
                assert!(after >= before, "{op:?} {flags:?}: {before} blocks, then {after}");
            } else {
                assert!(after + u64::from(sectors) <= before, "{op:?}: {before} blocks, then {after}");
            }
            let file = fs::read(&path).unwrap();
            let zeroes = 512 * 512..(512 + sectors as usize) * 512;
            assert!(file[zeroes.clone()].iter().all(|byte| *byte == 0), "{op:?}");
            assert!(file[..zeroes.start] == data[..zeroes.start]);
            assert!(file[zeroes.end..MIB as usize] == data[zeroes.end..]);
            assert_eq!(file.len() as u64, 4 * MIB, "the size stays");
        }
        assert_eq!(bench.one(range(Op::WriteZeroes, 0, (4 * MIB / 512) as u32, BioFlags::NO_UNMAP)), Status::Ok);
        assert!(blocks() >= 4 * MIB / 512);
    }
}

#[test]
fn a_file_that_became_shorter_fails_what_lies_beyond_its_end() {
    for folder in folders() {
        for direct in [Direct::Auto, Direct::Off] {
            let path = image(&folder, MIB);
            let mut bench = Bench::new(FileConfig { direct, ..FileConfig::new(&path) }, 4);
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8192 + 1000).unwrap();
            assert_eq!(bench.one(bio(Op::Read, 0, &[(0, 8192)])), Status::Ok);
            assert_eq!(bench.one(bio(Op::Read, 8, &[(0, 65536)])), Status::Io, "cut off in the middle");
            assert_eq!(bench.one(bio(Op::Read, 1024, &[(0, 4096)])), Status::Io, "beyond the end");
            assert_eq!(bench.one(bio(Op::Read, 8, &[(0, 4096), (8192, 8192)])), Status::Io, "in pieces");
        }
    }
}

#[test]
fn a_read_only_device_reads_and_takes_no_writes() {
    for folder in folders() {
        let path = image(&folder, MIB);
        fs::write(&path, pattern(MIB as usize, 2)).unwrap();
        let mut bench = Bench::new(FileConfig { read_only: true, ..FileConfig::new(&path) }, 4);
        assert!(bench.device.info().read_only);
        assert_eq!(bench.one(bio(Op::Read, 8, &[(0, 4096)])), Status::Ok);
        assert!(bench.bytes(0, 4096) == pattern(MIB as usize, 2)[4096..8192]);
        assert_eq!(bench.one(range(Op::Flush, 0, 0, BioFlags::empty())), Status::Ok);
        assert_eq!(bench.one(bio(Op::Write, 0, &[(0, 4096)])), Status::NotSupported);
        assert_eq!(bench.one(range(Op::Discard, 0, 8, BioFlags::empty())), Status::NotSupported);
    }
}

#[test]
fn a_request_outside_its_memory_is_refused_before_the_kernel_sees_it() {
    let folder = &folders()[0];
    let mut bench = Bench::new(FileConfig::new(image(folder, MIB)), 4);
    assert_eq!(bench.one(bio(Op::Read, 0, &[(8 * MIB - 2048, 4096)])), Status::Invalid);
    let mut elsewhere = bio(Op::Write, 0, &[(0, 4096)]);
    elsewhere.segments[0].region = 5;
    assert_eq!(bench.one(elsewhere), Status::Invalid);
    assert_eq!(bench.one(bio(Op::Read, 0, &[(0, 4096)])), Status::Ok, "the next goes on");
}

#[test]
fn a_ring_with_little_room_serves_a_deep_queue() {
    let folder = &folders()[0];
    let path = image(folder, MIB);
    for single_owner in [true, false] {
        let ring = RingConfig { entries: 2, outstanding_max: 1, single_owner, ..RingConfig::default() };
        let mut bench = Bench::with_ring(FileConfig::new(&path), 64, ring);
        let reads = (0..200).map(|i| bio(Op::Read, i * 8, &[(i * 4096, 4096)]));
        assert!(bench.run(reads.collect()).iter().all(|bio| bio.status.is_ok()));
    }
}

#[test]
fn memory_beyond_one_piece_is_used_across_the_seam() {
    let folder = folders().pop().unwrap();
    let path = image(&folder, MIB);
    let mut bench = Bench::new(FileConfig::new(&path), 4);
    let gib = 1_u64 << 30;
    let large = blkyard_mq::Region::anonymous((gib + 65_536) as usize).unwrap();
    let table = blkyard_mq::RegionTable::new(vec![large.clone()]);
    bench.queue.set_memory(&mut bench.ring, std::sync::Arc::new(table));
    match bench.ring.buffers() {
        FixedBuffers::Registered { bytes } => assert_eq!(bytes, gib + 65_536),
        FixedBuffers::Plain { reason } => println!("without fixed buffers: {reason}"),
    }
    fs::write(&path, pattern(MIB as usize, 4)).unwrap();
    for offset in [gib - 4096, gib - 8192, gib - 12_288, gib, gib + 4096] {
        assert_eq!(bench.one(bio(Op::Read, 0, &[(offset, 8192)])), Status::Ok);
        let mut back = vec![0; 8192];
        large.span(offset, 8192).unwrap().copy_to_slice(&mut back);
        assert!(back == pattern(MIB as usize, 4)[..8192], "{offset:#x}");
    }
}

/// Memory shared by another process, like a front-end's: its file, and our mapping.
fn shared(bytes: u64) -> (fs::File, Arc<Region>) {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    let region = Region::map_file(file.as_fd(), 0, bytes).unwrap();
    (file.into(), region)
}

#[test]
fn memory_that_its_owner_gave_back_and_uses_again_is_reached_as_it_is_now() {
    for (folder, is_registered) in folders().iter().flat_map(|folder| [(folder, false), (folder, true)]) {
        let path = image(folder, MIB);
        let mut bench = Bench::new(FileConfig::new(&path), 4);
        let (file, region) = shared(MIB);
        bench.queue.set_memory(&mut bench.ring, Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        let buffer = RegisteredBuffer::new(&region, 0, MIB, BufferAccess::ReadWrite).unwrap();
        assert!(bench.queue.add_buffer(&mut bench.ring, &buffer));
        let bio = |op, sector| {
            let mut bio = bio(op, sector, &[(0, 4096)]);
            // A registered buffer is not pinned either, if it is memory of others.
            bio.segments[0].region = if is_registered { buffer.id().number() } else { 0 };
            bio
        };
        let fill = |seed| region.span(0, 4096).unwrap().copy_from_slice(&pattern(4096, seed));
        fill(1);
        assert_eq!(bench.one(bio(Op::Write, 0)), Status::Ok);
        // As a guest's balloon, its reports of free pages, and memory that is unplugged have it done.
        let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, 0, MIB).unwrap();
        fill(2);
        assert_eq!(bench.one(bio(Op::Write, 8)), Status::Ok);
        assert!(
            fs::read(&path).unwrap()[4096..8192] == pattern(4096, 2),
            "what was written is what the memory was once"
        );
        assert_eq!(bench.one(bio(Op::Read, 0)), Status::Ok);
        let mut back = vec![0; 4096];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back == pattern(4096, 1), "what was read went where the memory was once");
    }
}

#[test]
fn a_registered_buffer_is_read_and_written_by_its_number() {
    for folder in folders() {
        let path = image(&folder, MIB);
        for direct in [Direct::Auto, Direct::Off] {
            let mut bench = Bench::new(FileConfig { direct, ..FileConfig::new(&path) }, 4);
            let region = Arc::clone(bench.queue.memory().region(0).unwrap());
            let buffer = RegisteredBuffer::new(&region, 8192, 65536, BufferAccess::ReadWrite).unwrap();
            assert!(bench.queue.add_buffer(&mut bench.ring, &buffer));
            let bio = |op, segment: Segment| {
                let mut bio = bio(op, 0, &[(0, segment.len)]);
                bio.segments[0] = segment;
                bio
            };
            bench.fill(8192 + 4096, &pattern(4096, 3));
            assert_eq!(bench.one(bio(Op::Write, buffer.segment(4096, 4096))), Status::Ok);
            assert!(fs::read(&path).unwrap()[..4096] == pattern(4096, 3));
            // To unaligned memory, too.
            for at in [0, 512, 520, 61440] {
                bench.fill(8192 + at, &[0; 4096]);
                assert_eq!(bench.one(bio(Op::Read, buffer.segment(at, 4096))), Status::Ok);
                let mut back = vec![0; 4096];
                region.span(8192 + at, 4096).unwrap().copy_to_slice(&mut back);
                assert!(back == pattern(4096, 3), "at {at}");
            }
            assert_eq!(bench.one(bio(Op::Read, buffer.segment(65024, 1024))), Status::Invalid, "beyond the buffer");
            assert!(bench.queue.remove_buffer(&mut bench.ring, buffer.id()));
            assert_eq!(bench.one(bio(Op::Read, buffer.segment(0, 4096))), Status::Invalid, "stale");
        }
    }
}

#[test]
fn shared_memory_of_our_own_is_a_fixed_buffer_once_it_is_registered() {
    for folder in folders() {
        let path = image(&folder, MIB);
        let mut bench = Bench::new(FileConfig::new(&path), 4);
        let own = Region::shared(MIB as usize).unwrap();
        let (_file, foreign) = shared(MIB);
        let before = bench.ring.buffers();
        let table = RegionTable::new([&own, &foreign].map(Arc::clone).into());
        bench.queue.set_memory(&mut bench.ring, Arc::new(table));
        let bytes = |bench: &Bench| match bench.ring.buffers() {
            FixedBuffers::Registered { bytes } => Some(bytes),
            FixedBuffers::Plain { .. } => None,
        };
        let FixedBuffers::Registered { .. } = before else { return println!("no fixed buffers here: {before:?}") };
        assert_eq!(bytes(&bench), Some(0), "memory that others have is not pinned unasked");
        for (region, fixed) in [(&foreign, 0), (&own, MIB)] {
            let buffer = RegisteredBuffer::new(region, 0, MIB, BufferAccess::ReadWrite).unwrap();
            assert!(bench.queue.add_buffer(&mut bench.ring, &buffer));
            assert_eq!(bytes(&bench), Some(fixed));
            region.span(0, 4096).unwrap().copy_from_slice(&pattern(4096, 5));
            for (op, at) in [(Op::Write, 0), (Op::Read, 8192)] {
                let mut bio = bio(op, 0, &[(0, 4096)]);
                bio.segments[0] = buffer.segment(at, 4096);
                assert_eq!(bench.one(bio), Status::Ok);
            }
            let mut back = vec![0; 4096];
            region.span(8192, 4096).unwrap().copy_to_slice(&mut back);
            assert!(back == pattern(4096, 5));
            assert!(bench.queue.remove_buffer(&mut bench.ring, buffer.id()));
        }
    }
}

#[test]
fn to_know_memory_of_others_takes_none_of_it() {
    let folder = folders().pop().unwrap();
    let mut bench = Bench::new(FileConfig::new(image(&folder, MIB)), 4);
    let (file, region) = shared(2 << 30);
    let start = std::time::Instant::now();
    bench.queue.set_memory(&mut bench.ring, Arc::new(RegionTable::new(vec![region])));
    println!("{:?}, {} blocks", start.elapsed(), file.metadata().unwrap().blocks());
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

#[test]
fn io_outlives_the_thread_that_submitted_it() {
    for folder in folders() {
        let path = image(&folder, MIB);
        fs::write(&path, pattern(MIB as usize, 7)).unwrap();
        let ring = RingConfig { single_owner: false, ..RingConfig::default() };
        let mut bench = Bench::with_ring(FileConfig::new(&path), 64, ring);
        for round in 0..20 {
            bench.fill(0, &vec![0; MIB as usize]);
            let submitted = std::thread::spawn(move || {
                (0..64).for_each(|i| bench.queue.submit(bio(Op::Read, i * 8, &[(i * 4096, 4096)])));
                bench.queue.issue(&mut bench.ring, 1);
                bench.ring.submit();
                bench
            });
            // The kernel cancels requests of an ended thread that it had not begun.
            bench = submitted.join().unwrap();
            let mut ended = 0;
            while ended < 64 {
                ended += run_once(&mut bench.queue, &mut bench.ring, &mut |bio| assert_eq!(bio.status, Status::Ok));
            }
            assert!(bench.bytes(0, 64 * 4096) == pattern(MIB as usize, 7)[..64 * 4096], "round {round}");
        }
        println!("asked again {} times", bench.device.counters().retried());
    }
}

#[test]
fn growing_a_file_never_cuts_what_somebody_else_grew_in_that_moment() {
    const STEPS: u64 = 1000;
    const LONGEST: u64 = 16 * MIB;
    for folder in folders() {
        let path = image(&folder, MIB);
        fs::write(&path, pattern(MIB as usize, 9)).unwrap();
        let device = open(FileConfig::new(&path));
        device.grow(0).unwrap();
        device.grow(MIB / 2).unwrap();
        assert!(fs::read(&path).unwrap() == pattern(MIB as usize, 9));

        let other = fs::File::options().write(true).open(&path).unwrap();
        let length = || other.metadata().unwrap().len();
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // However long the other is kept from its next step.
                while !enough.load(Relaxed) {
                    device.grow((device.length_bytes().unwrap() + 512).min(LONGEST)).unwrap();
                }
            });
            for step in 1..=STEPS {
                other.set_len(MIB + step * 8192).unwrap();
                std::thread::yield_now();
                let now = length();
                enough.store(step == STEPS || now < MIB + step * 8192, Relaxed);
                assert!(now >= MIB + step * 8192, "it was cut to {now} in step {step}");
            }
        });
        device.grow(64 * MIB).unwrap();
        assert_eq!(device.length_bytes().unwrap(), 64 * MIB);
        let taken = other.metadata().unwrap().blocks() * 512;
        assert!(taken < 24 * MIB, "{taken} bytes are taken by a file that was to be sparse");
        assert!(fs::read(&path).unwrap()[..MIB as usize] == pattern(MIB as usize, 9));
    }
}
