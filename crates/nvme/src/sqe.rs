//! The submission queue entry: opcodes, and the fields of the commands that a block driver sends.

use crate::DmaRights;

/// Bytes of a submission queue entry.
pub const SQE_BYTES: usize = 64;
/// Bytes of one range of a Dataset Management command.
pub const DSM_RANGE_BYTES: usize = 16;

/// Opcodes of the NVM command set.
pub mod io {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DSM: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
}

/// Opcodes of the admin command set.
pub mod admin {
    /// Delete I/O Submission Queue.
    pub const DELETE_SQ: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_SQ: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_CQ: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: u8 = 0x0c;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Cross-Controller Reset.
    pub const CROSS_CONTROLLER_RESET: u8 = 0x38;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: u8 = 0x7c;
    /// Format NVM.
    pub const FORMAT: u8 = 0x80;
}

/// Kinds of data for an Identify command (CNS).
pub mod cns {
    /// Namespace data.
    pub const NAMESPACE: u8 = 0x00;
    /// Controller data.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace list.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace identification descriptors.
    pub const NAMESPACE_IDS: u8 = 0x03;
    /// Namespace data of a command set.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// Controller data of a command set.
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// Namespace data independent of the command set.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
}

/// Feature identifiers.
pub mod feature {
    /// Arbitration.
    pub const ARBITRATION: u8 = 0x01;
    /// Power management.
    pub const POWER: u8 = 0x02;
    /// Temperature threshold.
    pub const TEMPERATURE: u8 = 0x04;
    /// Error recovery.
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// Volatile write cache.
    pub const WRITE_CACHE: u8 = 0x06;
    /// Number of queues.
    pub const QUEUES: u8 = 0x07;
    /// Interrupt coalescing.
    pub const COALESCING: u8 = 0x08;
    /// Interrupt vector configuration.
    pub const VECTOR: u8 = 0x09;
    /// Write atomicity normal.
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    /// Asynchronous event configuration.
    pub const ASYNC_EVENTS: u8 = 0x0b;
    /// Autonomous power state transition.
    pub const AUTONOMOUS_POWER: u8 = 0x0c;
    /// Host memory buffer.
    pub const HOST_MEMORY: u8 = 0x0d;
    /// Timestamp.
    pub const TIMESTAMP: u8 = 0x0e;
    /// Keep-alive timer.
    pub const KEEP_ALIVE: u8 = 0x0f;
    /// Host behaviour support.
    pub const HOST_BEHAVIOUR: u8 = 0x16;
}

/// Bits of the control field of Read, Write and Write Zeroes.
pub mod control {
    /// Deallocate, for Write Zeroes.
    pub const DEAC: u16 = 1 << 9;
    /// Force unit access.
    pub const FUA: u16 = 1 << 14;
    /// Limited retry.
    pub const LIMITED_RETRY: u16 = 1 << 15;
}

/// Kind of a command's data pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Psdt {
    /// Two PRP entries.
    Prp,
    /// One SGL descriptor; metadata is a contiguous buffer.
    Sgl,
    /// One SGL descriptor; metadata is an SGL segment.
    SglMetadata,
}

/// A range of a Dataset Management command as two words of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsmRange {
    /// First logical block.
    pub slba: u64,
    /// Logical blocks.
    pub blocks: u32,
}

impl DsmRange {
    /// From memory. Context attributes are hints and dropped.
    pub const fn from_words(words: [u64; 2]) -> DsmRange {
        DsmRange { slba: words[1], blocks: (words[0] >> 32) as u32 }
    }

    /// In memory format, without context attributes.
    pub const fn words(self) -> [u64; 2] {
        [(self.blocks as u64) << 32, self.slba]
    }
}

/// A submission queue entry as eight words of memory. Unset fields are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Sqe(pub [u64; 8]);

impl Sqe {
    /// Maximum logical blocks of a command with a block count.
    pub const BLOCKS_MAX: u32 = 1 << 16;
    /// Maximum ranges of a Dataset Management command.
    pub const RANGES_MAX: u16 = 256;

    /// A command for a namespace.
    #[inline]
    pub const fn new(opcode: u8, nsid: u32) -> Sqe {
        Sqe([opcode as u64 | (nsid as u64) << 32, 0, 0, 0, 0, 0, 0, 0])
    }

    /// A command of given dwords.
    pub fn from_dwords(dwords: [u32; 16]) -> Sqe {
        Sqe(std::array::from_fn(|word| u64::from(dwords[word * 2]) | u64::from(dwords[word * 2 + 1]) << 32))
    }

    /// All command dwords.
    pub fn dwords(&self) -> [u32; 16] {
        std::array::from_fn(|number| self.dword(number))
    }

