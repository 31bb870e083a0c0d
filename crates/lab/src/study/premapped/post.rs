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

/// A load of K. Busch's table of 31 August 2022: plain, registered, mapped.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct FollowUpLoad {
    pub(crate) depth: usize,
    pub(crate) bytes: u32,
    /// Thousands.
    pub(crate) iops: [f64; 3],
    /// Percent of a CPU in the kernel, if given.
    pub(crate) system_cpu: Option<[f64; 3]>,
}

impl FollowUpLoad {
    /// Time of an I/O that mapped memory saves over registered, us.
    pub(crate) fn saved_us(&self) -> f64 {
        let [_, registered, mapped] = self.iops;
        1e3 / registered - 1e3 / mapped
    }

    /// Share of the CPU of plain memory that an I/O in mapped memory takes.
    pub(crate) fn cpu_ratio(&self) -> Option<f64> {
        let [plain, _, mapped] = self.iops;
        self.system_cpu.map(|cpu| cpu[2] / mapped / (cpu[0] / plain))
    }
}

/// fio on one drive, strict IOMMU.
pub(crate) const FOLLOW_UP: [FollowUpLoad; 6] = [
    FollowUpLoad { depth: 1, bytes: 4 << 10, iops: [41.4, 43.8, 46.8], system_cpu: None },
    FollowUpLoad { depth: 1, bytes: 16 << 10, iops: [33.3, 33.9, 40.2], system_cpu: None },
    FollowUpLoad { depth: 1, bytes: 64 << 10, iops: [18.7, 20.0, 22.6], system_cpu: Some([18.2, 13.8, 7.6]) },
    FollowUpLoad { depth: 16, bytes: 4 << 10, iops: [207.0, 219.0, 310.0], system_cpu: None },
    FollowUpLoad { depth: 16, bytes: 16 << 10, iops: [164.0, 177.0, 186.0], system_cpu: Some([78.0, 76.0, 44.0]) },
    FollowUpLoad { depth: 16, bytes: 64 << 10, iops: [46.7, 46.7, 46.7], system_cpu: Some([30.5, 29.4, 15.6]) },
];

/// IOPS of the dma-buf series of 2025, millions, 4 KiB: with this kind of IOMMU, without and with mappings made once.
pub(crate) const DMA_BUF: [(&str, f64, f64); 3] =
    [("strict", 0.57, 5.01), ("lazy", 1.93, 5.01), ("pass-through", 5.01, 5.01)];
