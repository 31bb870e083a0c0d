//! Tags: slots in flight, as values.
//!
//! A [`Tag`] can be moved and not copied; its holder may use the request of its number, and must return it. A [`Cid`]
//! is the number under which the device or the kernel knows the request; it proves nothing until it is redeemed.

use std::ops::Range;

/// A slot in flight. Dropping one in use is a bug and panics.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a tag that is not given back is lost"]
pub struct Tag(u16);

impl Tag {
    /// Number of the slot.
    #[inline]
    pub fn index(&self) -> usize {
        usize::from(self.0)
    }

    /// Puts the tag down in a list of the queue it belongs to, which is still out of the set.
    #[inline]
    pub(crate) fn put_down(self) -> u16 {
        let number = self.0;
        std::mem::forget(self);
        number
    }

    /// Picks up a tag that was put down, once.
    #[inline]
    pub(crate) fn pick_up(number: u16) -> Tag {
        Tag(number)
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        // During a panic's unwinding there is no owner to return it to.
        assert!(std::thread::panicking(), "tag {} was dropped while it was out", self.0);
    }
}

/// The tags of one hardware queue. They belong to its owner: plain words, no atomics. Last in, first out, while the
/// request is still in the cache.
///
/// The lowest numbers may be reserved, for bios that must make progress when all others are in use.
#[derive(Debug)]
pub struct TagSet {
    /// Normal tags that are in; there is room for all.
    normal: Vec<u16>,
    /// Reserved tags that are in; there is room for all.
    reserved: Vec<u16>,
    /// Normal tags that stay in, since the depth was lowered.
    kept: usize,
    /// The numbers of normal tags.
    numbers: Range<usize>,
}

impl TagSet {
    /// Tags one set may hold, as in Linux (`BLK_MQ_MAX_DEPTH`).
    pub const DEPTH_MAX: usize = 10_240;

    /// A set of `depth` tags, all in, of which the first `reserved` are.
    ///
    /// # Panics
    /// If `depth` is zero or above [`TagSet::DEPTH_MAX`], or all are reserved: depths are checked where they are
    /// configured.
    pub fn new(depth: usize, reserved: usize) -> TagSet {
        assert!(
            (1..=TagSet::DEPTH_MAX).contains(&depth) && reserved < depth,
            "a tag set of {depth}, {reserved} reserved"
        );
        let stack = |numbers: Range<usize>| numbers.rev().map(|number| number as u16).collect();
        TagSet { normal: stack(reserved..depth), reserved: stack(0..reserved), kept: 0, numbers: reserved..depth }
    }

    /// How many tags there are, with those reserved.
    pub fn depth(&self) -> usize {
        self.numbers.end
    }

    /// How many are reserved.
    pub fn reserved(&self) -> usize {
        self.numbers.start
    }

    /// Limit of tags in use, with reserved ones.
    pub fn limit(&self) -> usize {
        self.depth() - self.kept
    }

    /// Limits the tags in use to `limit`, reserved ones included: at least one that is not reserved, and at most all.
    /// Excess tags return as their requests complete. Returns the new limit.
    pub fn set_limit(&mut self, limit: usize) -> usize {
        let limit = limit.clamp(self.reserved() + 1, self.depth());
        self.kept = self.depth() - limit;
        limit
    }

