//! Positions of sectors, and the times at which they pass under the head.
//!
//! Owned by the disk; pure. A disk is zones of tracks, outermost first; all tracks of a zone have equally many sectors.
//! Angles are times: how long after the index mark a sector begins to pass. Tracks are skewed by the time of a switch
//! to them, so sequential reads need not wait. All is integer, and several short accesses take the same time as one
//! long one: a rounding error would cost a revolution.

use super::DiskModel;
use crate::model::SECTOR_BYTES;

/// Tracks with the same number of sectors.
#[derive(Clone, Copy, Debug)]
struct Zone {
    first_sector: u64,
    first_track: u64,
    track_sectors: u64,
}

/// Where a sector lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SectorPosition {
    track: u64,
    /// Sectors of its track before it.
    in_track: u64,
    track_sectors: u64,
}

/// Zones, tracks and angles of a disk.
#[derive(Debug)]
pub(super) struct Layout {
    zones: Box<[Zone]>,
    heads: u64,
    cylinders: u64,
    turn_ns: u64,
    head_switch_ns: u64,
    cylinder_switch_ns: u64,
}

impl Layout {
    /// The layout of a disk with zones of equal width, whose sustained rate falls evenly from the first to the last.
    pub(super) fn new(model: &DiskModel) -> Layout {
        let cylinder_ns = (model.heads - 1) * model.head_switch_ns + model.cylinder_switch_ns;
        // While a track is read the platter turns once, and then for as long as the switch takes.
        let track_ns = model.turn_ns + cylinder_ns / model.heads;
        let track_sectors: Vec<u64> = (0..model.zones)
            .map(|zone| {
                let fall = (model.outer_bytes_per_s - model.inner_bytes_per_s) * zone / (model.zones - 1).max(1);
                (model.outer_bytes_per_s - fall) * track_ns / 1_000_000_000 / SECTOR_BYTES
            })
            .collect();
        let sectors_across: u64 = track_sectors.iter().map(|sectors| sectors * model.heads).sum();
        let zone_tracks = model.sectors.div_ceil(sectors_across).max(1) * model.heads;
        let mut first_sector = 0;
        let zone = |(number, track_sectors): (u64, u64)| {
            let zone = Zone { first_sector, first_track: number * zone_tracks, track_sectors };
            first_sector += zone_tracks * track_sectors;
            zone
        };
        Layout {
            zones: (0..).zip(track_sectors).map(zone).collect(),
            heads: model.heads,
            cylinders: zone_tracks / model.heads * model.zones,
            turn_ns: model.turn_ns,
            head_switch_ns: model.head_switch_ns,
            cylinder_switch_ns: model.cylinder_switch_ns,
        }
    }

    fn place(&self, sector: u64) -> SectorPosition {
        let zone = self.zones.partition_point(|zone| zone.first_sector <= sector) - 1;
        let Zone { first_sector, first_track, track_sectors } = self.zones[zone];
        let (track, in_track) = ((sector - first_sector) / track_sectors, (sector - first_sector) % track_sectors);
        SectorPosition { track: first_track + track, in_track, track_sectors }
    }

    /// The track of a sector, counted from the outermost.
    pub(super) fn track(&self, sector: u64) -> u64 {
        self.place(sector).track
    }

    /// Which cylinder a track belongs to.
    pub(super) fn cylinder(&self, track: u64) -> u64 {
        track / self.heads
    }

    /// Cylinders of the whole disk.
    pub(super) fn cylinders(&self) -> u64 {
        self.cylinders
    }

    /// How far around a track a sector begins, from where the track begins.
    fn around_ns(&self, in_track: u64, track_sectors: u64) -> u64 {
        in_track * self.turn_ns / track_sectors
    }

    /// How long after the index mark a sector begins to pass.
    pub(super) fn angle_ns(&self, sector: u64) -> u64 {
        let SectorPosition { track, in_track, track_sectors } = self.place(sector);
        let (cylinder, head) = (track / self.heads, track % self.heads);
        let switches = cylinder * (self.heads - 1) + head;
        let skew_ns = switches * self.head_switch_ns + cylinder * self.cylinder_switch_ns;
        (skew_ns + self.around_ns(in_track, track_sectors)) % self.turn_ns
    }

