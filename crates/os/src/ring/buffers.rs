//! Registered ("fixed") buffers of a ring: the kernel looks up and pins their pages once instead of for each I/O.
//!
//! Only memory that this process made is registered: private memory, and shared memory once a driver asks for it, for a
//! buffer that a program has registered. Another owner of memory may give its pages back and get new ones at the same
//! address, and the old ones would stay pinned; that owner also decides how much there is (ADR 28).
//!
//! The kernel takes pieces of at most a gibibyte and counts them as locked memory. A region that it refuses, for that
//! or another reason, is used unregistered, and is tried again when another region has gone. Registered or not, an
//! attached region stays mapped.
//!
//! Unsafe: the kernel is given addresses that it uses until they are unregistered.

use std::sync::Arc;

use blkyard_mem::Region;
use io_uring::Submitter;

use super::RingCounters;

/// Bytes of the largest piece the kernel takes (`io_uring_register(2)`, IORING_REGISTER_BUFFERS).
const PIECE_BYTES: u64 = 1 << PIECE_SHIFT;
const PIECE_SHIFT: u32 = 30;
/// Pieces of one lane: four tebibytes. The kernel's own bound is 16384.
const PIECES_MAX: usize = 4096;

/// Whether the memory to be registered is known to the kernel by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FixedBuffers {
    /// All of it, this much.
    Registered {
        /// Bytes of it attached.
        bytes: u64,
    },
    /// Not all of it: I/O into the rest looks up its pages each time.
    Plain {
        /// Why, and the cure if there is one.
        reason: String,
    },
}

impl Default for FixedBuffers {
    fn default() -> Self {
        FixedBuffers::Registered { bytes: 0 }
    }
}

/// Holds a region attached to a ring.
#[derive(Debug)]
pub struct Attachment {
    index: u32,
}

#[derive(Debug)]
struct AttachedBuffers {
    region: Arc<Region>,
    holder: Arc<Attachment>,
    /// Whether it is to be registered.
    is_wanted: bool,
    /// First of its consecutive pieces in the table, if it is registered.
    first: Option<u16>,
    refusal: Option<String>,
}

impl AttachedBuffers {
    fn pieces(&self) -> usize {
        (self.region.len() as u64).div_ceil(PIECE_BYTES) as usize
    }
}

#[derive(Debug)]
pub(crate) struct Buffers {
    attached: Vec<Option<AttachedBuffers>>,
    /// Which pieces of the table are taken; empty if there is no table.
    taken: Vec<bool>,
    no_table: Option<String>,
    view: Arc<RingCounters>,
}

impl Buffers {
    pub(crate) fn new(submitter: &Submitter<'_>, view: Arc<RingCounters>, registers: bool) -> Buffers {
        let make = || submitter.register_buffers_sparse(PIECES_MAX as u32);
        let no_table = if registers {
            make().err().map(|error| format!("the kernel cannot create a buffer table: {error}"))
        } else {
            Some("registering is off".into())
        };
        let taken = if no_table.is_none() { vec![false; PIECES_MAX] } else { Vec::new() };
        Buffers { attached: Vec::new(), taken, no_table, view }
    }

    #[inline]
    pub(crate) fn fixed(&self, attachment: &Attachment, offset: u64, len: u32) -> Option<u16> {
        let first = self.attached.get(attachment.index as usize)?.as_ref()?.first?;
        let last = (offset + u64::from(len) - 1) >> PIECE_SHIFT;
        (offset >> PIECE_SHIFT == last).then_some(first + last as u16)
    }

    pub(crate) fn region(&self, attachment: &Attachment) -> Option<&Arc<Region>> {
        Some(&self.attached.get(attachment.index as usize)?.as_ref()?.region)
    }

    pub(crate) fn attach(&mut self, submitter: &Submitter<'_>, region: &Arc<Region>) -> Arc<Attachment> {
        self.sweep(submitter);
        if let Some(known) = self.attached.iter().flatten().find(|known| Arc::ptr_eq(&known.region, region)) {
            return Arc::clone(&known.holder);
        }
        let index = self.attached.iter().position(Option::is_none).unwrap_or_else(|| {
            self.attached.push(None);
            self.attached.len() - 1
        });
        let holder = Arc::new(Attachment { index: index as u32 });
        let mut attached = AttachedBuffers {
            region: Arc::clone(region),
            holder: Arc::clone(&holder),
            is_wanted: region.file().is_none(),
            first: None,
            refusal: None,
        };
        self.register(submitter, &mut attached);
        self.attached[index] = Some(attached);
        self.tell();
        holder
    }

