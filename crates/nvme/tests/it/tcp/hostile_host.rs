//! A target's queue against a hostile host: each violation has its TermReq, and what is none fails one command.

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_nvme::tcp::{SendList, SendPiece, TcpEnd, TcpTargetEvent, TcpTargetOptions, TcpTargetQueue, TcpTransfer};
use blkyard_nvme::{Cqe, NvmeStatus, Psdt, Sqe, io};
use blkyard_wire::nvme_tcp::{
    Crc32c, DataLimits, FatalStatus, Framing, H2cData, IcReq, Pdu, PduEvent, PduReader, PduSender, TermReq,
};

const OPTIONS: TcpTargetOptions = TcpTargetOptions {
    slots: 4,
    segments_max: 8,
    in_capsule: 8192,
    maxh2cdata: 8192,
    header_digest: true,
    data_digest: true,
    alignment: 0,
};
const DIGESTS: Framing = Framing { header_digest: false, data_digest: true, alignment: 0 };
const IN_CAPSULE: u64 = 0x01 << 56;
const TRANSPORT: u64 = 0x5a << 56;

struct Rig {
    target: TcpTargetQueue,
    memory: RegionTable,
    reader: PduReader,
}

impl Rig {
    fn new(data_digest: bool) -> Rig {
        let memory = RegionTable::new(vec![Region::anonymous(1 << 20).unwrap()]);
        let reader = PduReader::new(PduSender::Controller, DataLimits { in_capsule: 0, h2c: 0 });
        let mut rig = Rig { target: TcpTargetQueue::new(OPTIONS), memory, reader };
        let request = Pdu::IcReq(IcReq { alignment: 0, header_digest: false, data_digest, maxr2t: 0 });
        assert_eq!(rig.events(request.encode(Framing::PLAIN).bytes()), [TcpTargetEvent::Started]);
        assert!(matches!(rig.answers()[..], [Pdu::IcResp(_)]));
        rig.reader.start(if data_digest { DIGESTS } else { Framing::PLAIN });
        rig
    }

    fn events(&mut self, mut bytes: &[u8]) -> Vec<TcpTargetEvent> {
        std::iter::from_fn(|| self.target.receive(&mut bytes, |_, _| {})).collect()
    }

    fn sent(&mut self) -> Vec<u8> {
        let mut list = SendList::new(64);
        if let Some(number) = self.target.fill(&self.memory, &mut list) {
            self.target.sent(number);
        }
        let bytes = list.pieces().flat_map(|piece| match piece {
            SendPiece::Bytes(bytes) => bytes.to_vec(),
            SendPiece::Data(segment) => vec![0; segment.len as usize],
        });
        bytes.collect()
    }

    fn answers(&mut self) -> Vec<Pdu> {
        let sent = self.sent();
        let mut bytes = &sent[..];
        let mut pdus = vec![];
        while let Some(event) = self.reader.next(&mut bytes).unwrap() {
            if let PduEvent::Header(pdu) = event {
                pdus.push(pdu);
            }
        }
        pdus
    }

    /// Statuses of the responses, by command.
    fn statuses(&mut self) -> Vec<(u16, NvmeStatus)> {
        let cqes = self.answers().into_iter().map(|pdu| match pdu {
            Pdu::CapsuleResp(cqe) => Cqe(cqe),
            other => panic!("{other:?}"),
        });
        cqes.map(|cqe| (cqe.cid(), cqe.status())).collect()
    }

    fn buffer(&mut self, slot: u16, len: u32) {
        let segment = Segment { region: 0, offset: 0, len };
        assert!(self.target.receive_data(&self.memory, slot, std::iter::once(segment)));
    }

    /// A write of 8192 bytes in slot 0 with an R2T sent, and a read in slot 1.
    fn with_write() -> (Rig, u16) {
        let mut rig = Rig::new(false);
        let bytes = [command(0x77, io::WRITE, TRANSPORT + 8192), command(0x78, io::READ, TRANSPORT + 4096)].concat();
        let events = rig.events(&bytes);
        assert!(matches!(
            events[..],
            [
                TcpTargetEvent::Command { slot: 0, transfer: TcpTransfer::Transport(8192), .. },
                TcpTargetEvent::Command { slot: 1, transfer: TcpTransfer::Transport(4096), .. }
            ]
        ));
        rig.buffer(0, 8192);
        let answers = rig.answers();
        let [Pdu::R2t(r2t)] = answers[..] else { panic!("{answers:?}") };
        assert_eq!((r2t.cccid, r2t.offset, r2t.len), (0x77, 0, 8192));
        (rig, r2t.ttag)
    }
}

