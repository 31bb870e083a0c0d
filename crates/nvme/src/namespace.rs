//! A namespace for the queue core: identify data becomes a [`DeviceInfo`] with limits.
//!
//! Host side. Untrusted data of the controller is checked: a namespace that the queue core cannot use is ignored.

use blkyard_mq::{BioFlags, DeviceInfo, Op, QueueLimits, SECTOR_BYTES, SECTOR_SHIFT};

use crate::{
    DsmRange, IdentifyController, IdentifyNamespace, NvmLimits, PAGE, SGL_DESCRIPTORS_MAX, Sqe, TRANSFER_BYTES_MAX,
    control, io,
};

/// Timeout of an I/O command, ns: 30 s, as in Linux.
const IO_TIMEOUT_NS: u64 = 30_000_000_000;
/// Average segment above which an SGL is preferred to PRP entries, bytes, as in Linux.
const SGL_THRESHOLD: u32 = 32 << 10;
/// Maximum discard, sectors: 512 GiB, so that sums of lengths fit 32 bits.
const DISCARD_SECTORS_MAX: u32 = 1 << 30;

/// Properties of a namespace for the driver of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmeNamespace {
    /// Namespace identifier.
    pub nsid: u32,
    /// Sectors of 512 bytes in a logical block, as a power of two.
    pub sector_shift: u8,
    /// Average segment above which an SGL is preferred, bytes; `None` if the controller accepts none.
    pub sgl_threshold: Option<u32>,
}

impl NvmeNamespace {
    /// A namespace of a controller with a minimum page of 4096 bytes, and its properties for the queue core.
    ///
    /// `None` if it is inactive, has metadata, or has an unusable block size or size.
    pub fn new(
        nsid: u32,
        controller: &IdentifyController,
        namespace: &IdentifyNamespace,
        nvm: &NvmLimits,
    ) -> Option<(NvmeNamespace, DeviceInfo)> {
        let format = namespace.current_format().filter(|format| format.metadata_bytes == 0)?;
        let capacity_sectors = namespace.capacity_sectors()?;
        let block = 1_u32 << format.block_shift;
        let sector_shift = format.block_shift - SECTOR_SHIFT as u8;
        let sectors = |blocks: u64| u32::try_from(blocks << sector_shift).unwrap_or(u32::MAX);
        let bytes_max = controller.transfer_bytes_max(0).unwrap_or(u64::MAX).min(TRANSFER_BYTES_MAX);
        let sectors_max = ((bytes_max / SECTOR_BYTES) as u32).min(sectors(u64::from(Sqe::BLOCKS_MAX)));
        let has_sgl = controller.has_sgl();
        // One block more than the pages of a transfer, since it may start within a page.
        let prp_segments_max = (bytes_max / PAGE + 1) as u16;
        let boundary = u64::from(namespace.optimal_boundary);
        let has_dsm = controller.nvm_commands & 1 << 2 != 0;
        let has_zeroes = controller.nvm_commands & 1 << 3 != 0;
        let zeroes_max = match nvm.write_zeroes_bytes {
            0 => u64::from(Sqe::BLOCKS_MAX),
            bytes => u64::from(Sqe::BLOCKS_MAX).min(bytes >> format.block_shift),
        };
        let has_sizes = namespace.features & 1 << 4 != 0;
        let granularity = u64::from(namespace.deallocate_granularity) + 1;
        let deallocate = if has_sizes { granularity * u64::from(block) } else { u64::from(block) };
        let limits = QueueLimits {
            logical_block_bytes: block,
            physical_block_bytes: physical_block(controller, namespace, block),
            sectors_max,
            segments_max: if has_sgl { SGL_DESCRIPTORS_MAX as u16 } else { prp_segments_max },
            segment_bytes_max: bytes_max as u32,
            chunk_sectors: if boundary.is_power_of_two() { sectors(boundary) } else { 0 },
            virt_boundary_mask: if has_sgl { 0 } else { PAGE as u32 - 1 },
            dma_alignment_mask: 3,
            discard_sectors_max: if has_dsm { discard_sectors(nvm, sector_shift) } else { 0 },
            discard_granularity_bytes: u32::try_from(deallocate).unwrap_or(block),
            discard_segments_max: match nvm.deallocate_ranges {
                0 => Sqe::RANGES_MAX,
                ranges => u16::from(ranges),
            },
            write_zeroes_sectors_max: if has_zeroes { sectors(zeroes_max) } else { 0 },
            ..QueueLimits::default()
        };
        limits.check().ok()?;
        let info = DeviceInfo {
            capacity_sectors,
            limits,
            read_only: namespace.attributes & 1 != 0,
            volatile_cache: controller.write_cache & 1 != 0,
            fua: controller.write_cache & 1 != 0,
            timeout_ns: IO_TIMEOUT_NS,
            ..DeviceInfo::default()
        };
        let sgl_threshold = has_sgl.then_some(SGL_THRESHOLD);
        Some((NvmeNamespace { nsid, sector_shift, sgl_threshold }, info))
    }
}

