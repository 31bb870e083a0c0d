//! Schedulers by name, with their options: `scheduler=deadline&fifo_batch=4` behind a device's name, and the same words for `blkyard set`.

use blkyard_mq::{
    DeadlineConfig, FAIR_WEIGHTS_MAX, FairConfig, FairDevice, KyberConfig, SchedulerConfig, SliceKey, SliceOrder,
    TimesliceConfig,
};

use crate::spec::{Spec, SpecError};

/// The longest time that an option may name: an hour, in milliseconds and in microseconds.
const TIME_MAX_MS: u64 = 3_600_000;
const TIME_MAX_US: u64 = u32::MAX as u64 - 1;

/// Takes which scheduler is wanted, and its options. Without a name options are of the one that there is, `now`; nothing if neither is
/// named.
///
/// # Errors
/// There is no such scheduler, or an option does not take its value.
pub fn take_scheduler(spec: &mut Spec, now: SchedulerConfig) -> Result<Option<SchedulerConfig>, SpecError> {
    let named = spec.take_with("scheduler", "none, deadline, kyber, timeslice or fair", |name| match name {
        "none" => Some(SchedulerConfig::None),
        "deadline" => Some(SchedulerConfig::Deadline(DeadlineConfig::default())),
        "kyber" => Some(SchedulerConfig::Kyber(KyberConfig::default())),
        "timeslice" => Some(SchedulerConfig::Timeslice(TimesliceConfig::default())),
        "fair" => Some(SchedulerConfig::Fair(FairConfig::default())),
        _ => None,
    })?;
    let mut config = named.unwrap_or(now);
    match &mut config {
        SchedulerConfig::None => {}
        SchedulerConfig::Deadline(config) => take_deadline(spec, config)?,
        SchedulerConfig::Kyber(config) => take_kyber(spec, config)?,
        SchedulerConfig::Timeslice(config) => take_timeslice(spec, config)?,
        SchedulerConfig::Fair(config) => take_fair(spec, config)?,
    }
    Ok((named.is_some() || config != now).then_some(config))
}

/// The scheduler that a device's name asks for; none if it does not.
///
/// # Errors
/// As for [`take_scheduler`].
pub fn take_device_scheduler(spec: &mut Spec) -> Result<SchedulerConfig, SpecError> {
    Ok(take_scheduler(spec, SchedulerConfig::None)?.unwrap_or_default())
}

/// Takes a number into its place, if it is there.
fn take_into(spec: &mut Spec, key: &'static str, min: u64, max: u64, place: &mut u32) -> Result<(), SpecError> {
    if let Some(number) = spec.take_number(key, min, max.min(u32::MAX.into()))? {
        *place = number as u32;
    }
    Ok(())
}

fn take_deadline(spec: &mut Spec, config: &mut DeadlineConfig) -> Result<(), SpecError> {
    take_into(spec, "read_expire_ms", 0, TIME_MAX_MS, &mut config.read_expire_ms)?;
    take_into(spec, "write_expire_ms", 0, TIME_MAX_MS, &mut config.write_expire_ms)?;
    take_into(spec, "writes_starved", 0, 1_000_000, &mut config.writes_starved)?;
    take_into(spec, "fifo_batch", 1, 1_000_000, &mut config.fifo_batch)?;
    take_into(spec, "prio_aging_expire_ms", 0, TIME_MAX_MS, &mut config.prio_aging_expire_ms)?;
    take_into(spec, "async_depth", 0, 1_000_000, &mut config.async_depth)?;
    config.front_merges = spec.take_switch("front_merges")?.unwrap_or(config.front_merges);
    Ok(())
}

fn take_kyber(spec: &mut Spec, config: &mut KyberConfig) -> Result<(), SpecError> {
    take_into(spec, "read_target_us", 1, TIME_MAX_US, &mut config.read_target_us)?;
    take_into(spec, "write_target_us", 1, TIME_MAX_US, &mut config.write_target_us)?;
    take_into(spec, "discard_target_us", 1, TIME_MAX_US, &mut config.discard_target_us)
}

fn take_timeslice(spec: &mut Spec, config: &mut TimesliceConfig) -> Result<(), SpecError> {
    take_into(spec, "slice_us", 0, TIME_MAX_US, &mut config.slice_us)?;
    take_into(spec, "extensions", 0, 1_000_000, &mut config.extensions)?;
    let idle_us = spec.take_with("idle_us", "microseconds, or 'slice' for as long as the slice lasts", |text| {
        if text == "slice" { Some(u32::MAX) } else { text.parse().ok().filter(|us| *us < u32::MAX) }
    })?;
    config.idle_us = idle_us.unwrap_or(config.idle_us);
    take_into(spec, "tick_us", 0, TIME_MAX_US, &mut config.tick_us)?;
    let key = spec.take_with("key", "stream or queue", |key| match key {
        "stream" => Some(SliceKey::Stream),
        "queue" => Some(SliceKey::Queue),
        _ => None,
    })?;
    config.key = key.unwrap_or(config.key);
    let order = spec.take_with("order", "arrival or lowest", |order| match order {
        "arrival" => Some(SliceOrder::Arrival),
        "lowest" => Some(SliceOrder::Lowest),
        _ => None,
    })?;
    config.order = order.unwrap_or(config.order);
    config.drain = spec.take_switch("drain")?.unwrap_or(config.drain);
    Ok(())
}

