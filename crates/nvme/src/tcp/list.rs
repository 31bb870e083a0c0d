//! What is to be sent: header bytes and segments in the order of the stream.

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{SendPiece, StreamLimits};
use blkyard_wire::nvme_tcp::{Crc32c, DIGEST_BYTES, EncodedPdu, Framing, Pdu, TERM_REQ_BYTES_MAX};

/// Bytes of data that are read at once for a digest.
const DIGEST_CHUNK: usize = 4096;

#[derive(Clone, Copy, Debug)]
enum SendEntry {
    Bytes { start: usize, end: usize },
    Data(Segment),
}

/// A bounded list of whole PDUs. Allocated once and filled again and again.
#[derive(Debug)]
pub struct SendList {
    bytes: Vec<u8>,
    entries: Vec<SendEntry>,
    /// Bytes of all pieces.
    total: usize,
}

impl SendList {
    /// Minimum pieces, so that a PDU with several segments fits.
    pub const PIECES_MIN: usize = 32;
    /// Pieces of data that fit whenever a PDU fits.
    pub(super) const DATA_PIECES_MIN: usize = 16;
    /// Bytes and pieces of a PDU besides its data.
    const PDU_BYTES: usize = TERM_REQ_BYTES_MAX + DIGEST_BYTES;
    const PDU_PIECES: usize = 2;

    /// An empty list for at most so many pieces, at least [`SendList::PIECES_MIN`].
    pub fn new(pieces_max: usize) -> SendList {
        let pieces = pieces_max.max(SendList::PIECES_MIN);
        // A PDU without data is one piece.
        let (bytes, entries) = (Vec::with_capacity(pieces * SendList::PDU_BYTES), Vec::with_capacity(pieces));
        SendList { bytes, entries, total: 0 }
    }

    /// Its maximum size, for the stream that sends it.
    pub fn limits(&self) -> StreamLimits {
        StreamLimits { pieces_max: self.entries.capacity(), bytes_max: self.bytes.capacity() }
    }

    /// Empties the list, which the kernel has taken or which was sent.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.entries.clear();
        self.total = 0;
    }

    /// Bytes of all pieces.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Whether nothing is to be sent.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = SendPiece<'_>> {
        self.entries.iter().map(|entry| match entry {
            SendEntry::Bytes { start, end } => SendPiece::Bytes(&self.bytes[*start..*end]),
            SendEntry::Data(segment) => SendPiece::Data(*segment),
        })
    }

    /// Appends its bytes to others, from this byte on and at most so many. False if a segment of them lies outside the
    /// memory, whose bytes are zeros then.
    pub fn copy(&self, memory: &RegionTable, from: usize, most: usize, into: &mut Vec<u8>) -> bool {
        let (mut skip, end, mut is_whole) = (from, into.len() + most, true);
        for piece in self.pieces() {
            let len = match piece {
                SendPiece::Bytes(bytes) => bytes.len(),
                SendPiece::Data(segment) => segment.len as usize,
            };
            let (start, room) = (skip.min(len), end - into.len());
            skip -= start;
            let taken = (len - start).min(room);
            match piece {
                SendPiece::Bytes(bytes) => into.extend_from_slice(&bytes[start..start + taken]),
                SendPiece::Data(segment) => {
                    let at = into.len();
                    into.resize(at + taken, 0);
                    match memory.resolve(segment) {
                        Some(span) => span.part(start, taken).copy_to_slice(&mut into[at..]),
                        None => is_whole &= taken == 0,
                    }
                }
            }
        }
        is_whole
    }

    /// Pieces of data for which the next PDU has room, at least [`SendList::DATA_PIECES_MIN`]; `None` if there are
    /// fewer.
    pub(super) fn room(&self) -> Option<usize> {
        let pieces = self.entries.capacity() - self.entries.len();
        let fits = self.bytes.capacity() - self.bytes.len() >= SendList::PDU_BYTES;
        pieces.checked_sub(SendList::PDU_PIECES).filter(|pieces| fits && *pieces >= SendList::DATA_PIECES_MIN)
    }

    pub(super) fn push_term_req(&mut self, pdu: &EncodedPdu) {
        self.push_bytes(pdu.bytes());
    }

    /// Adds a PDU, and its data.
    pub(super) fn push(
        &mut self,
        pdu: &Pdu,
        framing: Framing,
        memory: &RegionTable,
        data: impl Iterator<Item = Segment>,
    ) {
        let encoded = pdu.encode(framing);
        self.push_bytes(encoded.bytes());
        let mut digest = Crc32c::default();
        for segment in data {
            self.entries.push(SendEntry::Data(segment));
            self.total += segment.len as usize;
            if encoded.has_data_digest {
                update_digest(&mut digest, memory, segment);
            }
        }
        if encoded.has_data_digest {
            self.push_bytes(&digest.value().to_le_bytes());
        }
    }

    fn push_bytes(&mut self, bytes: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.total += bytes.len();
        let end = self.bytes.len();
        match self.entries.last_mut() {
            Some(SendEntry::Bytes { end: last, .. }) => *last = end,
            _ => self.entries.push(SendEntry::Bytes { start, end }),
        }
    }
}

/// Adds the bytes of a segment to a digest. A segment outside the memory has none.
pub(super) fn update_digest(digest: &mut Crc32c, memory: &RegionTable, segment: Segment) {
    let Some(span) = memory.resolve(segment) else { return };
    let mut chunk = [0; DIGEST_CHUNK];
    for start in (0..span.len()).step_by(DIGEST_CHUNK) {
        let len = DIGEST_CHUNK.min(span.len() - start);
        span.part(start, len).copy_to_slice(&mut chunk[..len]);
        digest.update(&chunk[..len]);
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mem::Region;

    use super::*;

    #[test]
    fn any_part_of_a_list_can_be_copied() {
        let region = Region::shared(8192).unwrap();
        let data: Vec<u8> = (0..8192_u32).map(|at| (at * 7 / 3) as u8).collect();
        region.span(0, 8192).unwrap().copy_from_slice(&data);
        let memory = RegionTable::new(vec![region]);
        let mut list = SendList::new(SendList::PIECES_MIN);
        list.push_bytes(b"head");
        for (offset, len) in [(100, 50), (4000, 1000)] {
            list.entries.push(SendEntry::Data(Segment { region: 0, offset, len }));
            list.total += len as usize;
        }
        list.push_bytes(b"tail");
        let whole = [b"head", &data[100..150], &data[4000..5000], b"tail"].concat();
        for (from, most) in [(0, 2000), (0, 3), (2, 10), (4, 50), (60, 994), (1056, 10), (1058, 10), (0, 0)] {
            let mut copied = b"before".to_vec();
            assert!(list.copy(&memory, from, most, &mut copied));
            assert_eq!(copied[6..], whole[from..whole.len().min(from + most)], "{most} bytes from {from} on");
        }
        let outside = Segment { region: 0, offset: 8000, len: 1000 };
        list.entries.push(SendEntry::Data(outside));
        let mut copied = Vec::new();
        assert!(list.copy(&memory, 0, whole.len(), &mut copied), "it is not among these");
        assert!(!list.copy(&memory, 0, whole.len() + 1, &mut copied));
    }
}
