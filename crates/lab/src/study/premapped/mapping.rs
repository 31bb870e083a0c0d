//! What it costs to map the pages of an I/O for a device and to unmap them: a model, since no IOMMU is needed here.
//!
//! Fitted to published figures, so it predicts none of them. The costs of strict mapping are K. Busch's submission
//! latencies of 31 August 2022: registered less mapped is 339, 1117 and 3040 ns with 1, 4 and 16 pages, a line of 160
//! ns and 180 ns a page. Unmapping is the rest of 1.55 us for a page, the difference between 570 K and 5.01 M IOPS in
//! the dma-buf series of 2025. Lazy mapping is fitted to the 0.32 us of that series.

use serde::Serialize;

/// How a machine maps memory for its devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct MappingModel {
    pub(crate) name: &'static str,
    /// To map memory, at submission.
    map_ns: f64,
    /// For each page of 4096 bytes.
    map_page_ns: f64,
    /// To unmap it at completion, with the flush of the IOMMU's cache.
    unmap_ns: f64,
}

/// The three of them.
pub(crate) const MODELS: [MappingModel; 3] = [
    MappingModel { name: "pass-through", map_ns: 0.0, map_page_ns: 0.0, unmap_ns: 0.0 },
    MappingModel { name: "lazy", map_ns: 140.0, map_page_ns: 180.0, unmap_ns: 0.0 },
    MappingModel { name: "strict", map_ns: 160.0, map_page_ns: 180.0, unmap_ns: 1210.0 },
];

/// Bytes of a page.
const PAGE: u32 = 4096;

impl MappingModel {
    /// Charge of the submission of an I/O.
    pub(crate) fn submit_ns(&self, bytes: u32) -> f64 {
        self.map_ns + self.map_page_ns * f64::from(bytes.div_ceil(PAGE))
    }

    /// Charge of both submission and completion.
    pub(crate) fn total_ns(&self, bytes: u32) -> f64 {
        self.submit_ns(bytes) + self.unmap_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_give_the_figures_that_they_are_fitted_to() {
        let [pass, lazy, strict] = MODELS;
        for (bytes, want) in [(4096, 339.0), (16384, 1117.0), (65536, 3040.0)] {
            assert!((strict.submit_ns(bytes) / want - 1.0_f64).abs() < 0.25, "{bytes}: {}", strict.submit_ns(bytes));
        }
        assert!((strict.total_ns(4096) - 1550.0).abs() < 1.0 && (lazy.total_ns(4096) - 320.0).abs() < 1.0);
        assert!(pass.total_ns(1 << 20) < f64::EPSILON);
    }
}