    /// Registers a shared region, if this process made it.
    pub(crate) fn want(&mut self, submitter: &Submitter<'_>, attachment: &Attachment) {
        let index = attachment.index as usize;
        let is_new = |attached: &&mut AttachedBuffers| !attached.is_wanted && attached.region.is_own();
        let Some(attached) = self.attached.get_mut(index).and_then(Option::as_mut).filter(is_new) else { return };
        attached.is_wanted = true;
        if let Some(mut attached) = self.attached[index].take() {
            self.register(submitter, &mut attached);
            self.attached[index] = Some(attached);
        }
        self.tell();
    }

    /// Releases regions without a holder, and tries those again that were refused before.
    pub(crate) fn sweep(&mut self, submitter: &Submitter<'_>) {
        let mut gone = false;
        for index in 0..self.attached.len() {
            let free = |attached: &AttachedBuffers| Arc::strong_count(&attached.holder) == 1;
            if !self.attached[index].as_ref().is_some_and(free) {
                continue;
            }
            if let Some(attached) = self.attached[index].take() {
                if let Some(first) = attached.first {
                    self.withdraw(submitter, usize::from(first), attached.pieces());
                }
                gone = true;
            }
        }
        if gone {
            self.retry(submitter);
        }
    }

    /// Tries those again that were refused before.
    fn retry(&mut self, submitter: &Submitter<'_>) {
        for index in 0..self.attached.len() {
            if let Some(mut attached) = self.attached[index].take() {
                if attached.first.is_none() {
                    self.register(submitter, &mut attached);
                }
                self.attached[index] = Some(attached);
            }
        }
        self.tell();
    }

    fn register(&mut self, submitter: &Submitter<'_>, attached: &mut AttachedBuffers) {
        if !attached.is_wanted {
            return;
        }
        let pieces = attached.pieces();
        attached.refusal.clone_from(&self.no_table);
        if attached.refusal.is_some() {
            return;
        }
        let Some(first) = self.taken.windows(pieces).position(|run| run.iter().all(|taken| !taken)) else {
            attached.refusal = Some(format!("more than {PIECES_MAX} buffers on one lane"));
            return;
        };
        for piece in 0..pieces {
            let offset = piece as u64 * PIECE_BYTES;
            let len = (attached.region.len() as u64 - offset).min(PIECE_BYTES);
            let Some(span) = attached.region.span(offset, len as usize) else { unreachable!("inside the region") };
            let buffer = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
            // SAFETY: the region stays mapped while it is attached, and is withdrawn from the table before it goes.
            let updated = unsafe { submitter.register_buffers_update((first + piece) as u32, &[buffer], None) };
            if let Err(error) = updated {
                attached.refusal = Some(reason(&error));
                self.withdraw(submitter, first, piece);
                return;
            }
            self.taken[first + piece] = true;
        }
        attached.first = Some(first as u16);
    }

    /// Empties table entries. I/O in flight keeps its pages pinned until it completes.
    fn withdraw(&mut self, submitter: &Submitter<'_>, first: usize, pieces: usize) {
        for place in first..first + pieces {
            let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty entry names no memory.
            let updated = unsafe { submitter.register_buffers_update(place as u32, &[empty], None) };
            // An entry that stays full keeps its pages pinned, which is harmless; it is not reused.
            self.taken[place] = updated.is_err();
        }
    }

    fn tell(&self) {
        let refusal = self.attached.iter().flatten().find_map(|attached| attached.refusal.clone());
        let wanted = self.attached.iter().flatten().filter(|attached| attached.is_wanted);
        let bytes = wanted.map(|attached| attached.region.len() as u64).sum();
        self.view.set_regions(self.attached.iter().flatten().count());
        self.view.set_buffers(match refusal {
            Some(reason) => FixedBuffers::Plain { reason },
            None => FixedBuffers::Registered { bytes },
        });
    }

    /// Keeps all regions mapped for good.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.attached));
    }
}

fn reason(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("no limit is set".into(), |bytes| format!("{} KiB", bytes >> 10));
            format!(
                "more memory than may be locked ({limit}): raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity"
            )
        }
        Some(libc::EFAULT) => "memory that is not mapped, or not writable".into(),
        _ => format!("the kernel refuses to lock memory: {error}"),
    }
}
