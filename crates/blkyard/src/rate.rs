//! Rate limits of devices and exports: `iops_max=1000&bytes_per_s_max=100M&burst_ms=50` behind a name, and the same
//! words for `blkyard set`.

use std::sync::{Arc, Mutex, PoisonError};

use blkyard_mq::{RateConfig, RateLimit};

use crate::spec::{Spec, SpecError, parse_size};

/// More I/Os a second than any lane passes.
const IOPS_MAX: u64 = 10_000_000;
/// From the smallest usual block to more than memory moves.
const BYTES_PER_S: std::ops::RangeInclusive<u64> = 4096..=1 << 40;
/// An I/O that may have been saved up for longer than this was not meant to be limited.
const BURST_MS_MAX: u64 = 60_000;

/// The limit of a device or an export, which may change; and its configuration, even if unlimited: a burst is kept for
/// the next limit.
#[derive(Debug, Default)]
pub struct RateSlot(Mutex<(RateConfig, Option<Arc<RateLimit>>)>);

impl RateSlot {
    /// One with this limit, if it is any.
    pub fn new(config: RateConfig) -> RateSlot {
        RateSlot(Mutex::new((config, RateLimit::new(config).map(Arc::new))))
    }

    /// The limit, if there is one.
    pub fn limit(&self) -> Option<Arc<RateLimit>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Its configuration.
    pub fn config(&self) -> RateConfig {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Replaces the limit, for queues that are told of it.
    pub fn set(&self, config: RateConfig) {
        let limit = RateLimit::new(config).map(Arc::new);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (config, limit);
    }

    /// Writes it into the name of its object, as it would be given there.
    pub fn put_into(&self, spec: &mut Spec) {
        options(self.config()).into_iter().for_each(|(key, value)| spec.put(key, value));
    }
}

/// A limit as options; `None` for unlimited values.
pub fn options(config: RateConfig) -> [(&'static str, Option<u64>); 3] {
    let some = |n: u64| (n > 0).then_some(n);
    let is_any = config.iops > 0 || config.bytes_per_s > 0;
    [
        ("iops_max", some(config.iops)),
        ("bytes_per_s_max", some(config.bytes_per_s)),
        ("burst_ms", is_any.then_some(config.burst_ms.into())),
    ]
}

/// A limit in words.
pub fn describe(config: RateConfig) -> String {
    let words: Vec<_> =
        options(config).into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?))).collect();
    if words.is_empty() { "no limit".into() } else { format!("limited to {}", words.join(" ")) }
}

/// Takes a limit. Values that are not named stay as in `now`; `None` if none is named.
///
/// # Errors
/// A value is out of bounds, or there is a burst without a rate.
pub fn take_rate(spec: &mut Spec, now: RateConfig) -> Result<Option<RateConfig>, SpecError> {
    let iops = spec.take_with("iops_max", "I/Os per second from 1 to 10000000, or off", |text| match text {
        "off" | "0" => Some(0),
        _ => text.parse().ok().filter(|iops| (1..=IOPS_MAX).contains(iops)),
    })?;
    let what = "bytes per second from 4k to 1T, such as 100M, or off";
    let bytes_per_s = spec.take_with("bytes_per_s_max", what, |text| match text {
        "off" | "0" => Some(0),
        _ => parse_size(text).filter(|bytes| BYTES_PER_S.contains(bytes)),
    })?;
    let burst_ms = spec.take_number("burst_ms", RateConfig::BURST_MS_MIN.into(), BURST_MS_MAX)?;
    let config = RateConfig {
        iops: iops.unwrap_or(now.iops),
        bytes_per_s: bytes_per_s.unwrap_or(now.bytes_per_s),
        burst_ms: burst_ms.map_or(now.burst_ms, |ms| ms as u32),
    };
    if burst_ms.is_some() && config.iops == 0 && config.bytes_per_s == 0 {
        let cause = "burst_ms needs a rate limit, and none is set";
        return Err(SpecError::new(&spec.name, cause, "give iops_max or bytes_per_s_max with it"));
    }
    Ok((iops.is_some() || bytes_per_s.is_some() || burst_ms.is_some()).then_some(config))
}

