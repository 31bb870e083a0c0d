//! A bounded first-in-first-out list of tag numbers.
//!
//! Holds tags that were put down on their way to the driver. Plain indexes that run free and are masked on use; it never
//! grows, since there are no more numbers than tags.

#[derive(Debug)]
pub(crate) struct Fifo {
    places: Box<[u16]>,
    head: usize,
    tail: usize,
}

impl Fifo {
    pub(crate) fn new(capacity: usize) -> Fifo {
        Fifo { places: vec![0; capacity.next_power_of_two()].into_boxed_slice(), head: 0, tail: 0 }
    }

    #[inline]
    fn at(&self, index: usize) -> usize {
        index & (self.places.len() - 1)
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    #[inline]
    pub(crate) fn push(&mut self, number: u16) {
        debug_assert!(self.len() < self.places.len());
        self.places[self.at(self.tail)] = number;
        self.tail = self.tail.wrapping_add(1);
    }

    /// Puts a number before all those that `later` says come after it: at the front, and behind what came back before it.
    pub(crate) fn put_back(&mut self, number: u16, later: impl Fn(u16) -> bool) {
        debug_assert!(self.len() < self.places.len());
        self.head = self.head.wrapping_sub(1);
        let mut at = self.head;
        while at.wrapping_add(1) != self.tail && !later(self.places[self.at(at.wrapping_add(1))]) {
            self.places[self.at(at)] = self.places[self.at(at.wrapping_add(1))];
            at = at.wrapping_add(1);
        }
        self.places[self.at(at)] = number;
    }

    /// Puts a number before all others.
    pub(crate) fn push_front(&mut self, number: u16) {
        self.put_back(number, |_| true);
    }

    /// The numbers, the last one first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = u16> {
        (0..self.len()).map(|back| self.places[self.at(self.tail.wrapping_sub(1 + back))])
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<u16> {
        (!self.is_empty()).then(|| self.places[self.at(self.head)])
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u16> {
        let number = self.front()?;
        self.head = self.head.wrapping_add(1);
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
        let mut fifo = Fifo::new(3);
        let (mut next_in, mut next_out) = (0, 0);
        for round in 0..100 {
            for _ in 0..=round % 3 {
                fifo.push(next_in);
                next_in += 1;
            }
            assert_eq!(fifo.len(), usize::from(next_in - next_out));
            while let Some(number) = fifo.pop() {
                assert_eq!(number, next_out);
                next_out += 1;
            }
        }
        assert_eq!((next_in, fifo.front()), (next_out, None));
    }
}
