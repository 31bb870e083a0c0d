//! vfio-user by hand-built bytes: each message in both directions, and malformed input with its exact error.
//!
//! Offsets and values are those of the specification's tables. The inputs that broke others are marked with their
//! class: (1) length trusted before allocation, (2) id used as index, (5) geometry of one object used for another,
//! (9) trust in the peer.

use blkyard_wire::vfio_user::*;

/// Maximum data bytes of one message in these tests.
const DATA_MAX: u32 = 4096;

/// A payload of numbers of given widths, in native byte order.
macro_rules! bytes {
    ($($value:expr),* $(,)?) => {{
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend_from_slice(&$value.to_ne_bytes());)*
        bytes
    }};
}

fn header(id: u16, command: u16, size: u32, flags: u32, error: u32) -> [u8; 16] {
    bytes![id, command, size, flags, error].try_into().unwrap()
}

fn request(command: Command, payload: &[u8], descriptors: usize) -> Result<VfioRequest<'_>, MessageError> {
    VfioRequest::parse(command as u16, payload, descriptors, DATA_MAX)
}

fn reply(command: Command, payload: &[u8], descriptors: usize) -> Result<VfioReply<'_>, MessageError> {
    VfioReply::parse(command, payload, descriptors, DATA_MAX)
}

fn version_payload(json: &str) -> Vec<u8> {
    [&bytes![0_u16, 1_u16][..], json.as_bytes(), &[0]].concat()
}

#[test]
fn headers_are_read_and_written_as_specified() {
    for (bytes, id, command, payload_bytes, kind) in [
        (header(7, 1, 16, 0, 0), 7, 1, 0, MessageKind::Command { no_reply: false }),
        (header(0xffff, 10, 40, 0x10, 0), 0xffff, 10, 24, MessageKind::Command { no_reply: true }),
        (header(0, 5, 48, 1, 0), 0, 5, 32, MessageKind::Reply),
        (header(3, 99, 16, 0x21, 22), 3, 99, 0, MessageKind::Error(22)),
        (header(3, 2, 16, 0x21, 0), 3, 2, 0, MessageKind::Error(0)),
        // As libvfio-user refuses to access a region.
        (header(3, 10, 32, 0x21, 22), 3, 10, 16, MessageKind::Error(22)),
    ] {
        let parsed = MessageHeader::parse(bytes, 4096).unwrap();
        assert_eq!(parsed, MessageHeader { id, command, payload_bytes, kind });
        assert_eq!(parsed.encode(), bytes);
    }
}

#[test]
fn headers_that_end_the_stream_are_refused() {
    for (bytes, error) in [
        (header(0, 1, 0, 0, 0), FrameError::Size { size: 0, max: 4096 }),
        (header(0, 1, 15, 0, 0), FrameError::Size { size: 15, max: 4096 }),
        (header(0, 1, 4097, 0, 0), FrameError::Size { size: 4097, max: 4096 }),
        (header(0, 1, u32::MAX, 0, 0), FrameError::Size { size: u32::MAX, max: 4096 }),
        (header(0, 1, 16, 2, 0), FrameError::Flags(2)),
        (header(0, 1, 16, 0x11, 0), FrameError::Flags(0x11)),
        (header(0, 1, 16, 0x20, 0), FrameError::Flags(0x20)),
        (header(0, 1, 16, 0x40, 0), FrameError::Flags(0x40)),
        (header(0, 1, 16, 1 << 31, 0), FrameError::Flags(1 << 31)),
    ] {
        assert_eq!(MessageHeader::parse(bytes, 4096), Err(error));
    }
}

#[test]
fn a_stream_is_cut_into_messages_with_their_descriptors() {
    let limits = FrameLimits { bytes_max: 64, descriptors_max: 2 };
    let stream =
        [&header(1, 4, 24, 0, 0)[..], &[9; 8], &header(2, 13, 16, 0, 0), &header(3, 2, 18, 1, 0), &[8; 2]].concat();
    for step in [1, 3, 16, 64] {
        let (mut reader, mut left, mut frames) = (FrameReader::new(limits), &stream[..], Vec::new());
        while !left.is_empty() {
            let count = reader.wanted().min(step).min(left.len());
            // A descriptor with the first byte of the first message, and one with the last byte of the last.
            let descriptors = [left.len() == stream.len(), left.len() == count].into_iter().filter(|with| *with);
            let (now, rest) = left.split_at(count);
            frames.extend(reader.push(now, descriptors.map(|_| left.len())).unwrap());
            left = rest;
        }
        let seen: Vec<_> = frames.iter().map(|f| (f.header.id, f.payload.len(), f.descriptors.len())).collect();
        assert_eq!(seen, [(1, 8, 1), (2, 0, 0), (3, 2, 1)], "in steps of {step}");
        assert_eq!(reader.end(), Ok(()));
    }
}