    /// How many are out.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.depth() - self.normal.len() - self.reserved.len()
    }

    /// How many may be taken that are not reserved.
    #[inline]
    pub fn free(&self) -> usize {
        self.normal.len().saturating_sub(self.kept)
    }

    /// How many may be taken that are reserved.
    #[inline]
    pub fn reserved_free(&self) -> usize {
        self.reserved.len()
    }

    /// Takes the tag that came back last.
    #[inline]
    pub fn take(&mut self) -> Option<Tag> {
        if self.normal.len() > self.kept { self.normal.pop().map(Tag) } else { None }
    }

    /// Takes a reserved tag.
    pub fn take_reserved(&mut self) -> Option<Tag> {
        self.reserved.pop().map(Tag)
    }

    /// Takes a tag back. It cannot come back twice, since it cannot be copied.
    ///
    /// # Panics
    /// If the tag is not from this set: all are free, or its number is beyond the depth.
    #[inline]
    pub fn put(&mut self, tag: Tag) {
        assert!(tag.index() < self.numbers.end, "tag {} came back to a set it is not from", tag.index());
        self.put_number(tag.put_down());
    }

    /// Takes back a tag of this set that was put down.
    #[inline]
    pub(crate) fn put_number(&mut self, number: u16) {
        // Both stacks were made full.
        if usize::from(number) >= self.numbers.start && self.normal.len() < self.normal.capacity() {
            self.normal.push(number);
        } else {
            self.put_reserved(number);
        }
    }

    #[cold]
    fn put_reserved(&mut self, number: u16) {
        let is_ours = usize::from(number) < self.numbers.start && self.reserved.len() < self.numbers.start;
        assert!(is_ours, "tag {number} came back to a set that has all of its own");
        self.reserved.push(number);
    }
}

/// The number by which a device or the kernel knows a request: generation in the upper half, slot in the lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cid(pub u32);

/// A completion that names no request in flight: late, repeated or invented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("completion for id {0:#x}, which is not in flight")]
pub struct Forged(pub u32);

/// The tags a driver has handed to the other side, each under an id that is good once.
#[derive(Debug)]
pub struct Cids {
    /// By slot: the id of its tag in flight; otherwise the last generation with `NOWHERE` for the slot.
    ids: Box<[u32]>,
}

/// Lower half of an id that names no slot.
const NOWHERE: u32 = 0xffff;
const _: () = assert!(TagSet::DEPTH_MAX <= NOWHERE as usize);

impl Cids {
    /// Room for the tags of a set of `depth`.
    pub fn new(depth: usize) -> Cids {
        Cids { ids: vec![NOWHERE; depth].into() }
    }

    /// Stores a tag; the id redeems it, once.
    ///
    /// # Panics
    /// If the tag's slot is taken, which would take two tags of one number.
    #[inline]
    pub fn park(&mut self, tag: Tag) -> Cid {
        let number = tag.put_down();
        let id = &mut self.ids[usize::from(number)];
        assert!(*id & NOWHERE == NOWHERE, "tag {number} is parked already");
        *id = *id & !NOWHERE | u32::from(number);
        Cid(*id)
    }

    /// The slot that a valid id names, without redeeming it.
    ///
    /// # Errors
    /// The id is not in flight.
    #[inline]
    pub fn look(&self, cid: Cid) -> Result<usize, Forged> {
        let index = (cid.0 & NOWHERE) as usize;
        if self.ids.get(index) == Some(&cid.0) { Ok(index) } else { Err(Forged(cid.0)) }
    }

    /// Gives the tag back for its id.
    ///
    /// # Errors
    /// The id is not in flight: unknown, redeemed before, or of an earlier generation.
    #[inline]
    pub fn redeem(&mut self, cid: Cid) -> Result<Tag, Forged> {
        let index = self.look(cid)?;
        self.ids[index] = (cid.0 | NOWHERE).wrapping_add(NOWHERE + 1);
        Ok(Tag::pick_up(index as u16))
    }

    /// Whether no tag is stored.
    pub fn is_empty(&self) -> bool {
        self.ids.iter().all(|id| id & NOWHERE == NOWHERE)
    }
}

