//! The PDUs: fields, and their bytes up to the data.

use super::{COMMON_BYTES, Crc32c, DIGEST_BYTES, HEADER_BYTES_MAX, PduError, TERM_REQ_BYTES_MAX};

/// Flag: a header digest follows the header.
pub(super) const HDGSTF: u8 = 1;
/// Flag: a data digest follows the data.
pub(super) const DDGSTF: u8 = 2;
/// Flag: the last data PDU of its command or R2T.
pub(super) const LAST_PDU: u8 = 4;
/// Flag: the command succeeded, and no response follows.
pub(super) const SUCCESS: u8 = 8;

/// Type of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PduType {
    /// Initialize Connection Request.
    IcReq = 0,
    /// Initialize Connection Response.
    IcResp = 1,
    /// Host to Controller Terminate Connection Request.
    H2cTermReq = 2,
    /// Controller to Host Terminate Connection Request.
    C2hTermReq = 3,
    /// Command Capsule.
    CapsuleCmd = 4,
    /// Response Capsule.
    CapsuleResp = 5,
    /// Host to Controller Data.
    H2cData = 6,
    /// Controller to Host Data.
    C2hData = 7,
    /// Ready to Transfer.
    R2t = 9,
}

impl PduType {
    /// Every type.
    pub const ALL: [PduType; 9] = [
        PduType::IcReq,
        PduType::IcResp,
        PduType::H2cTermReq,
        PduType::C2hTermReq,
        PduType::CapsuleCmd,
        PduType::CapsuleResp,
        PduType::H2cData,
        PduType::C2hData,
        PduType::R2t,
    ];

    /// By its number.
    pub fn from_number(number: u8) -> Option<PduType> {
        PduType::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Bytes of its header (HLEN).
    pub const fn header_bytes(self) -> usize {
        match self {
            PduType::IcReq | PduType::IcResp => 128,
            PduType::CapsuleCmd => 72,
            _ => 24,
        }
    }

    /// Whether digests apply to it: all except the connection's own PDUs.
    pub(super) const fn has_digests(self) -> bool {
        !matches!(self, PduType::IcReq | PduType::IcResp | PduType::H2cTermReq | PduType::C2hTermReq)
    }
}

/// Digests and alignment of the PDUs of one direction, as negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Whether headers have a digest.
    pub header_digest: bool,
    /// Whether data has a digest.
    pub data_digest: bool,
    /// Alignment of data from the start of its PDU, in dwords, 0's based: HPDA or CPDA of the receiver.
    pub alignment: u8,
}

impl Framing {
    /// No digests, and dword alignment: the state before the connection is initialized.
    pub const PLAIN: Framing = Framing { header_digest: false, data_digest: false, alignment: 0 };

    /// Alignment of data, bytes.
    pub const fn alignment_bytes(self) -> usize {
        (self.alignment as usize + 1) * 4
    }
}

/// Initialize Connection Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// Host PDU data alignment (HPDA), dwords, 0's based.
    pub alignment: u8,
    /// Whether the host asks for header digests.
    pub header_digest: bool,
    /// Whether the host asks for data digests.
    pub data_digest: bool,
    /// Maximum outstanding R2Ts of a command (MAXR2T), 0's based.
    pub maxr2t: u32,
}

/// Initialize Connection Response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// Controller PDU data alignment (CPDA), dwords, 0's based.
    pub alignment: u8,
    /// Whether headers have digests.
    pub header_digest: bool,
    /// Whether data has digests.
    pub data_digest: bool,
    /// Maximum data of one H2CData PDU, bytes.
    pub maxh2cdata: u32,
}

/// Terminate Connection Request, of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// Fatal error status (FES).
    pub status: u16,
    /// Fatal error information (FEI).
    pub information: u32,
}

impl From<PduError> for TermReq {
    fn from(error: PduError) -> TermReq {
        TermReq { status: error.status as u16, information: error.information }
    }
}

/// Host to Controller Data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// Identifier of the command.
    pub cccid: u16,
    /// Transfer tag of the R2T.
    pub ttag: u16,
    /// Offset in the command's data, bytes.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
    /// Whether it is the last of its R2T.
    pub is_last: bool,
}

/// Controller to Host Data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// Identifier of the command.
    pub cccid: u16,
    /// Offset in the command's data, bytes.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
    /// Whether it is the last of its command.
    pub is_last: bool,
    /// Whether the command succeeded, without a response.
    pub is_success: bool,
}

/// Ready to Transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// Identifier of the command.
    pub cccid: u16,
    /// Transfer tag, to be returned with the data.
    pub ttag: u16,
    /// Offset in the command's data, bytes.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// A PDU without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pdu {
    /// Initialize Connection Request.
    IcReq(IcReq),
    /// Initialize Connection Response.
    IcResp(IcResp),
    /// Terminate Connection Request of a host.
    H2cTermReq(TermReq),
    /// Terminate Connection Request of a controller.
    C2hTermReq(TermReq),
    /// A command, and the bytes of its in-capsule data.
    CapsuleCmd {
        /// Submission queue entry.
        sqe: [u64; 8],
        /// In-capsule data, bytes.
        len: u32,
    },
    /// A completion queue entry.
    CapsuleResp([u64; 2]),
    /// Host to Controller Data.
    H2cData(H2cData),
    /// Controller to Host Data.
    C2hData(C2hData),
    /// Ready to Transfer.
    R2t(R2t),
}

/// The bytes of a PDU before its data: header, header digest and padding. For a TermReq it is the whole PDU.
#[derive(Clone, Copy, Debug)]
pub struct EncodedPdu {
    bytes: [u8; TERM_REQ_BYTES_MAX],
    len: usize,
    /// Whether a data digest follows the data.
    pub has_data_digest: bool,
}

