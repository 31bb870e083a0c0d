//! vfio-user with random input: no bytes make a parser panic, and each encoded message is parsed to the same message.

use blkyard_wire::vfio_user::*;
use proptest::prelude::*;

const DATA_MAX: u32 = 1 << 16;

fn range() -> impl Strategy<Value = (u64, u64)> {
    (any::<u64>(), any::<u64>()).prop_map(|(start, len)| (start, len.min(u64::MAX - start)))
}

fn extent() -> impl Strategy<Value = (u64, u64)> {
    (0..u64::MAX, any::<u64>()).prop_map(|(start, len)| (start, len.clamp(1, u64::MAX - start)))
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..300)
}

fn access(count: u32) -> impl Strategy<Value = RegionAccess> {
    (0..=u64::MAX - u64::from(count), any::<u32>()).prop_map(move |(offset, region)| RegionAccess {
        offset,
        region,
        count,
    })
}

fn version(is_reply: bool) -> impl Strategy<Value = VfioVersion> {
    let numbers = (any::<u64>(), 1..=u64::MAX, any::<u64>(), 1..=u64::MAX, any::<bool>());
    let twin = (any::<bool>(), prop::option::of(Just(0)).prop_map(move |index| index.filter(|_| is_reply)));
    (any::<(u16, u16)>(), numbers, twin).prop_map(|((major, minor), numbers, (supported, fd_index))| {
        let (max_msg_fds, xfer, max_dma_maps, pgsizes, write_multiple) = numbers;
        let capabilities = VfioCapabilities {
            max_msg_fds,
            max_data_xfer_size: xfer.try_into().unwrap(),
            max_dma_maps,
            pgsizes: pgsizes.try_into().unwrap(),
            twin_socket: TwinSocket { supported, fd_index },
            write_multiple,
            region_io_fds: max_msg_fds % 2 == 1,
        };
        VfioVersion { major, minor, capabilities }
    })
}

fn unmap() -> impl Strategy<Value = DmaUnmapRequest> {
    prop_oneof![
        Just(DmaUnmapRequest::All),
        extent().prop_map(|(address, size)| DmaUnmapRequest::Range { address, size })
    ]
}

fn write() -> impl Strategy<Value = RegionWrite> {
    (1..=8_u32).prop_flat_map(access).prop_flat_map(|access| {
        any::<[u8; 8]>().prop_map(move |mut data| {
            data[access.count as usize..].fill(0);
            RegionWrite { access, data }
        })
    })
}

/// Checks that the encoding of a request is parsed to the same request.
fn is_read_back(request: &VfioRequest<'_>, descriptors: usize, id: u16, no_reply: bool) -> Result<(), TestCaseError> {
    let bytes = request.encode(id, no_reply);
    let mut reader = FrameReader::new(FrameLimits::for_data(DATA_MAX, 300));
    let (head, payload) = bytes.split_at(HEADER_BYTES);
    let mut frame = reader.push(head, vec![(); descriptors]).unwrap();
    if !payload.is_empty() {
        frame = reader.push(payload, []).unwrap();
    }
    let frame = frame.expect("a whole message");
    prop_assert_eq!((frame.header.id, frame.header.kind), (id, MessageKind::Command { no_reply }));
    let parsed = VfioRequest::parse(frame.header.command, &frame.payload, frame.descriptors.len(), DATA_MAX);
    prop_assert_eq!(parsed.as_ref(), Ok(request));
    Ok(())
}

fn reply_is_read_back(reply: &VfioReply<'_>, descriptors: usize, id: u16) -> Result<(), TestCaseError> {
    let bytes = reply.encode(id);
    let header = MessageHeader::parse(*bytes.first_chunk().unwrap(), u32::MAX).unwrap();
    prop_assert_eq!((header.id, header.kind), (id, MessageKind::Reply));
    let parsed = VfioReply::parse(reply.command(), &bytes[16..], descriptors, DATA_MAX);
    prop_assert_eq!(parsed.as_ref(), Ok(reply));
    Ok(())
}

