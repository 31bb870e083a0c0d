//! The parser of one direction's byte stream.
//!
//! Owned by one end of a connection. It buffers at most one header. A length is checked before it is used, and none
//! leads to an allocation.

use super::pdu::{DDGSTF, HDGSTF, LAST_PDU, SUCCESS};
use super::{
    ALIGNMENT_MAX, C2hData, COMMON_BYTES, Crc32c, DIGEST_BYTES, FatalStatus, Framing, H2cData, HEADER_BYTES_MAX, IcReq,
    IcResp, MAXH2CDATA_MIN, Pdu, PduError, PduType, R2t, TERM_REQ_BYTES_MAX, TermReq,
};

/// The sender of a byte stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PduSender {
    /// A host.
    Host,
    /// A controller.
    Controller,
}

/// Limits for the data of one PDU, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataLimits {
    /// In-capsule data.
    pub in_capsule: u32,
    /// H2CData: the receiver's MAXH2CDATA.
    pub h2c: u32,
}

/// A part of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PduEvent<'a> {
    /// The header of a PDU. Its data follows, if it has any.
    Header(Pdu),
    /// The next bytes of the data.
    Data(&'a [u8]),
    /// The end of the data.
    DataEnd {
        /// Whether its digest is right, or it has none.
        is_intact: bool,
    },
}

/// The PDU that a stream is in the middle of, for a reader that continues elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedPdu {
    /// Its bytes before the data, as far as received. Padding is zero.
    pub header: Vec<u8>,
    /// Bytes of its data that have come.
    pub data: u32,
    /// Its data digest, as far as received.
    pub digest: Vec<u8>,
    /// Bytes from there to its end, once all bytes before the data have come.
    pub left: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The first eight bytes of a header.
    Common,
    /// The rest of the header, and its digest.
    Header,
    /// Padding before the data.
    Padding,
    /// Data.
    Data,
    /// The data digest.
    Digest,
    /// The end of a TermReq.
    Skip,
    /// A violation was found.
    Failed(PduError),
}

/// Parser of one direction of a connection.
#[derive(Debug)]
pub struct PduReader {
    sender: PduSender,
    limits: DataLimits,
    framing: Framing,
    /// Whether the connection is initialized.
    is_started: bool,
    stage: Stage,
    /// The header with its digest, as far as received.
    header: [u8; HEADER_BYTES_MAX + DIGEST_BYTES],
    /// Bytes of the PDU received before the data, with padding.
    have: usize,
    /// Whether those bytes are of an earlier PDU: no byte of the next one has come.
    is_between: bool,
    /// Bytes of the PDU before the data.
    before_data: usize,
    kind: PduType,
    /// Bytes of data or of a TermReq still to come.
    left: u32,
    has_data_digest: bool,
    digest: Crc32c,
    received_digest: [u8; DIGEST_BYTES],
}

impl PduReader {
    /// A reader at the start of a connection, when the initialization PDU is awaited.
    pub fn new(sender: PduSender, limits: DataLimits) -> PduReader {
        PduReader {
            sender,
            limits,
            framing: Framing::PLAIN,
            is_started: false,
            stage: Stage::Common,
            header: [0; HEADER_BYTES_MAX + DIGEST_BYTES],
            have: 0,
            is_between: true,
            before_data: 0,
            kind: PduType::IcReq,
            left: 0,
            has_data_digest: false,
            digest: Crc32c::default(),
            received_digest: [0; DIGEST_BYTES],
        }
    }

    /// The connection is initialized: later PDUs have this framing.
    pub fn start(&mut self, framing: Framing) {
        self.framing = framing;
        self.is_started = true;
    }

    /// Bytes of the current header received so far, without digest and padding, for a TermReq.
    pub fn header_bytes(&self) -> &[u8] {
        // Beyond the common header, the type is that of this PDU.
        let header = if self.have > COMMON_BYTES { self.kind.header_bytes() } else { COMMON_BYTES };
        &self.header[..self.have.min(header)]
    }

    /// Bytes of the current PDU's data that have not arrived.
    pub fn data_left(&self) -> u32 {
        if self.stage == Stage::Data { self.left } else { 0 }
    }

    /// Whether the connection is initialized.
    pub fn is_started(&self) -> bool {
        self.is_started
    }

