//! Schedulers by name, with their options: `scheduler=deadline&fifo_batch=4` behind a device's name, and the same words
//! for `blkyard set`.

use blkyard_mq::{
    DeadlineConfig, FAIR_WEIGHTS_MAX, FairConfig, FairDevice, KyberConfig, SchedulerConfig, SliceKey, SliceOrder,
    StreamKey, TimesliceConfig,
};

use crate::spec::{Spec, SpecError};

/// The longest time that an option may name: an hour, in milliseconds and in microseconds.
const TIME_MAX_MS: u64 = 3_600_000;
const TIME_MAX_US: u64 = u32::MAX as u64 - 1;

/// Takes the scheduler and its options. Without a name the options are those of the current one, `now`; `None` if
/// neither is named.
///
/// # Errors
/// There is no such scheduler, or an option does not accept its value.
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
    Options::Take(spec).of(&mut config)?;
    Ok((named.is_some() || config != now).then_some(config))
}

/// The scheduler in a device's name; none without one.
///
/// # Errors
/// As for [`take_scheduler`].
pub fn take_device_scheduler(spec: &mut Spec) -> Result<SchedulerConfig, SpecError> {
    Ok(take_scheduler(spec, SchedulerConfig::None)?.unwrap_or_default())
}

/// Sets the scheduler in a device's name.
///
/// # Errors
/// The name's current scheduler is invalid.
pub fn put_device_scheduler(spec: &mut Spec, mut config: SchedulerConfig) -> Result<(), SpecError> {
    take_device_scheduler(spec)?;
    spec.put("scheduler", Some(config.name()));
    Options::Put(spec).of(&mut config)
}

/// Direction for a scheduler's options: taken from a name, or put into it. One list of them serves both.
enum Options<'a> {
    Take(&'a mut Spec),
    Put(&'a mut Spec),
}

impl Options<'_> {
    fn of(&mut self, config: &mut SchedulerConfig) -> Result<(), SpecError> {
        match config {
            SchedulerConfig::None => Ok(()),
            SchedulerConfig::Deadline(config) => self.of_deadline(config),
            SchedulerConfig::Kyber(config) => self.of_kyber(config),
            SchedulerConfig::Timeslice(config) => self.of_timeslice(config),
            SchedulerConfig::Fair(config) => self.of_fair(config),
        }
    }

    fn of_deadline(&mut self, config: &mut DeadlineConfig) -> Result<(), SpecError> {
        self.number("read_expire_ms", 0, TIME_MAX_MS, &mut config.read_expire_ms)?;
        self.number("write_expire_ms", 0, TIME_MAX_MS, &mut config.write_expire_ms)?;
        self.number("writes_starved", 0, 1_000_000, &mut config.writes_starved)?;
        self.number("fifo_batch", 1, 1_000_000, &mut config.fifo_batch)?;
        self.number("prio_aging_expire_ms", 0, TIME_MAX_MS, &mut config.prio_aging_expire_ms)?;
        self.number("async_depth", 0, 1_000_000, &mut config.async_depth)?;
        self.switch("front_merges", &mut config.front_merges)
    }

    fn of_kyber(&mut self, config: &mut KyberConfig) -> Result<(), SpecError> {
        self.number("read_target_us", 1, TIME_MAX_US, &mut config.read_target_us)?;
        self.number("write_target_us", 1, TIME_MAX_US, &mut config.write_target_us)?;
        self.number("discard_target_us", 1, TIME_MAX_US, &mut config.discard_target_us)
    }

    fn of_timeslice(&mut self, config: &mut TimesliceConfig) -> Result<(), SpecError> {
        self.number("slice_us", 0, TIME_MAX_US, &mut config.slice_us)?;
        self.number("extensions", 0, 1_000_000, &mut config.extensions)?;
        let wanted = "a number of microseconds, or 'slice' for the rest of the slice";
        let parse =
            |text: &str| if text == "slice" { Some(u32::MAX) } else { text.parse().ok().filter(|us| *us < u32::MAX) };
        let show = |us: &u32| if *us == u32::MAX { "slice".into() } else { us.to_string() };
        self.option("idle_us", wanted, parse, show, &mut config.idle_us)?;
        self.number("tick_us", 0, TIME_MAX_US, &mut config.tick_us)?;
        self.word("key", &[("stream", SliceKey::Stream), ("queue", SliceKey::Queue)], &mut config.key)?;
        self.word("order", &[("arrival", SliceOrder::Arrival), ("lowest", SliceOrder::Lowest)], &mut config.order)?;
        self.switch("drain", &mut config.drain)
    }

    fn of_fair(&mut self, config: &mut FairConfig) -> Result<(), SpecError> {
        self.number("slice_ms", 1, TIME_MAX_MS, &mut config.slice_ms)?;
        self.number("target_ms", 1, TIME_MAX_MS, &mut config.target_ms)?;
        self.number("idle_ms", 0, TIME_MAX_MS, &mut config.idle_ms)?;
        self.number("async_percent", 1, 100, &mut config.async_percent)?;
        self.switch("drain", &mut config.drain)?;
        let devices = [("measured", FairDevice::Measured), ("seeks", FairDevice::Seeks), ("flat", FairDevice::Flat)];
        self.word("device", &devices, &mut config.device)?;
        let keys = [("sequence", StreamKey::Sequence), ("queue", StreamKey::Queue), ("export", StreamKey::Export)];
        self.word("stream", &keys, &mut config.stream)?;
        self.number("in_flight_kib", 0, u32::MAX.into(), &mut config.in_flight_kib)?;
        self.switch("per_queue", &mut config.per_queue)?;
        let wanted =
            format!("up to {FAIR_WEIGHTS_MAX} pairs STREAM:WEIGHT joined by '+', with weights from 10 to 1000");
        self.option("weights", &wanted, parse_weights, show_weights, &mut config.weights)
    }

    /// An option of any type: `wanted` describes its values.
    fn option<T>(
        &mut self,
        key: &'static str,
        wanted: &str,
        parse: impl FnOnce(&str) -> Option<T>,
        show: impl FnOnce(&T) -> String,
        place: &mut T,
    ) -> Result<(), SpecError> {
        match self {
            Options::Take(spec) => {
                if let Some(value) = spec.take_with(key, wanted, parse)? {
                    *place = value;
                }
            }
            Options::Put(spec) => spec.put(key, Some(show(place))),
        }
        Ok(())
    }

    fn number(&mut self, key: &'static str, min: u64, max: u64, place: &mut u32) -> Result<(), SpecError> {
        let bounds = min as u32..=max.min(u32::MAX.into()) as u32;
        let wanted = format!("a number from {} to {}", bounds.start(), bounds.end());
        let parse = |text: &str| text.parse().ok().filter(|number| bounds.contains(number));
        self.option(key, &wanted, parse, u32::to_string, place)
    }

    fn switch(&mut self, key: &'static str, place: &mut bool) -> Result<(), SpecError> {
        match self {
            Options::Take(spec) => *place = spec.take_switch(key)?.unwrap_or(*place),
            Options::Put(spec) => spec.put(key, Some(if *place { "on" } else { "off" })),
        }
        Ok(())
    }

    fn word<T: Copy + PartialEq>(
        &mut self,
        key: &'static str,
        names: &[(&str, T)],
        place: &mut T,
    ) -> Result<(), SpecError> {
        let wanted = names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ");
        let parse = |text: &str| names.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        let show = |value: &T| {
            let name = names.iter().find(|(_, named)| named == value).map(|(name, _)| *name);
            name.unwrap_or_else(|| unreachable!("every value of {key} has a name")).to_owned()
        };
        self.option(key, &wanted, parse, show, place)
    }
}

