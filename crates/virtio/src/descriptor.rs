//! Descriptors as they lie in guest memory: in the table of a split ring, in a packed ring, and in indirect tables.
//!
//! Each is read once, as two words, and is a copy from then on. What a chain of them means is not known here.

use blkyard_mem::{Span, View};

use crate::GuestMemory;

/// Bytes of a descriptor: address, length, flags, next. [2.7.5]
pub(crate) const DESC_BYTES: usize = 16;

/// Longest table an indirect descriptor may point to: as many descriptors as the largest ring has.
pub const INDIRECT_BYTES_MAX: u32 = 32768 * DESC_BYTES as u32;

/// A descriptor, copied.
#[derive(Clone, Copy)]
pub(crate) struct Desc {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    /// Flags, and the next descriptor above them; in a packed ring the id. One number, to use one register.
    tail: u32,
}

impl Desc {
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;

    #[inline]
    pub(crate) fn from_words([addr, rest]: [u64; 2]) -> Desc {
        Desc { addr, len: rest as u32, tail: (rest >> 32) as u32 }
    }

    /// A packed descriptor has an id where a split one has its flags, and flags where that names its next. [2.8.13]
    #[inline]
    pub(crate) fn from_packed_words([addr, rest]: [u64; 2]) -> Desc {
        Desc { addr, len: rest as u32, tail: ((rest >> 32) as u32).rotate_left(16) }
    }

    /// In an indirect table of a packed ring only the direction means anything. [2.8.7]
    #[inline]
    pub(crate) fn from_packed_table(words: [u64; 2], goes_on: bool) -> Desc {
        let desc = Desc::from_packed_words(words);
        let more = if goes_on { Desc::NEXT } else { 0 };
        Desc { tail: desc.tail & u32::from(Desc::WRITE) | u32::from(more), ..desc }
    }

    #[inline]
    pub(crate) fn is(self, flag: u16) -> bool {
        self.tail & u32::from(flag) != 0
    }

    /// Descriptors in the table that it points to; `None` if no table can be so long.
    #[inline]
    pub(crate) fn rows(self) -> Option<u32> {
        let can_be = self.len > 0 && self.len.is_multiple_of(DESC_BYTES as u32) && self.len <= INDIRECT_BYTES_MAX;
        can_be.then_some(self.len / DESC_BYTES as u32)
    }

    /// Whether these are a whole table of a split ring with consecutive rows: the first readable, the last writable,
    /// and no undefined flags.
    #[inline]
    pub(crate) fn are_in_a_row([first, second, third]: [Desc; 3]) -> bool {
        const FLAGS: u32 = 0xffff;
        let (next, write) = (u32::from(Desc::NEXT), u32::from(Desc::WRITE));
        (first.tail ^ (next | 1 << 16)) | (second.tail & !write ^ (next | 2 << 16)) | (third.tail & FLAGS ^ write) == 0
    }

    /// Index of the next descriptor, or the id.
    #[inline]
    pub(crate) fn next(self) -> u16 {
        (self.tail >> 16) as u16
    }
}

/// The descriptor table of a split ring.
#[derive(Clone, Copy)]
pub(crate) struct DescriptorTable<'a> {
    pub(crate) view: &'a View,
    /// Descriptors in it.
    pub(crate) size: u16,
    /// Whether indirect descriptors were negotiated.
    pub(crate) indirect: bool,
}

impl DescriptorTable<'_> {
    /// Reads a descriptor once, as two words.
    #[inline]
    pub(crate) fn read(self, index: u16) -> Desc {
        use std::sync::atomic::Ordering::Relaxed;
        Desc::from_words(self.view.load_u64s(usize::from(index) * DESC_BYTES, Relaxed))
    }
}

/// The part of a packed ring that the driver may have filled.
#[derive(Clone, Copy)]
pub(crate) struct FilledSlots<'a> {
    pub(crate) view: &'a View,
    /// Descriptors in the ring.
    pub(crate) size: u16,
    /// The first of the driver's.
    pub(crate) place: u16,
    /// How many are the driver's: one at least.
    pub(crate) free: u16,
}

impl FilledSlots<'_> {
    /// Address of the descriptor `count` rows further on.
    #[inline]
    pub(crate) fn offset(self, ahead: u32) -> usize {
        let place = u32::from(self.place) + ahead;
        let size = u32::from(self.size);
        (if place < size { place } else { place - size }) as usize * DESC_BYTES
    }

    /// Reads a descriptor once, as two words.
    #[inline]
    pub(crate) fn read(self, ahead: u32) -> Desc {
        use std::sync::atomic::Ordering::Relaxed;
        Desc::from_packed_words(self.view.load_u64s(self.offset(ahead), Relaxed))
    }
}

/// Reads a descriptor of an indirect table once, as two words.
#[inline]
pub(crate) fn read_words(span: &Span<'_>, index: u32) -> [u64; 2] {
    span.u64s(index as usize * DESC_BYTES)
}

/// The same where the table lies across ranges: each descriptor is gathered by itself.
#[cold]
pub(crate) fn read_torn(memory: &GuestMemory, table: u64, index: u32) -> Option<[u64; 2]> {
    let mut bytes = [0; DESC_BYTES];
    let at = table.checked_add(u64::from(index) * DESC_BYTES as u64)?;
    let there = memory.read(at, &mut bytes);
    let words = u128::from_le_bytes(bytes);
    there.then_some([words as u64, (words >> 64) as u64])
}
