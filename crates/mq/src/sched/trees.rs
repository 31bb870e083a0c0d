//! Orders by a number, sectors mostly, over places that were made at start.
//!
//! Each order is a treap (Aragon and Seidel, 1989): a search tree by key that is a heap by weights drawn at random, so that it is
//! balanced whatever the keys are, and whoever chooses them. What is in it is the places' numbers; a place is in one order at
//! a time. Equal keys stand in the order in which they came. Insertion, removal and search take the logarithm of what is in one
//! order, and nothing allocates.

use super::slots::NONE;

/// One order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    root: u32,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree { root: NONE }
    }
}

/// The places of all orders.
#[derive(Debug)]
pub(crate) struct Trees {
    nodes: Box<[Node]>,
    /// Keys inserted so far.
    order: u64,
    chance: u32,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// What it is ordered by, and then how many came before it.
    key: (u64, u64),
    weight: u32,
    left: u32,
    right: u32,
}

/// Where the number of a node is written.
#[derive(Clone, Copy)]
enum Link {
    Root,
    Left(u32),
    Right(u32),
}

impl Trees {
    pub(crate) fn new(count: usize) -> Trees {
        let node = Node { key: (0, 0), weight: 0, left: NONE, right: NONE };
        Trees { nodes: vec![node; count].into(), order: 0, chance: 0x9e37_79b9 }
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn set(&mut self, tree: &mut Tree, link: Link, to: u32) {
        match link {
            Link::Root => tree.root = to,
            Link::Left(at) => self.nodes[at as usize].left = to,
            Link::Right(at) => self.nodes[at as usize].right = to,
        }
    }

    /// Puts a place, which is in no order, where its key belongs.
    pub(crate) fn insert(&mut self, tree: &mut Tree, place: u32, key: u64) {
        // xorshift32 (Marsaglia, 2003).
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 17;
        self.chance ^= self.chance << 5;
        let node = Node { key: (key, self.order), weight: self.chance, left: NONE, right: NONE };
        self.order += 1;
        self.nodes[place as usize] = node;
        let (mut at, mut link) = (tree.root, Link::Root);
        while at != NONE && self.node(at).weight >= node.weight {
            (at, link) = if self.node(at).key < node.key {
                (self.node(at).right, Link::Right(at))
            } else {
                (self.node(at).left, Link::Left(at))
            };
        }
        self.set(tree, link, place);
        // What was here is lighter, and goes below: what comes before to the left, what comes after to the right.
        let (mut before, mut after) = (Link::Left(place), Link::Right(place));
        while at != NONE {
            if self.node(at).key < node.key {
                self.set(tree, before, at);
                (before, at) = (Link::Right(at), self.node(at).right);
            } else {
                self.set(tree, after, at);
                (after, at) = (Link::Left(at), self.node(at).left);
            }
        }
        self.set(tree, before, NONE);
        self.set(tree, after, NONE);
    }

    /// Takes a place out of the order it is in.
    pub(crate) fn remove(&mut self, tree: &mut Tree, place: u32) {
        let Node { key, mut left, mut right, .. } = *self.node(place);
        let (mut at, mut link) = (tree.root, Link::Root);
        while at != place {
            assert!(at != NONE, "a place was taken out of an order that it is not in");
            (at, link) = if self.node(at).key < key {
                (self.node(at).right, Link::Right(at))
            } else {
                (self.node(at).left, Link::Left(at))
            };
        }
        while left != NONE && right != NONE {
            if self.node(left).weight >= self.node(right).weight {
                self.set(tree, link, left);
                (link, left) = (Link::Right(left), self.node(left).right);
            } else {
                self.set(tree, link, right);
                (link, right) = (Link::Left(right), self.node(right).left);
            }
        }
        self.set(tree, link, if left == NONE { right } else { left });
    }

    /// The first place whose key is this or more.
    pub(crate) fn first_from(&self, tree: Tree, key: u64) -> Option<u32> {
        let (mut at, mut found) = (tree.root, NONE);
        while at != NONE {
            let node = self.node(at);
            at = if node.key.0 >= key {
                found = at;
                node.left
            } else {
                node.right
            };
        }
        (found != NONE).then_some(found)
    }

    /// The last place whose key is less than this.
    pub(crate) fn last_before(&self, tree: Tree, key: u64) -> Option<u32> {
        let (mut at, mut found) = (tree.root, NONE);
        while at != NONE {
            let node = self.node(at);
            at = if node.key.0 < key {
                found = at;
                node.right
            } else {
                node.left
            };
        }
        (found != NONE).then_some(found)
    }

    /// Takes out the place whose key is the least.
    pub(crate) fn pop_first(&mut self, tree: &mut Tree) -> Option<u32> {
        let first = self.first_from(*tree, 0)?;
        self.remove(tree, first);
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn depth(trees: &Trees, at: u32) -> usize {
        if at == NONE { 0 } else { 1 + depth(trees, trees.node(at).left).max(depth(trees, trees.node(at).right)) }
    }

    proptest! {
        /// What a map that is kept in order says, over two orders that share their places.
        #[test]
        fn an_order_is_a_map_that_keeps_order(
            steps in prop::collection::vec((0..4_u32, 0_u64..20, 0..2_usize), 1..300),
        ) {
            let mut trees = Trees::new(32);
            let mut orders = [Tree::default(); 2];
            let mut wanted: [BTreeMap<(u64, usize), u32>; 2] = Default::default();
            let mut free: Vec<u32> = (0..32).collect();
            for (count, (what, key, which)) in steps.into_iter().enumerate() {
                let (tree, wanted) = (&mut orders[which], &mut wanted[which]);
                match what {
                    0 | 1 => {
                        let Some(place) = free.pop() else { continue };
                        trees.insert(tree, place, key);
                        wanted.insert((key, count), place);
                    }
                    2 => {
                        let Some((&at, &place)) = wanted.range((key, 0)..).next() else { continue };
                        wanted.remove(&at);
                        trees.remove(tree, place);
                        free.push(place);
                    }
                    _ => {
                        let first = wanted.pop_first().map(|(_, place)| place);
                        prop_assert_eq!(trees.pop_first(tree), first);
                        free.extend(first);
                    }
                }
                for key in 0..21 {
                    let from = wanted.range((key, 0)..).next().map(|(_, place)| *place);
                    let before = wanted.range(..(key, 0)).next_back().map(|(_, place)| *place);
                    prop_assert_eq!((trees.first_from(*tree, key), trees.last_before(*tree, key)), (from, before));
                }
            }
        }
    }

    #[test]
    fn an_order_is_flat_whatever_the_keys() {
        let keys: [fn(u64) -> u64; 4] = [|at| at, |at| 10_000 - at, |_| 7, |at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)];
        for key in keys {
            let (mut trees, mut tree) = (Trees::new(10_000), Tree::default());
            (0..10_000).for_each(|at| trees.insert(&mut tree, at, key(u64::from(at))));
            // Two and a half times the logarithm is beyond chance.
            assert!(depth(&trees, tree.root) < 40, "{}", depth(&trees, tree.root));
        }
    }
}
