//! The controllers behind a transport in these tests: the fake that fails on request, or the real one.

use std::cell::RefCell;
use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mem::{DmaDomain, Region, RegionTable, View};
use blkyard_nvme::{ControllerTransport, DeviceGone, DmaMap, DmaRange};

use crate::host::wide;

pub const PAGE: usize = 4096;

/// A controller on the thread of its host.
pub trait Peer {
    /// Updates registers to this time.
    fn at(&mut self, now_ns: u64);
    /// Executes available work.
    fn turn(&mut self, now_ns: u64);
    /// Returns all ones once unplugged.
    fn read32(&mut self, offset: usize) -> u32;
    fn write32(&mut self, offset: usize, value: u32);
    /// The doorbells, if shared.
    fn doorbells(&self) -> Option<View>;
    /// Bytes of its doorbells.
    fn doorbell_bytes(&self) -> usize {
        PAGE
    }
    fn vectors(&self) -> u16;
    fn reset_function(&mut self) -> bool;
    /// Whether it can access no memory once it is unplugged.
    fn is_silent_when_gone(&self) -> bool {
        true
    }
    /// Whether memory can be mapped for it.
    fn reaches_memory(&self) -> bool {
        true
    }
    /// Data pages lent by the host, by address.
    fn lent(&self) -> Rc<RefCell<HashSet<u64>>>;
    /// Recorded violations by the host.
    fn violations(&self) -> Vec<String>;
}

/// Transport to a test controller.
pub struct Transport<P> {
    pub fake: Rc<RefCell<P>>,
    domain: Arc<DmaDomain>,
}

impl<P> Transport<P> {
    pub fn on(domain: Arc<DmaDomain>, peer: P) -> Transport<P> {
        Transport { fake: Rc::new(RefCell::new(peer)), domain }
    }
}

pub fn base(region: &Region) -> u64 {
    region.span(0, 1).unwrap().as_ptr() as u64
}

/// Bus address of a byte of a region: our own, except in memory whose pages are in reverse order.
pub fn bus_addr(region: &Region, offset: u64) -> u64 {
    if region.len() == wide::BYTES { wide::reversed(region, offset) } else { base(region) + offset }
}

/// Maps the regions of a domain.
pub fn map_of(domain: &DmaDomain) -> DmaMap {
    map_where(domain, |_| true)
}

/// Maps some regions of a domain. The others have a number and no address.
pub fn map_where(domain: &DmaDomain, is_mapped: impl Fn(&Arc<Region>) -> bool) -> DmaMap {
    let regions = domain.regions();
    let mut ranges = vec![];
    for (number, region) in (0..).zip(&regions).filter(|(_, region)| is_mapped(region)) {
        let bytes = (region.len() / PAGE * PAGE) as u64;
        let step = if region.len() == wide::BYTES { PAGE as u64 } else { bytes };
        ranges.extend((0..bytes).step_by(step as usize).map(|offset| DmaRange {
            addr: bus_addr(region, offset),
            len: step,
            region: number,
            offset,
        }));
    }
    DmaMap::new(Arc::new(RegionTable::new(regions)), ranges).unwrap()
}

impl<P: Peer> ControllerTransport for Transport<P> {
    fn read32(&mut self, offset: usize) -> Result<u32, DeviceGone> {
        Ok(self.fake.borrow_mut().read32(offset))
    }

    fn write32(&mut self, offset: usize, value: u32) -> Result<(), DeviceGone> {
        self.fake.borrow_mut().write32(offset, value);
        Ok(())
    }

    fn dma_domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    fn dma_addr(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        wide::addr_of(&self.domain, region, offset).filter(|_| self.fake.borrow().reaches_memory())
    }

    fn doorbells(&self) -> Option<View> {
        self.fake.borrow().doorbells()
    }

    fn doorbell_bytes(&self) -> usize {
        self.fake.borrow().doorbell_bytes()
    }

    fn vectors(&self) -> u16 {
        self.fake.borrow().vectors()
    }

    fn eventfd(&self, _vector: u16) -> Option<BorrowedFd<'_>> {
        None
    }

    fn reset_function(&mut self) -> bool {
        self.fake.borrow_mut().reset_function()
    }

    fn is_silent_when_gone(&self) -> bool {
        self.fake.borrow().is_silent_when_gone()
    }
}
