//! Feature bits and configuration space of a virtio-blk device. [5.2.3, 5.2.4]
//!
//! Owned by the control path of one exported disk. The driver can write only the cache mode; the device may change the
//! size and notify the driver. The negotiated features are not known here.

use blkyard_mq::{DeviceInfo, SECTOR_SHIFT};

use crate::Features;

/// Bytes of the configuration space that may be read: the longest message of vhost-user. Undefined fields read as zero,
/// so a driver that knows more fields finds them absent.
pub const CONFIG_BYTES: u32 = 256;

/// Place of the cache mode in the configuration space.
pub const CACHE_MODE_AT: u32 = field::WCE as u32;

/// Where the fields are. [5.2.4]
pub(crate) mod field {
    pub(crate) const CAPACITY: usize = 0;
    pub(crate) const SIZE_MAX: usize = 8;
    pub(crate) const SEG_MAX: usize = 12;
    pub(crate) const BLK_SIZE: usize = 20;
    pub(crate) const PHYSICAL_BLOCK_EXP: usize = 24;
    pub(crate) const MIN_IO_SIZE: usize = 26;
    pub(crate) const WCE: usize = 32;
    pub(crate) const NUM_QUEUES: usize = 34;
    pub(crate) const MAX_DISCARD_SECTORS: usize = 36;
    pub(crate) const MAX_DISCARD_SEG: usize = 40;
    pub(crate) const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    pub(crate) const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    pub(crate) const MAX_WRITE_ZEROES_SEG: usize = 52;
    pub(crate) const WRITE_ZEROES_MAY_UNMAP: usize = 56;
}

/// The configuration of one disk.
#[derive(Clone, Debug)]
pub struct BlkConfig {
    info: DeviceInfo,
    queues: u16,
    seg_max: u32,
    wce: bool,
}

impl BlkConfig {
    /// The configuration of a device served with this many queues and requests of at most `seg_max` data segments.
    /// `wce`: whether the cache begins as write-back; a device without a cache is always write-through.
    ///
    /// # Panics
    /// Without queues.
    pub fn new(info: &DeviceInfo, queues: u16, seg_max: u32, wce: bool) -> BlkConfig {
        assert!(queues > 0, "a disk has at least one queue");
        BlkConfig { info: info.clone(), queues, seg_max, wce: wce && info.volatile_cache }
    }

    /// The features to offer.
    pub fn features(&self) -> Features {
        let mut features = Features::BLK_SIZE
            | Features::TOPOLOGY
            | Features::INDIRECT_DESC
            | Features::EVENT_IDX
            | Features::RING_PACKED
            | Features::IN_ORDER
            | Features::VERSION_1
            | Features::PROTOCOL_FEATURES;
        let limits = &self.info.limits;
        features.set(Features::SEG_MAX, self.seg_max > 0);
        features.set(Features::RO, self.info.read_only);
        // A driver that may toggle the cache must be able to flush it.
        features.set(Features::FLUSH | Features::CONFIG_WCE, self.info.volatile_cache);
        features.set(Features::MQ, self.queues > 1);
        features.set(Features::DISCARD, limits.discard_sectors_max > 0 && !self.info.read_only);
        features.set(Features::WRITE_ZEROES, limits.write_zeroes_sectors_max > 0 && !self.info.read_only);
        features
    }

    /// A part of the configuration space; `None` if it reaches beyond [`CONFIG_BYTES`] or is empty.
    pub fn read(&self, offset: u32, size: u32) -> Option<Vec<u8>> {
        let end = offset.checked_add(size).filter(|end| size > 0 && *end <= CONFIG_BYTES)?;
        Some(self.space()[offset as usize..end as usize].to_vec())
    }

    /// Writes a part of the configuration space. Only the cache mode can be written, with 0 or 1; otherwise returns
    /// false and changes nothing.
    pub fn write(&mut self, offset: u32, bytes: &[u8]) -> bool {
        match bytes {
            [wce @ (0 | 1)] if offset as usize == field::WCE && self.info.volatile_cache => {
                self.wce = *wce == 1;
                true
            }
            _ => false,
        }
    }

