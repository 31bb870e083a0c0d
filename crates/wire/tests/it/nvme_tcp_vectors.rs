//! NVMe/TCP PDUs byte for byte, and each malformed one with the exact TermReq.

use blkyard_wire::nvme_tcp::*;

const LIMITS: DataLimits = DataLimits { in_capsule: 8192, h2c: 65536 };
const DIGESTS: Framing = Framing { header_digest: true, data_digest: true, alignment: 0 };

/// The header of a PDU, with nonzero fields as (offset, bytes).
fn header(kind: u8, flags: u8, hlen: u8, pdo: u8, plen: u32, fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; usize::from(hlen).max(8)];
    bytes[..4].copy_from_slice(&[kind, flags, hlen, pdo]);
    bytes[4..8].copy_from_slice(&plen.to_le_bytes());
    for (at, part) in fields {
        bytes[*at..at + part.len()].copy_from_slice(part);
    }
    bytes
}

fn reader(sender: PduSender, framing: Option<Framing>) -> PduReader {
    let mut reader = PduReader::new(sender, LIMITS);
    if let Some(framing) = framing {
        reader.start(framing);
    }
    reader
}

/// The first error in a stream.
fn error(reader: &mut PduReader, mut bytes: &[u8]) -> Option<PduError> {
    loop {
        match reader.next(&mut bytes) {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(error) => return Some(error),
        }
    }
}

#[test]
fn each_pdu_is_as_the_specification_has_it() {
    let plain = Framing::PLAIN;
    let cases: &[(Pdu, Framing, Vec<u8>)] = &[
        (
            Pdu::IcReq(IcReq { alignment: 3, header_digest: true, data_digest: false, maxr2t: 0x0102_0304 }),
            DIGESTS,
            header(0, 0, 128, 0, 128, &[(10, &[3, 1]), (12, &[4, 3, 2, 1])]),
        ),
        (
            Pdu::IcResp(IcResp { alignment: 31, header_digest: false, data_digest: true, maxh2cdata: 0x20000 }),
            DIGESTS,
            header(1, 0, 128, 0, 128, &[(10, &[31, 2]), (12, &[0, 0, 2, 0])]),
        ),
        (
            Pdu::H2cTermReq(TermReq { status: 1, information: 0x0102_0304 }),
            DIGESTS,
            header(2, 0, 24, 0, 24, &[(8, &[1, 0, 4, 3, 2, 1])]),
        ),
        (Pdu::C2hTermReq(TermReq { status: 5, information: 0 }), DIGESTS, header(3, 0, 24, 0, 24, &[(8, &[5, 0])])),
        (
            Pdu::CapsuleCmd { sqe: [0x1234_0001, 0, 0, 0, 0, 0, 0, 0x0807_0605_0403_0201], len: 0 },
            plain,
            header(4, 0, 72, 0, 72, &[(8, &[1, 0, 0x34, 0x12]), (64, &[1, 2, 3, 4, 5, 6, 7, 8])]),
        ),
        (Pdu::CapsuleCmd { sqe: [0; 8], len: 512 }, plain, header(4, 0, 72, 72, 72 + 512, &[])),
        (
            Pdu::CapsuleResp([7, 0x0001_0203_0405_0607]),
            plain,
            header(5, 0, 24, 0, 24, &[(8, &[7]), (16, &[7, 6, 5, 4, 3, 2, 1, 0])]),
        ),
        (
            Pdu::H2cData(H2cData { cccid: 0x0102, ttag: 0x0304, offset: 0x1000, len: 8, is_last: true }),
            plain,
            header(6, 4, 24, 24, 32, &[(8, &[2, 1, 4, 3]), (12, &[0, 0x10]), (16, &[8])]),
        ),
        (
            Pdu::C2hData(C2hData { cccid: 0x0102, offset: 4, len: 8, is_last: true, is_success: true }),
            plain,
            header(7, 12, 24, 24, 32, &[(8, &[2, 1]), (12, &[4]), (16, &[8])]),
        ),
        (
            Pdu::R2t(R2t { cccid: 0x0102, ttag: 0x0304, offset: 8, len: 0x2000 }),
            plain,
            header(9, 0, 24, 0, 24, &[(8, &[2, 1, 4, 3]), (12, &[8]), (16, &[0, 0x20])]),
        ),
    ];
    for (pdu, framing, bytes) in cases {
        assert_eq!(pdu.encode(*framing).bytes(), bytes, "{pdu:?}");
    }
    // With digests and an alignment of 128 bytes: header, digest, padding.
    let framing = Framing { alignment: 31, ..DIGESTS };
    let encoded = Pdu::CapsuleCmd { sqe: [9; 8], len: 4096 }.encode(framing);
    assert_eq!((encoded.bytes().len(), encoded.has_data_digest), (128, true));
    assert_eq!(encoded.bytes()[..8], [4, 3, 72, 128, 0x84, 0x10, 0, 0]);
    assert_eq!(encoded.bytes()[72..76], Crc32c::of(&encoded.bytes()[..72]).to_le_bytes());
    assert_eq!(encoded.bytes()[76..], [0; 52]);
    // A TermReq brings the header of the PDU in error, at most 128 bytes of it.
    let term = Pdu::C2hTermReq(TermReq { status: 1, information: 2 }).encode_term_req(&[0xee; 200]);
    assert_eq!(term.bytes().len(), TERM_REQ_BYTES_MAX);
    assert_eq!((&term.bytes()[4..8], &term.bytes()[24..]), (&[152, 0, 0, 0][..], &[0xee; 128][..]));
}

