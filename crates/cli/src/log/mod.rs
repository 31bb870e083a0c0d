//! The program's output: the log on standard error, messages on standard output, and reports.
//!
//! Log and messages never block or end their writer, whatever the state of the stream: each stream has a bounded queue
//! and a writer thread (`lines.rs`). A command's final report is written directly, and a failure to write it is the
//! command's failure.

mod lines;

use std::fmt::{self, Display};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use blkyard_lab::Console;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Json, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use lines::LineWriter;

/// How long the end of the program waits for its last lines to be written.
const FLUSH_MAX: Duration = Duration::from_secs(1);
/// The same for a panic, whose thread may end the program next.
const PANIC_FLUSH_MAX: Duration = Duration::from_millis(100);

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// An object a line, for machines.
    Json,
}

/// Whether log lines are JSON.
static IS_JSON: AtomicBool = AtomicBool::new(false);
/// Name of the first thread that panicked.
static PANICKED: OnceLock<String> = OnceLock::new();

/// Writes the log to standard error from now on, and panics too.
pub fn install(level: Level) {
    let format = Format::default().with_target(false);
    let log = tracing_subscriber::fmt().with_max_level(level).with_ansi(io::stderr().is_terminal());
    let log = log.with_writer(ToLog).log_internal_errors(false);
    if is_journal() {
        log.event_format(EitherFormat::new(&format.without_time())).init();
    } else {
        log.event_format(EitherFormat::new(&format.with_timer(Timestamp))).init();
    }
    std::panic::set_hook(Box::new(tell_panic));
}

/// Sets the format of log lines.
pub fn set_format(format: LogFormat) {
    IS_JSON.store(format == LogFormat::Json, Relaxed);
}

/// The format of log lines.
pub fn format() -> LogFormat {
    if IS_JSON.load(Relaxed) { LogFormat::Json } else { LogFormat::Text }
}

/// Tells why the program fails.
pub fn fail(error: impl Display) {
    if IS_JSON.load(Relaxed) {
        tracing::error!("{error}");
    } else {
        stderr().push(format!("blkyard: {error}\n").into_bytes());
    }
}

/// Tells a line of progress on standard error, which may be lost.
pub fn note(line: impl Display) {
    stderr().push(format!("{line}\n").into_bytes());
}

/// Prints a line for the user who started the daemon. A closed stream ends the output, not the daemon.
pub fn say(line: impl Display) {
    stdout().push(format!("{line}\n").into_bytes());
}

/// Prints a report on standard output. Returns the exit code: `code`, or failure if the report cannot be written. A
/// closed pipe is not reported.
pub fn print(report: impl Display, code: ExitCode) -> ExitCode {
    let mut stdout = io::stdout().lock();
    let written = write!(stdout, "{report}").and_then(|()| stdout.flush());
    written.map_or_else(|error| unwritten(&error), |()| code)
}

/// How the commands of `blkyard-lab` write.
pub fn console() -> Console {
    Console { print: |report, code| print(report, code), note: |line| note(line) }
}

/// Tells that a report could not be written; the exit code is failure.
pub fn unwritten(error: &io::Error) -> ExitCode {
    if error.kind() != ErrorKind::BrokenPipe {
        fail(format_args!("standard output: the report cannot be written: {error}"));
    }
    ExitCode::FAILURE
}

/// Waits briefly until all lines are written.
pub fn flush() {
    stdout().flush(FLUSH_MAX);
    stderr().flush(FLUSH_MAX);
}

/// Name of the first thread that panicked.
pub fn panicked_thread() -> Option<&'static str> {
    PANICKED.get().map(String::as_str)
}

fn stderr() -> &'static LineWriter {
    static STDERR: OnceLock<LineWriter> = OnceLock::new();
    STDERR.get_or_init(|| LineWriter::start("log", io::stderr, |lost| tell_lost("the log", lost)))
}

fn stdout() -> &'static LineWriter {
    static STDOUT: OnceLock<LineWriter> = OnceLock::new();
    STDOUT.get_or_init(|| LineWriter::start("stdout", io::stdout, |lost| tell_lost("standard output", lost)))
}

fn tell_lost(stream: &str, lost: u64) {
    tracing::warn!("{stream}: {lost} lines were dropped: they could not be written, or were not read in time");
}

/// Tells a panic as any other error, so that it waits for no reader, and remembers the thread.
fn tell_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let _ = PANICKED.set(name.into());
    let place = panic.location().map_or_else(String::new, |place| format!(" at {place}"));
    let message = panic.payload_as_str().unwrap_or("no message");
    let trace = std::backtrace::Backtrace::capture();
    let trace = match trace.status() {
        std::backtrace::BacktraceStatus::Captured => format!("\n{trace}"),
        _ => String::new(),
    };
    tracing::error!("thread {name} panicked{place}: {message}{trace}");
    stderr().flush(PANIC_FLUSH_MAX);
}

/// Whether standard error is journald's, which adds timestamps.
fn is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").ok();
    let is_it =
        |stat: rustix::fs::Stat| stream.is_some_and(|stream| stream == format!("{}:{}", stat.st_dev, stat.st_ino));
    rustix::fs::fstat(io::stderr()).is_ok_and(is_it)
}

/// Gives each event to the log's queue.
struct ToLog;

impl MakeWriter<'_> for ToLog {
    type Writer = ToLog;

    fn make_writer(&self) -> ToLog {
        ToLog
    }
}

impl Write for ToLog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        stderr().push(line.into());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// RFC 3339 with milliseconds.
#[derive(Clone, Copy)]
struct Timestamp;

impl FormatTime for Timestamp {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let mut text = String::new();
        SystemTime.format_time(&mut Writer::new(&mut text))?;
        // It has microseconds.
        let length = text.rfind('.').map_or(text.len(), |point| point + 4);
        write!(writer, "{}Z", text.get(..length).unwrap_or(&text))
    }
}

/// One of two formats, as last set.
struct EitherFormat<T> {
    text: Format<Full, T>,
    json: Format<Json, T>,
}

impl<T: Clone> EitherFormat<T> {
    fn new(format: &Format<Full, T>) -> EitherFormat<T> {
        let json = format.clone().with_ansi(false).json().flatten_event(true);
        EitherFormat { text: format.clone(), json }
    }
}

impl<S, N, T> FormatEvent<S, N> for EitherFormat<T>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    T: FormatTime,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if IS_JSON.load(Relaxed) {
            self.json.format_event(context, writer, event)
        } else {
            self.text.format_event(context, writer, event)
        }
    }
}
