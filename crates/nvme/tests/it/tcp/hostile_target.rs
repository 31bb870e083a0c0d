//! A host's queue against a hostile target: each violation has its TermReq, and what is none fails one command.

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_nvme::tcp::{SendList, SendPiece, TcpDirection, TcpEnd, TcpHostEvent, TcpHostOptions, TcpHostQueue};
use blkyard_nvme::{Completed, Cqe, NvmeStatus, Sqe, io};
use blkyard_wire::nvme_tcp::{C2hData, FatalStatus, Framing, IcResp, Pdu, R2t, TermReq};

pub const OPTIONS: TcpHostOptions = TcpHostOptions {
    depth: 8,
    segments_max: 8,
    in_capsule: 512,
    header_digest: false,
    data_digest: false,
    alignment: 0,
};
pub const RESPONSE: IcResp = IcResp { alignment: 0, header_digest: false, data_digest: false, maxh2cdata: 4096 };

fn memory() -> RegionTable {
    RegionTable::new(vec![Region::anonymous(1 << 20).unwrap()])
}

fn encode(pdu: Pdu) -> Vec<u8> {
    let mut bytes = pdu.encode(Framing::PLAIN).bytes().to_vec();
    bytes.resize(bytes.len() + pdu.data_bytes() as usize, 0x5a);
    bytes
}

fn sent(memory: &RegionTable, host: &mut TcpHostQueue) -> Vec<u8> {
    let mut list = SendList::new(64);
    host.fill(memory, &mut list);
    let bytes = list.pieces().flat_map(|piece| match piece {
        SendPiece::Bytes(bytes) => bytes.to_vec(),
        SendPiece::Data(segment) => vec![0; segment.len as usize],
    });
    bytes.collect()
}

fn events(host: &mut TcpHostQueue, mut bytes: &[u8]) -> Vec<TcpHostEvent> {
    std::iter::from_fn(|| host.receive(&mut bytes, |_, _| {})).collect()
}

/// A started queue with a read of 4096 bytes (0), a write of 8192 (1), zeroes (2), and a write of 512 in its capsule
/// (3), all sent, and a read (4) that was not sent.
fn started(memory: &RegionTable) -> TcpHostQueue {
    let mut host = TcpHostQueue::new(OPTIONS);
    assert_eq!(sent(memory, &mut host).len(), 128);
    assert_eq!(events(&mut host, &encode(Pdu::IcResp(RESPONSE))), [TcpHostEvent::Started]);
    let data = |len| std::iter::once(Segment { region: 0, offset: 0, len });
    let commands = [
        (io::READ, TcpDirection::Read, 4096),
        (io::WRITE, TcpDirection::Write, 8192),
        (io::WRITE_ZEROES, TcpDirection::None, 0),
        (io::WRITE, TcpDirection::Write, 512),
    ];
    for (slot, (opcode, direction, len)) in (0..).zip(commands) {
        assert!(host.push(memory, slot, Sqe::with_blocks(opcode, 1, 0, 8, 0), direction, data(len)));
    }
    assert_eq!(sent(memory, &mut host).len(), 72 * 4 + 512);
    host.sent(2);
    assert!(host.push(memory, 4, Sqe::with_blocks(io::READ, 1, 0, 8, 0), TcpDirection::Read, data(4096)));
    host
}

fn response(cid: u16, status: NvmeStatus) -> Pdu {
    Pdu::CapsuleResp(Cqe::new(cid, 0, 0, status, 0, false).0)
}

fn data(cccid: u16, offset: u32, len: u32) -> C2hData {
    C2hData { cccid, offset, len, is_last: false, is_success: false }
}

fn r2t(cccid: u16, offset: u32, len: u32) -> Pdu {
    Pdu::R2t(R2t { cccid, ttag: 7, offset, len })
}