/// Sets the header digest of a PDU.
fn with_digest(mut bytes: Vec<u8>) -> Vec<u8> {
    let digest = Crc32c::of(&bytes);
    bytes.extend(digest.to_le_bytes());
    bytes
}

#[test]
fn each_malformed_pdu_has_its_term_req() {
    use FatalStatus::{HeaderDigest, InvalidHeaderField, LimitExceeded, SequenceError};
    use PduSender::{Controller, Host};
    let plain = Some(Framing::PLAIN);
    let aligned = Some(Framing { alignment: 1, ..Framing::PLAIN });
    let digests = Some(DIGESTS);
    let ic = |kind, fields: &[(usize, &[u8])]| header(kind, 0, 128, 0, 128, fields);
    let cases: Vec<(&str, PduSender, Option<Framing>, Vec<u8>, FatalStatus, u32)> = vec![
        ("unknown type", Host, plain, header(8, 0, 24, 0, 24, &[]), InvalidHeaderField, 0),
        ("unknown type at first", Host, None, header(0xff, 0, 24, 0, 24, &[]), InvalidHeaderField, 0),
        (
            "data of a controller from a host",
            Host,
            plain,
            header(7, 4, 24, 24, 28, &[(16, &[4])]),
            InvalidHeaderField,
            0,
        ),
        ("R2T from a host", Host, plain, header(9, 0, 24, 0, 24, &[]), InvalidHeaderField, 0),
        ("ICResp from a host", Host, None, ic(1, &[]), InvalidHeaderField, 0),
        ("command from a controller", Controller, plain, header(4, 0, 72, 0, 72, &[]), InvalidHeaderField, 0),
        ("TermReq of the other side", Controller, plain, header(2, 0, 24, 0, 24, &[]), InvalidHeaderField, 0),
        // CVE-2026-22998: data and commands before the connection is initialized.
        ("H2CData at first", Host, None, header(6, 4, 24, 24, 28, &[(16, &[4])]), SequenceError, 0),
        ("command at first", Host, None, header(4, 0, 72, 0, 72, &[]), SequenceError, 0),
        ("response at first", Controller, None, header(5, 0, 24, 0, 24, &[]), SequenceError, 0),
        // CVE-2026-89969: a second ICReq, also once headers have digests.
        ("second ICReq", Host, plain, ic(0, &[]), SequenceError, 0),
        ("second ICReq with digests", Host, digests, ic(0, &[]), SequenceError, 0),
        ("second ICResp", Controller, digests, ic(1, &[(13, &[0x10])]), SequenceError, 0),
        // CVE-2025-21927: a header length of 255 with header digests.
        ("header length 255", Controller, digests, header(5, 1, 255, 0, 24, &[]), InvalidHeaderField, 2),
        ("header length 0", Host, plain, header(4, 0, 0, 0, 72, &[]), InvalidHeaderField, 2),
        ("header length of a command", Host, plain, header(4, 0, 71, 0, 72, &[]), InvalidHeaderField, 2),
        ("header length of ICReq", Host, None, header(0, 0, 24, 0, 128, &[]), InvalidHeaderField, 2),
        ("length of ICReq", Host, None, header(0, 0, 128, 0, 129, &[]), InvalidHeaderField, 4),
        ("length of ICReq, 4 GiB", Host, None, header(0, 0, 128, 0, u32::MAX, &[]), InvalidHeaderField, 4),
        ("format version", Host, None, ic(0, &[(8, &[1])]), InvalidHeaderField, 8),
        ("host alignment", Host, None, ic(0, &[(10, &[32])]), InvalidHeaderField, 10),
        ("format version of a controller", Controller, None, ic(1, &[(9, &[1])]), InvalidHeaderField, 8),
        ("controller alignment", Controller, None, ic(1, &[(10, &[255])]), InvalidHeaderField, 10),
        ("MAXH2CDATA 0", Controller, None, ic(1, &[]), InvalidHeaderField, 12),
        ("MAXH2CDATA 4095", Controller, None, ic(1, &[(12, &[0xff, 0x0f])]), InvalidHeaderField, 12),
        ("MAXH2CDATA 4098", Controller, None, ic(1, &[(12, &[0x02, 0x10])]), InvalidHeaderField, 12),
        ("length below the header", Host, plain, header(4, 0, 72, 0, 71, &[]), InvalidHeaderField, 4),
        ("length 0", Host, plain, header(4, 0, 72, 0, 0, &[]), InvalidHeaderField, 4),
        ("data offset in the header", Host, plain, header(4, 0, 72, 71, 584, &[]), InvalidHeaderField, 3),
        ("data offset 0 with data", Host, plain, header(4, 0, 72, 0, 584, &[]), InvalidHeaderField, 3),
        ("data offset without alignment", Host, plain, header(4, 0, 72, 74, 584, &[]), InvalidHeaderField, 3),
        ("data offset of alignment 8", Host, aligned, header(4, 0, 72, 76, 584, &[]), InvalidHeaderField, 3),
        ("data offset beyond the PDU", Host, plain, header(4, 0, 72, 252, 100, &[]), InvalidHeaderField, 4),
        ("data digest in the header digest", Host, digests, header(4, 3, 72, 76, 80, &[]), InvalidHeaderField, 4),
        ("H2CData without data", Host, plain, header(6, 4, 24, 24, 24, &[]), InvalidHeaderField, 4),
        ("R2T with data", Controller, plain, header(9, 0, 24, 24, 28, &[]), InvalidHeaderField, 4),
        ("response, 4 GiB", Controller, plain, header(5, 0, 24, 24, u32::MAX, &[]), InvalidHeaderField, 4),
        ("TermReq of 153 bytes", Host, plain, header(2, 0, 24, 0, 153, &[]), InvalidHeaderField, 4),
        ("TermReq of 23 bytes", Host, plain, header(2, 0, 24, 0, 23, &[]), InvalidHeaderField, 4),
        ("header digest not negotiated", Host, plain, header(4, 1, 72, 0, 76, &[]), InvalidHeaderField, 1),
        ("header digest left out", Host, digests, header(4, 0, 72, 0, 72, &[]), InvalidHeaderField, 1),
        ("data digest not negotiated", Host, plain, header(6, 2, 24, 24, 32, &[]), InvalidHeaderField, 1),
        ("data digest left out", Host, digests, header(6, 1, 24, 28, 32, &[]), InvalidHeaderField, 1),
        ("data digest without data", Host, digests, header(4, 3, 72, 0, 76, &[]), InvalidHeaderField, 1),
        // CVE-2026-80789: lengths up to 4 GiB are refused before anything is allocated.
        ("in-capsule data, 8193 bytes", Host, plain, header(4, 0, 72, 72, 72 + 8193, &[]), LimitExceeded, 0),
        ("in-capsule data, 4 GiB", Host, plain, header(4, 0, 72, 72, u32::MAX, &[]), LimitExceeded, 0),
        ("H2CData above MAXH2CDATA", Host, plain, header(6, 0, 24, 24, 24 + 65540, &[]), LimitExceeded, 0),
        // CVE-2026-23112, CVE-2026-52989: length and offset of H2CData.
        ("data length differs", Host, plain, header(6, 0, 24, 24, 32, &[(16, &[12])]), InvalidHeaderField, 16),
        ("data length, 4 GiB", Host, plain, header(6, 0, 24, 24, 32, &[(16, &[0xff; 4])]), InvalidHeaderField, 16),
        ("odd offset", Host, plain, header(6, 0, 24, 24, 28, &[(12, &[2]), (16, &[4])]), InvalidHeaderField, 12),
        (
            "odd offset of a controller",
            Controller,
            plain,
            header(7, 0, 24, 24, 28, &[(12, &[1]), (16, &[4])]),
            InvalidHeaderField,
            12,
        ),
        ("success before the last", Controller, plain, header(7, 8, 24, 24, 28, &[(16, &[4])]), InvalidHeaderField, 1),
        (
            "odd offset of R2T",
            Controller,
            plain,
            header(9, 0, 24, 0, 24, &[(12, &[3]), (16, &[4])]),
            InvalidHeaderField,
            12,
        ),
        ("R2T for no data", Controller, plain, header(9, 0, 24, 0, 24, &[]), InvalidHeaderField, 16),
        (
            "header digest",
            Controller,
            digests,
            [header(5, 1, 24, 0, 28, &[]), vec![1, 2, 3, 4]].concat(),
            HeaderDigest,
            0x0403_0201,
        ),
    ];
    for (name, sender, framing, bytes, status, information) in cases {
        let mut reader = reader(sender, framing);
        let found = error(&mut reader, &bytes).unwrap_or_else(|| panic!("{name}: accepted"));
        assert_eq!((found.status, found.information), (status, information), "{name}: {found}");
        let received = reader.header_bytes();
        assert_eq!(received, &bytes[..received.len()], "{name}");
        assert!(received.len() >= 8, "{name}");
        assert_eq!(error(&mut reader, &[]), Some(found), "{name}: the error stays");
        assert_eq!(FatalStatus::from_number(found.status as u16), Some(status));
    }
}

