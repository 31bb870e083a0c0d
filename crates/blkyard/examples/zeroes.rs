//! Amount of unused space on a disk: reads it whole, from a thread for each CPU, and counts the blocks of zeroes.
//!
//! ```text
//! cargo run --release --example zeroes -- disk.img
//! ```
//!
//! Accepts the devices of `blkyard serve`: `ram:1G`, `vhost-user:SOCKET`, `disk.img?scheduler=fair&iops_max=5000`.

use std::error::Error;

use blkyard::{Bio, Disk, DiskConfig, Op, SECTOR_BYTES, Status, Submitter};

/// Size of a block: that of most filesystems.
const BLOCK_BYTES: usize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("name a device, such as disk.img or vhost-user:/run/vm1.sock")?;
    let (zeroes, blocks) = count(&name)?;
    println!("{name}: {zeroes} of {blocks} blocks of {BLOCK_BYTES} bytes hold nothing but zeroes");
    Ok(())
}

/// Number of zero blocks, and of all blocks. A partial last block is not counted.
fn count(name: &str) -> Result<(u64, u64), Box<dyn Error>> {
    let config = DiskConfig::default();
    let mut disk = Disk::open(name, config)?;
    let block_sectors = BLOCK_BYTES as u64 / SECTOR_BYTES;
    let blocks = disk.info().capacity_sectors / block_sectors;
    let first_of = |thread: usize| blocks * thread as u64 / config.threads as u64 * block_sectors;
    let counts = disk.run(|queue| {
        let (first, end) = (first_of(queue.number()), first_of(queue.number() + 1));
        zeroes(queue, config, first, end)
    });
    let zeroes = counts.into_iter().sum::<Result<u64, Status>>();
    Ok((zeroes.map_err(|status| format!("{name}: a read ended with {status:?}"))?, blocks))
}

/// Reads a range of sectors with as many bios out as there may be, and counts. Ends at the first error.
fn zeroes(queue: &mut Submitter, config: DiskConfig, first: u64, end: u64) -> Result<u64, Status> {
    let (mut next, mut count, mut error) = (first, 0, None);
    let mut block = [0; BLOCK_BYTES];
    let mut free: Vec<_> = (0..config.depth as u64)
        .map(|buffer| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = buffer;
            bio
        })
        .collect();
    let mut ended = Vec::with_capacity(config.depth);
    loop {
        while next < end && error.is_none() {
            let Some(mut bio) = free.pop() else { break };
            let bytes = ((end - next) * SECTOR_BYTES).min(config.buffer_bytes as u64);
            bio.reset();
            (bio.op, bio.sector, bio.sectors) = (Op::Read, next, (bytes / SECTOR_BYTES) as u32);
            bio.segments.push(queue.buffer(bio.cookie as usize, bytes as usize));
            next = bio.end();
            queue.submit(bio);
        }
        if queue.wait(|bio| ended.push(bio)) == 0 {
            return error.map_or(Ok(count), Err);
        }
        for bio in ended.drain(..) {
            if bio.status == Status::Ok {
                let data = queue.data(bio.segments[0]);
                for offset in (0..data.len()).step_by(BLOCK_BYTES) {
                    data.part(offset, BLOCK_BYTES).copy_to_slice(&mut block);
                    count += u64::from(block.iter().all(|byte| *byte == 0));
                }
            } else {
                error = Some(bio.status);
            }
            free.push(bio);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_zeroes_are_counted_wherever_they_lie() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut bytes = vec![0; 1000 * BLOCK_BYTES + 512];
        for block in [0, 7, 499, 500, 999] {
            bytes[block * BLOCK_BYTES + block] = 1;
        }
        std::fs::write(file.path(), bytes).unwrap();
        assert_eq!(count(file.path().to_str().unwrap()).unwrap(), (995, 1000));
    }

    #[test]
    fn a_name_may_have_all_its_options_and_a_wrong_one_is_told() {
        assert_eq!(count("ram:3M?scheduler=fair&iops_max=100000").unwrap(), (768, 768));
        let error = count("ram:3M?schedular=fair").unwrap_err().to_string();
        assert!(error.contains("schedular"), "{error}");
    }
}
