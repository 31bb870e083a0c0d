//! Recognises bios that need neither checks nor splitting, in a few instructions.
//!
//! The common case. A bio that passes may become a request unchanged; any other goes through [`QueueLimits::admit`] and
//! [`QueueLimits::split`], which know the rules.

use crate::{Bio, BioFlags, Op, QueueLimits, SECTOR_SHIFT, Segment};

/// Conditions of the fast path: a valid bio with data in one segment, no special flags, and one request of one piece. A
/// few comparisons cover all rules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FastPath {
    capacity_sectors: u64,
    block_mask: u64,
    dma_mask: u64,
    /// Bits in which the first and the last byte of a segment may not differ.
    boundary_bits: u64,
    /// No more than there are. Zero if requests must not cross chunks: then no bio is plain.
    sectors_max: u64,
    /// Bits of operation and flags that exclude the fast path. Tested separately, as they were just written: a read of
    /// both as one word would stall.
    op_slow: u8,
    flags_slow: u8,
}

const _: () = assert!(Op::Read as u8 == 0 && Op::Write as u8 == 1, "one bit tells data from all else");

impl FastPath {
    /// Closed fast path.
    pub(crate) const NOTHING: FastPath = FastPath {
        capacity_sectors: 0,
        block_mask: 0,
        dma_mask: 0,
        boundary_bits: 0,
        sectors_max: 0,
        op_slow: u8::MAX,
        flags_slow: u8::MAX,
    };

    /// Conditions on a device that is alone behind its queue; a bio with one of `flags_slow` or `ATOMIC` is excluded.
    pub(crate) fn new(limits: &QueueLimits, capacity_sectors: u64, read_only: bool, flags_slow: BioFlags) -> FastPath {
        let sectors_max = limits.sectors_max.min(limits.segment_bytes_max >> SECTOR_SHIFT);
        FastPath {
            capacity_sectors,
            block_mask: u64::from((limits.logical_block_bytes >> SECTOR_SHIFT) - 1),
            dma_mask: u64::from(limits.dma_alignment_mask),
            boundary_bits: !u64::from(limits.segment_boundary_mask),
            sectors_max: if limits.chunk_sectors == 0 { u64::from(sectors_max).min(capacity_sectors) } else { 0 },
            // Support and length of atomic writes are separate rules.
            flags_slow: (flags_slow | BioFlags::ATOMIC).bits(),
            op_slow: !(Op::Write as u8 * u8::from(!read_only)),
        }
    }

    #[inline]
    pub(crate) fn is(&self, bio: &Bio) -> bool {
        let [segment] = bio.segments[..] else { return false };
        let (sectors, len) = (u64::from(bio.sectors), u64::from(segment.len));
        let last_byte = segment.offset.wrapping_add(len).wrapping_sub(1);
        let wrong = ((bio.sector | sectors) & self.block_mask)
            | ((len | segment.offset) & self.dma_mask)
            | ((segment.offset ^ last_byte) & self.boundary_bits)
            | (len ^ (sectors << SECTOR_SHIFT))
            | u64::from(bio.op as u8 & self.op_slow)
            | u64::from(bio.flags.bits() & self.flags_slow)
            | u64::from(bio.namespace)
            // Writes from there take the slow path, too.
            | u64::from(segment.region & Segment::READ_ONLY_BIT);
        wrong == 0
            && sectors.wrapping_sub(1) < self.sectors_max
            // A bio within the maximum length is within the device.
            && bio.sector <= self.capacity_sectors - sectors
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Status;
    use crate::limits::Cursor;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]

        /// The fast path accepts only bios that the slow path would admit as one piece; and it accepts nearly all of
        /// these.
        #[test]
        fn a_plain_bio_is_one_request(
            op in prop::sample::select(&[Op::Read, Op::Write, Op::Discard, Op::Flush][..]), read_only: bool,
            flags in prop_oneof![3 => Just(0_u8), 1 => any::<u8>()],
            sector in 0_u64..120, sectors in 0_u32..12, offset in 0_u64..20, extra in 0_u32..2,
            sectors_max in 8_u32..10, chunk in prop::sample::select(&[0_u32, 8][..]),
            block in prop::sample::select(&[512_u32, 4096][..]), dma_mask in prop::sample::select(&[0_u32, 3, 511][..]),
            boundary in prop::sample::select(&[4095_u32, u32::MAX][..]), atomic in 0_u32..9,
        ) {
            let limits = QueueLimits {
                sectors_max, chunk_sectors: chunk, dma_alignment_mask: dma_mask, discard_sectors_max: 8,
                logical_block_bytes: block, physical_block_bytes: 4096, discard_granularity_bytes: 4096,
                segment_boundary_mask: boundary, atomic_sectors_max: atomic, ..QueueLimits::default()
            };
            let flags = BioFlags::from_bits_truncate(flags);
            let slow = BioFlags::FUA | BioFlags::NOWAIT;
            let segment = Segment { region: 0, offset, len: sectors * 512 + extra };
            let bio = Bio { op, flags, sector, sectors, segments: vec![segment], ..Bio::default() };
            let admitted = limits.admit(&bio, 100).is_ok() && !(read_only && op.is_write());
            let whole = admitted && op.has_data() && limits.split(&bio, Cursor::default()).map(|split| (split.sectors, split.segments)) == Ok((sectors, 1));
            let plain = FastPath::new(&limits, 100, read_only, slow).is(&bio);
            prop_assert!(!plain || whole);
            prop_assert!(plain || !whole || chunk != 0 || flags.intersects(slow | BioFlags::ATOMIC));
        }
    }

    #[test]
    fn a_read_into_a_read_only_buffer_is_refused() {
        let limits = QueueLimits::default();
        let plain = FastPath::new(&limits, 100, false, BioFlags::PREFLUSH);
        for (op, read_only, is_plain, admitted) in [
            (Op::Read, false, true, Ok(())),
            (Op::Write, false, true, Ok(())),
            (Op::Read, true, false, Err(Status::Invalid)),
            (Op::Write, true, false, Ok(())),
        ] {
            let region = 1 << 31 | if read_only { Segment::READ_ONLY_BIT } else { 0 };
            let segment = Segment { region, offset: 0, len: 4096 };
            let bio = Bio { op, sectors: 8, segments: vec![segment], ..Bio::default() };
            assert_eq!((plain.is(&bio), limits.admit(&bio, 100)), (is_plain, admitted), "{op:?} {read_only}");
            let two = Bio { sectors: 16, segments: vec![Segment { region: 0, ..segment }, segment], ..bio };
            assert_eq!(limits.admit(&two, 100), admitted, "{op:?} {read_only}");
        }
    }

    #[test]
    fn a_bio_that_wants_more_than_its_data_moved_is_not_plain() {
        let plain = FastPath::new(&QueueLimits::default(), 100, false, BioFlags::PREFLUSH | BioFlags::RESERVED);
        let segment = Segment { region: 0, offset: 0, len: 4096 };
        let mut bio = Bio { op: Op::Write, sectors: 8, segments: vec![segment], status: Status::Ok, ..Bio::default() };
        for flag in BioFlags::all().iter() {
            bio.flags = flag;
            let slow = flag.intersects(BioFlags::PREFLUSH | BioFlags::RESERVED | BioFlags::ATOMIC);
            assert_eq!(plain.is(&bio), !slow, "{flag:?}");
        }
    }
}
