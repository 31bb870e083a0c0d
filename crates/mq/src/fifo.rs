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
