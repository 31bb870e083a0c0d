//! A namespace: one of the devices behind a hardware queue, and its share of the tags.
//!
//! A single active namespace may use all tags. When several are active, each may hold an equal share, rounded up, and
//! never fewer than four (Linux `hctx_may_queue`): a busy one cannot keep the others out, and a few tags stay idle. A
//! namespace becomes active with its first bio, before it gets a tag, and inactive when it has had none for a tenth of
//! a second. Linux notices inactivity only after a request timeout, and until then the others have half.

use std::collections::VecDeque;
use std::sync::Arc;

use super::HwQueue;
use super::flush::{self, Flush};
use super::rated::Rated;
use super::scheduled::Scheduled;
use crate::limits::{Cursor, FastPath};
use crate::stats::{Held, HwStats};
use crate::{Bio, BioFlags, DeviceInfo, QueueLimits, SchedulerConfig};

/// The least that an active namespace may hold.
const SHARE_MIN: usize = 4;
/// A namespace without bios for this long leaves its tags to the others: long against a busy user's pauses, short
/// against what a person notices.
const IDLE_NS: u64 = 100_000_000;
/// Interval of the scan for idle namespaces.
const LOOK_NS: u64 = 10_000_000;

/// One device behind a hardware queue.
#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) info: Arc<DeviceInfo>,
    /// Copy of the limits in `info`, in the same cache line.
    pub(super) limits: QueueLimits,
    /// The flags of bios that requests take over.
    pub(super) request_flags: BioFlags,
    /// Bios not yet split, in the order they came. The first may be split in part. With a scheduler only those that do
    /// not pass through it.
    pub(super) bios: VecDeque<Box<Bio>>,
    /// Scheduler of all other bios, if any.
    pub(super) scheduled: Option<Scheduled>,
    /// Its configuration.
    pub(super) scheduler: SchedulerConfig,
    /// How often that has changed.
    pub(super) tickets: u16,
    /// Rate limits, if any.
    pub(super) rated: Option<Rated>,
    /// Set while a bio is partly split: its slot among the splits, and the position reached.
    pub(super) partial: Option<(u16, Cursor)>,
    pub(super) flush: Flush,
    /// Bios that have come since the last round and wait here, not with the scheduler.
    pub(super) fresh: usize,
    /// Cause for which the waiting bios are held.
    pub(super) held_by: Option<Held>,
    /// For how long that was a limit, the scheduler, a tag, nanoseconds; up to `clocks_at_ns`.
    pub(super) clocks_ns: [u64; 3],
    /// Time of the clocks' last update.
    pub(super) clocks_at_ns: u64,
    pub(super) stats: Arc<HwStats>,
    /// Tags it holds. Counted while there are others.
    held: usize,
    /// Tags it may hold.
    share: usize,
    active: bool,
    /// Whether a bio has arrived since the last scan.
    used: bool,
    /// When it was last seen with something to do.
    seen_ns: u64,
}

impl Namespace {
    pub(super) fn new(info: Arc<DeviceInfo>, bios_max: usize, depth: usize) -> Namespace {
        let mut namespace = Namespace {
            limits: info.limits,
            request_flags: BioFlags::empty(),
            info: Arc::clone(&info),
            bios: VecDeque::with_capacity(bios_max),
            scheduled: None,
            scheduler: SchedulerConfig::None,
            tickets: 0,
            rated: None,
            partial: None,
            flush: Flush::new(bios_max),
            fresh: 0,
            held_by: None,
            clocks_ns: [0; 3],
            clocks_at_ns: 0,
            stats: Arc::new(HwStats::default()),
            held: 0,
            share: depth,
            active: false,
            used: false,
            seen_ns: 0,
        };
        namespace.set_info(info);
        namespace
    }

    pub(super) fn set_info(&mut self, info: Arc<DeviceInfo>) {
        self.request_flags = flush::request_flags(&info);
        self.limits = info.limits;
        self.info = info;
    }

    /// Conditions of the fast path.
    pub(super) fn plain(&self) -> FastPath {
        // The fast path has no flush steps.
        let in_steps = BioFlags::PREFLUSH | BioFlags::FUA;
        let slow = (in_steps - self.request_flags) | BioFlags::NOWAIT | BioFlags::ATOMIC | BioFlags::RESERVED;
        FastPath::new(&self.limits, self.info.capacity_sectors, self.info.read_only, slow)
    }

