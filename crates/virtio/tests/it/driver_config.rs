//! A driver's parsing of a configuration space: our device's fields arrive, and inconsistent ones are refused with a
//! cure.

use blkyard_mq::{DeviceInfo, QueueLimits};
use blkyard_virtio::driver::{BlkDisk, BlkLayout, ConfigCause, DRIVER_FEATURES, SEGMENTS_MAX};
use blkyard_virtio::{BlkConfig, Features};
use proptest::prelude::*;

/// Every field with a value that makes sense: 1 MiB, blocks of 512 in pages of 4096, 4 queues.
fn space() -> [u8; 60] {
    let info = DeviceInfo {
        name: "disk".into(),
        capacity_sectors: 2048,
        limits: QueueLimits {
            physical_block_bytes: 4096,
            discard_sectors_max: 1024,
            discard_granularity_bytes: 4096,
            write_zeroes_sectors_max: 512,
            ..QueueLimits::default()
        },
        volatile_cache: true,
        ..DeviceInfo::default()
    };
    BlkConfig::new(&info, 4, 126, true).read(0, 60).unwrap().try_into().unwrap()
}

fn all() -> Features {
    DRIVER_FEATURES - Features::RO - Features::SIZE_MAX
}

fn read(features: Features, space: &[u8]) -> BlkDisk {
    BlkDisk::new("disk", features, space, 128).unwrap()
}

#[test]
fn what_our_device_says_arrives() {
    let disk = read(all(), &space());
    let DeviceInfo { name, capacity_sectors, limits, read_only, volatile_cache, fua, rotational, .. } = disk.info;
    assert!(!rotational, "virtio cannot say");
    assert_eq!((name.as_str(), capacity_sectors, read_only, volatile_cache, fua), ("disk", 2048, false, true, false));
    assert_eq!((disk.queues, disk.may_unmap), (4, true));
    let want = QueueLimits {
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        segments_max: 126,
        segment_bytes_max: u32::MAX,
        discard_sectors_max: 1024,
        discard_segments_max: 1,
        discard_granularity_bytes: 4096,
        write_zeroes_sectors_max: 512,
        ..QueueLimits::default()
    };
    assert_eq!(limits, want);
}

#[test]
fn fields_whose_feature_is_not_there_mean_nothing() {
    let mut noise = [0xff; 60];
    noise[..8].copy_from_slice(&2048_u64.to_le_bytes());
    for len in [8, 60] {
        let disk = read(Features::VERSION_1 | Features::INDIRECT_DESC, &noise[..len]);
        let want = QueueLimits { segments_max: 1, segment_bytes_max: u32::MAX, ..QueueLimits::default() };
        assert_eq!((disk.info.limits, disk.queues, disk.may_unmap), (want, 1, false));
        assert!(!disk.info.volatile_cache && !disk.info.read_only);
    }
}

#[test]
fn limits_are_those_of_the_device_as_far_as_there_is_room() {
    // Feature, offset, bytes, ring, result.
    type Row = (Features, usize, u32, u16, fn(&BlkDisk) -> u64, u64);
    let segments: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.segments_max.into();
    let discards: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.discard_sectors_max.into();
    let ranges: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.discard_segments_max.into();
    let granularity: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.discard_granularity_bytes.into();
    let zeroes: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.write_zeroes_sectors_max.into();
    let blocks: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.logical_block_bytes.into();
    let longest: fn(&BlkDisk) -> u64 = |disk| disk.info.limits.segment_bytes_max.into();
    let none = Features::empty();
    let table: &[Row] = &[
        (none, 12, 0, 128, segments, 1),
        (none, 12, 1, 128, segments, 1),
        (none, 12, 1000, 128, segments, 126),
        (none, 12, u32::MAX, 1024, segments, SEGMENTS_MAX.into()),
        (none, 12, 126, 4, segments, 2),
        (none, 12, 126, 1, segments, 1),
        (none, 20, 4096, 128, blocks, 4096),
        (Features::SIZE_MAX, 8, 4096, 128, longest, 4096),
        (Features::SIZE_MAX, 8, 0, 128, longest, u32::MAX.into()),
        (none, 36, 0, 128, discards, u32::MAX.into()),
        (none, 40, 0, 128, ranges, 125),
        (none, 40, 16, 128, ranges, 16),
        (none, 40, 1 << 30, 1024, ranges, 125),
        (none, 40, 8, 1, ranges, 1),
        (none, 44, 0, 128, granularity, 512),
        (none, 44, 16, 128, granularity, 8192),
        (none, 48, 0, 128, zeroes, u32::MAX.into()),
    ];
    for (feature, at, value, ring, what, want) in table {
        let mut space = space();
        space[*at..at + 4].copy_from_slice(&value.to_le_bytes());
        let disk = BlkDisk::new("disk", all() | *feature, &space, *ring).unwrap();
        assert_eq!(what(&disk), *want, "{value} at {at}, ring of {ring}");
    }
}

