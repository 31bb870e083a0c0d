//! NVMe/TCP with random input: no bytes make the parser panic, and an encoded stream, cut anywhere, is parsed to the
//! same PDUs.

use blkyard_wire::nvme_tcp::*;
use proptest::prelude::*;

const LIMITS: DataLimits = DataLimits { in_capsule: 8192, h2c: 65536 };

/// A PDU after the initialization, of one direction.
fn pdu(sender: PduSender) -> BoxedStrategy<Pdu> {
    let offset = || (0..u32::MAX / 4).prop_map(|dwords| dwords * 4);
    let len = 1..300_u32;
    match sender {
        PduSender::Host => prop_oneof![
            (any::<[u64; 8]>(), 0..300_u32).prop_map(|(sqe, len)| Pdu::CapsuleCmd { sqe, len }),
            (any::<(u16, u16, bool)>(), offset(), len).prop_map(|((cccid, ttag, is_last), offset, len)| {
                Pdu::H2cData(H2cData { cccid, ttag, offset, len, is_last })
            }),
            any::<(u16, u32)>().prop_map(|(status, information)| Pdu::H2cTermReq(TermReq { status, information })),
        ]
        .boxed(),
        PduSender::Controller => prop_oneof![
            any::<[u64; 2]>().prop_map(Pdu::CapsuleResp),
            (any::<(u16, bool, bool)>(), offset(), len).prop_map(|((cccid, is_last, is_success), offset, len)| {
                Pdu::C2hData(C2hData { cccid, offset, len, is_last, is_success: is_success && is_last })
            }),
            (any::<(u16, u16)>(), offset(), 1..=u32::MAX).prop_map(|((cccid, ttag), offset, len)| Pdu::R2t(R2t {
                cccid,
                ttag,
                offset,
                len
            })),
            any::<(u16, u32)>().prop_map(|(status, information)| Pdu::C2hTermReq(TermReq { status, information })),
        ]
        .boxed(),
    }
}

fn framing() -> impl Strategy<Value = Framing> {
    (any::<(bool, bool)>(), 0..=ALIGNMENT_MAX).prop_map(|((header_digest, data_digest), alignment)| Framing {
        header_digest,
        data_digest,
        alignment,
    })
}

fn stream() -> impl Strategy<Value = (PduSender, Framing, Vec<Pdu>)> {
    prop_oneof![Just(PduSender::Host), Just(PduSender::Controller)]
        .prop_flat_map(|sender| (Just(sender), framing(), prop::collection::vec(pdu(sender), 1..12)))
}

/// The events of a stream cut after these numbers of bytes, with adjacent data joined.
fn events(reader: &mut PduReader, bytes: &[u8], cuts: &[usize]) -> Result<Vec<(Option<Pdu>, Vec<u8>, bool)>, PduError> {
    let mut found = Vec::new();
    let (mut at, mut cut) = (0, 0);
    while at < bytes.len() {
        let len = cuts.get(cut % cuts.len().max(1)).copied().unwrap_or(bytes.len()).clamp(1, bytes.len() - at);
        let mut piece = &bytes[at..at + len];
        (at, cut) = (at + len, cut + 1);
        while let Some(event) = reader.next(&mut piece)? {
            match event {
                PduEvent::Header(pdu) => found.push((Some(pdu), Vec::new(), false)),
                PduEvent::Data(data) => found.last_mut().unwrap().1.extend_from_slice(data),
                PduEvent::DataEnd { is_intact } => found.last_mut().unwrap().2 = is_intact,
            }
        }
    }
    Ok(found)
}

proptest! {
    #[test]
    fn a_stream_cut_anywhere_is_parsed_to_the_same_pdus(
        (sender, framing, pdus) in stream(),
        cuts in prop::collection::vec(1..200_usize, 1..20),
        seed in any::<u8>(),
    ) {
        let mut bytes = Vec::new();
        let mut want = Vec::new();
        for pdu in pdus {
            let data: Vec<u8> = (0..pdu.data_bytes()).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
            let is_term_req = matches!(pdu, Pdu::H2cTermReq(_) | Pdu::C2hTermReq(_));
            let encoded = if is_term_req { pdu.encode_term_req(&[seed; 9]) } else { pdu.encode(framing) };
            bytes.extend_from_slice(encoded.bytes());
            bytes.extend_from_slice(&data);
            if encoded.has_data_digest {
                bytes.extend(Crc32c::of(&data).to_le_bytes());
            }
            let has_data = !data.is_empty();
            want.push((Some(pdu), data, has_data));
        }
        let mut reader = PduReader::new(sender, LIMITS);
        reader.start(framing);
        prop_assert_eq!(events(&mut reader, &bytes, &cuts).unwrap(), want);
    }

    #[test]
    fn no_bytes_make_the_parser_panic(
        (sender, framing, pdus) in stream(),
        is_started in any::<bool>(),
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..8),
        cuts in prop::collection::vec(1..64_usize, 1..8),
        tail in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes: Vec<u8> = pdus.iter().flat_map(|pdu| pdu.encode(framing).bytes().to_vec()).collect();
        bytes.extend(tail);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let mut reader = PduReader::new(sender, LIMITS);
        if is_started {
            reader.start(framing);
        }
        // An error must not depend on the cuts.
        let cut = events(&mut reader, &bytes, &cuts);
        let mut whole = PduReader::new(sender, LIMITS);
        if is_started {
            whole.start(framing);
        }
        prop_assert_eq!(cut, events(&mut whole, &bytes, &[]));
    }
}