impl EncodedPdu {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.bytes[at..at + N].copy_from_slice(&bytes);
    }
}

impl Pdu {
    /// Its type.
    pub fn kind(&self) -> PduType {
        match self {
            Pdu::IcReq(_) => PduType::IcReq,
            Pdu::IcResp(_) => PduType::IcResp,
            Pdu::H2cTermReq(_) => PduType::H2cTermReq,
            Pdu::C2hTermReq(_) => PduType::C2hTermReq,
            Pdu::CapsuleCmd { .. } => PduType::CapsuleCmd,
            Pdu::CapsuleResp(_) => PduType::CapsuleResp,
            Pdu::H2cData(_) => PduType::H2cData,
            Pdu::C2hData(_) => PduType::C2hData,
            Pdu::R2t(_) => PduType::R2t,
        }
    }

    /// Bytes of its data.
    pub fn data_bytes(&self) -> u32 {
        match self {
            Pdu::CapsuleCmd { len, .. } => *len,
            Pdu::H2cData(data) => data.len,
            Pdu::C2hData(data) => data.len,
            _ => 0,
        }
    }

    /// Its bytes before the data.
    ///
    /// # Panics
    /// If the data is so long that the PDU has no length in 32 bits.
    pub fn encode(&self, framing: Framing) -> EncodedPdu {
        let kind = self.kind();
        let header = kind.header_bytes();
        let data = self.data_bytes();
        let header_digest = framing.header_digest && kind.has_digests();
        let has_data_digest = framing.data_digest && data > 0;
        let before = header + if header_digest { DIGEST_BYTES } else { 0 };
        let offset = if data > 0 { before.next_multiple_of(framing.alignment_bytes()) } else { before };
        let after = if has_data_digest { DIGEST_BYTES } else { 0 };
        let total = u32::try_from(offset + after).ok().and_then(|rest| rest.checked_add(data));
        let total = total.expect("our own data is shorter than 4 GiB");
        let mut out = EncodedPdu { bytes: [0; TERM_REQ_BYTES_MAX], len: offset, has_data_digest };
        let flags = [(header_digest, HDGSTF), (has_data_digest, DDGSTF)];
        let flags =
            flags.into_iter().filter(|(is_set, _)| *is_set).fold(self.encode_fields(&mut out), |all, f| all | f.1);
        out.put(0, [kind as u8, flags, header as u8, if data > 0 { offset as u8 } else { 0 }]);
        out.put(4, total.to_le_bytes());
        if header_digest {
            let digest = Crc32c::of(&out.bytes[..header]);
            out.put(header, digest.to_le_bytes());
        }
        out
    }

    /// A whole TermReq: its header, and the header of the PDU in error as far as it was received.
    pub fn encode_term_req(&self, received: &[u8]) -> EncodedPdu {
        let mut out = self.encode(Framing::PLAIN);
        let received = &received[..received.len().min(HEADER_BYTES_MAX)];
        let total = out.len + received.len();
        out.bytes[out.len..total].copy_from_slice(received);
        out.len = total;
        out.put(4, (total as u32).to_le_bytes());
        out
    }

    /// Writes the fields after the common header; returns the flags.
    fn encode_fields(&self, out: &mut EncodedPdu) -> u8 {
        let digests = |header: bool, data: bool| u8::from(header) | u8::from(data) << 1;
        let mut flags = 0;
        match self {
            Pdu::IcReq(IcReq { alignment, header_digest, data_digest, maxr2t }) => {
                out.put(10, [*alignment, digests(*header_digest, *data_digest)]);
                out.put(12, maxr2t.to_le_bytes());
            }
            Pdu::IcResp(IcResp { alignment, header_digest, data_digest, maxh2cdata }) => {
                out.put(10, [*alignment, digests(*header_digest, *data_digest)]);
                out.put(12, maxh2cdata.to_le_bytes());
            }
            Pdu::H2cTermReq(term) | Pdu::C2hTermReq(term) => {
                out.put(8, term.status.to_le_bytes());
                out.put(10, term.information.to_le_bytes());
            }
            Pdu::CapsuleCmd { sqe, .. } => {
                for (number, word) in sqe.iter().enumerate() {
                    out.put(COMMON_BYTES + number * 8, word.to_le_bytes());
                }
            }
            Pdu::CapsuleResp(cqe) => {
                for (number, word) in cqe.iter().enumerate() {
                    out.put(COMMON_BYTES + number * 8, word.to_le_bytes());
                }
            }
            Pdu::H2cData(H2cData { cccid, ttag, offset, len, is_last }) => {
                flags = if *is_last { LAST_PDU } else { 0 };
                out.put_transfer(*cccid, *ttag, *offset, *len);
            }
            Pdu::C2hData(C2hData { cccid, offset, len, is_last, is_success }) => {
                flags = if *is_last { LAST_PDU } else { 0 } | if *is_success { SUCCESS } else { 0 };
                out.put_transfer(*cccid, 0, *offset, *len);
            }
            Pdu::R2t(R2t { cccid, ttag, offset, len }) => out.put_transfer(*cccid, *ttag, *offset, *len),
        }
        flags
    }
}

impl EncodedPdu {
    fn put_transfer(&mut self, cccid: u16, ttag: u16, offset: u32, len: u32) {
        self.put(8, cccid.to_le_bytes());
        self.put(10, ttag.to_le_bytes());
        self.put(12, offset.to_le_bytes());
        self.put(16, len.to_le_bytes());
    }
}