    /// What has come of the present PDU; all empty between two of them.
    pub fn unfinished(&self) -> UnfinishedPdu {
        let mut header = self.header[..self.have.min(self.header.len())].to_vec();
        header.resize(self.have, 0);
        let after = if self.has_data_digest { DIGEST_BYTES } else { 0 };
        let total = u32::from_le_bytes(self.array(4)).saturating_sub((self.before_data + after) as u32);
        match self.stage {
            Stage::Common | Stage::Header | Stage::Padding if !self.is_between => {
                UnfinishedPdu { header, ..UnfinishedPdu::default() }
            }
            Stage::Data => {
                let data = total.saturating_sub(self.left);
                UnfinishedPdu { header, data, digest: Vec::new(), left: self.left + after as u32 }
            }
            Stage::Digest => {
                let digest = self.received_digest[..DIGEST_BYTES - self.left as usize].to_vec();
                UnfinishedPdu { header, data: total, digest, left: self.left }
            }
            _ => UnfinishedPdu::default(),
        }
    }

    /// The next bytes of data were received directly into their destination. Returns the digest, to be updated with
    /// them, if the data has one.
    ///
    /// # Panics
    /// If that many bytes of data are not [left](PduReader::data_left).
    pub fn skip_data(&mut self, bytes: u32) -> Option<&mut Crc32c> {
        assert!(bytes <= self.data_left(), "{bytes} bytes of data are skipped, and {} left", self.data_left());
        self.left -= bytes;
        self.has_data_digest.then_some(&mut self.digest)
    }