fn sqe(cid: u16, opcode: u8, descriptor: u64) -> Sqe {
    Sqe::with_blocks(opcode, 1, 0, 8, 0).with_cid(cid).with_data(Psdt::Sgl, [0, descriptor])
}

fn command(cid: u16, opcode: u8, descriptor: u64) -> Vec<u8> {
    Pdu::CapsuleCmd { sqe: sqe(cid, opcode, descriptor).0, len: 0 }.encode(Framing::PLAIN).bytes().to_vec()
}

fn capsule(sqe: Sqe, len: u32) -> Vec<u8> {
    with_data(Pdu::CapsuleCmd { sqe: sqe.0, len }, Framing::PLAIN, false)
}

/// A PDU with data, and a data digest that is right or wrong.
fn with_data(pdu: Pdu, framing: Framing, is_damaged: bool) -> Vec<u8> {
    let encoded = pdu.encode(framing);
    let data = vec![0x5a; pdu.data_bytes() as usize];
    let digest = Crc32c::of(&data) ^ u32::from(is_damaged);
    let digest = if encoded.has_data_digest { &digest.to_le_bytes()[..] } else { &[] };
    [encoded.bytes(), &data, digest].concat()
}

#[test]
fn each_violation_of_a_host_has_its_term_req() {
    use FatalStatus::{InvalidHeaderField, OutOfRange, SequenceError};
    let (_, ttag) = Rig::with_write();
    let data = H2cData { cccid: 0x77, ttag, offset: 0, len: 4096, is_last: false };
    let cases: Vec<(&str, Vec<H2cData>, FatalStatus, u32)> = vec![
        // CVE-2023-6356, CVE-2026-22998.
        ("transfer tag of a read", vec![H2cData { ttag: 1, cccid: 0x78, ..data }], InvalidHeaderField, 10),
        ("transfer tag of a free slot", vec![H2cData { ttag: 2, ..data }], InvalidHeaderField, 10),
        ("transfer tag out of range", vec![H2cData { ttag: 0xfff, ..data }], InvalidHeaderField, 10),
        ("transfer tag of another use", vec![H2cData { ttag: ttag ^ 0x1000, ..data }], InvalidHeaderField, 10),
        ("command of another slot", vec![H2cData { cccid: 0x78, ..data }], InvalidHeaderField, 8),
        // CVE-2026-23112.
        ("data beyond the R2T", vec![H2cData { offset: 8188, len: 8, is_last: true, ..data }], OutOfRange, 0),
        ("data beyond 4 GiB", vec![H2cData { offset: u32::MAX - 3, len: 8192, ..data }], OutOfRange, 0),
        ("data with a gap", vec![H2cData { offset: 4096, is_last: true, ..data }], InvalidHeaderField, 12),
        ("data twice", vec![data, data], InvalidHeaderField, 12),
        ("last before the end", vec![H2cData { is_last: true, ..data }], InvalidHeaderField, 1),
        ("no last at the end", vec![data, H2cData { offset: 4096, ..data }], InvalidHeaderField, 1),
        (
            "data after the end",
            vec![H2cData { len: 8192, is_last: true, ..data }, H2cData { offset: 8192, len: 4, ..data }],
            InvalidHeaderField,
            10,
        ),
    ];
    let check = |name: &str, mut rig: Rig, bytes: &[u8], header: &[u8], status, information| {
        let events = rig.events(bytes);
        let Some(TcpTargetEvent::Ended(TcpEnd::Violation(error))) =
            events.iter().find(|event| matches!(event, TcpTargetEvent::Ended(_)))
        else {
            panic!("{name}: {events:?}")
        };
        assert_eq!((error.status, error.information), (status, information), "{name}: {error}");
        let term = Pdu::C2hTermReq(TermReq { status: status as u16, information }).encode_term_req(header);
        assert_eq!(rig.sent(), term.bytes(), "{name}");
        assert_eq!(rig.sent(), [0_u8; 0], "{name}");
    };
    for (name, pdus, status, information) in cases {
        let (rig, _) = Rig::with_write();
        let bytes: Vec<u8> =
            pdus.iter().flat_map(|data| with_data(Pdu::H2cData(*data), Framing::PLAIN, false)).collect();
        let header = Pdu::H2cData(*pdus.last().unwrap()).encode(Framing::PLAIN);
        check(name, rig, &bytes, header.bytes(), status, information);
    }
    let first = with_data(Pdu::H2cData(data), Framing::PLAIN, false);
    check("data before any command", Rig::new(false), &first, &first[..24], InvalidHeaderField, 10);
    let mut early = Rig::new(false);
    early.events(&command(0x77, io::WRITE, TRANSPORT + 8192));
    check("data before a buffer", early, &first, &first[..24], InvalidHeaderField, 10);
    let mut early = Rig::new(false);
    early.events(&command(0x77, io::WRITE, TRANSPORT + 8192));
    early.buffer(0, 8192);
    check("data before the R2T was sent", early, &first, &first[..24], InvalidHeaderField, 10);
    let five: Vec<u8> = (0..5).flat_map(|cid| command(cid, io::FLUSH, TRANSPORT)).collect();
    check("more commands than slots", Rig::new(false), &five, &command(4, io::FLUSH, TRANSPORT), SequenceError, 0);
}