impl Drop for Cids {
    fn drop(&mut self) {
        assert!(self.is_empty() || std::thread::panicking(), "tags were dropped while they were parked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_set_gives_each_tag_once() {
        for depth in [1, 2, 63, 64, 65, 128, 1023, TagSet::DEPTH_MAX] {
            let mut set = TagSet::new(depth, 0);
            let tags: Vec<Tag> = std::iter::from_fn(|| set.take()).collect();
            assert_eq!(tags.len(), depth);
            assert!(tags.iter().enumerate().all(|(i, tag)| tag.index() == i));
            tags.into_iter().for_each(|tag| set.put(tag));
            assert_eq!(set.in_use(), 0);
        }
    }

    #[test]
    #[should_panic(expected = "dropped while it was out")]
    fn dropping_a_tag_is_loud() {
        drop(TagSet::new(4, 0).take());
    }

    #[test]
    #[should_panic(expected = "while they were parked")]
    fn dropping_tags_that_are_parked_is_loud() {
        Cids::new(4).park(Tag::pick_up(3));
    }

    #[test]
    fn an_id_is_good_once_though_generations_go_round() {
        let mut cids = Cids::new(2);
        for generation in 0..=u32::from(u16::MAX) + 1 {
            let cid = cids.park(Tag::pick_up(1));
            assert_eq!(cid.0, generation << 16 | 1);
            assert_eq!(cids.redeem(cid).map(Tag::put_down), Ok(1));
            assert_eq!(
                (cids.look(cid), cids.look(Cid(cid.0 | 0xffff))),
                (Err(Forged(cid.0)), Err(Forged(cid.0 | 0xffff)))
            );
        }
    }

    #[test]
    fn an_id_is_good_once() {
        let mut set = TagSet::new(4, 0);
        let mut cids = Cids::new(4);
        let cid = cids.park(set.take().unwrap());
        assert_eq!(cids.redeem(Cid(cid.0 + 1)), Err(Forged(cid.0 + 1)));
        assert_eq!(cids.redeem(Cid(0xffff)), Err(Forged(0xffff)));
        set.put(cids.redeem(cid).unwrap());
        assert_eq!(cids.redeem(cid), Err(Forged(cid.0)));
        let next = cids.park(set.take().unwrap());
        assert_ne!(next, cid, "the same place has another generation");
        assert_eq!(cids.redeem(cid), Err(Forged(cid.0)));
        set.put(cids.redeem(next).unwrap());
    }

    #[test]
    fn reserved_tags_are_left_when_all_others_are_out() {
        let mut set = TagSet::new(4, 2);
        let normal: Vec<Tag> = std::iter::from_fn(|| set.take()).collect();
        assert_eq!(normal.iter().map(Tag::index).collect::<Vec<_>>(), [2, 3]);
        let reserved: Vec<Tag> = std::iter::from_fn(|| set.take_reserved()).collect();
        assert_eq!(reserved.iter().map(Tag::index).collect::<Vec<_>>(), [0, 1]);
        reserved.into_iter().for_each(|tag| set.put(tag));
        assert!(set.take().is_none() && set.reserved_free() == 2, "a reserved tag stays reserved");
        normal.into_iter().for_each(|tag| set.put(tag));
    }

    proptest! {
        /// No tag is owned twice, the count in use is taken less returned, and taking respects the limit, which may
        /// change at any time.
        #[test]
        fn tags_out_are_distinct_counted_and_within_the_limit(
            depth in 1_usize..300,
            steps in proptest::collection::vec((0_u8..8, any::<u16>()), 0..600),
        ) {
            let mut set = TagSet::new(depth, 0);
            let mut out: Vec<Tag> = Vec::new();
            for (step, pick) in steps {
                if step == 0 {
                    let limit = set.set_limit(usize::from(pick) % 400);
                    prop_assert!((1..=depth).contains(&limit) && limit == set.limit());
                } else if step < 5 {
                    let before = out.len();
                    if let Some(tag) = set.take() {
                        prop_assert!(before < set.limit() && tag.index() < depth && !out.contains(&tag));
                        out.push(tag);
                    } else {
                        prop_assert!(before >= set.limit());
                    }
                } else if !out.is_empty() {
                    let tag = out.swap_remove(usize::from(pick) % out.len());
                    set.put(tag);
                }
                prop_assert_eq!(set.in_use(), out.len());
                prop_assert_eq!(set.free(), set.limit().saturating_sub(out.len()));
            }
            out.into_iter().for_each(|tag| set.put(tag));
        }
    }
}