/// Class 1: a reader requests bytes as they arrive, independent of the size in the header.
#[test]
fn a_large_message_is_read_in_parts() {
    let mut reader: FrameReader<()> = FrameReader::new(FrameLimits { bytes_max: u32::MAX, descriptors_max: 0 });
    assert_eq!(reader.wanted(), HEADER_BYTES);
    assert_eq!(reader.push(&header(1, 10, u32::MAX, 0, 0), []), Ok(None));
    assert_eq!(reader.wanted(), READ_BYTES_MAX);
    assert_eq!(reader.end(), Err(FrameError::Truncated { bytes: 16 }));
    reader.push(&[0; 100], []).unwrap();
    assert_eq!(reader.end(), Err(FrameError::Truncated { bytes: 116 }));
}

#[test]
fn surplus_descriptors_end_the_stream() {
    let mut reader = FrameReader::new(FrameLimits { bytes_max: 64, descriptors_max: 2 });
    assert_eq!(reader.push(&[0; 1], [1, 2]), Ok(None));
    assert_eq!(reader.push(&[0; 1], [3]), Err(FrameError::Descriptors { max: 2 }));
}

#[test]
fn requests_are_read_and_written_as_specified() {
    let access = RegionAccess { offset: 0x1000, region: 0, count: 4 };
    let dma = DmaAccess { address: 0x10_0000, count: 3 };
    let write = RegionWrite { access, data: [1, 2, 3, 4, 0, 0, 0, 0] };
    let range = IrqRange { index: irq_index::MSIX, start: 1, count: 2 };
    let set = |action, data| VfioRequest::DeviceSetIrqs(IrqSetRequest { range, action, data });
    let off = IrqSetRequest {
        range: IrqRange { index: 2, start: 0, count: 0 },
        action: IrqAction::Trigger,
        data: IrqData::All,
    };
    for (payload, descriptors, expected) in [
        (
            bytes![32_u32, 3_u32, 0x2000_u64, 0x10_0000_u64, 0x4000_u64],
            1,
            VfioRequest::DmaMap(DmaMapRequest {
                flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
                offset: 0x2000,
                address: 0x10_0000,
                size: 0x4000,
            }),
        ),
        (
            bytes![24_u32, 0_u32, 0x10_0000_u64, 0x4000_u64],
            0,
            VfioRequest::DmaUnmap(DmaUnmapRequest::Range { address: 0x10_0000, size: 0x4000 }),
        ),
        // Sent by QEMU when a guest turns on its IOMMU.
        (
            bytes![24_u32, 0_u32, 0xfef0_0000_u64, 0xffff_ffff_0110_0000_u64],
            0,
            VfioRequest::DmaUnmap(DmaUnmapRequest::Range { address: 0xfef0_0000, size: 0xffff_ffff_0110_0000 }),
        ),
        (bytes![24_u32, 2_u32, 0_u64, 0_u64], 0, VfioRequest::DmaUnmap(DmaUnmapRequest::All)),
        (bytes![16_u32, 0_u32, 0_u32, 0_u32], 0, VfioRequest::DeviceGetInfo),
        (
            bytes![64_u32, 0_u32, 7_u32, 0_u32, 0_u64, 0_u64],
            0,
            VfioRequest::DeviceGetRegionInfo { argsz: 64, index: 7 },
        ),
        (bytes![96_u32, 0_u32, 0_u32, 0_u32], 0, VfioRequest::DeviceGetRegionIoFds { argsz: 96, index: 0 }),
        (bytes![16_u32, 0_u32, 2_u32, 0_u32], 0, VfioRequest::DeviceGetIrqInfo { index: 2 }),
        (bytes![20_u32, 0x24_u32, 2_u32, 1_u32, 2_u32], 2, set(IrqAction::Trigger, IrqData::SetEventfds)),
        (bytes![20_u32, 0x24_u32, 2_u32, 1_u32, 2_u32], 0, set(IrqAction::Trigger, IrqData::RemoveEventfds)),
        (bytes![20_u32, 0x11_u32, 2_u32, 1_u32, 2_u32], 0, set(IrqAction::Unmask, IrqData::All)),
        (bytes![22_u32, 0x0a_u32, 2_u32, 1_u32, 2_u32, 0_u8, 1_u8], 0, set(IrqAction::Mask, IrqData::Some(&[0, 1]))),
        (bytes![20_u32, 0x21_u32, 2_u32, 0_u32, 0_u32], 0, VfioRequest::DeviceSetIrqs(off)),
        (bytes![0x1000_u64, 0_u32, 4_u32], 0, VfioRequest::RegionRead(access)),
        (bytes![0x1000_u64, 0_u32, 4_u32, 7_u32], 0, VfioRequest::RegionWrite(access, &[7, 0, 0, 0])),
        (bytes![0x10_0000_u64, 3_u64], 0, VfioRequest::DmaRead(dma)),
        (bytes![0x10_0000_u64, 3_u64, 1_u8, 2_u8, 3_u8], 0, VfioRequest::DmaWrite(dma, &[1, 2, 3])),
        (vec![], 0, VfioRequest::DeviceReset),
        (
            bytes![1_u64, 0x1000_u64, 0_u32, 4_u32, 1_u8, 2_u8, 3_u8, 4_u8, 0_u32],
            0,
            VfioRequest::RegionWriteMulti(vec![write]),
        ),
    ] {
        let command = expected.command();
        assert_eq!(request(command, &payload, descriptors).as_ref(), Ok(&expected), "{command}");
        let whole = expected.encode(9, false);
        assert_eq!(whole[..16], header(9, command as u16, 16 + payload.len() as u32, 0, 0), "{command}");
        assert_eq!(whole[16..], payload, "{command}");
    }
}

