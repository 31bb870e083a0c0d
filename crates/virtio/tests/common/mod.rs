//! The smallest device: it completes each fetched chain at once, and records it.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Arc;

use blkyard_mq::{Bio, BioFlags, Op, Segment};
use blkyard_virtio::driver_model::ModelGuest;
use blkyard_virtio::{
    Chain, DeviceRing, Features, GuestMemory, ParseContext, Parsed, Refusal, Refusals, RingFault, SerialId,
    VirtioStatus, parse, write_status, written,
};

/// Segments in a bio; a chain has room for header and status, too.
pub const SEGMENTS: u16 = 8;

/// Every kind of ring, for format-independent tests.
pub fn kinds() -> Vec<Features> {
    let bits = [Features::RING_PACKED, Features::EVENT_IDX, Features::IN_ORDER];
    (0..8_u32)
        .map(|kind| {
            (0..3).filter(|bit| kind >> bit & 1 == 1).map(|bit| bits[bit]).fold(Features::empty(), |all, one| all | one)
        })
        .collect()
}

/// Result of one chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Io { op: Op, flags: BioFlags, sector: u64, sectors: u32, segments: Vec<Segment> },
    Id,
    Reject { status: VirtioStatus, answered: bool, reason: Refusal },
}

pub struct Device {
    pub ring: DeviceRing,
    pub chain: Chain,
    pub bio: Box<Bio>,
    pub context: ParseContext,
    pub refusals: Refusals,
    pub serial: SerialId,
    pub memory: Arc<GuestMemory>,
}

impl Device {
    pub fn new(guest: &ModelGuest, indirect: bool) -> Device {
        Device {
            ring: guest.device(indirect),
            chain: Chain::new(SEGMENTS + 2),
            bio: Bio::with_capacity(usize::from(SEGMENTS)),
            context: ParseContext { features: Features::all() - Features::RO, write_back: true },
            refusals: Refusals::default(),
            serial: SerialId::new("serial-0123456789").unwrap(),
            memory: Arc::clone(guest.memory()),
        }
    }

    /// Fetches and answers one chain.
    pub fn step(&mut self) -> Result<Option<Outcome>, RingFault> {
        let fetched = self.ring.fetch(&self.memory, &mut self.chain);
        let Some(head) = fetched.inspect_err(|fault| self.refusals.ring_fault(fault))? else { return Ok(None) };
        let room = self.chain.writable_bytes().saturating_sub(1);
        let (outcome, status, status_at) = match parse(&self.chain, &self.memory, &self.context, &mut self.bio) {
            Parsed::Io { status_at } => {
                let Bio { op, flags, sector, sectors, .. } = *self.bio;
                let segments = self.bio.segments.clone();
                (Outcome::Io { op, flags, sector, sectors, segments }, VirtioStatus::Ok, Some(status_at))
            }
            Parsed::GetId { status_at } => {
                self.serial.write(&self.memory, self.chain.writable());
                (Outcome::Id, VirtioStatus::Ok, Some(status_at))
            }
            Parsed::Reject { status, status_at, reason } => {
                self.refusals.request(&reason);
                (Outcome::Reject { status, answered: status_at.is_some(), reason }, status, status_at)
            }
        };
        let len = status_at.map_or(0, |at| {
            write_status(&self.memory, at, status);
            written(room, status)
        });
        self.ring.complete(head, len);
        Ok(Some(outcome))
    }

    /// Fetches and answers all there is, then shows it to the driver.
    pub fn turn(&mut self) -> Result<Vec<Outcome>, RingFault> {
        let mut outcomes = Vec::new();
        while let Some(outcome) = self.step()? {
            outcomes.push(outcome);
        }
        let _ = self.ring.publish();
        Ok(outcomes)
    }
}