impl NvmeNamespace {
    /// The command of a request, without data. The operation is not a discard, whose ranges are data.
    #[inline(always)]
    pub fn command(&self, op: Op, sector: u64, sectors: u32, flags: BioFlags) -> Sqe {
        let (slba, blocks) = (sector >> self.sector_shift, sectors >> self.sector_shift);
        let fua = if flags.contains(BioFlags::FUA) { control::FUA } else { 0 };
        match op {
            Op::Read => Sqe::with_blocks(io::READ, self.nsid, slba, blocks, 0),
            Op::Write => Sqe::with_blocks(io::WRITE, self.nsid, slba, blocks, fua),
            Op::WriteZeroes => {
                let deallocate = if flags.contains(BioFlags::NO_UNMAP) { 0 } else { control::DEAC };
                Sqe::with_blocks(io::WRITE_ZEROES, self.nsid, slba, blocks, fua | deallocate)
            }
            Op::Flush | Op::Discard => Sqe::new(io::FLUSH, self.nsid),
        }
    }

    /// A range of a discard, in logical blocks.
    #[inline]
    pub fn range(&self, (sector, sectors): (u64, u32)) -> DsmRange {
        DsmRange { slba: sector >> self.sector_shift, blocks: sectors >> self.sector_shift }
    }
}

/// Maximum discard. The queue core has one limit for all ranges together, so the smaller of both limits applies, but at
/// least one block.
fn discard_sectors(nvm: &NvmLimits, sector_shift: u8) -> u32 {
    let limits = [nvm.deallocate_blocks, u64::from(nvm.deallocate_range_blocks)];
    let blocks = limits.into_iter().filter(|blocks| *blocks > 0).min();
    let sectors = blocks.map(|blocks| blocks.saturating_mul(1 << sector_shift));
    sectors.and_then(|sectors| u32::try_from(sectors).ok()).unwrap_or(u32::MAX).min(DISCARD_SECTORS_MAX)
}