#[test]
fn replies_are_read_and_written_as_specified() {
    let access = RegionAccess { offset: 0x1000, region: 0, count: 4 };
    let dma = DmaAccess { address: 0x10_0000, count: 3 };
    let region = |sparse| RegionInfo {
        index: 0,
        flags: RegionFlags::READ | RegionFlags::WRITE | RegionFlags::MMAP,
        size: 0x4000,
        offset: 1 << 40,
        sparse,
    };
    let part = IoFd { offset: 0x1000, size: 4, fd_index: 1, kind: IoFdKind::EventFd, flags: 1, value: 9 };
    let shadow = IoFdKind::ShadowEventFd { memory: 2, at: 0x3000 };
    for (payload, descriptors, expected) in [
        (vec![], 0, VfioReply::DmaMap),
        (
            bytes![24_u32, 0_u32, 0x10_0000_u64, 0x4000_u64],
            0,
            VfioReply::DmaUnmap(DmaUnmapRequest::Range { address: 0x10_0000, size: 0x4000 }),
        ),
        (
            bytes![16_u32, 3_u32, 9_u32, 5_u32],
            0,
            VfioReply::DeviceGetInfo(DeviceRegions { flags: DeviceFlags::all(), regions: 9, irqs: 5 }),
        ),
        (bytes![32_u32, 7_u32, 0_u32, 0_u32, 0x4000_u64, 1_u64 << 40], 1, VfioReply::DeviceGetRegionInfo(region(None))),
        (
            bytes![
                64_u32,
                15_u32,
                0_u32,
                32_u32,
                0x4000_u64,
                1_u64 << 40,
                1_u16,
                1_u16,
                0_u32,
                1_u32,
                0_u32,
                0x1000_u64,
                0x3000_u64
            ],
            1,
            VfioReply::DeviceGetRegionInfo(region(Some(vec![SparseArea { offset: 0x1000, size: 0x3000 }]))),
        ),
        (
            bytes![64_u32, 7_u32, 0_u32, 0_u32, 0x4000_u64, 1_u64 << 40],
            0,
            VfioReply::RegionInfoCut { argsz: 64, fixed: region(None) },
        ),
        (
            bytes![64_u32, 0_u32, 0_u32, 1_u32, 0x1000_u64, 4_u64, 1_u32, 0_u32, 1_u32, 0_u32, 0_u64, 9_u64],
            2,
            VfioReply::DeviceGetRegionIoFds(RegionIoFds { index: 0, parts: vec![part] }),
        ),
        (
            bytes![64_u32, 0_u32, 0_u32, 1_u32, 0x1000_u64, 4_u64, 1_u32, 2_u32, 1_u32, 2_u32, 0x3000_u64, 9_u64],
            3,
            VfioReply::DeviceGetRegionIoFds(RegionIoFds { index: 0, parts: vec![IoFd { kind: shadow, ..part }] }),
        ),
        (bytes![64_u32, 0_u32, 3_u32, 1_u32], 0, VfioReply::RegionIoFdsCut { argsz: 64, index: 3 }),
        (
            bytes![16_u32, 9_u32, 2_u32, 33_u32],
            0,
            VfioReply::DeviceGetIrqInfo(IrqInfo { index: 2, flags: IrqFlags::EVENTFD | IrqFlags::NORESIZE, count: 33 }),
        ),
        (vec![], 0, VfioReply::DeviceSetIrqs),
        (bytes![0x1000_u64, 0_u32, 4_u32, 7_u32], 0, VfioReply::RegionRead(access, &[7, 0, 0, 0])),
        (bytes![0x1000_u64, 0_u32, 4_u32], 0, VfioReply::RegionWrite(access)),
        (bytes![0x10_0000_u64, 3_u64, 1_u8, 2_u8, 3_u8], 0, VfioReply::DmaRead(dma, &[1, 2, 3])),
        (bytes![0x10_0000_u64, 3_u64], 0, VfioReply::DmaWrite(dma)),
        (vec![], 0, VfioReply::DeviceReset),
        (bytes![2_u64], 0, VfioReply::RegionWriteMulti { count: 2 }),
    ] {
        let command = expected.command();
        assert_eq!(reply(command, &payload, descriptors).as_ref(), Ok(&expected), "{command}");
        let whole = expected.encode(9);
        assert_eq!(whole[..16], header(9, command as u16, 16 + payload.len() as u32, 1, 0), "{command}");
        assert_eq!(whole[16..], payload, "{command}");
    }
}

