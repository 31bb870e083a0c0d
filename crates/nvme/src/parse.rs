//! I/O commands, controller side: a command becomes a bio or an error status.
//!
//! All data written by a host is untrusted. The command is a copy; its data pointers are walked once.

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{Bio, BioFlags, Op, SECTOR_SHIFT};

use crate::{DSM_RANGE_BYTES, DataWalker, DmaMap, DsmRange, NvmeStatus, Sqe, control, io};

/// Properties of a namespace for a controller's parser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceFormat {
    /// Namespace identifier.
    pub nsid: u32,
    /// Logical blocks.
    pub blocks: u64,
    /// Size of a logical block as a power of two, 9 to 12.
    pub block_shift: u8,
    /// Whether the namespace is write protected.
    pub read_only: bool,
}

/// A valid command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoCommand {
    /// The bio is filled in.
    Bio,
    /// The ranges are to be discarded, each by a bio ([`IoParser::discard`]).
    Deallocate,
    /// The bio has the range, and the segments of the data to compare it with.
    Compare,
    /// The bio has the range to read without a transfer.
    Verify,
    /// No operation is needed.
    Nothing,
}

/// Parses the I/O commands of one queue.
#[derive(Debug)]
pub struct IoParser {
    walker: DataWalker,
    ranges: Vec<DsmRange>,
}

impl IoParser {
    /// A parser for transfers of at most `bytes_max` (MDTS) that accepts SGLs.
    pub fn new(bytes_max: u64) -> IoParser {
        IoParser { walker: DataWalker::new(bytes_max, true), ranges: Vec::with_capacity(usize::from(Sqe::RANGES_MAX)) }
    }

    /// Maximum segments of a bio.
    pub fn segments_max(&self) -> usize {
        self.walker.segments_max()
    }

    /// Fills in the bio of a command for a namespace. Its segments point into the table of `map`.
    ///
    /// # Errors
    /// The status to complete the command with.
    #[inline]
    pub fn parse(
        &mut self,
        sqe: &Sqe,
        namespace: &NamespaceFormat,
        map: &DmaMap,
        bio: &mut Bio,
    ) -> Result<IoCommand, NvmeStatus> {
        let (command, bytes) = IoParser::check(sqe, namespace, bio)?;
        if bytes > 0 {
            self.walker.walk(map, sqe, bytes, &mut bio.segments)?;
        }
        if command == IoCommand::Deallocate {
            self.read_ranges(sqe, namespace, map.table(), &mut bio.segments)?;
        }
        Ok(command)
    }

    /// Fills in operation and range of the bio of a command for a namespace. Returns the bytes of the command's data,
    /// too.
    ///
    /// # Errors
    /// The status to complete the command with.
    #[inline(always)]
    pub(crate) fn check(sqe: &Sqe, namespace: &NamespaceFormat, bio: &mut Bio) -> Result<(IoCommand, u64), NvmeStatus> {
        bio.reset();
        if sqe.fused() != 0 {
            return Err(NvmeStatus::INVALID_FIELD.with_dnr());
        }
        let is_for_all = sqe.opcode() == io::FLUSH && sqe.nsid() == u32::MAX;
        if sqe.nsid() != namespace.nsid && !is_for_all {
            return Err(NvmeStatus::INVALID_NAMESPACE.with_dnr());
        }
        let fua = if sqe.control() & control::FUA != 0 { BioFlags::FUA } else { BioFlags::empty() };
        match sqe.opcode() {
            io::FLUSH => bio.op = Op::Flush,
            opcode @ (io::READ | io::WRITE | io::COMPARE) => {
                namespace.check_writable(opcode == io::WRITE)?;
                let range = DsmRange { slba: sqe.slba(), blocks: sqe.blocks() };
                namespace.check(range)?;
                namespace.place(range, bio);
                bio.op = if opcode == io::WRITE { Op::Write } else { Op::Read };
                bio.flags = if opcode == io::WRITE { fua } else { BioFlags::empty() };
                let command = if opcode == io::COMPARE { IoCommand::Compare } else { IoCommand::Bio };
                return Ok((command, bio.bytes()));
            }
            io::VERIFY => {
                let range = DsmRange { slba: sqe.slba(), blocks: sqe.blocks() };
                namespace.check(range)?;
                namespace.place(range, bio);
                bio.op = Op::Read;
                return Ok((IoCommand::Verify, 0));
            }
            io::WRITE_ZEROES => {
                namespace.check_writable(true)?;
                let range = DsmRange { slba: sqe.slba(), blocks: sqe.blocks() };
                namespace.check(range)?;
                namespace.place(range, bio);
                bio.op = Op::WriteZeroes;
                let stays = sqe.control() & control::DEAC == 0;
                bio.flags = fua | if stays { BioFlags::NO_UNMAP } else { BioFlags::empty() };
            }
            // All other attributes are hints.
            io::DSM if !sqe.is_deallocate() => return Ok((IoCommand::Nothing, 0)),
            io::DSM => {
                namespace.check_writable(true)?;
                let ranges = u64::from(sqe.ranges()) * DSM_RANGE_BYTES as u64;
                return Ok((IoCommand::Deallocate, ranges));
            }
            _ => return Err(NvmeStatus::INVALID_OPCODE.with_dnr()),
        }
        Ok((IoCommand::Bio, 0))
    }

