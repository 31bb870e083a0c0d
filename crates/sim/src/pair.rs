//! A queue pair in memory: commands one way, completions the other, like that of an NVMe controller.
//!
//! The host owns [`HostEnd`], the device [`DeviceEnd`], in one thread or in two. Commands are written first and
//! published by one store, which stands for the doorbell. It knows no time and no tags: the host defines ids.

use blkyard_mem::Segment;
use blkyard_mem::ring::{Consumer, Producer, channel};
use blkyard_mq::{Op, Status};

/// A command as in a submission queue: 64 bytes, as with NVMe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Command {
    /// Its id, returned in the completion.
    pub cid: u32,
    /// Operation.
    pub op: Op,
    /// First sector.
    pub sector: u64,
    /// Sectors of 512 bytes.
    pub sectors: u32,
    /// First byte of data; the models move none.
    pub data: Segment,
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct PairCompletion {
    /// Of which.
    pub cid: u32,
    /// How it went.
    pub status: Status,
}

/// The host's end.
#[derive(Debug)]
pub struct HostEnd {
    sq: Producer<Command>,
    cq: Consumer<PairCompletion>,
}

/// The device's end.
#[derive(Debug)]
pub struct DeviceEnd {
    sq: Consumer<Command>,
    cq: Producer<PairCompletion>,
}

/// A pair of queues of `entries` each.
///
/// # Panics
/// If there are no entries.
pub fn queue_pair(entries: usize) -> (HostEnd, DeviceEnd) {
    let (sq, sq_device) = channel(entries);
    let (cq_device, cq) = channel(entries);
    (HostEnd { sq, cq }, DeviceEnd { sq: sq_device, cq: cq_device })
}

impl HostEnd {
    /// Commands that the queue holds at most.
    pub fn entries(&self) -> usize {
        self.sq.capacity()
    }

    /// Commands that still fit.
    #[inline]
    pub fn room(&mut self) -> usize {
        self.sq.room()
    }

    /// Writes a command; the device does not see it before the [doorbell](HostEnd::ring) rings.
    ///
    /// # Panics
    /// If there is no [room](HostEnd::room).
    #[inline]
    pub fn post(&mut self, command: Command) {
        assert!(self.sq.push(command).is_ok(), "a command was posted to a full queue");
    }

    /// Rings the doorbell for all that was posted.
    #[inline]
    pub fn ring(&mut self) {
        self.sq.publish();
    }

    /// The next completion. Its entry is the device's again once [released](HostEnd::release).
    #[inline]
    pub fn completion(&mut self) -> Option<PairCompletion> {
        self.cq.pop()
    }

    /// Tells the device which entries it may use again.
    #[inline]
    pub fn release(&mut self) {
        self.cq.release();
    }
}

impl DeviceEnd {
    /// The next command that the doorbell has announced.
    #[inline]
    pub fn command(&mut self) -> Option<Command> {
        let command = self.sq.pop();
        self.sq.release();
        command
    }

    /// Posts a completion, which the host sees at once.
    ///
    /// # Panics
    /// If the host has left no entry: it has more out than the queue is long.
    #[inline]
    pub fn complete(&mut self, completion: PairCompletion) {
        assert!(self.cq.push(completion).is_ok(), "the completion queue overran");
        self.cq.publish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_seen_once_the_doorbell_rings() {
        let (mut host, mut device) = queue_pair(4);
        host.post(Command { cid: 1, ..Command::default() });
        host.post(Command { cid: 2, ..Command::default() });
        assert_eq!((host.room(), device.command()), (2, None));
        host.ring();
        assert_eq!(device.command().map(|command| command.cid), Some(1));
        assert_eq!(device.command().map(|command| command.cid), Some(2));
        assert_eq!((host.room(), device.command()), (4, None));
        device.complete(PairCompletion { cid: 2, status: Status::Ok });
        assert_eq!(host.completion(), Some(PairCompletion { cid: 2, status: Status::Ok }));
        assert_eq!(host.completion(), None);
    }

    #[test]
    fn entries_have_the_sizes_of_nvme() {
        assert_eq!((size_of::<Command>(), size_of::<PairCompletion>()), (64, 16));
    }
}
