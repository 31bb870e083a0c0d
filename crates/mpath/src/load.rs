//! I/Os in flight on each path, for policies that count them.

use crate::PATHS_MAX;

/// Number of I/Os in flight by path, of one lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    by_path: [u32; PATHS_MAX],
}

impl InFlight {
    #[inline]
    pub(crate) fn of(&self, path: usize) -> u32 {
        self.by_path[path]
    }

    #[inline]
    pub(crate) fn begin(&mut self, path: usize) {
        self.by_path[path] += 1;
    }

    #[inline]
    pub(crate) fn end(&mut self, path: usize) {
        self.by_path[path] = self.by_path[path].saturating_sub(1);
    }
}
