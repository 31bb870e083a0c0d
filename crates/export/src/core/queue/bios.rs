//! The bios of one client queue: free ones, and the pending data of those in the hardware queue.
//!
//! A request is fetched only while a bio is free, so the number of bios bounds the requests in flight. The control
//! path's flush has a separate bio.

use std::sync::mpsc::Sender;

use blkyard_mq::{Bio, Op, Status};

use super::hw_set::HwQueueSet;

/// The request number in the cookie of the control path's flush, which no client request has.
const FLUSH: u32 = u32::MAX;

/// Cookie of a client queue's bio: its member, and the number of its request there.
fn cookie(member: usize, request: u32) -> u64 {
    (member as u64) << 32 | u64::from(request)
}

/// Number of the client queue in a bio's cookie.
#[inline]
pub(super) fn member_of(cookie: u64) -> usize {
    (cookie >> 32) as usize
}

#[inline]
fn request_of(cookie: u64) -> u32 {
    cookie as u32
}

/// Whether a bio is the control path's flush.
#[inline]
pub(super) fn is_flush(bio: &Bio) -> bool {
    request_of(bio.cookie) == FLUSH
}

/// Assigns a bio to the client queue with this number.
pub(super) fn set_member(bio: &mut Bio, member: usize) {
    bio.cookie = cookie(member, request_of(bio.cookie));
    bio.submitter = member as u16;
}

/// The bios of a client queue. `T` is the protocol's data for the completion of each.
pub(super) struct BioPool<T> {
    /// Number of the client queue.
    member: usize,
    free: Vec<Box<Bio>>,
    /// By request number; set while the bio is in the hardware queue.
    pending: Box<[Option<T>]>,
    /// Maximum bios in the hardware queue.
    out_max: usize,
    /// By request number: whether a flush of the control path waits for the bio.
    is_awaited: Box<[bool]>,
}

impl<T> BioPool<T> {
    /// This number of bios with room for this number of segments each, for the client queue with this number.
    pub(super) fn new(member: usize, bios: usize, segments: usize) -> BioPool<T> {
        let bio = |index| {
            let mut bio = Bio::with_capacity(segments);
            bio.cookie = cookie(member, index as u32);
            bio.submitter = member as u16;
            bio
        };
        let (free, pending) = ((0..bios).map(bio).collect(), (0..bios).map(|_| None).collect());
        let is_awaited = vec![false; bios].into();
        BioPool { member, free, pending, out_max: usize::MAX, is_awaited }
    }

    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<Box<Bio>> {
        self.free.pop()
    }

    #[inline(always)]
    pub(super) fn put_back(&mut self, bio: Box<Bio>) {
        self.free.push(bio);
    }

    /// Stores the data of a bio before it enters the hardware queue.
    #[inline(always)]
    pub(super) fn keep(&mut self, bio: &Bio, pending: T) {
        self.pending[request_of(bio.cookie) as usize] = Some(pending);
    }

    /// Takes the data of a returned bio.
    #[inline(always)]
    pub(super) fn pending_of(&mut self, bio: &Bio) -> T {
        let Some(pending) = self.pending[request_of(bio.cookie) as usize].take() else {
            unreachable!("a bio that is out has its request");
        };
        pending
    }

    /// The data of a bio in the hardware queue, if it belongs to this client queue.
    pub(super) fn pending(&self, bio: &Bio) -> Option<&T> {
        let is_own = member_of(bio.cookie) == self.member;
        self.pending.get(request_of(bio.cookie) as usize).filter(|_| is_own)?.as_ref()
    }

    /// Assigns the free bios to the client queue with this number. None is in the hardware queue.
    pub(super) fn set_member(&mut self, member: usize) {
        self.member = member;
        self.free.iter_mut().for_each(|bio| set_member(bio, member));
    }

    /// Limits the bios in the hardware queue. Excess bios leave it when they complete.
    pub(super) fn set_out_max(&mut self, out_max: usize) {
        self.out_max = out_max;
    }

