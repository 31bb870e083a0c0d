//! Data pointers of commands, controller side: PRP entries and lists, and SGLs, become segments.
//!
//! All input of a host is untrusted. Each list is copied out of shared memory once, in parts, and the copy is checked.
//! The number of steps is bounded by the length of the data and by [`SGL_DESCRIPTORS_MAX`]. Invalid input gives the
//! exact status, with "do not retry".

use blkyard_mem::Segment;

use crate::lists::{SGL_BYTES, sgl};
use crate::{DmaMap, DmaRights, NvmeStatus, PAGE, Psdt, SGL_DESCRIPTORS_MAX, Sqe};

const PAGE_BYTES: usize = PAGE as usize;
const PRP_BYTES: usize = 8;

/// Walks the data pointers of commands. Owned by one queue.
#[derive(Debug)]
pub struct DataWalker {
    /// Maximum transfer, bytes (MDTS).
    bytes_max: u64,
    /// Whether SGLs are accepted, as on all queues except the admin queue.
    takes_sgl: bool,
    /// A copy of one list page.
    page: Box<[u8; PAGE_BYTES]>,
}

/// Segments of one command during a walk.
struct FoundData<'a> {
    map: &'a DmaMap,
    /// Access of the controller to the data.
    access: DmaRights,
    segments: &'a mut Vec<Segment>,
}

impl FoundData<'_> {
    /// Appends the bytes at an address.
    fn push(&mut self, mut addr: u64, mut len: u32) -> Result<(), NvmeStatus> {
        while len > 0 {
            let piece = self.map.segment(addr, len, self.access).ok_or(refused(NvmeStatus::DATA_TRANSFER_ERROR))?;
            addr = addr.wrapping_add(u64::from(piece.len));
            len -= piece.len;
            match self.segments.last_mut() {
                Some(last) if last.region == piece.region && last.offset + u64::from(last.len) == piece.offset => {
                    last.len += piece.len;
                }
                _ => self.segments.push(piece),
            }
        }
        Ok(())
    }
}

impl DataWalker {
    /// Transfers of at most `bytes_max`, which is at most 1 GiB.
    ///
    /// # Panics
    /// If `bytes_max` is larger.
    pub fn new(bytes_max: u64, takes_sgl: bool) -> DataWalker {
        assert!(bytes_max <= 1 << 30, "transfers of {bytes_max} bytes");
        DataWalker { bytes_max, takes_sgl, page: Box::new([0; PAGE_BYTES]) }
    }

    /// Maximum segments of a command: a list with this capacity never grows.
    pub fn segments_max(&self) -> usize {
        // One segment for each page, and one more for each descriptor that starts or ends within a page.
        (self.bytes_max / PAGE) as usize + 2 * SGL_DESCRIPTORS_MAX
    }

    /// Replaces `segments` by those of a command's data, which is `bytes` long. Contiguous segments are joined. Memory
    /// without the right for the direction of the data is treated as unmapped.
    ///
    /// # Errors
    /// The status to complete the command with. The content of `segments` is unspecified then.
    pub fn walk(&mut self, map: &DmaMap, sqe: &Sqe, bytes: u64, segments: &mut Vec<Segment>) -> Result<(), NvmeStatus> {
        segments.clear();
        if bytes > self.bytes_max {
            return Err(refused(NvmeStatus::INVALID_FIELD));
        }
        let mut found = FoundData { map, access: sqe.data_access(), segments };
        match sqe.psdt() {
            Some(Psdt::Prp) => self.prp(sqe.data(), bytes, &mut found),
            Some(Psdt::Sgl | Psdt::SglMetadata) if self.takes_sgl => self.sgl(sqe.data(), bytes, &mut found),
            _ => Err(refused(NvmeStatus::INVALID_FIELD)),
        }
    }

    fn prp(&mut self, [first, second]: [u64; 2], bytes: u64, found: &mut FoundData<'_>) -> Result<(), NvmeStatus> {
        if first & 3 != 0 {
            return Err(refused(NvmeStatus::INVALID_PRP_OFFSET));
        }
        let len = bytes.min(PAGE - first % PAGE);
        found.push(first, len as u32)?;
        let left = bytes - len;
        if left == 0 {
            Ok(())
        } else if left <= PAGE {
            found.push(page_aligned(second)?, left as u32)
        } else {
            self.prp_list(second, left, found)
        }
    }

