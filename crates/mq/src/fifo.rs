//! A bounded first-in-first-out list of tag numbers.
//!
//! Holds the tags that wait for dispatch. It is an array with twice as many entries as there can be tags, whose content
//! is moved to its front when it reaches the end. That is rare, since a driver that takes every offered request leaves
//! the list empty. It never grows: there are no more numbers than tags.

#[derive(Debug)]
pub(crate) struct Fifo {
    /// Taken numbers up to `head`, waiting ones from there.
    numbers: Vec<u16>,
    head: usize,
}

impl Fifo {
    pub(crate) fn new(capacity: usize) -> Fifo {
        Fifo { numbers: Vec::with_capacity(2 * capacity), head: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.numbers.len() - self.head
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.numbers.len() == self.head
    }

    #[inline]
    pub(crate) fn push(&mut self, number: u16) {
        if self.numbers.len() < self.numbers.capacity() {
            self.numbers.push(number);
        } else {
            self.push_moved(number);
        }
    }

    #[cold]
    fn push_moved(&mut self, number: u16) {
        self.move_to(0);
        self.numbers.push(number);
    }

    /// The list begins at `head` from now on, and has room behind it.
    #[cold]
    fn move_to(&mut self, head: usize) {
        let (from, end) = (self.head..self.numbers.len(), head + self.len());
        assert!(end < self.numbers.capacity(), "more numbers than tags");
        self.numbers.resize(end.max(from.end), 0);
        self.numbers.copy_within(from, head);
        self.numbers.truncate(end);
        self.head = head;
    }

    /// Inserts a number before all for which `later` is true: at the front, behind earlier requeued ones.
    pub(crate) fn put_back(&mut self, number: u16, later: impl Fn(u16) -> bool) {
        if self.head == 0 {
            self.move_to(self.numbers.capacity() - self.len() - 1);
        }
        self.head -= 1;
        put_first(&mut self.numbers[self.head..], number, later);
    }

    /// Puts a number before all others.
    pub(crate) fn push_front(&mut self, number: u16) {
        self.put_back(number, |_| true);
    }

    /// The numbers, the last one first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = u16> {
        self.numbers[self.head..].iter().rev().copied()
    }

    /// The last number.
    #[inline]
    pub(crate) fn newest(&self) -> Option<u16> {
        self.numbers.get(self.head..).and_then(|numbers| numbers.last()).copied()
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<u16> {
        self.numbers.get(self.head).copied()
    }

    /// The first `count` numbers.
    #[inline]
    pub(crate) fn first(&mut self, count: usize) -> &mut [u16] {
        &mut self.numbers[self.head..][..count]
    }

    /// Takes the first `count` numbers. Their slots are reused once the list is [rewound](Fifo::rewind) or moved.
    #[inline]
    pub(crate) fn take(&mut self, count: usize) {
        self.head += count;
    }

    /// Removes each number for which `keep` is false; it is called in order.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u16) -> bool) {
        let mut kept = self.head;
        for at in self.head..self.numbers.len() {
            let number = self.numbers[at];
            if keep(number) {
                self.numbers[kept] = number;
                kept += 1;
            }
        }
        self.numbers.truncate(kept);
    }

    /// Begins at the front again if the list is empty. Returns whether it is.
    #[inline]
    pub(crate) fn rewind(&mut self) -> bool {
        let is_empty = self.is_empty();
        if is_empty {
            self.numbers.clear();
            self.head = 0;
        }
        is_empty
    }
}

/// Inserts a number into a list whose first slot is free: before all for which `later` is true.
pub(crate) fn put_first(numbers: &mut [u16], number: u16, later: impl Fn(u16) -> bool) {
    let mut at = 0;
    while at + 1 < numbers.len() && !later(numbers[at + 1]) {
        numbers[at] = numbers[at + 1];
        at += 1;
    }
    numbers[at] = number;
}

#[cfg(test)]
impl Fifo {
    fn pop(&mut self) -> Option<u16> {
        let number = self.front()?;
        self.take(1);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_stands_where_it_stood() {
        let mut fifo = Fifo::new(8);
        (0..6).for_each(|number| fifo.push(number));
        let taken: Vec<u16> = std::iter::from_fn(|| fifo.pop()).take(4).collect();
        for number in [taken[2], taken[0], taken[3], taken[1]] {
            fifo.put_back(number, |other| other > number);
        }
        assert_eq!(fifo.newest_first().collect::<Vec<_>>(), [5, 4, 3, 2, 1, 0]);
        fifo.push_front(9);
        assert_eq!(std::iter::from_fn(|| fifo.pop()).collect::<Vec<_>>(), [9, 0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn numbers_come_out_in_the_order_they_went_in() {
        for left in 0..3 {
            let mut fifo = Fifo::new(5);
            let (mut next_in, mut next_out) = (0, 0);
            for round in 0..100 {
                for _ in 0..=round % 3 {
                    fifo.push(next_in);
                    next_in += 1;
                }
                assert_eq!(fifo.len(), usize::from(next_in - next_out));
                while fifo.len() > left {
                    assert_eq!(fifo.pop(), Some(next_out));
                    next_out += 1;
                }
            }
            assert_eq!(usize::from(next_in - next_out), left);
        }
    }
}
