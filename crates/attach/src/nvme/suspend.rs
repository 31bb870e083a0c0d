//! Whether a controller is to be shut down until it is resumed, and who waits for that.

use std::sync::mpsc::Sender;

use crate::AttachError;

/// Answer to the one who asked.
pub(crate) type SuspendAnswer = Sender<Result<(), AttachError>>;

/// See the head of the module.
#[derive(Debug, Default)]
pub(crate) struct SuspendRequests {
    is_wanted: bool,
    /// What they have asked for.
    waiting: Vec<(bool, SuspendAnswer)>,
}

impl SuspendRequests {
    /// Whether the controller is to be shut down.
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Someone wants it shut down, or up.
    pub(crate) fn ask(&mut self, is_wanted: bool, answer: SuspendAnswer) {
        self.is_wanted = is_wanted;
        self.waiting.push((is_wanted, answer));
    }

    /// Whether someone waits.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Answers those who wait. `has_come`: whether the controller of `disk` is as wanted; `None` if it is lost.
    pub(crate) fn answer(&mut self, disk: &str, has_come: Option<bool>) {
        if has_come == Some(false) {
            return;
        }
        let is_wanted = self.is_wanted;
        for (wanted, answer) in self.waiting.drain(..) {
            let disk = || disk.to_owned();
            let answered = match has_come {
                None => {
                    let when = if is_wanted { "suspended" } else { "resumed" };
                    Err(AttachError::NotConnected { disk: disk(), when })
                }
                Some(_) if wanted != is_wanted => Err(AttachError::Overtaken { disk: disk() }),
                Some(_) => Ok(()),
            };
            // It may wait no longer.
            let _ = answer.send(answered);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_last_request_holds_and_each_one_is_answered_once() {
        let mut requests = SuspendRequests::default();
        let [(down, was_down), (up, was_up)] = [channel(), channel()];
        requests.ask(true, down);
        requests.answer("disk", Some(false));
        assert!(was_down.try_recv().is_err() && requests.is_awaited() && requests.is_wanted());
        requests.ask(false, up);
        requests.answer("disk", Some(true));
        assert!(matches!(was_down.try_recv(), Ok(Err(AttachError::Overtaken { .. }))));
        assert!(matches!(was_up.try_recv(), Ok(Ok(()))));
        assert!(!requests.is_awaited() && !requests.is_wanted());

        let (down, was_down) = channel();
        requests.ask(true, down);
        requests.answer("disk", None);
        assert!(matches!(was_down.try_recv(), Ok(Err(AttachError::NotConnected { when: "suspended", .. }))));
        assert!(requests.is_wanted(), "the next session is suspended");
    }
}
