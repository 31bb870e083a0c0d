//! The post's table, as published: the NVMe driver on the multi-queue core against its bio-based predecessor.
//!
//! M. Bjørling, linux-nvme, October 2013. 4 KiB random writes, a device with at most 270 K IOPS, a host with four
//! cores. The post prints the latencies of row 4,1024 (multi-queue) and of both rows 4,2048 in milliseconds; here all
//! are in microseconds, as Little's law confirms (4096 / 270 K = 15.2 ms).

/// Author, list and month. No address of the post is known.
pub(crate) const POST_NAME: &str =
    "M. Bjørling, linux-nvme, October 2013: the NVMe driver on the multi-queue block layer";

/// Result of one driver in one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostCell {
    pub(crate) iops: f64,
    /// Percent of one CPU, a job.
    pub(crate) user_percent: f64,
    pub(crate) system_percent: f64,
    pub(crate) min_us: f64,
    pub(crate) max_us: f64,
    pub(crate) mean_us: f64,
    pub(crate) stdev_us: f64,
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostRow {
    pub(crate) jobs: usize,
    pub(crate) depth: usize,
    pub(crate) mq: PostCell,
    pub(crate) bio: PostCell,
}

impl PostCell {
    /// CPU time for one I/O, nanoseconds.
    pub(crate) fn cpu_ns(&self, jobs: usize) -> f64 {
        self.user_ns(jobs) + self.system_ns(jobs)
    }

    /// The user's part of it.
    pub(crate) fn user_ns(&self, jobs: usize) -> f64 {
        self.user_percent / 100.0 * jobs as f64 / self.iops * 1e9
    }

    /// The system's part of it.
    pub(crate) fn system_ns(&self, jobs: usize) -> f64 {
        self.system_percent / 100.0 * jobs as f64 / self.iops * 1e9
    }
}

/// Thousands of IOPS, user and system percent, and latency in microseconds: minimum, maximum, mean, deviation.
const fn cell(kiops: f64, user: f64, system: f64, [min, max, mean, stdev]: [f64; 4]) -> PostCell {
    PostCell {
        iops: kiops * 1e3,
        user_percent: user,
        system_percent: system,
        min_us: min,
        max_us: max,
        mean_us: mean,
        stdev_us: stdev,
    }
}

const fn row(jobs: usize, depth: usize, mq: PostCell, bio: PostCell) -> PostRow {
    PostRow { jobs, depth, mq, bio }
}

/// The table, in the post's order.
#[rustfmt::skip]
pub(crate) const POST: [PostRow; 16] = [
    row(1, 1, cell(81.8, 9.76, 21.12, [11.0, 111.0, 11.90, 0.46]), cell(85.1, 7.44, 22.42, [10.0, 2116.0, 11.44, 3.31])),
    row(1, 2, cell(155.2, 20.64, 40.32, [8.0, 168.0, 12.53, 0.95]), cell(166.0, 19.92, 23.68, [7.0, 2117.0, 11.77, 3.40])),
    row(1, 4, cell(242.0, 32.96, 40.72, [11.0, 132.0, 16.32, 1.51]), cell(238.0, 14.32, 45.76, [9.0, 4907.0, 16.51, 9.08])),
    row(1, 8, cell(270.0, 32.00, 45.52, [13.0, 148.0, 29.34, 1.68]), cell(266.0, 15.69, 46.56, [11.0, 2138.0, 29.78, 7.80])),
    row(1, 16, cell(271.0, 32.16, 44.88, [26.0, 181.0, 58.97, 1.81]), cell(266.0, 16.96, 45.20, [22.0, 2169.0, 59.81, 13.10])),
    row(1, 128, cell(270.0, 26.24, 48.88, [196.0, 942.0, 473.90, 4.43]), cell(266.0, 17.92, 44.60, [156.0, 2585.0, 480.36, 23.39])),
    row(1, 1024, cell(270.0, 25.19, 39.98, [1386.0, 6693.0, 3798.54, 76.23]), cell(266.0, 15.83, 75.31, [1179.0, 7667.0, 3845.50, 109.20])),
    row(1, 2048, cell(269.0, 27.75, 37.43, [2818.0, 10448.0, 7593.71, 119.93]), cell(265.0, 7.43, 92.33, [3877.0, 14982.0, 7706.68, 344.34])),
    row(4, 1, cell(238.0, 13.14, 12.58, [9.0, 150.0, 16.35, 1.53]), cell(238.0, 12.02, 20.36, [10.0, 2122.0, 16.41, 4.23])),
    row(4, 2, cell(270.0, 11.58, 13.26, [10.0, 175.0, 29.26, 1.77]), cell(267.0, 10.02, 16.28, [12.0, 2132.0, 29.61, 5.77])),
    row(4, 4, cell(270.0, 12.12, 12.40, [12.0, 225.0, 58.94, 2.05]), cell(266.0, 10.56, 16.28, [12.0, 2167.0, 59.60, 10.87])),
    row(4, 8, cell(270.0, 10.54, 13.32, [19.0, 338.0, 118.20, 2.39]), cell(267.0, 9.84, 17.58, [15.0, 311.0, 119.40, 4.69])),
    row(4, 16, cell(270.0, 10.10, 12.78, [35.0, 453.0, 236.81, 2.88]), cell(267.0, 10.12, 16.88, [28.0, 2349.0, 239.25, 15.89])),
    row(4, 128, cell(270.0, 9.90, 12.64, [262.0, 3873.0, 1897.58, 31.38]), cell(266.0, 9.54, 15.38, [207.0, 4065.0, 1917.73, 54.19])),
    row(4, 1024, cell(270.0, 10.77, 18.57, [2_000.0, 124_000.0, 15_150.0, 21_020.0]), cell(266.0, 5.42, 54.88, [6829.0, 31_097.0, 15_373.44, 685.93])),
    row(4, 2048, cell(270.0, 10.51, 18.83, [2_000.0, 233_000.0, 30_170.0, 45_280.0]), cell(266.0, 5.96, 56.98, [15_000.0, 62_000.0, 30_660.0, 1850.0])),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_obeys_littles_law_in_microseconds() {
        for row in POST {
            for cell in [row.mq, row.bio] {
                let outstanding = cell.iops * cell.mean_us / 1e6;
                let wanted = (row.jobs * row.depth) as f64;
                assert!((outstanding / wanted - 1.0).abs() < 0.035, "{} x {}: {outstanding}", row.jobs, row.depth);
            }
        }
    }
}
