//! Without a model: reads of a device in memory that is mapped for each I/O, against memory that is mapped once.
//!
//! A program that registers its buffer, reads into it and unregisters it, one I/O after another; with `pci:` the kernel
//! pins the pages and the IOMMU maps and unmaps them each time. The figures include the hand-over to the thread that
//! controls the device, which maps, so they are those of a program and not of the IOMMU alone. CPU time is that of the
//! whole process.

use std::sync::Arc;
use std::time::Duration;

use blkyard::{
    Bio, BufferAccess, Disk, DiskBuffers, DiskConfig, Op, QueueCounts, Region, RegisteredBuffer, Status, Submitter,
};
use blkyard_mq::SECTOR_SHIFT;
use blkyard_os::{now_ns, process_cpu_ns};
use blkyard_sim::Rng;
use serde::Serialize;

use super::pairs::{RealPair, RealWindow, table};
use super::{PremappedLength, SIZES};
use crate::study::StudyError;

/// Length of a window.
const WINDOW: Duration = Duration::from_millis(100);

/// The pairs of a device.
#[derive(Debug, Serialize)]
pub(crate) struct DevicePairs {
    study: &'static str,
    device: String,
    /// Each I/O in memory mapped for it, and in memory mapped once.
    pairs: Vec<RealPair>,
}

/// Measures a device.
///
/// # Errors
/// The device cannot be opened, or an I/O failed.
pub(crate) fn run(name: &str, length: PremappedLength) -> Result<DevicePairs, StudyError> {
    let config = DiskConfig { threads: 1, depth: 1, buffer_bytes: 0, queues: QueueCounts::only(1) };
    let mut disk = Disk::open(name, config).map_err(|error| StudyError::Served(error.to_string()))?;
    let (info, buffers) = (disk.info().clone(), disk.buffers());
    let sector_count = info.capacity_sectors;
    let block = info.limits.logical_block_bytes;
    let mut sizes = SIZES.map(|bytes| bytes.max(block)).to_vec();
    sizes.dedup();
    sizes.retain(|bytes| u64::from(*bytes >> SECTOR_SHIFT) <= sector_count);
    let mut found = disk.run(|queue| {
        let pairs = sizes.iter().map(|bytes| pair(queue, &buffers, *bytes, sector_count, length.samples));
        pairs.collect::<Result<Vec<_>, _>>()
    });
    let pairs = found.pop().unwrap_or(Ok(Vec::new()));
    let pairs = pairs.map_err(|why| StudyError::Served(format!("{name}: {why}; see the messages of the device")))?;
    Ok(DevicePairs { study: "premapped", device: name.to_owned(), pairs })
}

impl DevicePairs {
    pub(crate) fn text(&self) -> String {
        format!(
            "study premapped: reads of {}, one at a time, without a model\n  each: the buffer is registered and mapped \
             for each read; once: for all\n  ratios are once over each; median and 95 % interval of {} samples\n\n{}",
            self.device,
            self.pairs.first().map_or(0, |pair| pair.samples),
            table(&self.pairs, ["each", "once"])
        )
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }
}

fn pair(
    queue: &mut Submitter,
    buffers: &DiskBuffers,
    bytes: u32,
    sectors: u64,
    samples: usize,
) -> Result<RealPair, String> {
    // Each in a region of its own: memory stays mapped for as long as a buffer in it is registered.
    let buffer = || {
        let region = Region::shared(bytes as usize).map_err(|error| error.to_string())?;
        region.span(0, region.len()).into_iter().for_each(|all| all.fill(0));
        RegisteredBuffer::new(&region, 0, bytes.into(), BufferAccess::ReadWrite).map_err(|error| error.to_string())
    };
    let (each, once): (Arc<_>, Arc<_>) = (buffer()?, buffer()?);
    buffers.register(&once);
    let (mut rng, mut windows) = (Rng::new(3), Vec::with_capacity(samples));
    for sample in 0..=samples {
        let pair = [(&each, true), (&once, false)].map(|(buffer, maps)| {
            window(queue, buffers, buffer, maps, || rng.below(sectors / u64::from(bytes >> SECTOR_SHIFT)))
        });
        let [each, once] = pair;
        // The first one warms up.
        if sample > 0 {
            windows.push([each?, once?]);
        }
    }
    buffers.unregister(&once);
    Ok(RealPair::new(bytes, &windows))
}

fn window(
    queue: &mut Submitter,
    buffers: &DiskBuffers,
    buffer: &Arc<RegisteredBuffer>,
    maps: bool,
    mut place: impl FnMut() -> u64,
) -> Result<RealWindow, String> {
    let bytes = buffer.len() as u32;
    let mut bio = Bio::with_capacity(1);
    let (start_ns, start_cpu_ns) = (now_ns(), process_cpu_ns());
    let mut ios = 0;
    while now_ns() - start_ns < WINDOW.as_nanos() as u64 {
        if maps {
            buffers.register(buffer);
        }
        bio.reset();
        (bio.op, bio.sectors) = (Op::Read, bytes >> SECTOR_SHIFT);
        bio.sector = place() * u64::from(bio.sectors);
        bio.segments.push(buffer.segment(0, bytes));
        queue.submit(bio);
        let mut back = None;
        while back.is_none() {
            queue.wait(|bio| back = Some(bio));
        }
        let Some(ended) = back else { return Err("a read did not come back".to_owned()) };
        if ended.status != Status::Ok {
            return Err(format!("a read failed: {}", ended.status));
        }
        bio = ended;
        if maps {
            buffers.unregister(buffer);
        }
        ios += 1;
    }
    Ok(RealWindow { ios, cpu_ns: process_cpu_ns() - start_cpu_ns, elapsed_ns: now_ns() - start_ns })
}

#[cfg(test)]
mod tests {
    use super::super::interval::SAMPLES_MIN;
    use super::*;

    #[test]
    fn a_device_is_measured_with_each_size_that_it_has() {
        let length = PremappedLength { samples: SAMPLES_MIN, windows: 1, quick: true };
        let report = run("ram:256K", length).unwrap();
        assert_eq!(report.pairs.iter().map(|pair| pair.bytes).collect::<Vec<_>>(), SIZES[..5]);
        assert!(report.pairs.iter().all(|pair| pair.once.iops.low > 0.0 && pair.samples == SAMPLES_MIN));
        assert!(report.text().contains("128 KiB") && report.json().contains("\"saves_cpu\""));
        let refused = run("pci:0000:ff:1f.7", length).unwrap_err().to_string();
        assert!(refused.contains("0000:ff:1f.7"), "{refused}");
    }
}
