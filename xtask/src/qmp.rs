//! A running QEMU, controlled by its machine protocol, one command at a time.
//!
//! QEMU's events in between are ignored.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Time limit for a command's answer on a busy machine; the operation it starts may take longer.
const ANSWER_LIMIT: Duration = Duration::from_mins(1);

/// A connection to a QEMU's monitor.
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects, and says that we speak the same.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("no monitor at {}", path.display()))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.line()?;
        monitor.command("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Result of a command.
    pub fn command(&mut self, name: &str, arguments: &Value) -> Result<Value> {
        let command = json!({ "execute": name, "arguments": arguments });
        writeln!(self.0.get_mut(), "{command}").context("the monitor does not listen")?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!("{name}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.0.read_line(&mut line).context("the monitor does not answer")?;
        serde_json::from_str(&line).with_context(|| format!("the monitor says {line:?}"))
    }
}
