//! Fields of a structure that two parties share, such as the rings of a virtqueue.
//!
//! A [`View`] is a checked part of a region. Its fields are read and written whole, once, as atomics, little-endian as
//! in virtio. The meaning of a field is not known here.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::{Region, Span};

/// A part of a region, read and written field by field. Offsets are bytes from its start.
#[derive(Clone, Debug)]
pub struct View {
    /// Keeps the memory behind `start` mapped.
    region: Arc<Region>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a view is a part of a region, which may be used from any thread; all access is by atomics.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

macro_rules! field {
    ($load:ident, $store:ident, $int:ty, $atomic:ty) => {
        /// Reads the field at `offset` once.
        ///
        /// # Panics
        /// If it does not lie in the view or is not aligned: offsets come from us, not from the peer.
        #[inline]
        pub fn $load(&self, offset: usize, order: Ordering) -> $int {
            <$int>::from_le(self.field::<$atomic>(offset).load(order))
        }

        /// Writes the field at `offset` once.
        ///
        /// # Panics
        /// As for the load.
        #[inline]
        pub fn $store(&self, offset: usize, value: $int, order: Ordering) {
            #[cfg(kill)]
            crate::kill::before_store();
            self.field::<$atomic>(offset).store(value.to_le(), order);
        }
    };
}

impl View {
    /// The `len` bytes at `offset` of a region, if they lie in it and start at a multiple of `align` in memory.
    pub fn new(region: Arc<Region>, offset: u64, len: usize, align: usize) -> Option<View> {
        let start = NonNull::new(region.span(offset, len)?.as_ptr())?;
        start.addr().get().is_multiple_of(align).then_some(View { region, start, len })
    }

    /// Bytes in the view.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region the view is a part of.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Has its whole pages on this NUMA node, and moves those that are present, unless another process uses them too,
    /// or a device. Advice only, for memory of our own.
    pub fn prefer_node(&self, node: u32) {
        let offset = self.start.addr().get() - self.region.start();
        self.region.prefer_node(offset as u64, self.len, node);
    }

    /// The `len` bytes from `offset` on, to be copied, if they lie in the view.
    #[inline]
    pub fn span(&self, offset: u64, len: usize) -> Option<Span<'_>> {
        let offset = usize::try_from(offset).ok().filter(|offset| *offset <= self.len && len <= self.len - offset)?;
        // SAFETY: they lie in the view, and the view in its region, which is mapped as long as `self` lives.
        Some(unsafe { Span::new(self.start.add(offset), len) })
    }

    field!(load_u8, store_u8, u8, AtomicU8);
    field!(load_u16, store_u16, u16, AtomicU16);
    field!(load_u32, store_u32, u32, AtomicU32);
    field!(load_u64, store_u64, u64, AtomicU64);

    /// Reads two fields that follow each other, each once, the first one first.
    ///
    /// # Panics
    /// As for the load of one.
    #[inline]
    pub fn load_u64s(&self, offset: usize, order: Ordering) -> [u64; 2] {
        self.field::<[AtomicU64; 2]>(offset).each_ref().map(|field| u64::from_le(field.load(order)))
    }

    /// Loads two fields, the second one first: for pairs whose second field says whether the first is valid.
    ///
    /// # Panics
    /// As for a single load.
    #[inline]
    pub fn load_u64s_back(&self, offset: usize, order: Ordering) -> [u64; 2] {
        let [first, second] = self.field::<[AtomicU64; 2]>(offset);
        let second = u64::from_le(second.load(order));
        [u64::from_le(first.load(order)), second]
    }

    /// Writes two fields that follow each other, each once, the first one first.
    ///
    /// # Panics
    /// As for the load.
    #[inline]
    pub fn store_u32s(&self, offset: usize, values: [u32; 2], order: Ordering) {
        let [first, second] = self.field::<[AtomicU32; 2]>(offset);
        for (field, value) in [(first, values[0]), (second, values[1])] {
            #[cfg(kill)]
            crate::kill::before_store();
            field.store(value.to_le(), order);
        }
    }

    /// Writes longer fields that follow each other, each once, the first one first.
    ///
    /// # Panics
    /// As for the load.
    #[inline]
    pub fn store_u64s<const N: usize>(&self, offset: usize, values: [u64; N], order: Ordering) {
        for (field, value) in self.field::<[AtomicU64; N]>(offset).iter().zip(values) {
            #[cfg(kill)]
            crate::kill::before_store();
            field.store(value.to_le(), order);
        }
    }

    /// Sets bits of the byte at `offset` atomically. A reader of these bits sees all earlier writes.
    ///
    /// # Panics
    /// As for the load.
    #[inline]
    pub fn set_bits(&self, offset: usize, bits: u8) {
        self.field::<AtomicU8>(offset).fetch_or(bits, Ordering::SeqCst);
    }

