//! The weight of an export beside others of its device, where `scheduler=fair` shares it.

use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use blkyard::spec::{Spec, SpecError};
use blkyard_mq::{FairConfig, SchedulerConfig};

/// Its option.
const KEY: &str = "scheduler_weight";

/// Weight of an export. Each change is passed to its queues by whoever makes it.
pub struct WeightSlot(AtomicU16);

impl WeightSlot {
    /// Takes it out of the options of an export.
    ///
    /// # Errors
    /// It is no weight.
    pub fn take_out_of(spec: &mut Spec) -> Result<WeightSlot, SpecError> {
        Ok(WeightSlot(AtomicU16::new(take_weight(spec)?.unwrap_or(FairConfig::WEIGHT))))
    }

    /// Writes it into the name of its export, as it would be given there.
    pub fn put_into(&self, spec: &mut Spec) {
        let weight = self.get();
        spec.put(KEY, (weight != FairConfig::WEIGHT).then_some(weight));
    }

    /// The weight.
    pub fn get(&self) -> u16 {
        self.0.load(Relaxed)
    }

    /// Replaces it, for queues that are told of it.
    pub fn set(&self, weight: u16) {
        self.0.store(weight, Relaxed);
    }

    /// The scheduler of a device as queues of this export have it.
    pub fn of(&self, mut scheduler: SchedulerConfig) -> SchedulerConfig {
        if let SchedulerConfig::Fair(config) = &mut scheduler {
            config.weight = self.get();
        }
        scheduler
    }
}

impl Default for WeightSlot {
    fn default() -> WeightSlot {
        WeightSlot(AtomicU16::new(FairConfig::WEIGHT))
    }
}

/// Takes the weight out of what an export is to be, if it is there.
///
/// # Errors
/// It is no weight.
pub fn take_weight(spec: &mut Spec) -> Result<Option<u16>, SpecError> {
    let (least, most) = (u64::from(FairConfig::WEIGHT_MIN), u64::from(FairConfig::WEIGHT_MAX));
    Ok(spec.take_number(KEY, least, most)?.map(|weight| weight as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_read_written_and_refused() {
        for (name, weight, again) in [
            ("vhost-user-blk:s", 100, None),
            ("vhost-user-blk:s?scheduler_weight=100", 100, None),
            ("vhost-user-blk:s?scheduler_weight=250", 250, Some("250")),
        ] {
            let mut spec = Spec::parse(name).unwrap();
            let slot = WeightSlot::take_out_of(&mut spec).unwrap();
            assert_eq!(slot.get(), weight);
            slot.put_into(&mut spec);
            assert_eq!(spec.take(KEY).as_deref(), again);
        }
        for weight in ["0", "9", "1001", "much"] {
            let mut spec = Spec::parse(&format!("vhost-user-blk:s?scheduler_weight={weight}")).unwrap();
            let error = WeightSlot::take_out_of(&mut spec).err().unwrap().to_string();
            assert!(error.contains("10") && error.contains("1000"), "{error}");
        }
    }
}