type Weights = [(u32, u16); FAIR_WEIGHTS_MAX];

fn parse_weights(text: &str) -> Option<Weights> {
    let mut weights = [(0, 0); FAIR_WEIGHTS_MAX];
    for (at, entry) in text.split('+').filter(|entry| !entry.is_empty()).enumerate() {
        let (stream, weight) = entry.split_once(':')?;
        let weight = weight.parse().ok().filter(|weight| (10..=1000).contains(weight))?;
        *weights.get_mut(at)? = (stream.parse().ok()?, weight);
    }
    Some(weights)
}

fn show_weights(weights: &Weights) -> String {
    let given = weights.iter().filter(|(_, weight)| *weight > 0);
    given.map(|(stream, weight)| format!("{stream}:{weight}")).collect::<Vec<_>>().join("+")
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
            ("ram:1M?scheduler=fair&weights=1:10+2:10+3:10+4:10+5:10+6:10+7:10+8:10+9:10", "up to 8 pairs"),
        ] {
            let error = taken(name, SchedulerConfig::None).unwrap_err();
            assert!(error.contains(words), "{name}: {error}");
        }
    }

    #[test]
    fn what_was_set_is_written_into_the_name_in_the_place_of_what_was_there() {
        for now in ["", "?scheduler=fair&weights=3:200+7:10", "?scheduler=timeslice&slice_us=9&idle_us=slice"] {
            for wanted in [
                "scheduler=none",
                "scheduler=deadline&read_expire_ms=1&write_expire_ms=2&writes_starved=3&fifo_batch=4&prio_aging_expire_ms=5&async_depth=6&front_merges=off",
                "scheduler=kyber&read_target_us=1&write_target_us=2&discard_target_us=3",
                "scheduler=timeslice&slice_us=1&extensions=2&idle_us=slice&tick_us=4&key=queue&order=lowest&drain=on",
                "scheduler=timeslice&idle_us=5",
                "scheduler=fair&slice_ms=1&target_ms=2&idle_ms=3&async_percent=4&drain=off&device=flat&stream=queue&in_flight_kib=5&per_queue=on&weights=3:200+7:10",
                "scheduler=fair&device=seeks&stream=export",
                "scheduler=fair",
            ] {
                let config = taken(&format!("ram:1M?{wanted}"), SchedulerConfig::None).unwrap().unwrap();
                let mut spec = Spec::parse(&format!("ram:1M{now}")).unwrap();
                put_device_scheduler(&mut spec, config).unwrap();
                assert_eq!(take_device_scheduler(&mut spec), Ok(config), "{wanted}, and was {now}");
                spec.finish().unwrap();
            }
        }
    }
}