    /// Clears the byte at `offset` atomically and returns it: the other side of [`View::set_bits`].
    ///
    /// # Panics
    /// As for the load.
    #[inline]
    pub fn take_bits(&self, offset: usize) -> u8 {
        self.field::<AtomicU8>(offset).swap(0, Ordering::SeqCst)
    }

    /// Prefetches the cache line of this byte, to be read and written soon. A hint without side effects.
    #[inline]
    pub fn warm(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: the byte lies in the view.
            warm_at(unsafe { self.start.add(offset) });
        }
    }

    /// Prefetches the cache line of this byte for reading. Its writer keeps the line until it writes, so this may be
    /// repeated.
    #[inline]
    pub fn warm_to_read(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: the byte lies in the view.
            warm_to_read_at(unsafe { self.start.add(offset) });
        }
    }

    #[inline]
    fn field<A>(&self, offset: usize) -> &A {
        let size = size_of::<A>();
        if offset.checked_add(size).is_none_or(|end| end > self.len) {
            outside(offset, self.len);
        }
        // SAFETY: the field lies in the view, and the view in its region.
        let at = unsafe { self.start.add(offset) };
        if !at.addr().get().is_multiple_of(align_of::<A>()) {
            outside(offset, self.len);
        }
        // SAFETY: mapped, aligned (both checked above) and alive as long as `self`; A is an atomic integer or an
        // array of such (see the callers), for which every bit pattern is valid and shared writing is allowed.
        unsafe { at.cast::<A>().as_ref() }
    }
}

/// Prefetches the cache line at which an object begins that will be used soon. A hint.
#[inline]
pub fn warm<T>(thing: &T) {
    warm_at(NonNull::from(thing).cast());
}

/// Has a line fetched, for writing: so it comes once, and not again when it is written.
#[inline]
pub(crate) fn warm_at(at: NonNull<u8>) {
    // The compiler's intrinsic becomes a prefetch for reading, since the oldest processors do not know the other
    // instruction; there it has no effect.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch changes only caches, and faults at no address.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at.as_ptr(), options(nostack, preserves_flags, readonly));
    }
    let _ = at;
}

/// Has a line fetched into the second level, for reading.
#[inline]
pub(crate) fn fetch_at(at: NonNull<u8>) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch changes only caches, and faults at no address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.as_ptr().cast());
    }
    let _ = at;
}

/// Has a line fetched, for reading.
#[inline]
fn warm_to_read_at(at: NonNull<u8>) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch changes only caches, and faults at no address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.as_ptr().cast());
    }
    let _ = at;
}

/// Takes its arguments by value, so that the callers need not keep them in memory for a message.
#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize) -> ! {
    panic!("the field at {offset} of a view of {len} bytes lies outside it, or is not aligned")
}

#[cfg(test)]
mod tests {
    use super::*;
    use Ordering::Relaxed;

    #[test]
    fn fields_are_little_endian_and_keep_apart() {
        let region = Region::anonymous(4096).unwrap();
        let view = View::new(Arc::clone(&region), 64, 16, 16).unwrap();
        view.store_u16(0, 0x1234, Relaxed);
        view.store_u32(4, 0x89ab_cdef, Relaxed);
        view.store_u64(8, 0x0102_0304_0506_0708, Relaxed);
        let mut bytes = [0; 16];
        region.span(64, 16).unwrap().copy_to_slice(&mut bytes);
        assert_eq!(bytes, [0x34, 0x12, 0, 0, 0xef, 0xcd, 0xab, 0x89, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(view.load_u32(4, Relaxed), 0x89ab_cdef);
        assert_eq!(view.load_u64s(0, Relaxed), [0x89ab_cdef_0000_1234, 0x0102_0304_0506_0708]);
        view.store_u32s(4, [0x89ab_cdef, 0x0506_0708], Relaxed);
        assert_eq!(view.load_u64s(0, Relaxed), [0x89ab_cdef_0000_1234, 0x0102_0304_0506_0708]);
        view.store_u64s(0, [3, 4], Relaxed);
        assert_eq!(view.load_u64s(0, Relaxed), [3, 4]);
        view.store_u64s(0, [0x89ab_cdef_0000_1234, 0x0102_0304_0506_0708], Relaxed);
        assert_eq!(view.load_u64s_back(0, Relaxed), view.load_u64s(0, Relaxed));
        view.store_u8(5, 0xff, Relaxed);
        assert_eq!((view.load_u32(4, Relaxed), view.load_u8(7, Relaxed)), (0x89ab_ffef, 0x89));
    }

    #[test]
    fn a_view_must_lie_in_its_region_and_be_aligned() {
        let region = Region::anonymous(4096).unwrap();
        assert!(View::new(Arc::clone(&region), 4090, 8, 1).is_none());
        assert!(View::new(Arc::clone(&region), 8, 8, 16).is_none());
        assert!(View::new(region, 32, 8, 16).is_some());
    }
}