/// Bytes that often resemble the numbers of a message.
fn payload() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        any::<u32>(),
        0..100_u32,
        Just(u32::MAX),
        Just(16),
        Just(20),
        Just(24),
        Just(32),
        Just(0x21),
        Just(0x24),
        Just(0x1_0001),
    ];
    let words = prop::collection::vec(word, 0..32);
    let words = words.prop_map(|words| words.into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<u8>>());
    (words, 0..4_usize).prop_map(|(mut bytes, less)| {
        bytes.truncate(bytes.len().saturating_sub(less));
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_payload_makes_a_parser_panic(
        number in 0..20_u16, bytes in payload(), descriptors in 0..3_usize, data_max in any::<u32>()
    ) {
        if let Ok(request) = VfioRequest::parse(number, &bytes, descriptors, data_max) {
            let again = request.encode(1, false);
            let parsed = VfioRequest::parse(number, &again[16..], descriptors, data_max);
            prop_assert_eq!(parsed.as_ref(), Ok(&request));
        }
        if let Some(command) = Command::from_number(number)
            && let Ok(reply) = VfioReply::parse(command, &bytes, descriptors, data_max)
        {
            let again = reply.encode(1);
            let parsed = VfioReply::parse(command, &again[16..], descriptors, data_max);
            prop_assert_eq!(parsed.as_ref(), Ok(&reply));
        }
    }

    #[test]
    fn no_stream_makes_the_reader_panic(chunks in prop::collection::vec((payload(), 0..3_usize), 1..20)) {
        let mut reader = FrameReader::new(FrameLimits { bytes_max: 256, descriptors_max: 2 });
        'stream: for (bytes, descriptors) in chunks {
            let mut left = &bytes[..];
            let mut descriptors = vec![(); descriptors];
            while !left.is_empty() {
                let (now, rest) = left.split_at(reader.wanted().min(left.len()));
                if reader.push(now, descriptors.drain(..)).is_err() {
                    break 'stream;
                }
                left = rest;
            }
        }
    }

    #[test]
    fn no_version_data_makes_the_parser_panic(text in ".{0,80}", bytes in data()) {
        for data in [text.as_bytes(), &bytes] {
            let payload = [&[0; 4], data, &[0]].concat();
            let _ = VfioRequest::parse(1, &payload, 0, 0);
            let _ = VfioReply::parse(Command::Version, &payload, 1, 0);
        }
    }

    #[test]
    fn requests_are_read_as_they_were_written(
        (id, no_reply, index) in any::<(u16, bool, u32)>(), more in 0..1000_u32, version in version(false),
        flags in 0..4_u32, (offset, size) in extent(), address in any::<u64>(), unmap in unmap(),
        data in data(), access in access(300), writes in prop::collection::vec(write(), 0..9)
    ) {
        is_read_back(&VfioRequest::Version(version), 0, id, no_reply)?;
        let flags = DmaMapFlags::from_bits(flags).unwrap();
        let map = DmaMapRequest { flags, offset, address: address.min(u64::MAX - size), size };
        is_read_back(&VfioRequest::DmaMap(map), 1, id, no_reply)?;
        is_read_back(&VfioRequest::DmaUnmap(unmap), 0, id, no_reply)?;
        for request in [
            VfioRequest::DeviceGetInfo,
            VfioRequest::DeviceGetRegionInfo { argsz: 32 + more, index },
            VfioRequest::DeviceGetRegionIoFds { argsz: 16 + more, index },
            VfioRequest::DeviceGetIrqInfo { index },
            VfioRequest::RegionRead(access),
            VfioRequest::DmaRead(DmaAccess { address: access.offset, count: access.count }),
            VfioRequest::DeviceReset,
            VfioRequest::RegionWriteMulti(writes),
        ] {
            is_read_back(&request, 0, id, no_reply)?;
        }
        let count = data.len() as u32;
        is_read_back(&VfioRequest::RegionWrite(RegionAccess { count, ..access }, &data), 0, id, no_reply)?;
        is_read_back(&VfioRequest::DmaWrite(DmaAccess { address: access.offset, count }, &data), 0, id, no_reply)?;
    }

    #[test]
    fn interrupt_requests_are_read_as_they_were_written(
        (index, start) in (any::<u32>(), 0..1_u32 << 31), data in prop::collection::vec(any::<u8>(), 1..300),
        action in prop_oneof![Just(IrqAction::Mask), Just(IrqAction::Unmask), Just(IrqAction::Trigger)]
    ) {
        let count = data.len();
        let range = IrqRange { index, start, count: count as u32 };
        for (data, descriptors) in [
            (IrqData::All, 0),
            (IrqData::Some(&data), 0),
            (IrqData::SetEventfds, count),
            (IrqData::RemoveEventfds, 0),
        ] {
            let set = IrqSetRequest { range, action, data };
            is_read_back(&VfioRequest::DeviceSetIrqs(set), descriptors, 1, false)?;
        }
    }

    #[test]
    fn replies_are_read_as_they_were_written(
        id in any::<u16>(), version in version(true), unmap in unmap(), (flags, index, count) in any::<(u32, u32, u32)>(),
        (size, offset) in range(), areas in prop::option::of(prop::collection::vec(any::<(u64, u64)>(), 0..9)),
        parts in prop::collection::vec((range(), 0..3_u32, any::<bool>(), any::<(u32, u64)>()), 0..9),
        data in data(), access in access(300)
    ) {
        reply_is_read_back(&VfioReply::Version(version), 1, id)?;
        let sparse = areas.map(|areas| {
            let areas = areas.into_iter().filter(|_| size > 0).map(|(offset, len)| {
                let offset = offset % size;
                SparseArea { offset, size: len % (size - offset) + 1 }
            });
            areas.collect()
        });
        let region_flags = RegionFlags::from_bits_retain(flags) - RegionFlags::CAPS;
        let info = RegionInfo { index, flags: region_flags, size, offset, sparse };
        reply_is_read_back(&VfioReply::DeviceGetRegionInfo(info.clone()), 1, id)?;
        let fixed = RegionInfo { sparse: None, ..info };
        reply_is_read_back(&VfioReply::RegionInfoCut { argsz: 33 + (count & 0xffff), fixed }, 0, id)?;
        let parts = parts.into_iter().map(|((offset, size), fd_index, eventfd, (flags, value))| {
            let kind = match (eventfd, flags % 2) {
                (true, 0) => IoFdKind::EventFd,
                (true, _) => IoFdKind::ShadowEventFd { memory: fd_index, at: offset },
                (false, _) => IoFdKind::RegionFd,
            };
            IoFd { offset, size, fd_index, kind, flags, value }
        });
        let fds = RegionIoFds { index, parts: parts.collect() };
        reply_is_read_back(&VfioReply::DeviceGetRegionIoFds(fds), 3, id)?;
        let device = DeviceRegions { flags: DeviceFlags::from_bits_retain(flags), regions: index, irqs: count };
        let irq = IrqInfo { index, flags: IrqFlags::from_bits_retain(flags), count };
        let bytes = data.len() as u32;
        for reply in [
            VfioReply::DmaMap,
            VfioReply::DmaUnmap(unmap),
            VfioReply::DeviceGetInfo(device),
            VfioReply::RegionIoFdsCut { argsz: 17 + (count & 0xffff), index },
            VfioReply::DeviceGetIrqInfo(irq),
            VfioReply::DeviceSetIrqs,
            VfioReply::RegionRead(RegionAccess { count: bytes, ..access }, &data),
            VfioReply::RegionWrite(access),
            VfioReply::DmaRead(DmaAccess { address: access.offset, count: bytes }, &data),
            VfioReply::DmaWrite(DmaAccess { address: access.offset, count: bytes }),
            VfioReply::DeviceReset,
            VfioReply::RegionWriteMulti { count: offset },
        ] {
            reply_is_read_back(&reply, 0, id)?;
        }
    }
}