#[test]
fn a_cache_is_volatile_if_it_can_be_flushed_whatever_wce_says() {
    let wce = |value| {
        let mut space = space();
        space[32] = value;
        space
    };
    for (features, value, want) in [
        (all(), 1, true),
        (all(), 0, true),
        (all() - Features::CONFIG_WCE, 0, true),
        (all() - Features::FLUSH, 1, false),
    ] {
        assert_eq!(read(features, &wce(value)).info.volatile_cache, want);
    }
    assert!(read(all() | Features::RO, &space()).info.read_only);
}

#[test]
fn what_makes_no_sense_is_refused_with_a_word_on_what_helps() {
    type Row = (&'static str, Features, usize, Vec<u8>, fn(&ConfigCause) -> bool);
    let le = |value: u32| value.to_le_bytes().to_vec();
    let table: &[Row] = &[
        ("legacy", all() - Features::VERSION_1, 0, vec![], |cause| *cause == ConfigCause::Legacy),
        ("capacity", all(), 0, vec![0xff; 8], |cause| matches!(cause, ConfigCause::Capacity(_))),
        ("no block", all(), 20, le(0), |cause| *cause == ConfigCause::BlockSize(0)),
        ("half a sector", all(), 20, le(256), |cause| *cause == ConfigCause::BlockSize(256)),
        ("odd block", all(), 20, le(1000), |cause| *cause == ConfigCause::BlockSize(1000)),
        ("large block", all(), 20, le(8192), |cause| *cause == ConfigCause::BlockSize(8192)),
        ("topology", all(), 24, vec![23], |cause| *cause == ConfigCause::PhysicalBlock(23)),
        ("topology, far", all(), 24, vec![255], |cause| *cause == ConfigCause::PhysicalBlock(255)),
        ("size_max", all() | Features::SIZE_MAX, 8, le(511), |cause| *cause == ConfigCause::SizeMax(511)),
        ("no queues", all(), 34, vec![0, 0], |cause| *cause == ConfigCause::NoQueues),
        ("discard", all(), 36, le(7), |cause| matches!(cause, ConfigCause::Limits(_))),
        ("alignment", all(), 44, le(u32::MAX), |cause| matches!(cause, ConfigCause::Limits(_))),
    ];
    for (name, features, at, bytes, is_right) in table {
        let mut space = space();
        space[*at..at + bytes.len()].copy_from_slice(bytes);
        let error = BlkDisk::new("vhost-user:/run/a", *features, &space, 128).unwrap_err();
        assert!(is_right(&error.cause), "{name}: {error}");
        let text = error.to_string();
        assert!(text.starts_with("the virtio-blk device vhost-user:/run/a "), "{text}");
        let helps = ["start its", "check its", "set a", "disable", "correct", "raise"];
        assert!(helps.iter().any(|word| text.contains(word)), "{name}: {text}");
    }
    let direct = all() - Features::INDIRECT_DESC;
    assert_eq!(BlkDisk::new("disk", direct, &space(), 2).unwrap_err().cause, ConfigCause::RingSize(2));
    for len in [0, 7, 8, 12, 23, 33, 47, 56] {
        let error = BlkDisk::new("disk", all(), &space()[..len], 128).unwrap_err();
        assert!(matches!(error.cause, ConfigCause::Short { have, .. } if have == len), "{len}: {error}");
    }
}

proptest! {
    /// Any bytes: refused, or limits that hold and a layout that fits them.
    #[test]
    fn any_configuration_is_refused_or_fits(
        features in any::<u64>(),
        space in prop::collection::vec(prop_oneof![Just(0_u8), Just(1), Just(2), any::<u8>()], 0..64),
        size in 1_u16..300,
    ) {
        let features = Features::from_bits_truncate(features) & DRIVER_FEATURES | Features::VERSION_1;
        let size = if features.contains(Features::RING_PACKED) { size } else { size.next_power_of_two() };
        if let Ok(disk) = BlkDisk::new("any", features, &space, size) {
            prop_assert!(disk.info.limits.check().is_ok() && disk.queues > 0);
            let layout = BlkLayout::new(&disk, size);
            prop_assert!(disk.info.limits.segments_max + 2 <= layout.rows);
            prop_assert!(layout.depth >= 1 && layout.depth <= size);
        }
    }
}
