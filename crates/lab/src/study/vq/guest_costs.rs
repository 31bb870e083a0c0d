//! Costs of a guest of 2014 and of its host. No machine of that time is here to measure: each cost comes from a post,
//! is assumed, or is calibrated.

use serde::Serialize;

use crate::study::post;

/// Costs, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[expect(clippy::struct_field_names, reason = "a unit comes last, and all have the same")]
pub(crate) struct GuestCosts {
    pub(crate) prepare_ns: u64,
    pub(crate) complete_ns: u64,
    pub(crate) service_ns: u64,
    pub(crate) hold_ns: u64,
    pub(crate) transfer_ns: u64,
    pub(crate) kick_ns: u64,
    pub(crate) interrupt_ns: u64,
    /// At each of both ends.
    pub(crate) call_ns: u64,
}

/// What an I/O of one job took a host of that time: M. Bjørling, October 2013, one job at depth 128.
fn host_job_ns() -> u64 {
    post::POST[5].mq.cpu_ns(post::POST[5].jobs) as u64
}

/// Share of that which a CPU spends in the completion.
const COMPLETE_NS: u64 = 800;

impl GuestCosts {
    /// The model of the report.
    pub(crate) fn of_2014() -> GuestCosts {
        GuestCosts {
            prepare_ns: host_job_ns() - COMPLETE_NS,
            complete_ns: COMPLETE_NS,
            service_ns: host_job_ns(),
            hold_ns: 500,
            transfer_ns: 100,
            kick_ns: 2_000,
            interrupt_ns: 2_000,
            call_ns: 3_000,
        }
    }

    /// Each cost with what it is and where it comes from.
    pub(crate) fn origins(&self) -> [(&'static str, u64, &'static str); 8] {
        [
            (
                "prepare an I/O",
                self.prepare_ns,
                "a host's job in M. Bjørling's post of October 2013, 1 x 128, without the completion",
            ),
            ("complete an I/O", self.complete_ns, "assumed share of the same"),
            (
                "serve an I/O, host",
                self.service_ns,
                "the same job: by the post one I/O thread does what one job on the host does",
            ),
            ("hold the lock, each I/O added or taken", self.hold_ns, "assumed"),
            ("lock growth, each waiter", self.transfer_ns, "assumed: a cache line goes to another CPU"),
            ("kick", self.kick_ns, "assumed: an exit"),
            ("interrupt", self.interrupt_ns, "assumed: injection and its exits"),
            ("call of another CPU, at each end", self.call_ns, "calibrated on +33 % with two jobs"),
        ]
    }

    /// The assumed costs at half and at twice their value, one at a time. The calibrated one stays.
    pub(crate) fn varied(self) -> Vec<GuestCosts> {
        let mut varied = Vec::new();
        for (times, over) in [(1, 2), (2, 1)] {
            let scaled = |ns: u64| ns * times / over;
            let complete_ns = scaled(self.complete_ns);
            let prepare_ns = self.prepare_ns + self.complete_ns - complete_ns;
            varied.extend([
                GuestCosts { complete_ns, prepare_ns, ..self },
                GuestCosts { hold_ns: scaled(self.hold_ns), ..self },
                GuestCosts { transfer_ns: scaled(self.transfer_ns), ..self },
                GuestCosts { kick_ns: scaled(self.kick_ns), ..self },
                GuestCosts { interrupt_ns: scaled(self.interrupt_ns), ..self },
            ]);
        }
        varied
    }

    /// Without one of the four causes, in the order of [`CAUSES`].
    pub(crate) fn without(self) -> [GuestCosts; 4] {
        [
            GuestCosts { transfer_ns: 0, ..self },
            GuestCosts { kick_ns: 0, ..self },
            GuestCosts { interrupt_ns: 0, ..self },
            GuestCosts { call_ns: 0, ..self },
        ]
    }
}

/// The causes that the model can leave out.
pub(crate) const CAUSES: [&str; 4] = ["lock growth", "kicks", "interrupts", "calls"];