    /// Reads the ranges of a Dataset Management command from its data, and empties `segments`; all are checked before
    /// any is discarded.
    ///
    /// # Errors
    /// The status to complete the command with.
    pub(crate) fn read_ranges(
        &mut self,
        sqe: &Sqe,
        namespace: &NamespaceFormat,
        table: &RegionTable,
        segments: &mut Vec<Segment>,
    ) -> Result<(), NvmeStatus> {
        let mut left = usize::from(sqe.ranges());
        self.ranges.clear();
        let (mut bytes, mut filled) = ([0; DSM_RANGE_BYTES], 0);
        // A range may cross segments.
        for segment in &*segments {
            let Some(span) = table.resolve_region(*segment) else {
                return Err(NvmeStatus::DATA_TRANSFER_ERROR.with_dnr());
            };
            let mut at = 0;
            // The data may be longer than its ranges.
            while at < span.len() && left > 0 {
                let len = (DSM_RANGE_BYTES - filled).min(span.len() - at);
                span.part(at, len).copy_to_slice(&mut bytes[filled..filled + len]);
                (at, filled) = (at + len, filled + len);
                if filled == DSM_RANGE_BYTES {
                    let words = [0, 8].map(|word| {
                        let mut field = [0; 8];
                        field.copy_from_slice(&bytes[word..word + 8]);
                        u64::from_le_bytes(field)
                    });
                    self.ranges.push(DsmRange::from_words(words));
                    (filled, left) = (0, left - 1);
                }
            }
        }
        segments.clear();
        for range in &self.ranges {
            namespace.check(*range)?;
        }
        Ok(())
    }

    /// Fills in a bio that discards the next range, in descending order; false once all are done. Empty ranges are
    /// skipped, and ranges longer than a bio are split.
    pub fn discard(&mut self, namespace: &NamespaceFormat, bio: &mut Bio) -> bool {
        let blocks_max = u32::MAX >> namespace.sector_shift();
        while let Some(range) = self.ranges.pop() {
            if range.blocks == 0 {
                continue;
            }
            let blocks = range.blocks.min(blocks_max);
            if blocks < range.blocks {
                self.ranges.push(DsmRange { slba: range.slba + u64::from(blocks), blocks: range.blocks - blocks });
            }
            bio.reset();
            bio.op = Op::Discard;
            namespace.place(DsmRange { blocks, ..range }, bio);
            return true;
        }
        false
    }
}

impl NamespaceFormat {
    fn check(&self, range: DsmRange) -> Result<(), NvmeStatus> {
        let end = range.slba.checked_add(u64::from(range.blocks));
        if end.is_some_and(|end| end <= self.blocks) { Ok(()) } else { Err(NvmeStatus::LBA_OUT_OF_RANGE.with_dnr()) }
    }

    /// Refuses a write of a write-protected namespace.
    fn check_writable(&self, is_write: bool) -> Result<(), NvmeStatus> {
        if is_write && self.read_only { Err(NvmeStatus::WRITE_PROTECTED.with_dnr()) } else { Ok(()) }
    }

    /// Sets the range of a bio; the range was checked.
    pub(crate) fn place(&self, range: DsmRange, bio: &mut Bio) {
        bio.sector = range.slba << self.sector_shift();
        bio.sectors = range.blocks << self.sector_shift();
    }

    /// Sectors of a logical block, as a power of two.
    fn sector_shift(&self) -> u32 {
        u32::from(self.block_shift) - SECTOR_SHIFT
    }
}