#[test]
fn a_term_req_has_the_header_without_digest_and_padding() {
    let framing = Framing { alignment: 31, ..DIGESTS };
    let data = H2cData { cccid: 1, ttag: 2, offset: 0, len: 8, is_last: true };
    for (pdu, header) in [(Pdu::CapsuleCmd { sqe: [5; 8], len: 512 }, 72), (Pdu::H2cData(data), 24)] {
        let encoded = pdu.encode(framing);
        let mut reader = reader(PduSender::Host, Some(framing));
        for (at, byte) in encoded.bytes().iter().enumerate() {
            assert_eq!(reader.header_bytes(), &encoded.bytes()[..at.min(header)]);
            reader.next(&mut std::slice::from_ref(byte)).unwrap();
        }
        assert_eq!(reader.header_bytes(), &encoded.bytes()[..header]);
    }
}

#[test]
fn what_the_specification_leaves_open_is_accepted() {
    let plain = Some(Framing::PLAIN);
    let cases = [
        ("reserved flags", PduSender::Host, plain, header(4, 0xf0, 72, 0, 72, &[])),
        ("data offset without data", PduSender::Host, plain, header(4, 0, 72, 72, 72, &[])),
        ("data offset of a response", PduSender::Controller, plain, header(5, 0, 24, 24, 24, &[])),
        ("TermReq at first", PduSender::Host, None, header(2, 0, 24, 0, 24, &[(8, &[2])])),
        ("digests of a TermReq", PduSender::Host, Some(DIGESTS), header(2, 0, 24, 0, 24, &[(8, &[2])])),
        (
            "reserved bytes of ICReq",
            PduSender::Host,
            None,
            header(0, 0, 128, 9, 128, &[(11, &[0xfc]), (16, &[1; 112])]),
        ),
        ("header digest", PduSender::Controller, Some(DIGESTS), with_digest(header(5, 1, 24, 0, 28, &[]))),
    ];
    for (name, sender, framing, bytes) in cases {
        let mut reader = reader(sender, framing);
        let mut rest = &bytes[..];
        assert!(matches!(reader.next(&mut rest), Ok(Some(PduEvent::Header(_)))), "{name}");
        assert_eq!(rest, [0_u8; 0], "{name}");
    }
}