    /// Read, Write, Write Zeroes or another command with a range of 1 to [`Sqe::BLOCKS_MAX`] blocks.
    #[inline]
    pub const fn with_blocks(opcode: u8, nsid: u32, slba: u64, blocks: u32, control: u16) -> Sqe {
        let mut sqe = Sqe::new(opcode, nsid);
        sqe.0[5] = slba;
        sqe.0[6] = (blocks.wrapping_sub(1) & 0xffff) as u64 | (control as u64) << 16;
        sqe
    }

    /// Dataset Management: deallocates 1 to [`Sqe::RANGES_MAX`] ranges, listed in its data.
    pub const fn deallocate(nsid: u32, ranges: u16) -> Sqe {
        let mut sqe = Sqe::new(io::DSM, nsid);
        sqe.0[5] = (ranges.wrapping_sub(1) & 0xff) as u64 | 1 << (32 + 2);
        sqe
    }

    /// Identify. `id` is the controller for controller data, `csi` the command set.
    pub const fn identify(cns: u8, nsid: u32, id: u16, csi: u8) -> Sqe {
        let mut sqe = Sqe::new(admin::IDENTIFY, nsid);
        sqe.0[5] = cns as u64 | (id as u64) << 16 | (csi as u64) << 56;
        sqe
    }

    /// Create I/O Completion Queue, physically contiguous at `addr`, with an interrupt if `vector` is set.
    pub const fn create_cq(qid: u16, entries: u32, addr: u64, vector: Option<u16>) -> Sqe {
        let mut sqe = Sqe::new(admin::CREATE_CQ, 0);
        let (flags, vector) = match vector {
            Some(vector) => (3, vector),
            None => (1, 0),
        };
        sqe.0[3] = addr;
        sqe.0[5] = Sqe::queue(qid, entries) | flags << 32 | (vector as u64) << 48;
        sqe
    }

