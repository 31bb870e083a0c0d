//! The disk that a driver derives from a device's feature bits and configuration space. [5.2.3, 5.2.4]
//!
//! Pure. The space is a copy, read once. Its values are checked, and a device that contradicts itself is refused.
//! Limits follow Linux's driver (`virtblk_read_limits`).

use blkyard_mq::{DeviceInfo, LimitsError, QueueLimits, SECTOR_SHIFT};

use crate::Features;
use crate::config::field;

/// Features supported by this driver. It needs [`Features::VERSION_1`]; the others are used where offered.
///
/// Without [`Features::CONFIG_WCE`]: a device that can flush is then in write-back mode, and is flushed [5.2.6.2]. With
/// it the device would say whether it needs to be; qemu-storage-daemon 10.0 says no, and holds back writes all the
/// same.
pub const DRIVER_FEATURES: Features = Features::SIZE_MAX
    .union(Features::SEG_MAX)
    .union(Features::RO)
    .union(Features::BLK_SIZE)
    .union(Features::FLUSH)
    .union(Features::TOPOLOGY)
    .union(Features::MQ)
    .union(Features::DISCARD)
    .union(Features::WRITE_ZEROES)
    .union(Features::INDIRECT_DESC)
    .union(Features::EVENT_IDX)
    .union(Features::VERSION_1)
    .union(Features::RING_PACKED);

/// Upper bound of data segments in a request, for any device: 1 MiB in separate pages of 4 KiB, the sectors of the
/// largest request.
pub const SEGMENTS_MAX: u16 = 254;

/// Most ranges in one discard, as in Linux (`MAX_DISCARD_SEGMENTS`).
const RANGES_MAX: u16 = 256;

/// The largest logical block: what every Linux accepts, a page.
const BLOCK_BYTES_MAX: u32 = 4096;

/// A virtio-blk device as its driver sees it.
#[derive(Clone, Debug)]
pub struct BlkDisk {
    /// Properties for the queue core.
    pub info: DeviceInfo,
    /// Queues the device has.
    pub queues: u16,
    /// Negotiated features.
    pub features: Features,
    /// Whether zeroed blocks may be given back.
    pub may_unmap: bool,
}

/// A configuration no disk can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the virtio-blk device {name} {cause}")]
pub struct ConfigError {
    /// The device, as the user named it.
    pub name: String,
    /// Fault and cure.
    pub cause: ConfigCause,
}

/// Fault of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigCause {
    /// Only the legacy interface.
    #[error("has only the legacy interface; start its back-end with VERSION_1 (\"modern\")")]
    Legacy,
    /// A field that a feature promises is not there.
    #[error("has {have} bytes of configuration, too few for its {what}; disable that feature at its back-end")]
    Short {
        /// Content of the field.
        what: &'static str,
        /// Bytes of the space.
        have: usize,
    },
    /// More bytes than 64 bits can count.
    #[error("reports {0} sectors, above the maximum; check its back-end")]
    Capacity(u64),
    /// Invalid block size.
    #[error("has an invalid block size of {0} bytes; set a power of two from 512 to {BLOCK_BYTES_MAX} at its back-end")]
    BlockSize(u32),
    /// A physical block beyond any medium.
    #[error("reports 2^{0} logical blocks in a physical one; correct the topology at its back-end")]
    PhysicalBlock(u8),
    /// Segments too short for a block.
    #[error("accepts segments of at most {0} bytes, less than a block; raise size_max at its back-end")]
    SizeMax(u32),
    /// Multiple queues offered, with a count of 0.
    #[error("offers multiple queues and has 0; set at least one at its back-end")]
    NoQueues,
    /// A ring that cannot hold a request.
    #[error("has rings of {0} entries without indirect descriptors, but a request takes three; use larger rings")]
    RingSize(u16),
    /// Inconsistent limits.
    #[error("has inconsistent limits: {0}; correct them at its back-end")]
    Limits(LimitsError),
}

/// The readable part of the configuration space.
struct Space<'a>(&'a [u8]);

impl Space<'_> {
    fn bytes<const N: usize>(&self, at: usize, what: &'static str) -> Result<[u8; N], ConfigCause> {
        let field = self.0.get(at..at + N).and_then(|bytes| bytes.try_into().ok());
        field.ok_or(ConfigCause::Short { what, have: self.0.len() })
    }

    fn u8(&self, at: usize, what: &'static str) -> Result<u8, ConfigCause> {
        self.bytes(at, what).map(u8::from_le_bytes)
    }

    fn u16(&self, at: usize, what: &'static str) -> Result<u16, ConfigCause> {
        self.bytes(at, what).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize, what: &'static str) -> Result<u32, ConfigCause> {
        self.bytes(at, what).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize, what: &'static str) -> Result<u64, ConfigCause> {
        self.bytes(at, what).map(u64::from_le_bytes)
    }
}

impl BlkDisk {
    /// Parses a copy of the configuration space. `features` were negotiated, rings have `ring_size` entries.
    ///
    /// # Errors
    /// This driver cannot drive the device, or its configuration is inconsistent.
    pub fn new(name: &str, features: Features, space: &[u8], ring_size: u16) -> Result<BlkDisk, ConfigError> {
        read(name, features, &Space(space), ring_size).map_err(|cause| ConfigError { name: name.into(), cause })
    }