    /// The switch from a track to the next.
    fn switch_ns(&self, track: u64) -> u64 {
        if (track + 1).is_multiple_of(self.heads) { self.cylinder_switch_ns } else { self.head_switch_ns }
    }

    /// When `end` is reached if `from` begins to pass at `since_ns`, and the arm follows.
    pub(super) fn passed_ns(&self, from: u64, since_ns: u64, end: u64) -> u64 {
        let (mut sector, mut at_ns) = (from, since_ns);
        loop {
            let SectorPosition { track, in_track, track_sectors } = self.place(sector);
            let begun_ns = self.around_ns(in_track, track_sectors);
            let left = track_sectors - in_track;
            if end - sector <= left {
                return at_ns + self.around_ns(in_track + (end - sector), track_sectors) - begun_ns;
            }
            sector += left;
            at_ns += self.turn_ns - begun_ns + self.switch_ns(track);
        }
    }

    /// Position of the head at `now_ns` if `from` began to pass at `since_ns`: the sector under it is read to its end.
    /// At most `limit`.
    pub(super) fn reached(&self, from: u64, since_ns: u64, limit: u64, now_ns: u64) -> u64 {
        let (mut sector, mut at_ns) = (from, since_ns);
        while sector < limit && at_ns < now_ns {
            let SectorPosition { track, in_track, track_sectors } = self.place(sector);
            let begun_ns = self.around_ns(in_track, track_sectors);
            let over_ns = at_ns + self.turn_ns - begun_ns;
            if over_ns > now_ns {
                let around_ns = begun_ns + (now_ns - at_ns);
                let mut reached = around_ns * track_sectors / self.turn_ns;
                while self.around_ns(reached, track_sectors) < around_ns {
                    reached += 1;
                }
                return (sector - in_track + reached).min(limit);
            }
            sector += track_sectors - in_track;
            at_ns = over_ns + self.switch_ns(track);
        }
        sector.min(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout() -> Layout {
        Layout::new(&DiskModel::DESKTOP_2012)
    }

    #[test]
    fn what_is_in_order_passes_without_waiting_for_the_platter() {
        let (layout, turn_ns) = (layout(), DiskModel::DESKTOP_2012.turn_ns);
        for from in [0, 7_777_777, 999_999_999] {
            let end_ns = layout.passed_ns(from, layout.angle_ns(from), from + 50_000);
            // The next one begins to pass after a switch at most, and that only at the end of a track.
            let wait_ns = (layout.angle_ns(from + 50_000) + turn_ns - end_ns % turn_ns) % turn_ns;
            let at_edge = layout.track(from + 50_000) != layout.track(from + 49_999);
            assert_eq!(wait_ns > 0, at_edge, "{from}: {wait_ns}");
            assert!(wait_ns <= 1_800_000, "{from}: {wait_ns}");
        }
    }

    #[test]
    fn the_disk_is_as_large_as_it_says_and_hardly_larger() {
        let (layout, model) = (layout(), DiskModel::DESKTOP_2012);
        let last = layout.track(model.sectors - 1);
        let tracks = layout.cylinders() * model.heads;
        assert!(last < tracks && last > tracks - tracks / 1000, "{last} of {tracks}");
    }

    proptest! {
        /// In several goes as in one, and reached when passed.
        #[test]
        fn time_and_place_agree(from in 0_u64..1_900_000_000, first in 1_u64..6_000, second in 1_u64..6_000, since_ns in 0_u64..1 << 40) {
            let layout = layout();
            let (middle, end) = (from + first, from + first + second);
            let end_ns = layout.passed_ns(from, since_ns, end);
            prop_assert_eq!(layout.reached(from, since_ns, u64::MAX, end_ns), end);
            prop_assert_eq!(layout.reached(from, since_ns, u64::MAX, end_ns - 1), end);
            prop_assert_eq!(layout.reached(from, since_ns, middle, end_ns), middle);
            let middle_ns = layout.passed_ns(from, since_ns, middle);
            let turn_ns = layout.turn_ns;
            let wait_ns = (layout.angle_ns(middle) + turn_ns - (layout.angle_ns(from) + middle_ns - since_ns) % turn_ns) % turn_ns;
            prop_assert_eq!(layout.passed_ns(middle, middle_ns + wait_ns, end), end_ns);
        }
    }
}
