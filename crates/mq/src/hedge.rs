//! Reads that a driver over several drivers sends twice: what each of them offers for it.
//!
//! A read in flight at one driver is sent to another as well, a *hedge*. The hedge has no tag and reads into memory of
//! its driver. If it comes first, its data is copied, and the first driver gives the read up: its tag comes back, and
//! nothing accesses the memory of the request any more. What the device still sends for it is dropped.

use blkyard_mem::RegionTable;

use crate::{Request, Segments, Tag};

/// A driver that can send hedges, and give up reads. A device that writes to memory by itself cannot give up a read.
pub trait HedgeDriver {
    /// Sends a read that another driver has in flight. Returns the number of the hedge, which it keeps until
    /// [`HedgeDriver::release_hedge`]; `None` if it cannot be sent now, or is too long.
    fn send_hedge(&mut self, request: &Request) -> Option<u16>;

    /// Gives up the read in this slot, which is in flight here. Returns its tag, and the number by which
    /// [`HedgeDriver::next_ended`] tells its end; `None` if it cannot, such as while its data comes in.
    fn give_up(&mut self, place: usize) -> Option<(Tag, u16)>;

    /// The next hedge, or read given up, that has ended. Connections that are lost end them, too.
    fn next_ended(&mut self) -> Option<EndedHedge>;

    /// Copies the data of an ended hedge, which was successful, to the segments of the request.
    fn copy_hedge(&self, number: u16, memory: &RegionTable, to: Segments<'_>);

    /// A hedge that has ended is not needed any more.
    fn release_hedge(&mut self, number: u16);
}

/// The end of a hedge, or of a read that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedHedge {
    /// Its number.
    pub number: u16,
    /// Whether the device has read the data.
    pub is_ok: bool,
}
