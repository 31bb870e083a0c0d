//! Figures that were published after the post, each beside ours: K. Busch's table of 31 August 2022, and the dma-buf
//! series of 2025.

use super::host::HostPairs;
use super::interval::MedianInterval;
use super::mapping::{MODELS, MappingModel};
use super::post::{DMA_BUF, FOLLOW_UP, FollowUpLoad};
use super::report::{size, spread};
use super::verdicts::{PremappedClaim, PremappedVerdict, charged, interrupt, most, polled, ratio};
use super::{Bed, IoMemory, PremappedRow, PremappedRows};

/// Largest difference of IOPS that count as equal.
const EQUAL: f64 = 0.05;

/// All of them with their verdicts.
pub(crate) fn follow_up(rows: &PremappedRows, host: &Result<HostPairs, String>) -> Vec<PremappedClaim> {
    let mut claims: Vec<_> = FOLLOW_UP.iter().map(|load| iops(rows, load)).collect();
    claims.extend(FOLLOW_UP[3..5].iter().map(|load| registered(load, host)));
    claims.extend(FOLLOW_UP.iter().filter_map(|load| cpu(rows, load)));
    claims.extend(
        DMA_BUF.into_iter().zip(MODELS.into_iter().rev()).map(|(figures, model)| dma_buf(rows, figures, model)),
    );
    claims
}

fn load_name(load: &FollowUpLoad) -> String {
    format!("depth {}, {}", load.depth, size(load.bytes))
}

/// The row of one device with the batch that is nearest to a depth.
fn row(rows: &PremappedRows, load: &FollowUpLoad, memory: IoMemory) -> PremappedRow {
    rows.get(Bed::One, load.bytes, if load.depth == 1 { 1 } else { 8 }, memory).clone()
}

/// Mapped against the others. A drive's time of an I/O is in these figures, and not in ours.
fn iops(rows: &PremappedRows, load: &FollowUpLoad) -> PremappedClaim {
    let [_, _, strict] = MODELS;
    let [registered, mapped] = [IoMemory::Registered, IoMemory::Mapped].map(|memory| row(rows, load, memory));
    let all = charged(strict);
    let saved = MedianInterval::of(all(&registered).into_iter().zip(all(&mapped)).map(|(one, other)| one - other));
    let [of_plain, of_registered] = [load.iops[2] / load.iops[0], load.iops[2] / load.iops[1]];
    PremappedClaim {
        what: format!(
            "{}: mapped has {of_plain:.2} of the IOPS of plain, {of_registered:.2} of registered ({:.1} K)",
            load_name(load),
            load.iops[2]
        ),
        found: format!(
            "an I/O takes {:.2} us less than registered with the strict model, {:.2} us there",
            saved.median / 1e3,
            load.saved_us()
        ),
        verdict: PremappedVerdict::NotApplicable,
        reason: "the time of a drive is in these IOPS, and a null device has none".into(),
    }
}

/// Registered against plain, at the depth of our pairs on a file.
fn registered(load: &FollowUpLoad, host: &Result<HostPairs, String>) -> PremappedClaim {
    let what = format!("{}: registered has {:.2} of the IOPS of plain", load_name(load), load.iops[1] / load.iops[0]);
    let pair = host.as_ref().map(|host| host.pairs.iter().find(|pair| pair.bytes == load.bytes));
    let (found, verdict, reason) = match pair {
        Ok(Some(pair)) => (
            format!("{}, io_uring on a file", spread(pair.iops_ratio)),
            pair.is_faster,
            "fixed buffers are pinned once; neither is mapped once",
        ),
        Ok(None) => ("no pair".into(), PremappedVerdict::NotShown, "this size was not measured"),
        Err(why) => (why.clone(), PremappedVerdict::NotShown, "there is no disk for the pairs without a model"),
    };
    PremappedClaim { what, found, verdict, reason: reason.into() }
}