/// Preferred write granularity, at most the unit that is atomic at power failure.
fn physical_block(controller: &IdentifyController, namespace: &IdentifyNamespace, block: u32) -> u32 {
    let of_namespace = namespace.features & 1 << 1 != 0 && namespace.atomic_power_fail_blocks > 0;
    let atomic = match (namespace.atomic_offset, of_namespace) {
        (0, true) => u64::from(namespace.atomic_power_fail_blocks) + 1,
        (0, false) => u64::from(controller.atomic_power_fail_blocks) + 1,
        _ => 1,
    };
    let has_sizes = namespace.features & 1 << 4 != 0;
    let preferred = if has_sizes { u64::from(namespace.write_granularity) + 1 } else { 1 };
    let blocks = preferred.min(atomic);
    // The queue core requires a power of two.
    u32::try_from((1 << blocks.ilog2()) * u64::from(block)).unwrap_or(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LbaFormat;

    fn identify() -> (IdentifyController, IdentifyNamespace) {
        let controller = IdentifyController { mdts: 5, nvm_commands: 0xc, write_cache: 1, ..Default::default() };
        let mut namespace = IdentifyNamespace { blocks: 1 << 20, capacity: 1 << 20, ..Default::default() };
        namespace.set_lba_format(0, LbaFormat { block_shift: 12, ..LbaFormat::default() });
        (controller, namespace)
    }

    fn device(
        change: impl FnOnce(&mut IdentifyController, &mut IdentifyNamespace),
    ) -> Option<(NvmeNamespace, DeviceInfo)> {
        let (mut controller, mut namespace) = identify();
        change(&mut controller, &mut namespace);
        NvmeNamespace::new(7, &controller, &namespace, &NvmLimits::default())
    }

    fn limits(change: impl FnOnce(&mut IdentifyController, &mut IdentifyNamespace)) -> QueueLimits {
        device(change).unwrap().1.limits
    }

    #[test]
    fn identify_data_becomes_limits() {
        let (namespace, info) = device(|_, _| ()).unwrap();
        assert_eq!(namespace, NvmeNamespace { nsid: 7, sector_shift: 3, sgl_threshold: None });
        assert_eq!((info.capacity_sectors, info.limits.logical_block_bytes), (8 << 20, 4096));
        assert!(info.volatile_cache && info.fua && !info.read_only);
        assert_eq!((info.limits.sectors_max, info.limits.segments_max), (256, 33));
        assert_eq!((info.limits.virt_boundary_mask, info.limits.dma_alignment_mask), (4095, 3));
        assert_eq!((info.limits.discard_sectors_max, info.limits.discard_segments_max), (1 << 30, 256));
        assert_eq!(info.limits.write_zeroes_sectors_max, 65536 * 8);
        assert_eq!((info.limits.chunk_sectors, info.limits.physical_block_bytes), (0, 4096));
    }

    #[test]
    fn each_field_changes_its_limit() {
        assert_eq!(limits(|controller, _| controller.mdts = 0).sectors_max, 16384, "8 MiB at most");
        assert_eq!(limits(|controller, _| controller.mdts = 1).sectors_max, 16);
        let sgl = limits(|controller, _| controller.sgl = 1);
        assert_eq!((sgl.virt_boundary_mask, sgl.segments_max), (0, 256));
        let none = limits(|controller, _| controller.nvm_commands = 0);
        assert_eq!((none.discard_sectors_max, none.write_zeroes_sectors_max), (0, 0));
        assert_eq!(limits(|_, namespace| namespace.optimal_boundary = 32).chunk_sectors, 256);
        assert_eq!(limits(|_, namespace| namespace.optimal_boundary = 33).chunk_sectors, 0, "no power of two");
        let sizes = |awupf: u16, offset: u16| {
            limits(move |controller, namespace| {
                controller.atomic_power_fail_blocks = awupf;
                (namespace.features, namespace.atomic_offset) = (1 << 4, offset);
                (namespace.write_granularity, namespace.deallocate_granularity) = (15, 255);
            })
        };
        assert_eq!(sizes(31, 0).physical_block_bytes, 65536);
        assert_eq!(sizes(3, 0).physical_block_bytes, 16384, "no more than is written whole");
        assert_eq!(sizes(31, 1).physical_block_bytes, 4096, "atomic blocks begin elsewhere");
        assert_eq!(sizes(31, 0).discard_granularity_bytes, 1 << 20);
        assert!(device(|_, namespace| namespace.attributes = 1).unwrap().1.read_only);
        let (controller, namespace) = identify();
        let nvm = |change: fn(&mut NvmLimits)| {
            let mut nvm = NvmLimits::default();
            change(&mut nvm);
            NvmeNamespace::new(7, &controller, &namespace, &nvm).unwrap().1.limits
        };
        assert_eq!(nvm(|nvm| nvm.write_zeroes_bytes = 128 << 12).write_zeroes_sectors_max, 1024);
        assert_eq!(nvm(|nvm| nvm.write_zeroes_bytes = u64::MAX).write_zeroes_sectors_max, 65536 * 8);
        assert_eq!(nvm(|nvm| nvm.deallocate_ranges = 7).discard_segments_max, 7);
        assert_eq!(nvm(|nvm| nvm.deallocate_range_blocks = 100).discard_sectors_max, 800);
        assert_eq!(
            nvm(|nvm| (nvm.deallocate_range_blocks, nvm.deallocate_blocks) = (100, 90)).discard_sectors_max,
            720
        );
        assert_eq!(nvm(|nvm| nvm.deallocate_blocks = u64::MAX).discard_sectors_max, 1 << 30);
    }

    #[test]
    fn a_namespace_that_cannot_be_used_is_none() {
        assert!(device(|_, namespace| namespace.capacity = 0).is_none());
        assert!(device(|_, namespace| namespace.format = 1).is_none());
        for (metadata_bytes, block_shift) in [(8, 12), (0, 8), (0, 13), (0, 255)] {
            let format = LbaFormat { metadata_bytes, block_shift, performance: 0 };
            assert!(device(|_, namespace| namespace.set_lba_format(0, format)).is_none(), "{format:?}");
        }
        // The result is usable for any data of a controller.
        for byte in [1, 0x7f, 0x80, 0xff] {
            let controller = IdentifyController::parse(&[byte; 4096]);
            let mut namespace = IdentifyNamespace::parse(&[byte; 4096]);
            (namespace.blocks, namespace.format) = (1000, 0);
            namespace.set_lba_format(0, LbaFormat { block_shift: 9, ..LbaFormat::default() });
            let nvm = NvmLimits::parse(&[byte; 4096]);
            let (_, info) = NvmeNamespace::new(1, &controller, &namespace, &nvm).unwrap();
            assert_eq!(info.limits.check(), Ok(()));
        }
    }
}
