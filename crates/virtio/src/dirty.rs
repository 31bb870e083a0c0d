//! The dirty log: pages of guest memory that the device has written, for a front-end that migrates a running guest.
//! [vhost-user, Migration]
//!
//! A bit for each page, in memory that the front-end shares: it clears bits and copies their pages, repeatedly, the
//! last time after the rings have stopped. A bit is set after the bytes it stands for are written. If it were set
//! before, the front-end could clear it and copy the page in between, and the bytes would be lost; set after, the page
//! is copied once more at worst. Bits are set atomically, which also orders earlier writes: so a bit that is set
//! already is set again.

use std::sync::Arc;

use blkyard_mem::{Region, Segment, View};

use crate::GuestMemory;

/// Bytes of guest memory for each bit.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// Bits for all of a guest's pages, by guest address from zero on.
#[derive(Debug)]
pub struct DirtyLog(View);

impl DirtyLog {
    /// All of a region, in which each byte has the bits of eight pages, the lowest page's in the lowest bit.
    pub fn new(region: Arc<Region>) -> Option<DirtyLog> {
        let len = region.len();
        View::new(region, 0, len, 1).map(DirtyLog)
    }

    /// Where it lies.
    pub fn region(&self) -> &Arc<Region> {
        self.0.region()
    }

    /// Marks written bytes. Pages beyond the log are ignored.
    pub fn mark(&self, guest_addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|more| guest_addr.checked_add(more)) else { return };
        let (mut page, last) = (guest_addr / LOG_PAGE_BYTES, last / LOG_PAGE_BYTES);
        while page <= last {
            let Some(byte) = usize::try_from(page / 8).ok().filter(|byte| *byte < self.0.len()) else { return };
            let end = last.min(page | 7);
            let bits = (0xff_u8 << (page % 8)) & (0xff >> (7 - end % 8));
            self.0.set_bits(byte, bits);
            page = end + 1;
        }
    }

    /// The bytes of a segment of this memory were written.
    pub fn mark_segment(&self, memory: &GuestMemory, segment: Segment) {
        if let Some(guest_addr) = memory.guest_addr(segment) {
            self.mark(guest_addr, segment.len.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_that_is_touched_gets_its_bit_and_no_other() {
        for (addr, len) in [
            (0, 1),
            (4095, 1),
            (4095, 2),
            (4096, 4096),
            (4096, 4097),
            (7 * 4096, 4096),
            (7 * 4096 + 1, 4096),
            (5, 100 * 4096),
            (8 * 4096, 8 * 4096),
            (3 * 4096, 13 * 4096),
            (100, 0),
            (255 * 4096, 4096),
            // Beyond the bits of the log.
            (255 * 4096, 1 << 40),
            (256 * 4096, 1),
            (u64::MAX, 1),
            (u64::MAX, u64::MAX),
        ] {
            let region = Region::anonymous(32).unwrap();
            let log = DirtyLog::new(Arc::clone(&region)).unwrap();
            log.mark(addr, len);
            let mut bytes = [0; 32];
            region.span(0, 32).unwrap().copy_to_slice(&mut bytes);
            for page in 0..256_u64 {
                let touched = len > 0 && addr < (page + 1) * 4096 && addr.saturating_add(len) > page * 4096;
                let is_set = bytes[page as usize / 8] >> (page % 8) & 1 == 1;
                assert_eq!(is_set, touched, "page {page} of {len} bytes at {addr}");
            }
        }
    }
}
