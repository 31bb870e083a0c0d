//! virtio-blk requests: well made ones become bios, however they are cut into buffers; others are refused by name.

use blkyard_mq::{BioFlags, Op, Segment, Status};
use blkyard_virtio::RequestFault::*;
use blkyard_virtio::VirtioStatus::{IoErr, Ok as Done, Unsupp};
use blkyard_virtio::driver_model::{GUEST_BASE, ModelBuffer, ModelGuest, blk_header};
use blkyard_virtio::{Chain, Features, Refusal, RequestFault, SerialError, SerialId, VirtioStatus, status_of, written};

use crate::common::{Device, Outcome};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

struct Bench {
    guest: ModelGuest,
    device: Device,
    base: u64,
}

impl Bench {
    fn new() -> Bench {
        let mut guest = ModelGuest::new(64, 0x10000, true);
        let mut device = Device::new(&guest, true);
        device.chain = Chain::new(64);
        let base = guest.alloc(0x8000, 4096);
        Bench { guest, device, base }
    }

    /// One request of readable bytes, cut into these lengths, and writable ones.
    fn ask(&mut self, bytes: &[u8], readable: &[u32], writable: &[u32]) -> (Outcome, u32) {
        self.guest.write(self.base, bytes);
        let mut addr = self.base;
        let mut buffers = Vec::new();
        for (len, is_writable) in
            readable.iter().map(|len| (*len, false)).chain(writable.iter().map(|len| (*len, true)))
        {
            buffers.push(ModelBuffer { addr, len, writable: is_writable });
            addr += u64::from(len);
        }
        let head = self.guest.chain(&buffers).unwrap();
        self.guest.offer(head);
        self.guest.publish();
        let outcome = self.device.turn().unwrap().remove(0);
        (outcome, self.guest.poll().unwrap().1)
    }

    /// The segment of bytes from `at` of the request.
    fn at(&self, at: u64, len: u32) -> Segment {
        Segment { region: 0, offset: self.base - GUEST_BASE + at, len }
    }
}