fn take_fair(spec: &mut Spec, config: &mut FairConfig) -> Result<(), SpecError> {
    take_into(spec, "slice_ms", 1, TIME_MAX_MS, &mut config.slice_ms)?;
    take_into(spec, "target_ms", 1, TIME_MAX_MS, &mut config.target_ms)?;
    take_into(spec, "idle_ms", 0, TIME_MAX_MS, &mut config.idle_ms)?;
    take_into(spec, "async_percent", 1, 100, &mut config.async_percent)?;
    config.drain = spec.take_switch("drain")?.unwrap_or(config.drain);
    let device = spec.take_with("device", "measured, seeks or flat", |device| match device {
        "measured" => Some(FairDevice::Measured),
        "seeks" => Some(FairDevice::Seeks),
        "flat" => Some(FairDevice::Flat),
        _ => None,
    })?;
    config.device = device.unwrap_or(config.device);
    take_into(spec, "in_flight_kib", 0, u32::MAX.into(), &mut config.in_flight_kib)?;
    config.per_queue = spec.take_switch("per_queue")?.unwrap_or(config.per_queue);
    let wanted = format!("up to {FAIR_WEIGHTS_MAX} times STREAM:WEIGHT with a '+' between, weights from 10 to 1000");
    if let Some(weights) = spec.take_with("weights", &wanted, parse_weights)? {
        config.weights = weights;
    }
    Ok(())
}

fn parse_weights(text: &str) -> Option<[(u32, u16); FAIR_WEIGHTS_MAX]> {
    let mut weights = [(0, 0); FAIR_WEIGHTS_MAX];
    for (at, entry) in text.split('+').filter(|entry| !entry.is_empty()).enumerate() {
        let (stream, weight) = entry.split_once(':')?;
        let weight = weight.parse().ok().filter(|weight| (10..=1000).contains(weight))?;
        *weights.get_mut(at)? = (stream.parse().ok()?, weight);
    }
    Some(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(name: &str, now: SchedulerConfig) -> Result<Option<SchedulerConfig>, String> {
        let mut spec = Spec::parse(name).unwrap();
        let taken = take_scheduler(&mut spec, now).map_err(|error| error.to_string())?;
        spec.finish().map_err(|error| error.to_string())?;
        Ok(taken)
    }

    #[test]
    fn a_scheduler_is_named_with_its_options() {
        let batch = |fifo_batch| SchedulerConfig::Deadline(DeadlineConfig { fifo_batch, ..DeadlineConfig::default() });
        let slices = TimesliceConfig { slice_us: 250, idle_us: u32::MAX, drain: true, ..TimesliceConfig::default() };
        let mut fair = FairConfig { slice_ms: 50, device: FairDevice::Seeks, drain: false, ..FairConfig::default() };
        (fair.weights[0], fair.weights[1]) = ((3, 200), (7, 10));
        for (name, now, wanted) in [
            ("ram:1M", SchedulerConfig::None, None),
            (
                "ram:1M?scheduler=fair&slice_ms=50&device=seeks&drain=off&weights=3:200+7:10",
                batch(1),
                Some(SchedulerConfig::Fair(fair)),
            ),
            ("ram:1M?scheduler=none", batch(1), Some(SchedulerConfig::None)),
            ("ram:1M?scheduler=deadline&fifo_batch=4", SchedulerConfig::None, Some(batch(4))),
            ("ram:1M?fifo_batch=4", batch(1), Some(batch(4))),
            ("ram:1M", batch(1), None),
            (
                "ram:1M?scheduler=timeslice&slice_us=250&idle_us=slice&drain=on",
                batch(1),
                Some(SchedulerConfig::Timeslice(slices)),
            ),
        ] {
            assert_eq!(taken(name, now), Ok(wanted), "{name}");
        }
    }

    #[test]
    fn what_a_scheduler_does_not_know_is_refused() {
        for (name, words) in [
            ("ram:1M?scheduler=cfq", "none, deadline, kyber, timeslice or fair"),
            ("ram:1M?scheduler=deadline&slice_us=4", "unknown key 'slice_us'"),
            ("ram:1M?slice_us=4", "unknown key 'slice_us'"),
            ("ram:1M?scheduler=timeslice&key=cpu", "stream or queue"),
            ("ram:1M?scheduler=kyber&read_target_us=0", "from 1 to"),
            ("ram:1M?scheduler=fair&weights=3:9", "weights from 10 to 1000"),
            ("ram:1M?scheduler=fair&weights=1:10+2:10+3:10+4:10+5:10+6:10+7:10+8:10+9:10", "up to 8 times"),
        ] {
            let error = taken(name, SchedulerConfig::None).unwrap_err();
            assert!(error.contains(words), "{name}: {error}");
        }
    }
}
