//! Latency trackers of devices: `tracker=on&tracker_window_us=2000` behind a device's name, and the same words for
//! `blkyard set`.

use blkyard_mq::TrackerConfig;

use crate::spec::{Spec, SpecError};

/// A tracker wakes up once a window.
const WINDOW_US_MIN: u64 = 500;
const WINDOW_US_MAX: u64 = 60_000_000;
const SAMPLES_MAX: u64 = 1 << 20;
const NS_PER_US: u64 = 1000;

/// Takes the tracker's options. `now` is the present tracker, if it is on; `usual` the settings that one begins with.
/// Returns the tracker that there is to be: the present one if no option names another.
///
/// # Errors
/// An option does not accept its value, or names a setting of a tracker that is off.
pub fn take_tracker(
    spec: &mut Spec,
    now: Option<TrackerConfig>,
    usual: TrackerConfig,
) -> Result<Option<TrackerConfig>, SpecError> {
    let switch = spec.take_switch("tracker")?;
    let window_us = spec.take_number("tracker_window_us", WINDOW_US_MIN, WINDOW_US_MAX)?;
    let samples_min = spec.take_number("tracker_samples_min", 1, SAMPLES_MAX)?;
    let decay = spec.take_number("tracker_decay", 0, TrackerConfig::DECAY_MAX.into())?;
    let is_on = switch.unwrap_or(now.is_some());
    let has_settings = window_us.is_some() || samples_min.is_some() || decay.is_some();
    if !is_on {
        return if has_settings {
            let cause = "the settings of its tracker are given, and it is off";
            Err(SpecError::new(&spec.name, cause, "add tracker=on, or leave them out"))
        } else {
            Ok(None)
        };
    }
    let before = now.unwrap_or(usual);
    Ok(Some(TrackerConfig {
        window_ns: window_us.map_or(before.window_ns, |us| us * NS_PER_US),
        samples_min: samples_min.unwrap_or(before.samples_min),
        decay: decay.map_or(before.decay, |decay| decay as u8),
    }))
}

/// The tracker in a device's name, if it is on, once the device and so its usual settings are known: the name's options
/// are taken before the device is opened.
///
/// # Errors
/// As for [`take_tracker`].
pub fn take_device_tracker(
    spec: &mut Spec,
) -> Result<impl Fn(TrackerConfig) -> Option<TrackerConfig> + use<>, SpecError> {
    // Without a window the device decides.
    let open = TrackerConfig { window_ns: 0, ..TrackerConfig::default() };
    let named = take_tracker(spec, None, open)?;
    Ok(move |usual: TrackerConfig| {
        named.map(
            |named| if named.window_ns == 0 { TrackerConfig { window_ns: usual.window_ns, ..named } } else { named },
        )
    })
}

/// Sets the tracker in a device's name, as it would be given there.
pub fn put_tracker(spec: &mut Spec, tracker: Option<TrackerConfig>) {
    spec.put("tracker", tracker.map(|_| "on"));
    for (key, value) in tracker_options(tracker) {
        spec.put(key, value);
    }
}

/// The settings as options.
pub fn tracker_options(tracker: Option<TrackerConfig>) -> [(&'static str, Option<u64>); 3] {
    [
        ("tracker_window_us", tracker.map(|config| config.window_ns / NS_PER_US)),
        ("tracker_samples_min", tracker.map(|config| config.samples_min)),
        ("tracker_decay", tracker.map(|config| config.decay.into())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(name: &str, now: Option<TrackerConfig>) -> Result<Option<TrackerConfig>, String> {
        let mut spec = Spec::parse(name).unwrap();
        let taken = take_tracker(&mut spec, now, TrackerConfig::default()).map_err(|error| error.to_string())?;
        spec.finish().map_err(|error| error.to_string())?;
        Ok(taken)
    }

    #[test]
    fn settings_begin_with_the_usual_ones_and_change_one_by_one() {
        let usual = TrackerConfig::default();
        let slow = TrackerConfig { window_ns: 75_000_000, ..usual };
        assert_eq!(take("null:8M", None), Ok(None));
        assert_eq!(take("null:8M?tracker=off", None), Ok(None));
        assert_eq!(take("null:8M?tracker=on", None), Ok(Some(usual)));
        assert_eq!(take("null:8M?tracker=on", Some(slow)), Ok(Some(slow)));
        assert_eq!(take("null:8M?tracker_window_us=75000", Some(usual)), Ok(Some(slow)));
        let own = TrackerConfig { window_ns: 500_000, samples_min: 1, decay: 100 };
        let all = "null:8M?tracker=on&tracker_window_us=500&tracker_samples_min=1&tracker_decay=100";
        assert_eq!(take(all, None), Ok(Some(own)));
        let mut spec = Spec::parse("null:8M").unwrap();
        put_tracker(&mut spec, Some(own));
        assert_eq!(take_tracker(&mut spec, None, usual).unwrap(), Some(own));
        put_tracker(&mut spec, Some(own));
        let rotating = TrackerConfig { window_ns: TrackerConfig::ROTATIONAL_WINDOW_NS, ..usual };
        assert_eq!(take_device_tracker(&mut spec).unwrap()(rotating), Some(own), "as it was handed over");
        let mut spec = Spec::parse("null:8M?tracker=on").unwrap();
        assert_eq!(take_device_tracker(&mut spec).unwrap()(rotating), Some(rotating));
        put_tracker(&mut spec, None);
        assert_eq!(take_tracker(&mut spec, None, usual).unwrap(), None);
    }

    #[test]
    fn wrong_settings_are_refused_with_their_cure() {
        let error = take("null:8M?tracker_decay=10", None).unwrap_err();
        assert!(error.contains("it is off") && error.contains("add tracker=on"), "{error}");
        assert!(take("null:8M?tracker=off&tracker_decay=10", Some(TrackerConfig::default())).is_err());
        let error = take("null:8M?tracker=on&tracker_decay=101", None).unwrap_err();
        assert!(error.contains("from 0 to 100"), "{error}");
        assert!(take("null:8M?tracker=on&tracker_window_us=10", None).is_err());
    }
}