    /// The next part of the stream, taken from the front of `bytes`. `None` if all bytes are taken and more are needed.
    /// After a violation it returns the same error for ever.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<PduEvent<'a>>, PduError> {
        loop {
            match self.stage {
                Stage::Common => {
                    if !self.collect(bytes, COMMON_BYTES) {
                        return Ok(None);
                    }
                    self.check_common().map_err(|error| self.fail(error))?;
                    self.stage = Stage::Header;
                }
                Stage::Header => {
                    // The digest is checked before the padding, whose length it covers.
                    let digest = if self.has_header_digest() { DIGEST_BYTES } else { 0 };
                    if !self.collect(bytes, self.kind.header_bytes() + digest) {
                        return Ok(None);
                    }
                    self.check_header_digest().map_err(|error| self.fail(error))?;
                    self.stage = Stage::Padding;
                }
                Stage::Padding => {
                    if !self.collect(bytes, self.before_data) {
                        return Ok(None);
                    }
                    let pdu = self.parse_header().map_err(|error| self.fail(error))?;
                    self.stage = match self.kind {
                        _ if self.left == 0 => Stage::Common,
                        PduType::H2cTermReq | PduType::C2hTermReq => Stage::Skip,
                        _ => Stage::Data,
                    };
                    self.is_between = true;
                    self.digest.reset();
                    return Ok(Some(PduEvent::Header(pdu)));
                }
                Stage::Data if self.left > 0 => {
                    let taken = take(bytes, self.left as usize);
                    if taken.is_empty() {
                        return Ok(None);
                    }
                    self.left -= taken.len() as u32;
                    if self.has_data_digest {
                        self.digest.update(taken);
                    }
                    return Ok(Some(PduEvent::Data(taken)));
                }
                Stage::Data if self.has_data_digest => {
                    self.left = DIGEST_BYTES as u32;
                    self.stage = Stage::Digest;
                }
                Stage::Data => {
                    self.stage = Stage::Common;
                    return Ok(Some(PduEvent::DataEnd { is_intact: true }));
                }
                Stage::Digest => {
                    let taken = take(bytes, self.left as usize);
                    let at = DIGEST_BYTES - self.left as usize;
                    self.received_digest[at..at + taken.len()].copy_from_slice(taken);
                    self.left -= taken.len() as u32;
                    if self.left > 0 {
                        return Ok(None);
                    }
                    self.stage = Stage::Common;
                    let is_intact = u32::from_le_bytes(self.received_digest) == self.digest.value();
                    return Ok(Some(PduEvent::DataEnd { is_intact }));
                }
                Stage::Skip => {
                    self.left -= take(bytes, self.left as usize).len() as u32;
                    if self.left > 0 {
                        return Ok(None);
                    }
                    self.stage = Stage::Common;
                }
                Stage::Failed(error) => return Err(error),
            }
        }
    }

    fn fail(&mut self, error: PduError) -> PduError {
        self.stage = Stage::Failed(error);
        error
    }

    /// Collects bytes of the header until there are `until`; returns whether there are.
    fn collect(&mut self, bytes: &mut &[u8], until: usize) -> bool {
        if self.is_between && !bytes.is_empty() {
            (self.have, self.is_between) = (0, false);
        }
        let taken = take(bytes, until.saturating_sub(self.have));
        // Padding is not kept.
        let kept = taken.len().min(self.header.len().saturating_sub(self.have));
        copy_header(&mut self.header[self.have.min(HEADER_BYTES_MAX + DIGEST_BYTES)..][..kept], &taken[..kept]);
        self.have += taken.len();
        !self.is_between && self.have >= until
    }

    /// Checks the common header, and with it every length of the PDU.
    fn check_common(&mut self) -> Result<(), PduError> {
        let [number, flags, header_bytes, offset, ..] = self.header;
        let total = u32::from_le_bytes(self.array(4));
        let kind = PduType::from_number(number).ok_or(PduError::field(0, "unknown PDU type"))?;
        let sender = match kind {
            PduType::IcReq | PduType::H2cTermReq | PduType::CapsuleCmd | PduType::H2cData => PduSender::Host,
            _ => PduSender::Controller,
        };
        if sender != self.sender {
            return Err(PduError::field(0, "PDU type of the other direction"));
        }
        let is_initialization = matches!(kind, PduType::IcReq | PduType::IcResp);
        if !self.is_started && kind.has_digests() {
            return Err(PduError::new(FatalStatus::SequenceError, "PDU before the connection was initialized"));
        }
        if self.is_started && is_initialization {
            return Err(PduError::new(FatalStatus::SequenceError, "the connection was initialized already"));
        }
        let header = kind.header_bytes();
        if usize::from(header_bytes) != header {
            return Err(PduError::field(2, "wrong header length"));
        }
        let header_digest = self.framing.header_digest && kind.has_digests();
        if kind.has_digests() && (flags & HDGSTF != 0) != header_digest {
            return Err(PduError::field(1, "header digest flag differs from the negotiated value"));
        }
        let before = header + if header_digest { DIGEST_BYTES } else { 0 };
        let wrong_length = Err(PduError::field(4, "wrong PDU length"));
        let total_bytes = total as usize;
        (self.kind, self.before_data, self.left, self.has_data_digest) = (kind, before, 0, false);
        match kind {
            PduType::H2cTermReq | PduType::C2hTermReq => {
                if !(header..=TERM_REQ_BYTES_MAX).contains(&total_bytes) {
                    return wrong_length;
                }
                self.left = (total_bytes - header) as u32;
            }
            PduType::CapsuleCmd | PduType::H2cData | PduType::C2hData => {
                let offset = usize::from(offset);
                if total_bytes < before {
                    return wrong_length;
                }
                let has_data = kind != PduType::CapsuleCmd || total_bytes > before;
                if (flags & DDGSTF != 0) != (self.framing.data_digest && has_data) {
                    return Err(PduError::field(1, "data digest flag differs from the negotiated value"));
                }
                if !has_data {
                    return Ok(());
                }
                if offset < before || !offset.is_multiple_of(self.framing.alignment_bytes()) {
                    return Err(PduError::field(3, "wrong data offset"));
                }
                let after = if self.framing.data_digest { DIGEST_BYTES } else { 0 };
                let data = total_bytes.checked_sub(offset + after).filter(|data| *data > 0);
                let Some(data) = data else { return wrong_length };
                (self.before_data, self.left, self.has_data_digest) = (offset, data as u32, self.framing.data_digest);
                let limit = match kind {
                    PduType::CapsuleCmd => self.limits.in_capsule,
                    PduType::H2cData => self.limits.h2c,
                    _ => u32::MAX,
                };
                if self.left > limit {
                    return Err(PduError::new(FatalStatus::LimitExceeded, "more data in a PDU than allowed"));
                }
            }
            _ if total_bytes != before => return wrong_length,
            _ => {}
        }
        Ok(())
    }

    fn has_header_digest(&self) -> bool {
        self.framing.header_digest && self.kind.has_digests()
    }

    fn check_header_digest(&self) -> Result<(), PduError> {
        let header = self.kind.header_bytes();
        let received = u32::from_le_bytes(self.array(header.min(HEADER_BYTES_MAX)));
        if !self.has_header_digest() || received == Crc32c::of(&self.header[..header]) {
            return Ok(());
        }
        let (status, what) = (FatalStatus::HeaderDigest, "wrong header digest");
        Err(PduError { status, information: received, what })
    }

    /// Parses a header whose digest is right.
    fn parse_header(&self) -> Result<Pdu, PduError> {
        let (u16_at, u32_at) = (|at| u16::from_le_bytes(self.array(at)), |at| u32::from_le_bytes(self.array(at)));
        let digests = self.header[11];
        let (header_digest, data_digest) = (digests & 1 != 0, digests & 2 != 0);
        if matches!(self.kind, PduType::IcReq | PduType::IcResp) {
            if u16_at(8) != 0 {
                return Err(PduError::field(8, "unknown format version"));
            }
            if self.header[10] > ALIGNMENT_MAX {
                return Err(PduError::field(10, "data alignment above 128 bytes"));
            }
        }
        let flags = self.header[1];
        let (is_last, is_success) = (flags & LAST_PDU != 0, flags & SUCCESS != 0);
        Ok(match self.kind {
            PduType::IcReq => {
                Pdu::IcReq(IcReq { alignment: self.header[10], header_digest, data_digest, maxr2t: u32_at(12) })
            }
            PduType::IcResp => {
                let maxh2cdata = u32_at(12);
                if maxh2cdata < MAXH2CDATA_MIN || !maxh2cdata.is_multiple_of(4) {
                    return Err(PduError::field(12, "MAXH2CDATA is below 4096 or not a multiple of 4"));
                }
                Pdu::IcResp(IcResp { alignment: self.header[10], header_digest, data_digest, maxh2cdata })
            }
            PduType::H2cTermReq => Pdu::H2cTermReq(TermReq { status: u16_at(8), information: u32_at(10) }),
            PduType::C2hTermReq => Pdu::C2hTermReq(TermReq { status: u16_at(8), information: u32_at(10) }),
            PduType::CapsuleCmd => {
                let word = |number| u64::from_le_bytes(self.array(COMMON_BYTES + number * 8));
                Pdu::CapsuleCmd { sqe: std::array::from_fn(word), len: self.left }
            }
            PduType::CapsuleResp => {
                Pdu::CapsuleResp([COMMON_BYTES, COMMON_BYTES + 8].map(|at| u64::from_le_bytes(self.array(at))))
            }
            PduType::H2cData | PduType::C2hData | PduType::R2t => {
                let (cccid, ttag, offset, len) = (u16_at(8), u16_at(10), u32_at(12), u32_at(16));
                if !offset.is_multiple_of(4) {
                    return Err(PduError::field(12, "offset is not a multiple of 4"));
                }
                match self.kind {
                    PduType::R2t if len == 0 => return Err(PduError::field(16, "R2T for no data")),
                    PduType::R2t => return Ok(Pdu::R2t(R2t { cccid, ttag, offset, len })),
                    _ if len != self.left => {
                        return Err(PduError::field(16, "data length differs from that of the PDU"));
                    }
                    PduType::H2cData => Pdu::H2cData(H2cData { cccid, ttag, offset, len, is_last }),
                    _ if is_success && !is_last => {
                        return Err(PduError::field(1, "success flag on a PDU that is not the last"));
                    }
                    _ => Pdu::C2hData(C2hData { cccid, offset, len, is_last, is_success }),
                }
            }
        })
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|number| self.header[at + number])
    }
}

/// Copies bytes of a header. The usual lengths are known to the compiler, which makes no call for them: the common
/// header, and the rest of a header of 24 bytes and of a command.
#[inline]
fn copy_header(to: &mut [u8], from: &[u8]) {
    fn fixed<const N: usize>(to: &mut [u8], from: &[u8]) {
        to[..N].copy_from_slice(&from[..N]);
    }
    match from.len() {
        0 => {}
        8 => fixed::<8>(to, from),
        16 => fixed::<16>(to, from),
        64 => fixed::<64>(to, from),
        _ => to.copy_from_slice(from),
    }
}

/// Takes at most `max` bytes from the front.
fn take<'a>(bytes: &mut &'a [u8], max: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(bytes.len().min(max));
    *bytes = rest;
    taken
}
