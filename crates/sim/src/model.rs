//! What all models of devices have in common: commands with a time go in, and what happened, and when, comes out.
//!
//! A model is a machine of events. It knows no clock: whoever has it says what time it is, and asks when something
//! happens next. It moves no data and never fails. It is told of times in their order; one that is past counts as now.

use blkyard_mq::Op;

use crate::disk::RotaryDisk;
use crate::flash::Flash;
use crate::line::FixedLatency;

pub(crate) use blkyard_mq::SECTOR_BYTES;

/// What a device is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// What it will be known by; whoever asks makes sure that it is unique among those that are not over.
    pub id: u64,
    /// What is wanted.
    pub op: Op,
    /// The write is on the medium when it is over.
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

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelEvent {
    /// An access is over.
    Done {
        /// By its id.
        id: u64,
        /// When.
        at_ns: u64,
    },
    /// A range has reached the medium, and would outlive a power failure. Of an access with FUA the end is told first.
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

    /// When something happens next, if nothing more comes.
    pub fn next_ns(&self) -> Option<u64> {
        match self {
            Model::Disk(disk) => disk.next_ns(),
            Model::Flash(flash) => flash.next_ns(),
            Model::Line(line) => line.next_ns(),
        }
    }

    /// Tells `to` all that has happened up to now and was not told, in the order it happened.
    pub fn run(&mut self, now_ns: u64, to: impl FnMut(ModelEvent)) {
        let happened = match self {
            Model::Disk(disk) => disk.run(now_ns),
            Model::Flash(flash) => flash.run(now_ns),
            Model::Line(line) => line.run(now_ns),
        };
        happened.drain(..).for_each(to);
    }

    /// The power fails, and is back at once: what is in flight and what a volatile cache holds is gone, and will not be
    /// told of.
    pub fn cut_power(&mut self, now_ns: u64) {
        match self {
            Model::Disk(disk) => disk.cut_power(now_ns),
            Model::Flash(flash) => flash.cut_power(now_ns),
            Model::Line(line) => line.cut_power(),
        }
    }
}