    /// Requests that a ring of `ring_size` entries holds at one time. Without indirect descriptors each takes two
    /// or more entries. (Linux halves the depth, too.)
    pub fn depth(&self, ring_size: u16) -> u16 {
        if self.features.contains(Features::INDIRECT_DESC) { ring_size } else { (ring_size / 2).max(1) }
    }
}

fn read(name: &str, features: Features, space: &Space<'_>, ring_size: u16) -> Result<BlkDisk, ConfigCause> {
    let has = |feature| features.contains(feature);
    if !has(Features::VERSION_1) {
        return Err(ConfigCause::Legacy);
    }
    if ring_size < 3 && !has(Features::INDIRECT_DESC) {
        return Err(ConfigCause::RingSize(ring_size));
    }
    let mut limits = QueueLimits { segments_max: segments_max(features, space, ring_size)?, ..QueueLimits::default() };
    read_blocks(features, space, &mut limits)?;
    if has(Features::DISCARD) {
        read_discard(space, &mut limits)?;
    }
    let mut may_unmap = false;
    if has(Features::WRITE_ZEROES) {
        limits.write_zeroes_sectors_max =
            or_unlimited(space.u32(field::MAX_WRITE_ZEROES_SECTORS, "write-zeroes limit")?);
        may_unmap = space.u8(field::WRITE_ZEROES_MAY_UNMAP, "write-zeroes mode")? != 0;
    }
    limits.check().map_err(ConfigCause::Limits)?;
    let sectors = space.u64(field::CAPACITY, "capacity")?;
    if sectors > u64::MAX >> SECTOR_SHIFT {
        return Err(ConfigCause::Capacity(sectors));
    }
    let queues = if has(Features::MQ) { space.u16(field::NUM_QUEUES, "number of queues")? } else { 1 };
    if queues == 0 {
        return Err(ConfigCause::NoQueues);
    }
    let block_sectors = u64::from(limits.logical_block_bytes >> SECTOR_SHIFT);
    let info = DeviceInfo {
        name: name.into(),
        // A partial last block cannot be reached.
        capacity_sectors: sectors - sectors % block_sectors,
        limits,
        read_only: has(Features::RO),
        // Without a way to flush a device must not hold back writes. [5.2.6.2]
        volatile_cache: has(Features::FLUSH),
        fua: false,
        // virtio cannot say.
        rotational: false,
        ..DeviceInfo::default()
    };
    Ok(BlkDisk { info, queues, features, may_unmap })
}

/// Data segments in one request: the device's limit, or 1 without one. A chain is no longer than the ring, even in an
/// indirect table. [2.7.5.3.1, 2.8.8]
fn segments_max(features: Features, space: &Space<'_>, ring_size: u16) -> Result<u16, ConfigCause> {
    let said = if features.contains(Features::SEG_MAX) { space.u32(field::SEG_MAX, "most segments")? } else { 1 };
    let fits = ring_size.saturating_sub(2).clamp(1, SEGMENTS_MAX);
    Ok(u16::try_from(said).unwrap_or(fits).clamp(1, fits))
}

fn read_blocks(features: Features, space: &Space<'_>, limits: &mut QueueLimits) -> Result<(), ConfigCause> {
    if features.contains(Features::BLK_SIZE) {
        let bytes = space.u32(field::BLK_SIZE, "block size")?;
        if !bytes.is_power_of_two() || !(512..=BLOCK_BYTES_MAX).contains(&bytes) {
            return Err(ConfigCause::BlockSize(bytes));
        }
        limits.logical_block_bytes = bytes;
    }
    limits.physical_block_bytes = limits.logical_block_bytes;
    if features.contains(Features::TOPOLOGY) {
        let exponent = space.u8(field::PHYSICAL_BLOCK_EXP, "physical block")?;
        limits.physical_block_bytes =
            limits.logical_block_bytes.checked_mul(1_u32.checked_shl(exponent.into()).unwrap_or(0)).unwrap_or(0);
        if limits.physical_block_bytes == 0 {
            return Err(ConfigCause::PhysicalBlock(exponent));
        }
    }
    limits.discard_granularity_bytes = limits.logical_block_bytes;
    limits.segment_bytes_max = u32::MAX;
    if features.contains(Features::SIZE_MAX) {
        limits.segment_bytes_max = or_unlimited(space.u32(field::SIZE_MAX, "longest segment")?);
        if limits.segment_bytes_max < limits.logical_block_bytes {
            return Err(ConfigCause::SizeMax(limits.segment_bytes_max));
        }
    }
    Ok(())
}

fn read_discard(space: &Space<'_>, limits: &mut QueueLimits) -> Result<(), ConfigCause> {
    limits.discard_sectors_max = or_unlimited(space.u32(field::MAX_DISCARD_SECTORS, "longest discard")?);
    let ranges = or_unlimited(space.u32(field::MAX_DISCARD_SEG, "discard segment limit")?);
    let fits = super::place::ranges_max(limits.segments_max).min(RANGES_MAX);
    limits.discard_segments_max = u16::try_from(ranges).unwrap_or(fits).min(fits);
    let alignment = space.u32(field::DISCARD_SECTOR_ALIGNMENT, "discard alignment")?;
    if alignment > 0 {
        // On overflow a value that is no multiple of a block, and is refused for that.
        limits.discard_granularity_bytes = alignment.checked_mul(1 << SECTOR_SHIFT).unwrap_or(1);
    }
    Ok(())
}

/// Zero means unlimited.
fn or_unlimited(max: u32) -> u32 {
    if max == 0 { u32::MAX } else { max }
}