#[test]
fn a_count_of_four_bytes_in_the_reply_to_dma_write_is_read() {
    let written = DmaAccess { address: 0x10_0000, count: 3 };
    assert_eq!(reply(Command::DmaWrite, &bytes![0x10_0000_u64, 3_u32], 0), Ok(VfioReply::DmaWrite(written)));
}

#[test]
fn longer_replies_of_later_versions_are_read() {
    let longer = bytes![20_u32, 2_u32, 9_u32, 5_u32, 0_u32];
    let device = DeviceRegions { flags: DeviceFlags::PCI, regions: 9, irqs: 5 };
    assert_eq!(reply(Command::DeviceGetInfo, &longer, 0), Ok(VfioReply::DeviceGetInfo(device)));
    // Another capability (VFIO_REGION_INFO_CAP_TYPE) before the sparse one.
    let typed = bytes![
        80_u32, 15_u32, 0_u32, 32_u32, 0x4000_u64, 0_u64, 2_u16, 1_u16, 48_u32, 3_u32, 1_u32, 1_u16, 1_u16, 0_u32,
        1_u32, 0_u32, 0_u64, 0x1000_u64
    ];
    let Ok(VfioReply::DeviceGetRegionInfo(info)) = reply(Command::DeviceGetRegionInfo, &typed, 1) else {
        panic!("a region")
    };
    assert_eq!(info.sparse, Some(vec![SparseArea { offset: 0, size: 0x1000 }]));
}