    /// Number of bios that may still enter the hardware queue.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len().min(self.out_max.saturating_sub(self.out()))
    }

    /// Bios in the hardware queue.
    #[inline]
    pub(super) fn out(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// Marks the bios in the hardware queue as awaited. Returns how many were not.
    #[cold]
    fn await_all(&mut self) -> usize {
        let new =
            self.pending.iter().zip(&mut self.is_awaited).filter(|(bio, is_awaited)| bio.is_some() && !**is_awaited);
        new.map(|(_, is_awaited)| *is_awaited = true).count()
    }

    /// Takes the mark of a returned bio.
    #[cold]
    fn take_awaited(&mut self, bio: &Bio) -> bool {
        std::mem::take(&mut self.is_awaited[request_of(bio.cookie) as usize])
    }
}

/// Flushes requested by the control path, one at a time: of one device after another.
///
/// A flush begins once all bios have returned that were in the hardware queue when it was requested: a write among them
/// may end after a flush that began earlier, and that would not cover it. Nor does a flush in flight cover what ended
/// since it began, so a later request waits for the next one.
pub(super) struct Flushing {
    /// `None` while it is in flight.
    bio: Option<Box<Bio>>,
    /// The device to flush next, or in flight.
    device: u16,
    devices: u16,
    /// Result of the devices before it.
    status: Status,
    /// Requests for the next flush.
    asked: Vec<Sender<bool>>,
    /// Requests for the flush that has begun.
    riding: Vec<Sender<bool>>,
    /// Bios that have to return before the next flush.
    awaited: usize,
}

impl Flushing {
    pub(super) fn new(member: usize, devices: usize) -> Flushing {
        let mut bio = Bio::with_capacity(0);
        bio.op = Op::Flush;
        bio.cookie = cookie(member, FLUSH);
        bio.submitter = member as u16;
        Flushing {
            bio: Some(bio),
            device: 0,
            devices: devices as u16,
            status: Status::Ok,
            asked: Vec::new(),
            riding: Vec::new(),
            awaited: 0,
        }
    }

    /// Requests a flush of all that was fetched before; the channel receives whether it succeeded.
    pub(super) fn ask<T>(&mut self, bios: &mut BioPool<T>, answer: Sender<bool>) {
        self.asked.push(answer);
        self.awaited += bios.await_all();
    }

    /// A bio of a request has returned.
    #[inline(always)]
    pub(super) fn returned<T>(&mut self, bios: &mut BioPool<T>, bio: &Bio) {
        if self.awaited > 0 {
            self.awaited -= usize::from(bios.take_awaited(bio));
        }
    }

    /// Submits a flush if one is requested and the queue has room.
    #[inline]
    pub(super) fn submit<D>(&mut self, hw: &mut HwQueueSet<D>) {
        if !self.is_at_hand() && hw.room() > 0 {
            self.submit_next(hw);
        }
    }

    #[cold]
    fn submit_next<D>(&mut self, hw: &mut HwQueueSet<D>) {
        let is_first = self.device == 0;
        if is_first && self.awaited > 0 {
            return;
        }
        let Some(mut bio) = self.bio.take() else { return };
        if is_first {
            std::mem::swap(&mut self.asked, &mut self.riding);
        }
        bio.namespace = self.device;
        hw.submit(bio);
    }

    #[cold]
    pub(super) fn end(&mut self, bio: Box<Bio>) {
        let status = self.status.and(bio.status);
        self.bio = Some(bio);
        self.device += 1;
        if self.device < self.devices {
            self.status = status;
        } else {
            (self.device, self.status) = (0, Status::Ok);
            self.riding.drain(..).for_each(|answer| _ = answer.send(status.is_ok()));
        }
    }

    /// Whether no flush is requested or in flight.
    #[inline]
    pub(super) fn is_at_hand(&self) -> bool {
        self.asked.is_empty() && self.bio.is_some() && self.device == 0
    }

    /// The flush bio; `None` while it is in flight.
    pub(super) fn bio_mut(&mut self) -> Option<&mut Box<Bio>> {
        self.bio.as_mut()
    }
}
