//! Recognisable blocks: a header with their identity, content derived from it, and a checksum.
//!
//! ```text
//!   byte  0        8        16       20       24        32
//!         ├ magic ─┼ sector ┼ length ┼ crc32c ┼ origin ─┼ contents ...
//! ```
//!
//! Little-endian. The checksum covers the whole block, with its own four bytes as zero. *Origin* is the seed of the run
//! that wrote the block; content is drawn from origin and sector. So a reader can tell a torn, misplaced or stale block
//! from a good one without a record of the writes, and find the wrong byte.
//!
//! Does no I/O.

use super::places::{FastRng, stir};

/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = 32;
const MAGIC: [u8; 8] = *b"blkyard1";

/// Makes the block for a position. `block` is at least a sector.
pub(crate) fn fill(block: &mut [u8], sector: u64, origin: u64) {
    let (header, contents) = block.split_at_mut(HEADER_BYTES);
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&sector.to_le_bytes());
    let len = (HEADER_BYTES + contents.len()) as u32;
    header[16..20].copy_from_slice(&len.to_le_bytes());
    header[20..24].fill(0);
    header[24..32].copy_from_slice(&origin.to_le_bytes());
    let mut rng = FastRng::new(stir(origin) ^ sector);
    for word in contents.chunks_mut(8) {
        word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()]);
    }
    let crc = crc32c(block);
    block[20..24].copy_from_slice(&crc.to_le_bytes());
}

/// Checks a block that was read from a position. `scratch` has the same length; it is used to find the byte that
/// differs.
///
/// # Errors
/// The mismatch, as text.
pub(crate) fn check(block: &[u8], sector: u64, scratch: &mut [u8]) -> Result<(), String> {
    let crc = u32::from_le_bytes([block[20], block[21], block[22], block[23]]);
    scratch.copy_from_slice(block);
    scratch[20..24].fill(0);
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| block[at + i]));
    if block[..8] != MAGIC {
        let what = if block.iter().all(|byte| *byte == 0) { "all zeroes" } else { "something else" };
        return Err(format!("it was never written by a verifying run, or lost: it contains {what}"));
    }
    let computed = crc32c(scratch);
    if computed == crc {
        let len = word(16) as u32;
        return match (word(8), len as usize == block.len()) {
            (_, false) => Err(format!("it was written in blocks of {len} bytes and read in blocks of {}", block.len())),
            (place, _) if place != sector => Err(format!("it is intact, but belongs to sector {place}")),
            _ => Ok(()),
        };
    }
    fill(scratch, word(8), word(24));
    let differ = block.iter().zip(scratch.iter()).position(|(got, want)| got != want);
    let from = differ.map_or(String::new(), |at| {
        let count = block.iter().zip(scratch.iter()).filter(|(got, want)| got != want).count();
        format!("; {count} bytes differ, the first at {at}: {:#04x} for {:#04x}", block[at], scratch[at])
    });
    Err(format!("checksum {computed:#010x}, but its header says {crc:#010x}{from}"))
}

/// CRC-32C (Castagnoli), as in iSCSI, ext4 and fio; reflected polynomial 0x82f63b78.
///
/// Eight tables, eight bytes a step: some 2 GB/s, fast enough for the device to be the limit.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let low = crc ^ u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        let step = |table: usize, byte: u32| TABLES[table][(byte & 0xff) as usize];
        crc = step(7, low)
            ^ step(6, low >> 8)
            ^ step(5, low >> 16)
            ^ step(4, low >> 24)
            ^ step(3, word[4].into())
            ^ step(2, word[5].into())
            ^ step(1, word[6].into())
            ^ step(0, word[7].into());
    }
    for byte in words.remainder() {
        crc = crc >> 8 ^ TABLES[0][((crc ^ u32::from(*byte)) & 0xff) as usize];
    }
    !crc
}

static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0_u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_of_the_known_vectors() {
        // RFC 3720, B.4, and the check value every table of CRCs has.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let up: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&up), 0x46dd_794e);
    }

    #[test]
    fn a_block_is_known_again_and_any_change_is_found() {
        let (mut block, mut scratch) = (vec![0; 512], vec![0; 512]);
        fill(&mut block, 4096, 77);
        assert_eq!(check(&block, 4096, &mut scratch), Ok(()));
        for at in [0, 8, 16, 20, 24, 32, 300, 511] {
            let mut bad = block.clone();
            bad[at] ^= 0x10;
            assert!(check(&bad, 4096, &mut scratch).is_err(), "byte {at}");
        }
    }

    #[test]
    fn what_differs_is_said() {
        let (mut block, mut scratch) = (vec![0; 1024], vec![0; 1024]);
        assert!(check(&block, 0, &mut scratch).unwrap_err().contains("all zeroes"));
        fill(&mut block, 8, 1);
        assert!(check(&block, 16, &mut scratch).unwrap_err().contains("belongs to sector 8"));
        block[512..].fill(0);
        let error = check(&block, 8, &mut scratch).unwrap_err();
        assert!(error.contains("the first at 51") && error.contains("checksum"), "{error}");
        let mut half = vec![0; 512];
        fill(&mut half, 8, 1);
        let mut whole = half.clone();
        whole.resize(1024, 0);
        assert!(check(&whole, 8, &mut scratch).is_err());
    }
}