    /// The last entry of a list page is the address of the next list page if more than one page of data remains, at any
    /// start offset of the list in its page.
    fn prp_list(&mut self, mut list: u64, mut left: u64, found: &mut FoundData<'_>) -> Result<(), NvmeStatus> {
        if !list.is_multiple_of(PRP_BYTES as u64) {
            return Err(refused(NvmeStatus::INVALID_PRP_OFFSET));
        }
        loop {
            let room = (PAGE - list % PAGE) as usize / PRP_BYTES;
            let needed = left.div_ceil(PAGE) as usize;
            let has_link = needed > room;
            let (pointers, entries) = if has_link { (room - 1, room) } else { (needed, needed) };
            let copy = &mut self.page[..entries * PRP_BYTES];
            if !found.map.read(list, copy) {
                return Err(refused(NvmeStatus::DATA_TRANSFER_ERROR));
            }
            let entry = |number: usize| {
                let mut bytes = [0; PRP_BYTES];
                bytes.copy_from_slice(&self.page[number * PRP_BYTES..][..PRP_BYTES]);
                page_aligned(u64::from_le_bytes(bytes))
            };
            for number in 0..pointers {
                let len = left.min(PAGE);
                found.push(entry(number)?, len as u32)?;
                left -= len;
            }
            if !has_link {
                return Ok(());
            }
            list = entry(pointers)?;
        }
    }

    fn sgl(&mut self, descriptor: [u64; 2], bytes: u64, found: &mut FoundData<'_>) -> Result<(), NvmeStatus> {
        let mut walk = SglWalk { left: bytes, descriptors: 0 };
        let mut next = walk.take(descriptor, true, found)?;
        while let Some(segment) = next {
            next = self.sgl_segment(&segment, &mut walk, found)?;
        }
        if walk.left == 0 { Ok(()) } else { Err(refused(NvmeStatus::INVALID_DATA_SGL_LENGTH)) }
    }

    /// Takes the descriptors of a segment, and returns the next segment descriptor.
    fn sgl_segment(
        &mut self,
        segment: &SglSegment,
        walk: &mut SglWalk,
        found: &mut FoundData<'_>,
    ) -> Result<Option<SglSegment>, NvmeStatus> {
        let len = segment.len as usize;
        if len == 0 || !len.is_multiple_of(SGL_BYTES) {
            return Err(refused(NvmeStatus::INVALID_SGL_SEGMENT));
        }
        if len / SGL_BYTES > SGL_DESCRIPTORS_MAX {
            return Err(refused(NvmeStatus::INVALID_SGL_COUNT));
        }
        if !found.map.read(segment.addr, &mut self.page[..len]) {
            return Err(refused(NvmeStatus::DATA_TRANSFER_ERROR));
        }
        let mut next = None;
        for (number, bytes) in self.page[..len].chunks_exact(SGL_BYTES).enumerate() {
            let word = |at: usize| {
                let mut word = [0; 8];
                word.copy_from_slice(&bytes[at..at + 8]);
                u64::from_le_bytes(word)
            };
            let is_end = (number + 1) * SGL_BYTES == len;
            next = walk.take([word(0), word(8)], is_end, found)?;
        }
        // A last segment ends the walk; any other continues.
        if next.is_some() == segment.is_last {
            return Err(refused(NvmeStatus::INVALID_SGL_SEGMENT));
        }
        Ok(next)
    }
}

/// A segment or last-segment descriptor.
struct SglSegment {
    addr: u64,
    len: u32,
    is_last: bool,
}

/// Position of an SGL walk.
struct SglWalk {
    /// Remaining bytes of data.
    left: u64,
    descriptors: usize,
}

impl SglWalk {
    /// Takes a descriptor: a data block, or a segment descriptor, which is only valid at the end of a segment.
    fn take(
        &mut self,
        descriptor: [u64; 2],
        is_end: bool,
        found: &mut FoundData<'_>,
    ) -> Result<Option<SglSegment>, NvmeStatus> {
        let [addr, rest] = descriptor;
        let (len, kind) = (rest as u32, (rest >> 56) as u8);
        self.descriptors += 1;
        // The descriptor in the command and segment descriptors are not counted as list entries.
        if self.descriptors > SGL_DESCRIPTORS_MAX + 2 {
            return Err(refused(NvmeStatus::INVALID_SGL_COUNT));
        }
        match kind {
            sgl::DATA_BLOCK => {
                if (addr | u64::from(len)) & 3 != 0 {
                    return Err(refused(NvmeStatus::INVALID_SGL_GRANULARITY));
                }
                let left = self.left.checked_sub(u64::from(len));
                self.left = left.ok_or(refused(NvmeStatus::INVALID_DATA_SGL_LENGTH))?;
                found.push(addr, len)?;
                Ok(None)
            }
            sgl::SEGMENT | sgl::LAST_SEGMENT if is_end => {
                Ok(Some(SglSegment { addr, len, is_last: kind == sgl::LAST_SEGMENT }))
            }
            sgl::SEGMENT | sgl::LAST_SEGMENT => Err(refused(NvmeStatus::INVALID_SGL_COUNT)),
            _ => Err(refused(NvmeStatus::INVALID_SGL_TYPE)),
        }
    }
}

fn page_aligned(addr: u64) -> Result<u64, NvmeStatus> {
    if addr.is_multiple_of(PAGE) { Ok(addr) } else { Err(refused(NvmeStatus::INVALID_PRP_OFFSET)) }
}

/// A host's error is permanent.
const fn refused(status: NvmeStatus) -> NvmeStatus {
    status.with_dnr()
}