#[test]
fn a_wrong_data_digest_fails_its_pdu_only() {
    for flip in [false, true] {
        let pdu = Pdu::H2cData(H2cData { cccid: 1, ttag: 2, offset: 0, len: 8, is_last: true });
        let mut bytes = pdu.encode(DIGESTS).bytes().to_vec();
        bytes.extend(*b"01234567");
        bytes.extend((Crc32c::of(b"01234567") ^ u32::from(flip)).to_le_bytes());
        bytes.extend(Pdu::CapsuleCmd { sqe: [3; 8], len: 0 }.encode(DIGESTS).bytes());
        let mut reader = reader(PduSender::Host, Some(DIGESTS));
        let mut rest = &bytes[..];
        assert_eq!(reader.next(&mut rest), Ok(Some(PduEvent::Header(pdu))));
        assert_eq!(reader.data_left(), 8);
        // Three bytes are received directly, five through the reader.
        let (direct, after) = rest.split_at(3);
        reader.skip_data(3).unwrap().update(direct);
        rest = after;
        assert_eq!(reader.next(&mut rest), Ok(Some(PduEvent::Data(b"34567"))));
        assert_eq!(reader.next(&mut rest), Ok(Some(PduEvent::DataEnd { is_intact: !flip })));
        assert!(matches!(reader.next(&mut rest), Ok(Some(PduEvent::Header(Pdu::CapsuleCmd { .. })))));
    }
}
