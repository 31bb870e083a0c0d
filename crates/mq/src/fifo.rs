//! A bounded first-in-first-out list of tag numbers.
//!
//! Holds tags that were put down on their way to the driver. It stands in an array twice as long as it can get, and is moved to its
//! front when it reaches the end: which is rare, for a driver that takes all it is offered leaves it empty. It never grows, since
//! there are no more numbers than tags.

#[derive(Debug)]
pub(crate) struct Fifo {
    places: Box<[u16]>,
    head: usize,
    tail: usize,
}

impl Fifo {
    pub(crate) fn new(capacity: usize) -> Fifo {
        Fifo { places: vec![0; 2 * capacity].into_boxed_slice(), head: 0, tail: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.tail - self.head
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    #[inline]
    pub(crate) fn push(&mut self, number: u16) {
        if self.tail == self.places.len() {
            self.move_to(0);
        }
        self.places[self.tail] = number;
        self.tail += 1;
    }

    /// The list begins at `head` from now on.
    #[cold]
    fn move_to(&mut self, head: usize) {
        let len = self.len();
        assert!(head + len < self.places.len(), "more numbers than tags");
        self.places.copy_within(self.head..self.tail, head);
        (self.head, self.tail) = (head, head + len);
    }

    /// Puts a number before all those that `later` says come after it: at the front, and behind what came back before it.
    pub(crate) fn put_back(&mut self, number: u16, later: impl Fn(u16) -> bool) {
        if self.head == 0 {
            self.move_to(self.places.len() - self.len() - 1);
        }
        self.head -= 1;
        let mut at = self.head;
        while at + 1 < self.tail && !later(self.places[at + 1]) {
            self.places[at] = self.places[at + 1];
            at += 1;
        }
        self.places[at] = number;
    }

    /// Puts a number before all others.
    pub(crate) fn push_front(&mut self, number: u16) {
        self.put_back(number, |_| true);
    }

    /// The numbers, the last one first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = u16> {
        self.places[self.head..self.tail].iter().rev().copied()
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<u16> {
        (!self.is_empty()).then(|| self.places[self.head])
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u16> {
        let number = self.front()?;
        self.head += 1;
        if self.head == self.tail {
            (self.head, self.tail) = (0, 0);
        }
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
