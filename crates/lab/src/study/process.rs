//! A process that a study starts, and ends with itself.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use blkyard_os::bind_to_us;

/// A process of ours. Dropping it kills it; it ends with us in any case.
pub(crate) struct StudyProcess {
    child: Child,
    /// File of its output and errors.
    output: PathBuf,
}

impl StudyProcess {
    /// Starts the command, without input, and with its output and errors in this file.
    pub(crate) fn start(command: &mut Command, output: PathBuf) -> io::Result<StudyProcess> {
        let said = File::create(&output)?;
        bind_to_us(command);
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
        Ok(StudyProcess { child: command.spawn()?, output })
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// What it has said so far.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default().trim().to_owned()
    }
}

impl Drop for StudyProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
