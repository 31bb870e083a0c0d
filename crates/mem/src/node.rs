//! Placement of memory on NUMA nodes.
//!
//! A thread [prefers a node](prefer_node) for all memory that it allocates from then on: heap and regions. A region
//! keeps the node at which it was made, whoever touches it first; memory that exists already is
//! [moved](crate::View::prefer_node). All of it is advice: a node without free memory, or a system without nodes, gives
//! memory elsewhere. Threads that never ask make no system call, which is every thread on a machine with one node.
//!
//! Which thread belongs to which node is the caller's knowledge.
//!
//! Unsafe: neither the standard library nor rustix has the three system calls.

use std::cell::Cell;

/// Nodes that a policy can name, as many as Linux can be built for.
const NODES_MAX: usize = 1024;
/// The kernel reads one bit less than it is told.
const MASK_BITS: usize = NODES_MAX + 1;

/// Of `linux/mempolicy.h`, as wide as arguments of system calls are.
const PREFERRED_POLICY: libc::c_long = libc::MPOL_PREFERRED as libc::c_long;
/// Move pages that only this process has mapped.
const MF_MOVE: libc::c_long = 1 << 1;
/// Ask for the policy at an address.
const F_ADDR: libc::c_long = 1 << 1;

/// A set of nodes as the kernel reads it.
type NodeMask = [libc::c_ulong; NODES_MAX / libc::c_ulong::BITS as usize + 1];

thread_local! {
    static PREFERRED: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Takes memory that this thread allocates from now on from this node, while the node has some.
pub fn prefer_node(node: u32) {
    let Some(mask) = mask_of(node) else { return };
    // SAFETY: the mask outlives the call and has the bits that are announced. The policy changes the place of pages
    // only. A failure leaves the default, which is the node of the CPU that touches a page first.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED_POLICY, mask.as_ptr(), MASK_BITS) };
    if done == 0 {
        PREFERRED.set(Some(node));
    }
}

/// The node that this thread prefers; unset if it never asked for one.
pub fn preferred_node() -> Option<u32> {
    PREFERRED.get()
}

fn mask_of(node: u32) -> Option<NodeMask> {
    let (bits, node) = (libc::c_ulong::BITS as usize, node as usize);
    let mut mask = NodeMask::default();
    (node < NODES_MAX).then(|| {
        mask[node / bits] |= 1 << (node % bits);
        mask
    })
}

/// Has the pages from `start` on, whole pages of our own mapping, on this node: those to come, and those present that
/// no other process has mapped.
pub(crate) fn place(start: *mut libc::c_void, len: usize, node: u32) {
    let Some(mask) = mask_of(node) else { return };
    // SAFETY: the mask outlives the call and has the bits that are announced. Contents and addresses of the pages stay.
    let _ = unsafe { libc::syscall(libc::SYS_mbind, start, len, PREFERRED_POLICY, mask.as_ptr(), MASK_BITS, MF_MOVE) };
}

/// The node that was asked for at this address of our own mapping, as the kernel recorded it.
pub(crate) fn placed_at(start: *const libc::c_void) -> Option<u32> {
    let (mut mode, mut mask) = (0_i32, NodeMask::default());
    // SAFETY: the kernel writes a mode and at most as many bits as the mask has.
    let done =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), MASK_BITS, start, F_ADDR) };
    let is_set = |node: &u32| mask_of(*node).is_some_and(|one| one.iter().zip(&mask).any(|(a, b)| a & b != 0));
    (done == 0 && libc::c_long::from(mode) == PREFERRED_POLICY).then(|| (0..NODES_MAX as u32).find(is_set)).flatten()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{PAGE_BYTES, Region, View};

    /// Whether this kernel has nodes; it records no policy otherwise.
    fn has_nodes() -> bool {
        std::path::Path::new("/sys/devices/system/node/node0").exists()
    }

    #[test]
    fn regions_record_the_node_that_their_maker_prefers() {
        if !has_nodes() {
            return;
        }
        let regions = || [Region::anonymous(5 * PAGE_BYTES).unwrap(), Region::shared(5 * PAGE_BYTES).unwrap()];
        assert!(regions().iter().all(|region| region.node_at(0).is_none()), "by default the kernel chooses");
        let maker = std::thread::spawn(move || {
            prefer_node(0);
            (preferred_node(), regions())
        });
        let (preferred, made) = maker.join().unwrap();
        assert_eq!((preferred, preferred_node()), (Some(0), None), "a preference is the thread's own");
        for region in made {
            assert_eq!([0, 4].map(|page| region.node_at(page * PAGE_BYTES as u64)), [Some(0); 2]);
        }
    }

    #[test]
    fn a_view_moves_the_pages_that_are_its_own() {
        if !has_nodes() {
            return;
        }
        let page = PAGE_BYTES as u64;
        for region in [Region::anonymous(8 * PAGE_BYTES).unwrap(), Region::shared(8 * PAGE_BYTES).unwrap()] {
            region.span(0, 8 * PAGE_BYTES).unwrap().fill(7);
            // From the middle of page 1 to the middle of page 5.
            let view = View::new(Arc::clone(&region), page + 2048, 4 * PAGE_BYTES, 1).unwrap();
            view.prefer_node(0);
            let nodes = [0, 1, 2, 4, 5].map(|index| region.node_at(index * page));
            assert_eq!(nodes, [None, None, Some(0), Some(0), None], "pages shared with others stay");
            let mut back = vec![0; 8 * PAGE_BYTES];
            region.span(0, 8 * PAGE_BYTES).unwrap().copy_to_slice(&mut back);
            assert!(back.iter().all(|byte| *byte == 7), "contents stay");
        }
    }

    #[test]
    fn a_node_that_does_not_exist_leaves_the_default() {
        let region = std::thread::spawn(|| {
            prefer_node(1000);
            prefer_node(u32::MAX);
            Region::anonymous(PAGE_BYTES).unwrap()
        });
        let region = region.join().unwrap();
        region.span(0, 4).unwrap().fill(1);
        assert_eq!(region.node_at(0), None);
    }
}