    /// Create I/O Submission Queue, physically contiguous at `addr`, medium priority, completing to `cqid`.
    pub const fn create_sq(qid: u16, entries: u32, addr: u64, cqid: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::CREATE_SQ, 0);
        sqe.0[3] = addr;
        sqe.0[5] = Sqe::queue(qid, entries) | 1 << 32 | (cqid as u64) << 48;
        sqe
    }

    const fn queue(qid: u16, entries: u32) -> u64 {
        qid as u64 | ((entries.wrapping_sub(1) & 0xffff) as u64) << 16
    }

    /// Delete I/O Submission Queue or Completion Queue, depending on the opcode.
    pub const fn delete_queue(opcode: u8, qid: u16) -> Sqe {
        let mut sqe = Sqe::new(opcode, 0);
        sqe.0[5] = qid as u64;
        sqe
    }

    /// Abort.
    pub const fn abort(sqid: u16, cid: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::ABORT, 0);
        sqe.0[5] = sqid as u64 | (cid as u64) << 16;
        sqe
    }

    /// Set Features or Get Features, depending on the opcode, without data.
    pub const fn feature(opcode: u8, fid: u8, dword11: u32) -> Sqe {
        let mut sqe = Sqe::new(opcode, 0);
        sqe.0[5] = fid as u64 | (dword11 as u64) << 32;
        sqe
    }

    /// Get Log Page: `dwords` (at least one) from byte `offset` on.
    pub const fn get_log_page(lid: u8, nsid: u32, lsp: u8, dwords: u32, offset: u64) -> Sqe {
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE, nsid);
        let count = dwords.wrapping_sub(1) as u64;
        sqe.0[5] = lid as u64 | (lsp as u64 & 0x7f) << 8 | count << 16;
        sqe.0[6] = offset;
        sqe
    }

    /// Doorbell Buffer Config: one page each for shadow doorbells and event indexes.
    pub const fn doorbell_buffer(doorbells: u64, events: u64) -> Sqe {
        let mut sqe = Sqe::new(admin::DOORBELL_BUFFER, 0);
        sqe.0[3] = doorbells;
        sqe.0[4] = events;
        sqe
    }

    /// Sets the identifier.
    #[inline]
    #[must_use]
    pub const fn with_cid(mut self, cid: u16) -> Sqe {
        self.0[0] = self.0[0] & !(0xffff << 16) | (cid as u64) << 16;
        self
    }

    /// Sets the data pointer.
    #[inline]
    #[must_use]
    pub const fn with_data(mut self, psdt: Psdt, pointer: [u64; 2]) -> Sqe {
        let flags: u64 = match psdt {
            Psdt::Prp => 0,
            Psdt::Sgl => 0x40,
            Psdt::SglMetadata => 0x80,
        };
        self.0[0] = self.0[0] & !(0xc0 << 8) | flags << 8;
        self.0[3] = pointer[0];
        self.0[4] = pointer[1];
        self
    }

    /// Sets the metadata pointer.
    #[must_use]
    pub const fn with_metadata(mut self, pointer: u64) -> Sqe {
        self.0[2] = pointer;
        self
    }

    /// The opcode.
    #[inline]
    pub const fn opcode(&self) -> u8 {
        self.0[0] as u8
    }

    /// Access of a controller to the data, by bits 0 and 1 of the opcode. A command without data has none.
    #[inline]
    pub(crate) const fn data_access(&self) -> DmaRights {
        match self.opcode() & 3 {
            2 => DmaRights::WriteOnly,
            3 => DmaRights::ReadWrite,
            _ => DmaRights::ReadOnly,
        }
    }

    /// Bits 0 and 1 of the flags: fused operation.
    #[inline]
    pub const fn fused(&self) -> u8 {
        (self.0[0] >> 8 & 3) as u8
    }

    /// Kind of the data pointer; `None` for the reserved value.
    #[inline]
    pub const fn psdt(&self) -> Option<Psdt> {
        match self.0[0] >> 14 & 3 {
            0 => Some(Psdt::Prp),
            1 => Some(Psdt::Sgl),
            2 => Some(Psdt::SglMetadata),
            _ => None,
        }
    }

    /// The identifier.
    #[inline]
    pub const fn cid(&self) -> u16 {
        (self.0[0] >> 16) as u16
    }

    /// The namespace.
    #[inline]
    pub const fn nsid(&self) -> u32 {
        (self.0[0] >> 32) as u32
    }

    /// The metadata pointer.
    #[inline]
    pub const fn metadata(&self) -> u64 {
        self.0[2]
    }

    /// The data pointer: two PRP entries or one SGL descriptor.
    #[inline]
    pub const fn data(&self) -> [u64; 2] {
        [self.0[3], self.0[4]]
    }

    /// Command dword `number`, 0 to 15.
    ///
    /// # Panics
    /// If there is no such dword.
    #[inline]
    pub const fn dword(&self, number: usize) -> u32 {
        (self.0[number / 2] >> (number % 2 * 32)) as u32
    }

    /// First logical block, of commands that have a range.
    #[inline]
    pub const fn slba(&self) -> u64 {
        self.0[5]
    }

    /// Logical blocks, of commands that have a range.
    #[inline]
    pub const fn blocks(&self) -> u32 {
        (self.0[6] & 0xffff) as u32 + 1
    }

    /// The control field, of commands that have a range.
    #[inline]
    pub const fn control(&self) -> u16 {
        (self.0[6] >> 16) as u16
    }

    /// Ranges of a Dataset Management command.
    #[inline]
    pub const fn ranges(&self) -> u16 {
        (self.0[5] & 0xff) as u16 + 1
    }

    /// Whether a Dataset Management command deallocates its ranges.
    #[inline]
    pub const fn is_deallocate(&self) -> bool {
        self.dword(11) & 4 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(sqe: Sqe) -> [u8; SQE_BYTES] {
        let mut bytes = [0; SQE_BYTES];
        for (at, word) in bytes.chunks_exact_mut(8).zip(sqe.0) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The nonzero bytes of a command as (offset, bytes).
    fn expect(name: &str, sqe: Sqe, parts: &[(usize, &[u8])]) {
        let mut want = [0; SQE_BYTES];
        for (at, part) in parts {
            want[*at..at + part.len()].copy_from_slice(part);
        }
        assert_eq!(bytes(sqe), want, "{name}");
    }

    #[test]
    fn each_command_is_as_the_specification_has_it() {
        let read = Sqe::with_blocks(io::READ, 0x0a0b_0c0d, 0x1112_1314_1516_1718, 0x100, control::FUA)
            .with_cid(0x3456)
            .with_metadata(0x2122_2324_2526_2728)
            .with_data(Psdt::Prp, [0x3132_3334_3536_3738, 0x4142_4344_4546_4748]);
        let parts: &[(usize, &[u8])] = &[
            (0, &[0x02]),
            (2, &[0x56, 0x34]),
            (4, &[0x0d, 0x0c, 0x0b, 0x0a]),
            (16, &[0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21]),
            (24, &[0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31]),
            (32, &[0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41]),
            (40, &[0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]),
            (48, &[0xff, 0x00]),
            (50, &[0x00, 0x40]),
        ];
        expect("read", read, parts);
        assert_eq!((read.opcode(), read.fused(), read.psdt(), read.cid()), (io::READ, 0, Some(Psdt::Prp), 0x3456));
        assert_eq!((read.nsid(), read.slba(), read.blocks()), (0x0a0b_0c0d, 0x1112_1314_1516_1718, 0x100));
        assert_eq!((read.control(), read.metadata()), (control::FUA, 0x2122_2324_2526_2728));
        assert_eq!(read.data(), [0x3132_3334_3536_3738, 0x4142_4344_4546_4748]);
        assert_eq!((read.dword(0), read.dword(1), read.dword(12)), (0x3456_0002, 0x0a0b_0c0d, 0x4000_00ff));

        let sgl = Sqe::new(io::WRITE, 1).with_data(Psdt::Sgl, [1, 2]);
        expect("SGL", sgl, &[(0, &[1, 0x40]), (4, &[1]), (24, &[1]), (32, &[2])]);
        let sgl = sgl.with_data(Psdt::SglMetadata, [1, 2]);
        expect("SGL and metadata SGL", sgl, &[(0, &[1, 0x80]), (4, &[1]), (24, &[1]), (32, &[2])]);
        assert_eq!(sgl.psdt(), Some(Psdt::SglMetadata));
        assert_eq!(Sqe([0xc000, 0, 0, 0, 0, 0, 0, 0]).psdt(), None);

        assert_eq!(Sqe::from_dwords(read.dwords()), read);

        expect("flush", Sqe::new(io::FLUSH, 7), &[(4, &[7])]);
        let zeroes = Sqe::with_blocks(io::WRITE_ZEROES, 1, 5, Sqe::BLOCKS_MAX, control::DEAC);
        expect("zeroes", zeroes, &[(0, &[8]), (4, &[1]), (40, &[5]), (48, &[0xff, 0xff, 0x00, 0x02])]);
        assert_eq!(zeroes.blocks(), Sqe::BLOCKS_MAX);
        let dsm = Sqe::deallocate(1, 256);
        expect("deallocate", dsm, &[(0, &[9]), (4, &[1]), (40, &[255]), (44, &[4])]);
        assert_eq!((dsm.ranges(), dsm.is_deallocate()), (256, true));
    }

    #[test]
    fn each_admin_command_is_as_the_specification_has_it() {
        let identify = Sqe::identify(cns::CSI_CONTROLLER, 3, 0x1234, 2);
        expect("identify", identify, &[(0, &[6]), (4, &[3]), (40, &[6, 0, 0x34, 0x12]), (47, &[2])]);
        let cq = Sqe::create_cq(2, 1024, 0x10_0000, Some(5));
        let parts: &[(usize, &[u8])] =
            &[(0, &[5]), (26, &[0x10]), (40, &[2, 0]), (42, &[0xff, 0x03]), (44, &[3, 0]), (46, &[5, 0])];
        expect("create completion queue", cq, parts);
        expect("polled", Sqe::create_cq(2, 2, 0, None), &[(0, &[5]), (40, &[2, 0, 1, 0, 1])]);
        let sq = Sqe::create_sq(3, 1024, 0x10_0000, 2);
        let parts: &[(usize, &[u8])] =
            &[(0, &[1]), (26, &[0x10]), (40, &[3, 0]), (42, &[0xff, 0x03]), (44, &[1, 0]), (46, &[2, 0])];
        expect("create submission queue", sq, parts);
        expect("delete", Sqe::delete_queue(admin::DELETE_CQ, 0x102), &[(0, &[4]), (40, &[2, 1])]);
        expect("abort", Sqe::abort(0x102, 0x304), &[(0, &[8]), (40, &[2, 1, 4, 3])]);
        let queues = Sqe::feature(admin::SET_FEATURES, feature::QUEUES, 3 | 4 << 16);
        expect("number of queues", queues, &[(0, &[9]), (40, &[7]), (44, &[3, 0, 4, 0])]);
        let log = Sqe::get_log_page(2, u32::MAX, 1, 0x1_0203, 0x0506);
        let parts: &[(usize, &[u8])] =
            &[(0, &[2]), (4, &[0xff; 4]), (40, &[2, 1]), (42, &[2, 2]), (44, &[1, 0]), (48, &[6, 5])];
        expect("log page", log, parts);
        let doorbells = Sqe::doorbell_buffer(0x1000, 0x2000);
        expect("doorbell buffers", doorbells, &[(0, &[0x7c]), (25, &[0x10]), (33, &[0x20])]);
    }

    #[test]
    fn a_range_is_as_the_specification_has_it() {
        let range = DsmRange { slba: 0x0102_0304_0506_0708, blocks: 0x1112_1314 };
        let bytes: Vec<u8> = range.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes, [0, 0, 0, 0, 0x14, 0x13, 0x12, 0x11, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes.len(), DSM_RANGE_BYTES);
        assert_eq!(DsmRange::from_words(range.words()), range);
    }
}
