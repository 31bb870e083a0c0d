//! CRC-32C, the digest of headers and data.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 4;

/// A CRC-32C of bytes that come in pieces.
#[derive(Clone, Copy, Debug)]
pub struct Crc32c(Digest);

impl Default for Crc32c {
    fn default() -> Crc32c {
        Crc32c(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl Crc32c {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> u32 {
        crc_fast::crc32_iscsi(bytes)
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes added.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }

    /// Forgets all bytes.
    pub fn reset(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_the_one_of_rfc_3720() {
        // Appendix B.4: 32 bytes of zeroes, of ones, ascending.
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, want) in [(&[0; 32][..], 0x8a91_36aa), (&[0xff; 32], 0x62a8_ab43), (&ascending, 0x46dd_794e)] {
            assert_eq!(Crc32c::of(bytes), want);
            let mut crc = Crc32c::default();
            bytes.chunks(5).for_each(|piece| crc.update(piece));
            assert_eq!(crc.value(), want);
            crc.reset();
            assert_eq!(crc.value(), 0);
        }
    }
}