#[test]
fn capabilities_of_known_peers_are_read() {
    let defaults = VfioCapabilities::default();
    let sized = |fds, size: u64| VfioCapabilities {
        max_msg_fds: fds,
        max_data_xfer_size: size.try_into().unwrap(),
        ..VfioCapabilities::default()
    };
    for (json, expected) in [
        // libvfio-user
        (
            r#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576,"migration":{"pgsize":4096}}}"#,
            sized(8, 1 << 20),
        ),
        // QEMU's client
        (
            r#"{"capabilities":{"max_msg_fds":9,"max_data_xfer_size":1048576,"pgsizes":4096,"max_dma_maps":65535,"write_multiple":true}}"#,
            VfioCapabilities { write_multiple: true, ..sized(9, 1 << 20) },
        ),
        (
            r#"{"capabilities":{"max_msg_fds":9,"max_data_xfer_size":1048576,"max_dma_maps":65535,"pgsizes":4096,"region_io_fds":true}}"#,
            VfioCapabilities { region_io_fds: true, ..sized(9, 1 << 20) },
        ),
        // The vfio_user crate, without the outer object.
        (r#"{"max_msg_fds":1,"max_data_xfer_size":1048576,"migration":{"pgsize":4096}}"#, defaults.clone()),
        ("{}", defaults.clone()),
    ] {
        let payload = version_payload(json);
        let expected = VfioVersion { major: 0, minor: 1, capabilities: expected };
        assert_eq!(request(Command::Version, &payload, 0), Ok(VfioRequest::Version(expected.clone())), "{json}");
        assert_eq!(reply(Command::Version, &payload, 0), Ok(VfioReply::Version(expected)), "{json}");
    }
    let bare = bytes![0_u16, 1_u16];
    let expected = VfioVersion { major: 0, minor: 1, capabilities: defaults };
    assert_eq!(request(Command::Version, &bare, 0), Ok(VfioRequest::Version(expected)));
}

#[test]
fn version_data_that_makes_no_sense_is_refused() {
    for json in [
        "",
        "{",
        "[]x",
        r#"{"capabilities":7}"#,
        r#"{"capabilities":{"max_msg_fds":-1}}"#,
        r#"{"capabilities":{"max_msg_fds":"8"}}"#,
        r#"{"capabilities":{"max_data_xfer_size":0}}"#,
        r#"{"capabilities":{"max_data_xfer_size":1e300}}"#,
        r#"{"capabilities":{"pgsizes":0}}"#,
        r#"{"capabilities":{"twin_socket":true}}"#,
        r#"{"capabilities":{}}{"#,
        "{}\0{}",
        "\u{fffd}",
    ] {
        let payload = version_payload(json);
        let refused = request(Command::Version, &payload, 0);
        assert!(matches!(refused, Err(MessageError::Json(_))), "{json}: {refused:?}");
    }
    let deep = version_payload(&format!("{{\"a\":{}", "[".repeat(4000)));
    assert!(matches!(request(Command::Version, &deep, 0), Err(MessageError::Json(_))), "a stack overflow");
    let unterminated = [&bytes![0_u16, 1_u16][..], b"{}"].concat();
    assert_eq!(request(Command::Version, &unterminated, 0), Err(MessageError::VersionData { bytes: 2 }));
    let long = version_payload(&" ".repeat(VERSION_BYTES_MAX));
    assert_eq!(request(Command::Version, &long, 0), Err(MessageError::VersionData { bytes: VERSION_BYTES_MAX + 1 }));
    let twin = version_payload(r#"{"capabilities":{"twin_socket":{"supported":true,"fd_index":0}}}"#);
    assert_eq!(
        reply(Command::Version, &twin, 0),
        Err(MessageError::NoDescriptor { command: Command::Version, index: 0 })
    );
    assert!(reply(Command::Version, &twin, 1).is_ok());
}

fn length(command: Command, bytes: usize, expected: u64) -> MessageError {
    MessageError::Length { command, bytes, expected }
}

#[test]
fn requests_of_a_wrong_length_are_refused() {
    // Each with the bytes of its fixed part.
    for (command, fixed) in [
        (Command::Version, 4),
        (Command::DmaMap, 32),
        (Command::DmaUnmap, 24),
        (Command::DeviceGetInfo, 16),
        (Command::DeviceGetRegionInfo, 32),
        (Command::DeviceGetRegionIoFds, 16),
        (Command::DeviceGetIrqInfo, 16),
        (Command::DeviceSetIrqs, 20),
        (Command::RegionRead, 16),
        (Command::RegionWrite, 16),
        (Command::DmaRead, 16),
        (Command::DmaWrite, 16),
        (Command::RegionWriteMulti, 8),
    ] {
        for bytes in 0..fixed {
            assert_eq!(request(command, &vec![0xff; bytes], 0), Err(length(command, bytes, fixed as u64)));
        }
    }
    assert_eq!(request(Command::DeviceReset, &[0], 0), Err(length(Command::DeviceReset, 1, 0)));
    for (command, payload, expected) in [
        (Command::RegionRead, bytes![0_u64, 0_u32, 4_u32, 0_u32], 16),
        (Command::RegionWrite, bytes![0_u64, 0_u32, 4_u32, 0_u16], 20),
        (Command::RegionWrite, bytes![0_u64, 0_u32, 0_u32, 0_u16], 16),
        (Command::DmaRead, bytes![0_u64, 4_u64, 0_u32], 16),
        (Command::DmaWrite, bytes![0_u64, 4_u64], 20),
        (Command::RegionWriteMulti, bytes![2_u64, 0_u64, 0_u32, 4_u32, 0_u64], 56),
        (Command::RegionWriteMulti, bytes![u64::MAX], u64::MAX),
        (Command::DeviceSetIrqs, bytes![21_u32, 0x0a_u32, 2_u32, 0_u32, 2_u32, 1_u8], 22),
        (Command::DeviceSetIrqs, bytes![21_u32, 0x21_u32, 2_u32, 0_u32, 2_u32, 1_u8], 20),
    ] {
        assert_eq!(request(command, &payload, 0), Err(length(command, payload.len(), expected)), "{payload:?}");
    }
}

#[test]
fn replies_of_a_wrong_length_are_refused() {
    for (command, fixed) in [
        (Command::Version, 4),
        (Command::DmaUnmap, 24),
        (Command::DeviceGetInfo, 16),
        (Command::DeviceGetRegionInfo, 32),
        (Command::DeviceGetRegionIoFds, 16),
        (Command::DeviceGetIrqInfo, 16),
        (Command::RegionRead, 16),
        (Command::RegionWrite, 16),
        (Command::DmaRead, 16),
        (Command::RegionWriteMulti, 8),
    ] {
        for bytes in 0..fixed {
            assert_eq!(reply(command, &vec![0xff; bytes], 0), Err(length(command, bytes, fixed as u64)));
        }
    }
    for command in [Command::DmaMap, Command::DeviceSetIrqs, Command::DeviceReset] {
        assert_eq!(reply(command, &[0], 0), Err(length(command, 1, 0)));
    }
    for (command, payload, expected) in [
        (Command::RegionRead, bytes![0_u64, 0_u32, 4_u32], 20),
        (Command::RegionRead, bytes![0_u64, 0_u32, 4_u32, 0_u64], 20),
        (Command::RegionWrite, bytes![0_u64, 0_u32, 4_u32, 0_u32], 16),
        (Command::DmaRead, bytes![0_u64, 4_u64, 0_u16], 20),
        (Command::DmaWrite, bytes![0_u64, 4_u64, 0_u16], 16),
        (Command::RegionWriteMulti, bytes![1_u64, 1_u64], 8),
    ] {
        assert_eq!(reply(command, &payload, 0), Err(length(command, payload.len(), expected)), "{payload:?}");
    }
}

/// Classes 1, 2 and 9.
#[test]
fn ranges_and_counts_that_wrap_round_are_refused() {
    let range = |command, start, len| MessageError::Range { command, start, len };
    let long = |command, count| MessageError::DataTooLong { command, count, max: DATA_MAX };
    let map = |offset: u64, address: u64, size: u64| bytes![32_u32, 3_u32, offset, address, size];
    for (command, payload, error) in [
        (Command::DmaMap, map(0, 0, 0), range(Command::DmaMap, 0, 0)),
        (Command::DmaMap, map(0, u64::MAX, 1), range(Command::DmaMap, u64::MAX, 1)),
        (Command::DmaMap, map(1, 0, u64::MAX), range(Command::DmaMap, 1, u64::MAX)),
        (Command::DmaUnmap, bytes![24_u32, 0_u32, 5_u64, 0_u64], range(Command::DmaUnmap, 5, 0)),
        (Command::DmaUnmap, bytes![24_u32, 0_u32, 2_u64, !0_u64], range(Command::DmaUnmap, 2, !0)),
        (Command::DmaUnmap, bytes![24_u32, 2_u32, 0_u64, !0_u64], range(Command::DmaUnmap, 0, !0)),
        (Command::RegionRead, bytes![!3_u64, 0_u32, 4_u32], range(Command::RegionRead, !3, 4)),
        (Command::RegionRead, bytes![0_u64, 0_u32, 4097_u32], long(Command::RegionRead, 4097)),
        (Command::RegionRead, bytes![0_u64, 0_u32, u32::MAX], long(Command::RegionRead, u64::from(u32::MAX))),
        (Command::RegionWrite, bytes![!0_u64, 0_u32, 1_u32, 0_u8], range(Command::RegionWrite, !0, 1)),
        (Command::DmaRead, bytes![!0_u64, 1_u64], range(Command::DmaRead, !0, 1)),
        (Command::DmaRead, bytes![0_u64, 1_u64 << 32], long(Command::DmaRead, 1 << 32)),
        (Command::DmaWrite, bytes![0_u64, !0_u64], long(Command::DmaWrite, !0)),
        (
            Command::DeviceSetIrqs,
            bytes![20_u32, 0x21_u32, 2_u32, 1_u32, u32::MAX],
            range(Command::DeviceSetIrqs, 1, u64::from(u32::MAX)),
        ),
        (
            Command::DeviceSetIrqs,
            bytes![20_u32, 0x24_u32, 2_u32, 0_u32, 0_u32],
            MessageError::Count { command: Command::DeviceSetIrqs, count: 0 },
        ),
        (
            Command::DeviceSetIrqs,
            bytes![20_u32, 0x21_u32, 2_u32, 1_u32, 0_u32],
            MessageError::Count { command: Command::DeviceSetIrqs, count: 0 },
        ),
        (
            Command::RegionWriteMulti,
            bytes![1_u64, 0_u64, 0_u32, 9_u32, 0_u64],
            MessageError::Count { command: Command::RegionWriteMulti, count: 9 },
        ),
        (
            Command::RegionWriteMulti,
            bytes![1_u64, 0_u64, 0_u32, 0_u32, 0_u64],
            MessageError::Count { command: Command::RegionWriteMulti, count: 0 },
        ),
    ] {
        assert_eq!(request(command, &payload, 0), Err(error), "{payload:?}");
    }
}

#[test]
fn flags_and_sizes_that_contradict_are_refused() {
    let flags = |command, flags| MessageError::Flags { command, flags };
    let argsz = |command, argsz| MessageError::Argsz { command, argsz };
    let set = |flags: u32| bytes![20_u32, flags, 2_u32, 0_u32, 1_u32];
    for (command, payload, error) in [
        (Command::DmaMap, bytes![32_u32, 4_u32, 0_u64, 0_u64, 1_u64], flags(Command::DmaMap, 4)),
        (Command::DmaMap, bytes![31_u32, 3_u32, 0_u64, 0_u64, 1_u64], argsz(Command::DmaMap, 31)),
        (Command::DmaUnmap, bytes![24_u32, 1_u32, 0_u64, 1_u64], flags(Command::DmaUnmap, 1)),
        (Command::DmaUnmap, bytes![0_u32, 0_u32, 0_u64, 1_u64], argsz(Command::DmaUnmap, 0)),
        (Command::DeviceGetInfo, bytes![15_u32, 0_u32, 0_u64], argsz(Command::DeviceGetInfo, 15)),
        (
            Command::DeviceGetRegionInfo,
            bytes![31_u32, 0_u32, 0_u64, 0_u64, 0_u64],
            argsz(Command::DeviceGetRegionInfo, 31),
        ),
        (Command::DeviceSetIrqs, set(0), flags(Command::DeviceSetIrqs, 0)),
        (Command::DeviceSetIrqs, set(0x20), flags(Command::DeviceSetIrqs, 0x20)),
        (Command::DeviceSetIrqs, set(0x23), flags(Command::DeviceSetIrqs, 0x23)),
        (Command::DeviceSetIrqs, set(0x31), flags(Command::DeviceSetIrqs, 0x31)),
        (Command::DeviceSetIrqs, set(0x61), flags(Command::DeviceSetIrqs, 0x61)),
        (Command::DeviceSetIrqs, bytes![24_u32, 0x21_u32, 2_u32, 0_u32, 1_u32], argsz(Command::DeviceSetIrqs, 24)),
    ] {
        assert_eq!(request(command, &payload, 0), Err(error), "{payload:?}");
    }
}

#[test]
fn descriptors_come_only_where_they_belong() {
    let map = bytes![32_u32, 3_u32, 0_u64, 0_u64, 1_u64];
    assert!(request(Command::DmaMap, &map, 0).is_ok() && request(Command::DmaMap, &map, 1).is_ok());
    let eventfds = bytes![20_u32, 0x24_u32, 2_u32, 0_u32, 3_u32];
    for (command, payload, came, max) in [
        (Command::Version, bytes![0_u16, 1_u16], 1, 0),
        (Command::DmaMap, map, 2, 1),
        (Command::DmaUnmap, bytes![24_u32, 0_u32, 0_u64, 1_u64], 1, 0),
        (Command::DeviceGetInfo, bytes![16_u32, 0_u32, 0_u64], 1, 0),
        (Command::DeviceGetRegionInfo, bytes![32_u32, 0_u32, 0_u64, 0_u64, 0_u64], 1, 0),
        (Command::DeviceSetIrqs, eventfds.clone(), 2, 3),
        (Command::DeviceSetIrqs, eventfds, 4, 3),
        (Command::DeviceSetIrqs, bytes![20_u32, 0x21_u32, 2_u32, 0_u32, 3_u32], 3, 0),
        (Command::RegionRead, bytes![0_u64, 0_u64], 1, 0),
        (Command::DmaWrite, bytes![0_u64, 0_u64], 1, 0),
        (Command::DeviceReset, vec![], 1, 0),
        (Command::RegionWriteMulti, bytes![0_u64], 1, 0),
    ] {
        let error = MessageError::Descriptors { command, came, max };
        assert_eq!(request(command, &payload, came), Err(error), "{command}");
    }
    for command in [Command::DmaMap, Command::DeviceSetIrqs, Command::DeviceReset] {
        assert_eq!(reply(command, &[], 1), Err(MessageError::Descriptors { command, came: 1, max: 0 }));
    }
}

#[test]
fn unknown_commands_are_named_and_leave_the_stream_intact() {
    for command in [0, 14, 16, 17, 18, 19, u16::MAX] {
        assert_eq!(VfioRequest::parse(command, &[], 0, 0), Err(MessageError::UnknownCommand(command)));
    }
    for (command, name) in Command::ALL {
        assert_eq!(Command::from_number(command as u16), Some(command));
        assert_eq!(command.to_string(), name);
    }
}

/// QEMU issue 3867 and class 5: the size of a region, and areas of another geometry than their region.
#[test]
fn region_replies_that_lie_are_refused() {
    let command = Command::DeviceGetRegionInfo;
    let fixed =
        |argsz: u32, flags: u32, first: u32, size: u64, offset: u64| bytes![argsz, flags, 0_u32, first, size, offset];
    let sparse = |next: u32, areas: &[(u64, u64)]| {
        let mut capability = bytes![1_u16, 1_u16, next, areas.len() as u32, 0_u32];
        areas.iter().for_each(|(offset, size)| capability.extend(bytes![*offset, *size]));
        capability
    };
    let with = |first: u32, rest: &[u8]| [&fixed(32 + rest.len() as u32, 15, first, 0x4000, 0)[..], rest].concat();
    let outside = |start, len| MessageError::OutsideRegion { start, len, region: 0x4000 };
    let capability = |offset| MessageError::Capability { offset };
    let huge = bytes![1_u16, 1_u16, 0_u32, u32::MAX, 0_u32];
    let twice = [sparse(48, &[]), sparse(0, &[])].concat();
    let again = [sparse(32, &[(0, 0x1000)])].concat();
    for (payload, error) in [
        (fixed(32, 3, 0, 2, u64::MAX), MessageError::Range { command, start: u64::MAX, len: 2 }),
        (fixed(32, 7, 0, u64::MAX, 0x1000), MessageError::Range { command, start: 0x1000, len: u64::MAX }),
        (fixed(31, 3, 0, 0x1000, 0), MessageError::Argsz { command, argsz: 31 }),
        (with(32, &sparse(0, &[(0x3000, 0x2000)])), outside(0x3000, 0x2000)),
        (with(32, &sparse(0, &[(0, 0x1000), (0x4000, 1)])), outside(0x4000, 1)),
        (with(32, &sparse(0, &[(!0xfff, 0x2000)])), outside(!0xfff, 0x2000)),
        (with(32, &huge), capability(32)),
        (with(32, &bytes![1_u16, 1_u16, 0_u32]), capability(32)),
        (with(32, &bytes![1_u16, 2_u16, 0_u32, 0_u64]), MessageError::CapabilityVersion { id: 1, version: 2 }),
        (with(1, &sparse(0, &[])), capability(1)),
        (with(31, &sparse(0, &[])), capability(31)),
        (with(41, &sparse(0, &[])), capability(41)),
        (with(48, &sparse(0, &[])), capability(48)),
        (with(u32::MAX, &sparse(0, &[])), capability(u32::MAX)),
        (with(32, &twice), capability(48)),
        // A circular chain, and one into its own areas.
        (with(32, &again), capability(32)),
        (with(32, &sparse(50, &[(0, 0x1000)])), capability(50)),
    ] {
        assert_eq!(reply(command, &payload, 1), Err(error), "{payload:?}");
    }
    assert_eq!(
        reply(command, &fixed(32, 7, 0, 0x1000, 0), 0),
        Err(MessageError::NoDescriptor { command, index: 0 }),
        "a region that can be mapped has a file"
    );
    // A circular chain of other capabilities.
    let circle = with(32, &[bytes![9_u16, 1_u16, 40_u32], bytes![9_u16, 1_u16, 32_u32]].concat());
    assert_eq!(reply(command, &circle, 1), Err(capability(32)));
    // Empty areas are ignored.
    let Ok(VfioReply::DeviceGetRegionInfo(info)) = reply(command, &with(32, &sparse(0, &[(0, 0)])), 1) else {
        panic!("a region")
    };
    assert_eq!(info.sparse, Some(vec![]));
}

#[test]
fn replies_about_descriptors_for_io_that_lie_are_refused() {
    let command = Command::DeviceGetRegionIoFds;
    let entry = |offset: u64, fd_index: u32, kind: u32| bytes![offset, 8_u64, fd_index, kind, 0_u32, 0_u32, 0_u64];
    let shadow = |memory: u32, at: u64| bytes![0_u64, 8_u64, 0_u32, 2_u32, 0_u32, memory, at, 0_u64];
    let with = |argsz: u32, count: u32, rest: &[u8]| [&bytes![argsz, 0_u32, 0_u32, count][..], rest].concat();
    for (payload, error) in [
        (with(56, 1, &entry(0, 1, 0)), MessageError::NoDescriptor { command, index: 1 }),
        (with(56, 1, &entry(0, u32::MAX, 1)), MessageError::NoDescriptor { command, index: u32::MAX }),
        (with(56, 1, &entry(0, 0, 2)), MessageError::IoFdType(2)),
        (with(64, 1, &shadow(1, 0)), MessageError::NoDescriptor { command, index: 1 }),
        (with(64, 1, &shadow(0, !0)), MessageError::Range { command, start: !0, len: 8 }),
        (with(56, 1, &entry(!0, 0, 0)), MessageError::Range { command, start: !0, len: 8 }),
        (with(56, 2, &entry(0, 0, 0)), MessageError::Count { command, count: 2 }),
        (with(56, u32::MAX, &entry(0, 0, 0)), MessageError::Count { command, count: u64::from(u32::MAX) }),
        (with(56, 0, &entry(0, 0, 0)), MessageError::Count { command, count: 0 }),
        (bytes![16_u32, 1_u32, 0_u32, 0_u32], MessageError::Flags { command, flags: 1 }),
        (bytes![15_u32, 0_u32, 0_u32, 0_u32], MessageError::Argsz { command, argsz: 15 }),
    ] {
        assert_eq!(reply(command, &payload, 1), Err(error), "{payload:?}");
    }
    // Entries of the specification, which have no memory, and entries with additional bytes of a later version.
    let part = IoFd { offset: 0, size: 8, fd_index: 0, kind: IoFdKind::EventFd, flags: 0, value: 0 };
    let in_memory = IoFd { kind: IoFdKind::ShadowEventFd { memory: 0, at: 4096 }, ..part };
    for (payload, part) in
        [(with(56, 1, &entry(0, 0, 0)), part), (with(72, 1, &[shadow(0, 4096), bytes![7_u64]].concat()), in_memory)]
    {
        let fds = RegionIoFds { index: 0, parts: vec![part] };
        assert_eq!(reply(command, &payload, 1), Ok(VfioReply::DeviceGetRegionIoFds(fds)));
    }
}
