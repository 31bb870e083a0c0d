//! Child processes that must not outlive this process.
//!
//! Unsafe: code between fork and exec may do no more than a signal handler.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, set_parent_process_death_signal};

/// The program is killed when the thread that starts it ends, however that comes. Ctrl-C at the terminal is not for it.
pub fn bind_to_us(command: &mut Command) {
    command.process_group(0);
    // SAFETY: one system call, which neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_program_ends_with_the_thread_that_started_it() {
        let start = || {
            let mut command = Command::new("sleep");
            command.arg("600");
            bind_to_us(&mut command);
            command.spawn().unwrap()
        };
        let mut child = std::thread::spawn(start).join().unwrap();
        let limit = Instant::now() + Duration::from_mins(1);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "it lives on");
            std::thread::yield_now();
        }
    }
}