    /// Whether bios wait only for a tag.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.partial.is_some() || (!self.bios.is_empty() && !self.is_held())
    }

    /// Whether its scheduler can be asked for one more.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.scheduled.as_ref().is_some_and(Scheduled::is_ready) && !self.is_held()
    }

    /// Whether the next bio is held by a limit.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        let is_free = |bio: &Bio| bio.flags.contains(BioFlags::RESERVED);
        self.rated.as_ref().is_some_and(Rated::is_held) && !self.bios.front().is_some_and(|bio| is_free(bio))
    }

    /// Bios that wait to be split.
    pub(super) fn waiting(&self) -> usize {
        let scheduled = self.scheduled.as_ref().map_or(0, Scheduled::waiting);
        self.bios.len() + usize::from(self.partial.is_some()) + scheduled
    }

    /// Whether its share lets it have one more tag.
    #[inline]
    pub(super) fn may_take(&self) -> bool {
        self.held < self.share
    }

    /// A tag of it is back, of several namespaces or not.
    pub(super) fn uncount_tag(&mut self, several: bool) {
        if several {
            self.held -= 1;
        }
    }

    /// Whether it has something to do just now.
    fn is_busy(&self) -> bool {
        self.held > 0 || self.waiting() > 0 || self.flush.is_wanted()
    }

    /// Tags in use, their limit, and whether it counts as active for the shares.
    pub(super) fn tags(&self) -> (usize, usize, bool) {
        (self.held, self.share, self.active)
    }
}

impl<D> HwQueue<D> {
    /// A namespace has something to do.
    #[inline]
    pub(super) fn activate(&mut self, number: usize) {
        let namespace = &mut self.namespaces[number];
        namespace.used = true;
        if !namespace.active {
            namespace.active = true;
            namespace.seen_ns = self.looked_ns;
            self.reshare();
        }
    }

    /// A namespace got a tag.
    #[inline]
    pub(super) fn count_tag(&mut self, number: usize) {
        if self.namespaces.len() > 1 {
            self.namespaces[number].held += 1;
        }
    }

    /// A tag of a namespace is back.
    #[inline]
    pub(super) fn uncount_tag(&mut self, number: usize) {
        let several = self.namespaces.len() > 1;
        self.namespaces[number].uncount_tag(several);
    }

    /// Divides the tags among the active namespaces.
    #[inline(never)]
    pub(super) fn reshare(&mut self) {
        let tags = self.tags.limit() - self.tags.reserved();
        let active = self.namespaces.iter().filter(|namespace| namespace.active).count();
        let share = if active > 1 { tags.div_ceil(active).max(SHARE_MIN).min(tags) } else { tags };
        self.namespaces.iter_mut().for_each(|namespace| namespace.share = share);
    }

    /// Time of the next idle scan, if other namespaces may be waiting for tags.
    pub(super) fn rest_due_ns(&self) -> Option<u64> {
        if self.namespaces.len() == 1 {
            return None;
        }
        let resting = self.namespaces.iter().filter(|namespace| namespace.active && !namespace.is_busy());
        let rested_ns = |namespace: &Namespace| if namespace.used { 0 } else { namespace.seen_ns + IDLE_NS };
        resting.map(rested_ns).min().map(|due_ns| due_ns.max(self.looked_ns + LOOK_NS))
    }

    /// Marks idle namespaces.
    pub(super) fn look_for_idle(&mut self, now_ns: u64) {
        if self.namespaces.len() == 1 || now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return;
        }
        self.looked_ns = now_ns;
        let mut left = false;
        for namespace in self.namespaces.iter_mut().filter(|namespace| namespace.active) {
            if std::mem::take(&mut namespace.used) || namespace.is_busy() {
                namespace.seen_ns = now_ns;
            } else if now_ns.saturating_sub(namespace.seen_ns) >= IDLE_NS {
                namespace.active = false;
                left = true;
            }
        }
        if left {
            self.reshare();
        }
    }
}