fn range(kind: u32, sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = blk_header(kind, 0).to_vec();
    bytes.extend(sector.to_le_bytes());
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

#[test]
fn a_request_is_the_same_however_it_is_cut() {
    let mut bench = Bench::new();
    let header = blk_header(IN, 5);
    for readable in [&[16][..], &[1, 15], &[4, 4, 8], &[1; 16]] {
        for writable in [&[1024, 1][..], &[1025], &[512, 513], &[1, 1023, 1], &[1000, 25]] {
            let (got, len) = bench.ask(&header, readable, writable);
            let Outcome::Io { op: Op::Read, sector: 5, sectors: 2, segments, .. } = got else { panic!("{got:?}") };
            assert_eq!(joined(&segments), (bench.at(16, 0).offset, 1024), "{readable:?} {writable:?}");
            assert_eq!(len, 1025);
        }
    }
    let header = blk_header(OUT, 6);
    for readable in [&[16, 512][..], &[528], &[17, 511], &[15, 513], &[1, 1, 526], &[8, 8, 256, 256], &[10, 6, 512]] {
        let (got, len) = bench.ask(&header, readable, &[1]);
        let Outcome::Io { op: Op::Write, sector: 6, sectors: 1, segments, .. } = got else { panic!("{got:?}") };
        assert_eq!(joined(&segments), (bench.at(16, 0).offset, 512), "{readable:?}");
        assert_eq!(len, 1);
    }
}

/// Start and length of segments that follow each other without a gap; the buffers of a bench do.
fn joined(segments: &[Segment]) -> (u64, u64) {
    let start = segments[0].offset;
    let end = segments.iter().fold(start, |at, segment| {
        assert_eq!((segment.offset, segment.region), (at, 0));
        assert!(segment.len > 0);
        at + u64::from(segment.len)
    });
    (start, end - start)
}

#[test]
fn requests_without_data_become_bios() {
    let mut bench = Bench::new();
    let io = |op, flags, sector, sectors| Outcome::Io { op, flags, sector, sectors, segments: vec![] };
    let none = BioFlags::empty();
    let table = [
        ("flush", blk_header(FLUSH, 99).to_vec(), io(Op::Flush, none, 0, 0)),
        ("discard", range(DISCARD, 8, 16, 0), io(Op::Discard, none, 8, 16)),
        ("zeroes", range(WRITE_ZEROES, 8, 16, 0), io(Op::WriteZeroes, BioFlags::NO_UNMAP, 8, 16)),
        ("zeroes, unmapped", range(WRITE_ZEROES, 8, 16, 1), io(Op::WriteZeroes, none, 8, 16)),
        ("the last sectors", range(DISCARD, u64::MAX - 16, 16, 0), io(Op::Discard, none, u64::MAX - 16, 16)),
    ];
    for (name, bytes, want) in table {
        let len = bytes.len() as u32;
        for cut in [vec![len], vec![16, len - 16], vec![3, len - 3], vec![1; bytes.len()]] {
            let cut: Vec<u32> = cut.into_iter().filter(|len| *len > 0).collect();
            assert_eq!(bench.ask(&bytes, &cut, &[1]), (want.clone(), 1), "{name}, {cut:?}");
        }
    }
}

/// Name, bytes, lengths of readable and writable buffers, status, reason.
type Row = (&'static str, Vec<u8>, &'static [u32], &'static [u32], VirtioStatus, RequestFault);

#[test]
fn requests_that_are_not_as_their_type_demands_are_refused() {
    let h = |kind, sector| blk_header(kind, sector).to_vec();
    let mut two_ranges = range(DISCARD, 8, 16, 0);
    two_ranges.extend_from_slice(&range(DISCARD, 64, 16, 0)[16..]);
    let table: &[Row] = &[
        ("no header", h(IN, 0), &[], &[512, 1], IoErr, ShortHeader),
        ("a header of 15 bytes", h(IN, 0), &[15], &[512, 1], IoErr, ShortHeader),
        ("a header of 15 bytes, cut", h(IN, 0), &[8, 7], &[1], IoErr, ShortHeader),
        ("a read with readable data", h(IN, 0), &[16, 512], &[512, 1], IoErr, Direction),
        ("a read with one byte too many", h(IN, 0), &[17], &[512, 1], IoErr, Direction),
        ("a read without data", h(IN, 0), &[16], &[1], IoErr, NoData),
        ("a read of 511 bytes", h(IN, 0), &[16], &[511, 1], IoErr, Unaligned),
        ("a read of 513 bytes", h(IN, 0), &[16], &[513, 1], IoErr, Unaligned),
        ("a read of 512 with the status in it", h(IN, 0), &[16], &[512], IoErr, Unaligned),
        ("a read around the last sector", h(IN, u64::MAX), &[16], &[512, 1], IoErr, Overflow),
        ("a write with writable data", h(OUT, 0), &[16, 512], &[512, 1], IoErr, Direction),
        ("a write with a status of two bytes", h(OUT, 0), &[16, 512], &[2], IoErr, Direction),
        ("a write without data", h(OUT, 0), &[16], &[1], IoErr, NoData),
        ("a write of 100 bytes", h(OUT, 0), &[16, 100], &[1], IoErr, Unaligned),
        ("a write around the last sector", h(OUT, u64::MAX - 1), &[16, 1024], &[1], IoErr, Overflow),
        ("a flush with data to read", h(FLUSH, 0), &[16, 512], &[1], IoErr, Direction),
        ("a flush with data to write", h(FLUSH, 0), &[16], &[512, 1], IoErr, Direction),
        ("an id of 19 bytes", h(GET_ID, 0), &[16], &[19, 1], IoErr, ShortId),
        ("an id of no bytes", h(GET_ID, 0), &[16], &[1], IoErr, ShortId),
        ("an id with data", h(GET_ID, 0), &[16, 20], &[20, 1], IoErr, Direction),
        ("a discard without range", h(DISCARD, 0), &[16], &[1], IoErr, RangeLength),
        ("a discard of half a range", range(DISCARD, 0, 8, 0), &[24], &[1], IoErr, RangeLength),
        ("a discard of a range and a half", two_ranges.clone(), &[40], &[1], IoErr, RangeLength),
        ("a discard of two ranges", two_ranges, &[48], &[1], Unsupp, TooManyRanges),
        ("a discard into writable memory", range(DISCARD, 0, 8, 0), &[16], &[16, 1], IoErr, Direction),
        ("a discard that unmaps", range(DISCARD, 0, 8, 1), &[32], &[1], Unsupp, RangeFlags),
        ("a discard with flag 31", range(DISCARD, 0, 8, 1 << 31), &[32], &[1], Unsupp, RangeFlags),
        ("zeroes with flag 1", range(WRITE_ZEROES, 0, 8, 2), &[32], &[1], Unsupp, RangeFlags),
        ("zeroes with all flags", range(WRITE_ZEROES, 0, 8, u32::MAX), &[32], &[1], Unsupp, RangeFlags),
        ("a discard of no sectors", range(DISCARD, 0, 0, 0), &[32], &[1], IoErr, EmptyRange),
        ("a discard around the last sector", range(DISCARD, u64::MAX, 8, 0), &[32], &[1], IoErr, Overflow),
        ("zeroes around the last sector", range(WRITE_ZEROES, u64::MAX - 6, 8, 0), &[32], &[1], IoErr, Overflow),
        ("a SCSI command", h(2, 0), &[16, 512], &[1], Unsupp, Unknown),
        ("lifetime", h(10, 0), &[16], &[24, 1], Unsupp, Unknown),
        ("secure erase", range(14, 0, 8, 0), &[32], &[1], Unsupp, Unknown),
        ("a zone report", h(16, 0), &[16], &[4096, 1], Unsupp, Unknown),
        ("a read with the old barrier bit", h(IN | 1 << 31, 0), &[16], &[512, 1], Unsupp, Unknown),
        ("type 4294967295", h(u32::MAX, 0), &[16], &[1], Unsupp, Unknown),
    ];
    let mut bench = Bench::new();
    for (name, bytes, readable, writable, status, fault) in table {
        let (got, len) = bench.ask(bytes, readable, writable);
        let reason = Refusal::Request(*fault);
        assert_eq!(got, Outcome::Reject { status: *status, answered: true, reason }, "{name}");
        let room: u32 = writable.iter().sum();
        let at = bench.base + u64::from(readable.iter().sum::<u32>() + room - 1);
        assert_eq!(bench.guest.read(at, 1), [*status as u8], "{name}");
        assert_eq!(len, u32::from(room == 1), "{name}: only what was written without a gap counts");
    }
}

#[test]
fn a_request_without_a_status_byte_is_not_done() {
    let mut bench = Bench::new();
    let reason = Refusal::Request(NoStatus);
    let want = Outcome::Reject { status: IoErr, answered: false, reason };
    assert_eq!(bench.ask(&blk_header(OUT, 0), &[16, 512], &[]), (want.clone(), 0));
    assert_eq!(bench.ask(&blk_header(FLUSH, 0), &[16], &[]), (want, 0));
}

#[test]
fn what_was_not_negotiated_is_not_known() {
    let mut bench = Bench::new();
    let table = [
        (Features::FLUSH, blk_header(FLUSH, 0).to_vec()),
        (Features::DISCARD, range(DISCARD, 0, 8, 0)),
        (Features::WRITE_ZEROES, range(WRITE_ZEROES, 0, 8, 0)),
    ];
    for (feature, bytes) in table {
        bench.device.context.features = Features::all() - Features::RO - feature;
        let (got, _) = bench.ask(&bytes, &[bytes.len() as u32], &[1]);
        let reason = Refusal::Request(Unknown);
        assert_eq!(got, Outcome::Reject { status: Unsupp, answered: true, reason }, "{feature:?}");
    }
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let mut bench = Bench::new();
    bench.device.context.features = Features::all();
    let mut write = blk_header(OUT, 0).to_vec();
    write.resize(528, 7);
    for bytes in [write, range(DISCARD, 0, 8, 0), range(WRITE_ZEROES, 0, 8, 0)] {
        let (got, _) = bench.ask(&bytes, &[bytes.len() as u32], &[1]);
        let reason = Refusal::Request(ReadOnly);
        assert_eq!(got, Outcome::Reject { status: IoErr, answered: true, reason });
    }
    assert!(matches!(bench.ask(&blk_header(IN, 0), &[16], &[512, 1]).0, Outcome::Io { .. }));
}

#[test]
fn without_a_cache_to_flush_each_write_is_durable_by_itself() {
    let mut bench = Bench::new();
    let all = Features::all() - Features::RO;
    for (features, write_back, fua) in [
        (all, true, false),
        (all, false, true),
        (all - Features::FLUSH, true, true),
        (all - Features::FLUSH, false, true),
    ] {
        (bench.device.context.features, bench.device.context.write_back) = (features, write_back);
        for (bytes, readable) in [(blk_header(OUT, 0).to_vec(), 528), (range(WRITE_ZEROES, 0, 8, 1), 32)] {
            let (Outcome::Io { flags, .. }, _) = bench.ask(&bytes, &[readable], &[1]) else { panic!() };
            assert_eq!(flags.contains(BioFlags::FUA), fua, "{write_back}");
        }
        let (Outcome::Io { flags, .. }, _) = bench.ask(&blk_header(IN, 0), &[16], &[513]) else { panic!() };
        assert_eq!(flags, BioFlags::empty());
    }
}

#[test]
fn the_serial_number_fills_its_place_and_no_more() {
    let mut bench = Bench::new();
    for writable in [&[20, 1][..], &[21], &[1, 19, 1], &[30, 1], &[512, 1]] {
        let room: u32 = writable.iter().sum();
        bench.guest.write(bench.base, &[0xee; 600]);
        let (got, len) = bench.ask(&blk_header(GET_ID, 0), &[16], writable);
        assert_eq!((got, len), (Outcome::Id, room), "{writable:?}");
        let bytes = bench.guest.read(bench.base + 16, room as usize + 1);
        assert_eq!(&bytes[..20], b"serial-0123456789\0\0\0");
        assert_eq!(bytes[room as usize - 1], 0, "status");
        assert!(bytes[20..room as usize - 1].iter().all(|byte| *byte == 0xee));
        assert_eq!(bytes[room as usize], 0xee);
    }
}

#[test]
fn serial_numbers_are_checked() {
    assert_eq!(SerialId::new("").unwrap().bytes(), &[0; 20]);
    assert_eq!(SerialId::new("12345678901234567890").unwrap().to_string(), "12345678901234567890");
    assert_eq!("a b".parse::<SerialId>().unwrap().to_string(), "a b");
    assert!(matches!(SerialId::new("123456789012345678901"), Err(SerialError::TooLong(_))));
    for (serial, bad) in [("ä", 'ä'), ("a\0", '\0'), ("a\n", '\n'), ("\u{7f}", '\u{7f}')] {
        assert_eq!(SerialId::new(serial), Err(SerialError::Character(serial.into(), bad)));
    }
}

#[test]
fn statuses_and_lengths_say_what_became_of_it() {
    assert_eq!(status_of(Status::Ok), Done);
    assert_eq!(status_of(Status::NotSupported), Unsupp);
    for status in [Status::NoSpace, Status::Medium, Status::Io, Status::Offline, Status::Invalid] {
        assert_eq!(status_of(status), IoErr);
    }
    for (room, status, want) in [
        (0, Done, 1),
        (0, IoErr, 1),
        (4096, Done, 4097),
        (4096, IoErr, 0),
        (4096, Unsupp, 0),
        (u64::from(u32::MAX) - 1, Done, u32::MAX),
        (u64::from(u32::MAX), Done, u32::MAX),
    ] {
        assert_eq!(written(room, status), want, "{room} {status:?}");
    }
}