/// CPU of mapped memory against plain, one interrupt for each I/O at depth 1.
fn cpu(rows: &PremappedRows, load: &FollowUpLoad) -> Option<PremappedClaim> {
    let (limit, cpu) = (load.cpu_ratio()?, load.system_cpu?);
    let [plain, mapped] = [IoMemory::Plain, IoMemory::Mapped].map(|memory| row(rows, load, memory));
    let value = ratio(&mapped, &plain, interrupt(rows));
    let [_, _, strict] = MODELS;
    let (all, price) = (interrupt(rows), strict.total_ns(load.bytes));
    let with = all(&mapped).into_iter().zip(all(&plain)).map(|(mapped, plain)| mapped / (plain + price));
    let with = MedianInterval::of(with);
    // The model decides nothing where the claim holds without it.
    let verdict = match (most(value, limit), most(with, limit)) {
        (PremappedVerdict::Yes, _) => PremappedVerdict::Yes,
        (_, PremappedVerdict::Yes) => PremappedVerdict::BuiltIn,
        (_, verdict) => verdict,
    };
    Some(PremappedClaim {
        what: format!(
            "{}: mapped takes {:.2} of the system CPU of plain ({} and {} %), {limit:.2} for each I/O",
            load_name(load),
            cpu[2] / cpu[0],
            cpu[2],
            cpu[0]
        ),
        found: format!("{} without a model of mapping, {:.3} with the strict one", spread(value), with.median),
        verdict,
        reason: "by interrupt, one for each batch; pinning of plain memory is not charged".into(),
    })
}

/// Mappings made once against mappings for each I/O of 4 KiB, many I/Os in flight.
fn dma_buf(rows: &PremappedRows, (name, without, with): (&str, f64, f64), model: MappingModel) -> PremappedClaim {
    let [registered, mapped] =
        [IoMemory::Registered, IoMemory::Mapped].map(|memory| rows.get(Bed::One, 4 << 10, 31, memory));
    let value = ratio(registered, mapped, charged(model));
    let is_model = model.total_ns(4 << 10) > 0.0;
    let (verdict, reason) = if is_model {
        (PremappedVerdict::BuiltIn, "the model is fitted to the difference; an I/O takes 200 ns there")
    } else {
        (equal(ratio(registered, mapped, polled)), "nothing is modelled; up to 5 % count as equal")
    };
    PremappedClaim {
        what: format!("dma-buf, {name} IOMMU: mapped once has {:.1} times the IOPS ({with} M)", with / without),
        found: spread(value),
        verdict,
        reason: reason.into(),
    }
}

fn equal(value: MedianInterval) -> PremappedVerdict {
    let (least, limit) = (1.0 - EQUAL, 1.0 + EQUAL);
    if value.low >= least && value.high <= limit {
        PremappedVerdict::Yes
    } else if value.high < least || value.low > limit {
        PremappedVerdict::No
    } else {
        PremappedVerdict::Undecided
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_ratios_follow_from_the_published_figures() {
        let near = |value: f64, want: f64| assert!((value - want).abs() < 0.011, "{value} is not {want}");
        for (load, [of_plain, of_registered]) in
            FOLLOW_UP.iter().zip([[1.13, 1.07], [1.21, 1.19], [1.21, 1.13], [1.50, 1.42], [1.13, 1.05], [1.0, 1.0]])
        {
            near(load.iops[2] / load.iops[0], of_plain);
            near(load.iops[2] / load.iops[1], of_registered);
        }
        let cpu = FOLLOW_UP.iter().filter_map(|load| load.system_cpu).map(|cpu| cpu[2] / cpu[0]);
        cpu.zip([0.42, 0.56, 0.51]).for_each(|(value, want)| near(value, want));
        for ((_, without, with), want) in DMA_BUF.into_iter().zip([8.79, 2.596, 1.0]) {
            near(with / without, want);
        }
    }

    #[test]
    fn iops_are_equal_within_their_noise_only() {
        let interval = |low, high| MedianInterval { low, median: f64::midpoint(low, high), high };
        assert_eq!(equal(interval(0.96, 1.04)), PremappedVerdict::Yes);
        assert_eq!(equal(interval(0.94, 1.04)), PremappedVerdict::Undecided);
        assert_eq!(equal(interval(1.06, 1.1)), PremappedVerdict::No);
    }
}
