//! Published figures: the post, its follow-up, and the measurements of K. Busch on a machine with a strict IOMMU.

use serde::Serialize;

/// The post itself, linux-nvme, 2 August 2022 (v2 of the series), J. Axboe: 24 drives, depth 8, random reads.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PostedRatio {
    pub(crate) load: &'static str,
    pub(crate) registered: &'static str,
    pub(crate) mapped: &'static str,
    pub(crate) ratio: f64,
}

pub(crate) const POST: [PostedRatio; 4] = [
    PostedRatio {
        load: "512 B, polled, IOPS",
        registered: "44.66 M (44.36 to 44.93)",
        mapped: "43.70 M (43.53 to 44.04)",
        ratio: 0.978,
    },
    PostedRatio {
        load: "128 KiB, polled, IOPS",
        registered: "988.8 K (972 to 990)",
        mapped: "996.6 K (978 to 997)",
        ratio: 1.008,
    },
    PostedRatio { load: "128 KiB, by interrupt, CPU", registered: "1", mapped: "0.5", ratio: 0.5 },
    PostedRatio { load: "follow-up: 512 B, IOPS", registered: "45.72 M", mapped: "46.13 M", ratio: 1.009 },
];

/// I/Os a second of 128 KiB at the ceiling of the post's link: mapped, the mean of its last five samples.
pub(crate) const LINK_128K_IOPS: f64 = 996_600.0;

/// K. Busch, 31 August 2022, fio at depth 1, strict IOMMU: submission latency in ns, plain, registered, mapped.
pub(crate) const SUBMISSION_NS: [(u32, [f64; 3]); 3] =
    [(4 << 10, [2126.0, 1843.0, 1504.0]), (16 << 10, [3279.0, 2607.0, 1490.0]), (64 << 10, [6778.0, 4626.0, 1586.0])];