    /// Whether the cache is write-back.
    pub fn wce(&self) -> bool {
        self.wce
    }

    /// Switches the cache between write-back and write-through; a device without a cache stays write-through. A guest's
    /// reset does this, too. [5.2.5.2]
    pub fn set_wce(&mut self, wce: bool) {
        self.wce = wce && self.info.volatile_cache;
    }

    /// The device behind it is this from now on. The cache mode stays as the driver chose it.
    pub fn set_info(&mut self, info: &DeviceInfo) {
        self.info = info.clone();
        self.wce &= info.volatile_cache;
    }

    /// Sets the number of queues; not while a driver uses another number.
    ///
    /// # Panics
    /// Without queues.
    pub fn set_queues(&mut self, queues: u16) {
        assert!(queues > 0, "a disk has at least one queue");
        self.queues = queues;
    }

    /// Queues the disk is served with.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// The device behind it.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// All fields at their offsets. [5.2.4] A field whose feature is not offered is zero.
    fn space(&self) -> [u8; CONFIG_BYTES as usize] {
        let mut space = [0; CONFIG_BYTES as usize];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let features = self.features();
        let limits = &self.info.limits;
        let blocks_per_physical = limits.physical_block_bytes / limits.logical_block_bytes;
        put(field::CAPACITY, &self.info.capacity_sectors.to_le_bytes());
        put(field::SEG_MAX, &self.seg_max.to_le_bytes());
        put(field::BLK_SIZE, &limits.logical_block_bytes.to_le_bytes());
        put(field::PHYSICAL_BLOCK_EXP, &[blocks_per_physical.trailing_zeros() as u8]);
        // 25, alignment_offset: the first block begins a physical one.
        put(field::MIN_IO_SIZE, &u16::try_from(blocks_per_physical).unwrap_or(u16::MAX).to_le_bytes()); // in blocks
        // 28, opt_io_size: no length is better than others.
        put(field::WCE, &[u8::from(self.wce)]);
        if features.contains(Features::MQ) {
            put(field::NUM_QUEUES, &self.queues.to_le_bytes());
        }
        let discard_alignment = limits.discard_granularity_bytes >> SECTOR_SHIFT;
        if features.contains(Features::DISCARD) {
            put(field::MAX_DISCARD_SECTORS, &limits.discard_sectors_max.to_le_bytes());
            put(field::MAX_DISCARD_SEG, &1_u32.to_le_bytes());
            put(field::DISCARD_SECTOR_ALIGNMENT, &discard_alignment.to_le_bytes());
        }
        if features.contains(Features::WRITE_ZEROES) {
            put(field::MAX_WRITE_ZEROES_SECTORS, &limits.write_zeroes_sectors_max.to_le_bytes());
            put(field::MAX_WRITE_ZEROES_SEG, &1_u32.to_le_bytes());
            put(field::WRITE_ZEROES_MAY_UNMAP, &[u8::from(features.contains(Features::DISCARD))]);
        }
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mq::QueueLimits;

    fn info() -> DeviceInfo {
        DeviceInfo {
            name: "test".into(),
            capacity_sectors: 0x0102_0304_0506,
            limits: QueueLimits {
                logical_block_bytes: 512,
                physical_block_bytes: 4096,
                discard_sectors_max: 0x8000,
                discard_granularity_bytes: 4096,
                write_zeroes_sectors_max: 0x4000,
                ..QueueLimits::default()
            },
            read_only: false,
            volatile_cache: true,
            fua: true,
            ..DeviceInfo::default()
        }
    }

    #[test]
    fn fields_are_where_the_specification_puts_them() {
        let config = BlkConfig::new(&info(), 4, 126, true);
        #[rustfmt::skip]
        let want: [u8; 60] = [
            6, 5, 4, 3, 2, 1, 0, 0, // capacity
            0, 0, 0, 0, // size_max
            126, 0, 0, 0, // seg_max
            0, 0, 0, 0, // geometry
            0, 2, 0, 0, // blk_size
            3, 0, 8, 0, 0, 0, 0, 0, // topology
            1, 0, // wce
            4, 0, // num_queues
            0, 0x80, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, // discard
            0, 0x40, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, // write zeroes
        ];
        assert_eq!(config.read(0, 60).unwrap(), want);
        let own = Features::RO | Features::SIZE_MAX | Features::LOG_ALL;
        assert_eq!(config.features(), Features::all() - own);
        assert_eq!(config.read(34, 2).unwrap(), [4, 0]);
        assert!(config.read(60, CONFIG_BYTES - 60).unwrap().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn parts_that_are_not_there_are_not_read() {
        let config = BlkConfig::new(&info(), 1, 126, true);
        for (offset, size) in [(0, 0), (0, 257), (256, 1), (255, 2), (u32::MAX, 1), (1, u32::MAX), (u32::MAX, u32::MAX)]
        {
            assert!(config.read(offset, size).is_none(), "{size} at {offset}");
        }
        assert_eq!(config.read(0, 256).unwrap().len(), 256);
        assert_eq!(config.read(255, 1).unwrap(), [0]);
    }

    #[test]
    fn what_the_device_cannot_do_is_not_offered() {
        let none = QueueLimits { discard_sectors_max: 0, write_zeroes_sectors_max: 0, ..info().limits };
        let plain = DeviceInfo { limits: none, volatile_cache: false, ..info() };
        let config = BlkConfig::new(&plain, 1, 0, true);
        let absent = Features::SIZE_MAX
            | Features::LOG_ALL
            | Features::SEG_MAX
            | Features::RO
            | Features::FLUSH
            | Features::CONFIG_WCE
            | Features::MQ
            | Features::DISCARD
            | Features::WRITE_ZEROES;
        assert_eq!(config.features(), Features::all() - absent);
        assert_eq!(config.read(32, 28).unwrap(), [0; 28]);
        let read_only = BlkConfig::new(&DeviceInfo { read_only: true, ..info() }, 1, 1, true);
        assert!(read_only.features().contains(Features::RO));
        assert!(!read_only.features().intersects(Features::DISCARD | Features::WRITE_ZEROES));
    }

    #[test]
    fn another_size_changes_the_capacity_and_nothing_else() {
        let mut config = BlkConfig::new(&info(), 4, 126, true);
        assert!(config.write(32, &[0]));
        let before = config.read(0, 60).unwrap();
        config.set_info(&DeviceInfo { capacity_sectors: 7, ..info() });
        assert_eq!(config.read(0, 8).unwrap(), 7_u64.to_le_bytes());
        assert_eq!(config.read(8, 52).unwrap(), before[8..], "the cache mode among the rest");
        config.set_queues(1);
        assert_eq!((config.read(34, 2).unwrap(), config.features().contains(Features::MQ)), (vec![0, 0], false));
    }

    #[test]
    fn only_the_cache_mode_can_be_written() {
        let mut config = BlkConfig::new(&info(), 1, 126, true);
        for (offset, bytes) in [(0, &[0_u8][..]), (31, &[0, 0]), (32, &[0, 0]), (32, &[2]), (32, &[]), (u32::MAX, &[0])]
        {
            assert!(!config.write(offset, bytes), "{bytes:?} at {offset}");
            assert!(config.wce());
        }
        assert!(config.write(32, &[0]) && !config.wce());
        assert_eq!(config.read(32, 1).unwrap(), [0]);
        assert!(config.write(32, &[1]) && config.wce());
        let mut through = BlkConfig::new(&DeviceInfo { volatile_cache: false, ..info() }, 1, 126, true);
        assert!(!through.wce() && !through.write(32, &[1]));
    }
}