#[test]
fn each_violation_of_a_target_has_its_term_req() {
    use FatalStatus::{InvalidHeaderField, LimitExceeded, OutOfRange, SequenceError};
    let success = NvmeStatus::SUCCESS;
    let whole = C2hData { is_last: true, is_success: true, ..data(0, 0, 4096) };
    let cases: Vec<(&str, Vec<Pdu>, FatalStatus, u32)> = vec![
        ("response for a slot that does not exist", vec![response(8, success)], InvalidHeaderField, 20),
        ("response for a free slot", vec![response(5, success)], InvalidHeaderField, 20),
        ("response of another sequence", vec![response(0x1000, success)], InvalidHeaderField, 20),
        ("response of a command that was not sent", vec![response(4, success)], InvalidHeaderField, 20),
        ("second response", vec![response(2, success), response(2, success)], InvalidHeaderField, 20),
        // CVE-2026-89481: the host would send memory that a read is to fill.
        ("R2T for a read", vec![r2t(0, 0, 4096)], InvalidHeaderField, 8),
        ("R2T for in-capsule data", vec![r2t(3, 0, 512)], InvalidHeaderField, 8),
        ("R2T for no command", vec![r2t(0xffff, 0, 512)], InvalidHeaderField, 8),
        // CVE-2025-38264.
        ("two R2Ts at once", vec![r2t(1, 0, 4096), r2t(1, 4096, 4096)], LimitExceeded, 0),
        ("the same R2T twice", vec![r2t(1, 0, 8192), r2t(1, 0, 8192)], LimitExceeded, 0),
        ("R2T beyond the data", vec![r2t(1, 0, 8196)], OutOfRange, 0),
        ("R2T beyond 4 GiB", vec![r2t(1, u32::MAX - 3, u32::MAX)], OutOfRange, 0),
        ("R2T out of order", vec![r2t(1, 4096, 4096)], InvalidHeaderField, 12),
        // CVE-2026-89482.
        ("data for Write Zeroes", vec![Pdu::C2hData(data(2, 0, 512))], InvalidHeaderField, 8),
        ("data for a write", vec![Pdu::C2hData(data(1, 0, 512))], InvalidHeaderField, 8),
        ("data for no command", vec![Pdu::C2hData(data(6, 0, 512))], InvalidHeaderField, 8),
        ("data beyond the buffer", vec![Pdu::C2hData(data(0, 0, 4100))], OutOfRange, 0),
        ("data after all data", vec![Pdu::C2hData(data(0, 0, 4096)), Pdu::C2hData(data(0, 4096, 4))], OutOfRange, 0),
        ("data with a gap", vec![Pdu::C2hData(data(0, 512, 512))], InvalidHeaderField, 12),
        ("data twice", vec![Pdu::C2hData(data(0, 0, 512)), Pdu::C2hData(data(0, 0, 512))], InvalidHeaderField, 12),
        (
            "data after the last",
            vec![Pdu::C2hData(C2hData { is_last: true, ..data(0, 0, 512) }), Pdu::C2hData(data(0, 512, 512))],
            SequenceError,
            0,
        ),
        ("success before all data", vec![Pdu::C2hData(C2hData { len: 512, ..whole })], InvalidHeaderField, 1),
        ("response after success", vec![Pdu::C2hData(whole), response(0, success)], InvalidHeaderField, 20),
        ("data after success", vec![Pdu::C2hData(whole), Pdu::C2hData(data(0, 0, 4))], InvalidHeaderField, 8),
        ("success of a write without its data", vec![response(1, success)], SequenceError, 0),
    ];
    let memory = memory();
    for (name, pdus, status, information) in cases {
        let mut host = started(&memory);
        let bytes: Vec<u8> = pdus.iter().flat_map(|pdu| encode(*pdu)).collect();
        let events = events(&mut host, &bytes);
        let Some(TcpHostEvent::Ended(TcpEnd::Violation(error))) = events.last() else { panic!("{name}: {events:?}") };
        assert_eq!((error.status, error.information), (status, information), "{name}: {error}");
        // The TermReq has the header of the last PDU, and nothing follows it.
        let mut header = encode(*pdus.last().unwrap());
        header.truncate(24);
        let term = Pdu::H2cTermReq(TermReq { status: status as u16, information });
        assert_eq!(sent(&memory, &mut host), term.encode_term_req(&header).bytes(), "{name}");
        assert_eq!(sent(&memory, &mut host), [0_u8; 0], "{name}");
        let completed = events.iter().filter(|event| matches!(event, TcpHostEvent::Completed(_))).count();
        let cancelled = (0..8).filter(|slot| host.cancel(*slot)).count();
        assert_eq!(completed + cancelled, 5, "{name}");
    }
}

#[test]
fn digests_that_were_not_requested_end_the_connection() {
    let memory = memory();
    let mut host = TcpHostQueue::new(OPTIONS);
    sent(&memory, &mut host);
    let events = events(&mut host, &encode(Pdu::IcResp(IcResp { data_digest: true, ..RESPONSE })));
    let [TcpHostEvent::Ended(TcpEnd::Violation(error))] = events[..] else { panic!("{events:?}") };
    assert_eq!((error.status, error.information), (FatalStatus::InvalidHeaderField, 11));
}

#[test]
fn a_short_read_is_no_success() {
    let memory = memory();
    for (pdus, want) in [
        (vec![response(0, NvmeStatus::SUCCESS)], NvmeStatus::DATA_TRANSFER_ERROR),
        (vec![Pdu::C2hData(data(0, 0, 512)), response(0, NvmeStatus::SUCCESS)], NvmeStatus::DATA_TRANSFER_ERROR),
        (vec![response(0, NvmeStatus::UNRECOVERED_READ)], NvmeStatus::UNRECOVERED_READ),
        (vec![Pdu::C2hData(data(0, 0, 4096)), response(0, NvmeStatus::SUCCESS)], NvmeStatus::SUCCESS),
    ] {
        let mut host = started(&memory);
        let bytes: Vec<u8> = pdus.iter().flat_map(|pdu| encode(*pdu)).collect();
        let completed = Completed { slot: 0, status: want, result: 0 };
        assert_eq!(events(&mut host, &bytes), [TcpHostEvent::Completed(completed)]);
    }
}

#[test]
fn a_write_is_complete_when_the_kernel_is_done_with_its_data() {
    let memory = memory();
    let mut host = started(&memory);
    assert_eq!(events(&mut host, &encode(r2t(1, 0, 8192))), []);
    // The read that waited, and two PDUs of data.
    assert_eq!(sent(&memory, &mut host).len(), 72 + 2 * (24 + 4096));
    assert_eq!(events(&mut host, &encode(response(1, NvmeStatus::SUCCESS))), []);
    host.sent(2);
    assert_eq!(events(&mut host, &[]), []);
    host.sent(3);
    let completed = Completed { slot: 1, status: NvmeStatus::SUCCESS, result: 0 };
    assert_eq!(events(&mut host, &[]), [TcpHostEvent::Completed(completed)]);
}

#[test]
fn a_term_req_of_the_target_ends_the_connection() {
    let memory = memory();
    let mut host = started(&memory);
    let term = TermReq { status: 2, information: 0 };
    let bytes = Pdu::C2hTermReq(term).encode_term_req(&[1; 72]).bytes().to_vec();
    assert_eq!(events(&mut host, &bytes), [TcpHostEvent::Ended(TcpEnd::Terminated(term))]);
    assert_eq!(sent(&memory, &mut host), [0_u8; 0], "no TermReq answers another");
}
