//! Interface of all device models: commands with a time go in, and events with their times come out.
//!
//! A model is an event machine without a clock: the caller passes the time, and asks for the time of the next event. It
//! moves no data and never fails. Times must be in order; a past one counts as now.

use blkyard_mq::Op;

use crate::disk::RotaryDisk;
use crate::flash::Flash;
use crate::line::FixedLatency;

pub(crate) use blkyard_mq::SECTOR_BYTES;

/// A command for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Its id; the caller ensures that it is unique among commands in flight.
    pub id: u64,
    /// Operation.
    pub op: Op,
    /// The write completes when it is on the medium.
    pub fua: bool,
    /// First sector.
    pub sector: u64,
    /// Sectors of 512 bytes.
    pub sectors: u32,
}

impl Access {
    /// The sector after the last.
    pub(crate) fn end(&self) -> u64 {
        self.sector + u64::from(self.sectors)
    }
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelEvent {
    /// A command has completed.
    Done {
        /// By its id.
        id: u64,
        /// When.
        at_ns: u64,
    },
    /// A range has reached the medium, and would survive a power failure. For a command with FUA its completion comes
    /// first.
    OnMedium {
        /// First sector.
        sector: u64,
        /// Sectors of 512 bytes.
        sectors: u64,
    },
}

/// A device, as a machine of events.
#[derive(Debug)]
pub enum Model {
    /// A disk that turns.
    Disk(Box<RotaryDisk>),
    /// Channels of dies.
    Flash(Box<Flash>),
    /// A latency and a ceiling.
    Line(FixedLatency),
}

impl Model {
    /// How many more accesses the device takes now.
    pub fn room(&self) -> usize {
        match self {
            Model::Disk(disk) => disk.room(),
            Model::Flash(flash) => flash.room(),
            Model::Line(line) => line.room(),
        }
    }

    /// Takes an access.
    ///
    /// # Panics
    /// If there is no [room](Model::room).
    pub fn take(&mut self, now_ns: u64, access: Access) {
        assert!(self.room() > 0, "an access was given to a full device");
        match self {
            Model::Disk(disk) => disk.take(now_ns, access),
            Model::Flash(flash) => flash.take(now_ns, access),
            Model::Line(line) => line.take(now_ns, access),
        }
    }

    /// Time of the next event, without further commands.
    pub fn next_ns(&self) -> Option<u64> {
        match self {
            Model::Disk(disk) => disk.next_ns(),
            Model::Flash(flash) => flash.next_ns(),
            Model::Line(line) => line.next_ns(),
        }
    }

    /// Passes all events up to now to `to`, in order.
    pub fn run(&mut self, now_ns: u64, to: impl FnMut(ModelEvent)) {
        let happened = match self {
            Model::Disk(disk) => disk.run(now_ns),
            Model::Flash(flash) => flash.run(now_ns),
            Model::Line(line) => line.run(now_ns),
        };
        happened.drain(..).for_each(to);
    }

    /// A power failure with immediate restart: commands in flight and the content of a volatile cache are lost, without
    /// events.
    pub fn cut_power(&mut self, now_ns: u64) {
        match self {
            Model::Disk(disk) => disk.cut_power(now_ns),
            Model::Flash(flash) => flash.cut_power(now_ns),
            Model::Line(line) => line.cut_power(),
        }
    }
}