/// The limit in a name; unlimited without one.
///
/// # Errors
/// As for [`take_rate`].
pub fn take_own_rate(spec: &mut Spec) -> Result<RateConfig, SpecError> {
    Ok(take_rate(spec, RateConfig::default())?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: RateConfig = RateConfig { iops: 0, bytes_per_s: 0, burst_ms: 100 };
    const SOME: RateConfig = RateConfig { iops: 500, bytes_per_s: 1 << 20, burst_ms: 20 };

    fn taken(name: &str, now: RateConfig) -> Result<Option<RateConfig>, String> {
        let mut spec = Spec::parse(name).unwrap();
        let taken = take_rate(&mut spec, now).map_err(|error| error.to_string())?;
        spec.finish().map_err(|error| error.to_string())?;
        Ok(taken)
    }

    #[test]
    fn a_limit_is_named_with_its_options() {
        for (name, now, wanted) in [
            ("ram:1M", SOME, None),
            ("ram:1M?iops_max=1000", NONE, Some(RateConfig { iops: 1000, ..NONE })),
            (
                "ram:1M?bytes_per_s_max=100M&burst_ms=5",
                NONE,
                Some(RateConfig { bytes_per_s: 100 << 20, burst_ms: 5, ..NONE }),
            ),
            ("ram:1M?burst_ms=7", SOME, Some(RateConfig { burst_ms: 7, ..SOME })),
            ("ram:1M?iops_max=off", SOME, Some(RateConfig { iops: 0, ..SOME })),
            ("ram:1M?iops_max=0&bytes_per_s_max=off", SOME, Some(RateConfig { iops: 0, bytes_per_s: 0, ..SOME })),
        ] {
            assert_eq!(taken(name, now), Ok(wanted), "{name}");
        }
    }

    #[test]
    fn what_is_no_limit_is_refused_with_what_would_be_one() {
        for (name, words) in [
            ("ram:1M?iops_max=lots", "from 1 to 10000000, or off"),
            ("ram:1M?iops_max=10000001", "from 1 to 10000000, or off"),
            ("ram:1M?bytes_per_s_max=100", "from 4k to 1T, such as 100M, or off"),
            ("ram:1M?iops_max=5&burst_ms=0", "a number from 1 to 60000"),
            ("ram:1M?burst_ms=5", "give iops_max or bytes_per_s_max with it"),
            ("ram:1M?iops=5", "the known keys are: iops_max, bytes_per_s_max, burst_ms"),
        ] {
            let error = taken(name, NONE).unwrap_err();
            assert!(error.starts_with(name) && error.contains(words), "{name}: {error}");
        }
    }

    #[test]
    fn a_limit_that_was_set_is_written_into_the_name() {
        let mut spec = Spec::parse("ram:1M?iops_max=9").unwrap();
        RateSlot::new(SOME).put_into(&mut spec);
        assert_eq!(take_own_rate(&mut spec), Ok(SOME));
        let mut spec = Spec::parse("ram:1M?iops_max=9&burst_ms=1").unwrap();
        RateSlot::default().put_into(&mut spec);
        assert_eq!(take_own_rate(&mut spec), Ok(NONE));
    }

    #[test]
    fn a_limit_that_is_off_keeps_its_burst_for_the_next() {
        let slot = RateSlot::new(SOME);
        let set = |words| slot.set(taken(words, slot.config()).unwrap().unwrap());
        set("ram:1M?iops_max=off&bytes_per_s_max=off");
        assert!(slot.limit().is_none());
        let mut spec = Spec::parse("ram:1M").unwrap();
        slot.put_into(&mut spec);
        assert_eq!(take_own_rate(&mut spec), Ok(NONE), "what is no limit is none elsewhere");
        set("ram:1M?iops_max=9");
        assert_eq!(slot.config(), RateConfig { iops: 9, bytes_per_s: 0, ..SOME });
        assert_eq!(slot.limit().unwrap().config(), slot.config());
    }
}