#[test]
fn an_invalid_sgl_fails_its_command_only() {
    let offset = sqe(1, io::WRITE, IN_CAPSULE + 512).with_data(Psdt::Sgl, [4, IN_CAPSULE + 512]);
    let cases = [
        ("PRPs", sqe(1, io::WRITE, 0).with_data(Psdt::Prp, [4096, 0]), 0, NvmeStatus::INVALID_FIELD),
        ("offset in the capsule", offset, 512, NvmeStatus::INVALID_SGL_OFFSET),
        ("length above the capsule's", sqe(1, io::WRITE, IN_CAPSULE + 516), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("length below the capsule's", sqe(1, io::WRITE, IN_CAPSULE + 4), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("no data in the capsule", sqe(1, io::WRITE, IN_CAPSULE + 4), 0, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("transport data in the capsule", sqe(1, io::WRITE, TRANSPORT + 512), 512, NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("a segment", sqe(1, io::READ, (0x30 << 56) + 16), 0, NvmeStatus::INVALID_SGL_TYPE),
        ("a keyed descriptor", sqe(1, io::READ, (0x40 << 56) + 512), 0, NvmeStatus::INVALID_SGL_TYPE),
        ("an address", sqe(1, io::READ, 512), 0, NvmeStatus::INVALID_SGL_TYPE),
    ];
    for (name, sqe, len, status) in cases {
        let mut rig = Rig::new(false);
        let bytes = [capsule(sqe, len), command(2, io::FLUSH, TRANSPORT)].concat();
        let events = rig.events(&bytes);
        let [TcpTargetEvent::Command { slot, transfer: TcpTransfer::None, .. }] = events[..] else {
            panic!("{name}: {events:?}")
        };
        rig.target.respond(slot, NvmeStatus::SUCCESS, 0);
        assert_eq!(rig.statuses(), [(1, status.with_dnr()), (2, NvmeStatus::SUCCESS)], "{name}");
        assert_eq!(rig.events(&[]), [TcpTargetEvent::Released(slot)], "{name}");
        assert_eq!(rig.target.in_use(), 0, "{name}");
    }
}

#[test]
fn a_transfer_of_4_gib_is_a_number_only() {
    // CVE-2026-80789: nothing is allocated by it.
    let mut rig = Rig::new(false);
    let events = rig.events(&command(1, io::WRITE, TRANSPORT + u64::from(u32::MAX)));
    assert!(matches!(events[..], [TcpTargetEvent::Command { transfer: TcpTransfer::Transport(u32::MAX), .. }]));
    rig.target.respond(0, NvmeStatus::INVALID_FIELD, 0);
    assert_eq!(rig.statuses(), [(1, NvmeStatus::INVALID_FIELD)]);
}

#[test]
fn a_wrong_data_digest_is_answered_once() {
    // CVE-2026-64534: in the capsule of a command that has failed already.
    let mut rig = Rig::new(true);
    let invalid = Pdu::CapsuleCmd { sqe: sqe(1, io::WRITE, IN_CAPSULE + 4).0, len: 512 };
    assert_eq!(rig.events(&with_data(invalid, DIGESTS, true)), []);
    assert_eq!(rig.statuses(), [(1, NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())]);
    // In the capsule of a valid one.
    let valid = Pdu::CapsuleCmd { sqe: sqe(2, io::WRITE, IN_CAPSULE + 512).0, len: 512 };
    let bytes = with_data(valid, DIGESTS, true);
    let mut rest = &bytes[..];
    let event = rig.target.receive(&mut rest, |_, _| {});
    let Some(TcpTargetEvent::Command { slot, .. }) = event else { panic!("{event:?}") };
    assert_eq!(rig.target.receive(&mut rest, |_, _| {}), None, "no byte is taken before there is a buffer");
    assert!(!rest.is_empty());
    rig.buffer(slot, 512);
    assert_eq!(rig.events(rest), []);
    assert_eq!(rig.statuses(), [(2, NvmeStatus::TRANSIENT_TRANSPORT)]);
    assert_eq!(rig.events(&[]), [TcpTargetEvent::Released(slot)]);
    // CVE-2026-64535: in a PDU that is not the last.
    let events = rig.events(&command(3, io::WRITE, TRANSPORT + 8192));
    let [TcpTargetEvent::Command { slot, .. }] = events[..] else { panic!("{events:?}") };
    rig.buffer(slot, 8192);
    let [Pdu::R2t(r2t)] = rig.answers()[..] else { panic!("no R2T") };
    let data = H2cData { cccid: 3, ttag: r2t.ttag, offset: 0, len: 4096, is_last: false };
    assert_eq!(rig.events(&with_data(Pdu::H2cData(data), DIGESTS, true)), []);
    assert_eq!(rig.statuses(), [], "the rest of the data is to come");
    let last = H2cData { offset: 4096, is_last: true, ..data };
    assert_eq!(rig.events(&with_data(Pdu::H2cData(last), DIGESTS, false)), []);
    assert_eq!(rig.statuses(), [(3, NvmeStatus::TRANSIENT_TRANSPORT)]);
    assert_eq!(rig.events(&[]), [TcpTargetEvent::Released(slot)]);
    assert_eq!(rig.target.in_use(), 0);
}

#[test]
fn a_closed_connection_releases_each_command_once() {
    // In every state: waiting for a buffer, for data, executing, answered.
    let (mut rig, _) = Rig::with_write();
    let bytes = [command(3, io::FLUSH, TRANSPORT), command(4, io::WRITE, TRANSPORT + 4096)].concat();
    assert_eq!(rig.events(&bytes).len(), 2);
    rig.target.respond(2, NvmeStatus::SUCCESS, 0);
    rig.target.abandon(TcpEnd::Closed);
    let mut released = rig.events(&[]);
    rig.target.respond(1, NvmeStatus::SUCCESS, 0);
    rig.buffer(3, 4096);
    released.extend(rig.events(&command(9, io::FLUSH, TRANSPORT)));
    let mut slots: Vec<u16> = released
        .iter()
        .map(|event| match event {
            TcpTargetEvent::Released(slot) => *slot,
            other => panic!("{other:?}"),
        })
        .collect();
    slots.sort_unstable();
    assert_eq!(slots, [0, 1, 2, 3]);
    assert_eq!((rig.target.in_use(), rig.sent().len()), (0, 0));
}

#[test]
fn a_buffer_is_released_when_the_kernel_is_done_with_it() {
    // With or without the end of the connection meanwhile; a response that is not in a list waits for earlier lists.
    for is_closed in [false, true] {
        let (mut rig, _) = Rig::with_write();
        let segment = Segment { region: 0, offset: 0, len: 4096 };
        assert!(rig.target.respond_with(&rig.memory, 1, std::iter::once(segment), 0));
        let mut list = SendList::new(64);
        let number = rig.target.fill(&rig.memory, &mut list).unwrap();
        assert_eq!(rig.events(&command(3, io::FLUSH, TRANSPORT)).len(), 1);
        rig.target.respond(2, NvmeStatus::SUCCESS, 0);
        assert_eq!(rig.events(&[]), []);
        if is_closed {
            rig.target.abandon(TcpEnd::Closed);
            assert_eq!(rig.events(&[]), [TcpTargetEvent::Released(0)], "the write that waited for data");
        }
        rig.target.sent(number - 1);
        assert_eq!(rig.events(&[]), []);
        rig.target.sent(number);
        let mut released = vec![TcpTargetEvent::Released(1)];
        if is_closed {
            released.push(TcpTargetEvent::Released(2));
        }
        assert_eq!(rig.events(&[]), released);
    }
}
