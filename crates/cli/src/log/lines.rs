//! Lines for a stream that may fail or stall: a bounded queue and one writer thread.
//!
//! [`LineWriter::push`] never waits for the stream and never fails: a line that finds the queue full, or that the
//! stream does not accept, is counted as lost. The writer reports the count when the stream accepts lines again.
//!
//! It neither formats nor interprets lines.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blkyard_sys::{PollFd, PollFlags, is_ready, wait_for};

/// Size of the lines that wait for a reader, at most. Some thousand lines: hours of an ordinary log.
const QUEUE_BYTES_MAX: usize = 256 << 10;

/// The queue and its writer thread. The thread is never joined: it may be stuck in a write for good.
pub(super) struct LineWriter {
    shared: Arc<WriterState>,
    /// The stream, if there is no thread. Lines for which it has no room are lost: the caller must not wait for it.
    direct: Option<Mutex<Box<dyn LineStream>>>,
}

/// A stream of lines.
trait LineStream: Write + AsFd + Send {}

impl<W: Write + AsFd + Send> LineStream for W {}

#[derive(Default)]
struct WriterState {
    queue: Mutex<LineQueue>,
    /// Signalled when a line comes and when one is written.
    changed: Condvar,
}

#[derive(Default)]
struct LineQueue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Lines lost since the last report.
    lost: u64,
    /// A line that is not in the queue any more is not yet written.
    is_writing: bool,
}

impl WriterState {
    fn queue(&self) -> MutexGuard<'_, LineQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LineWriter {
    /// Starts the writer of a stream. `report` gets the number of lines that were lost, once the stream takes lines
    /// again; it may push.
    pub(super) fn start<W: Write + AsFd + Send + 'static>(
        name: &str,
        open: impl Fn() -> W,
        report: impl Fn(u64) + Send + 'static,
    ) -> LineWriter {
        let shared = Arc::new(WriterState::default());
        let (of_thread, stream) = (Arc::clone(&shared), open());
        let write = move || run(&of_thread, stream, report);
        match std::thread::Builder::new().name(name.into()).spawn(write) {
            Ok(_) => LineWriter { shared, direct: None },
            Err(_) => LineWriter::without_thread(open()),
        }
    }

    /// The writer of a stream for which the system has no thread.
    fn without_thread(stream: impl Write + AsFd + Send + 'static) -> LineWriter {
        LineWriter { shared: Arc::default(), direct: Some(Mutex::new(Box::new(stream))) }
    }

    /// Queues a line, its newline included.
    pub(super) fn push(&self, line: Vec<u8>) {
        if let Some(stream) = &self.direct {
            let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
            let is_written = has_room(&**stream, &line) && write_line(&mut *stream, &line).is_ok();
            self.shared.queue().lost += u64::from(!is_written);
            return;
        }
        let mut queue = self.shared.queue();
        if queue.bytes + line.len() > QUEUE_BYTES_MAX {
            queue.lost += 1;
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line);
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Waits until all that was pushed is written or lost, but no longer than `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        let busy = |queue: &mut LineQueue| !queue.lines.is_empty() || queue.is_writing;
        if self.direct.is_none() {
            let _ = self.shared.changed.wait_timeout_while(self.shared.queue(), limit, busy);
        }
    }
}

fn run(shared: &WriterState, mut stream: impl Write + AsFd, report: impl Fn(u64)) {
    loop {
        let mut queue = shared.queue();
        let line = loop {
            match queue.lines.pop_front() {
                Some(line) => break line,
                None => queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        queue.bytes -= line.len();
        queue.is_writing = true;
        drop(queue);
        let written = write_line(&mut stream, &line);
        let mut queue = shared.queue();
        let lost = if written.is_ok() { std::mem::take(&mut queue.lost) } else { 0 };
        queue.lost += u64::from(written.is_err());
        drop(queue);
        if lost > 0 {
            report(lost);
        }
        shared.queue().is_writing = false;
        shared.changed.notify_all();
    }
}

/// Whether a line can be written without a wait: a writable pipe has room for so much.
fn has_room(stream: &dyn LineStream, line: &[u8]) -> bool {
    const ROOM_BYTES: usize = 4096;
    line.len() <= ROOM_BYTES && is_ready(stream.as_fd(), PollFlags::OUT)
}

/// Writes a whole line. The stream may be non-blocking, since another process that shares it may have set that.
fn write_line(stream: &mut (impl Write + AsFd + ?Sized), mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match stream.write(line) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => line = &line[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let _ = wait_for(&mut [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::OUT)], None);
            }
            Err(error) => return Err(error),
        }
    }
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, PipeReader};

    /// Longer than a busy machine takes.
    const LONG: Duration = Duration::from_secs(30);

    /// A writer into a pipe, and where it reports the lines it lost.
    fn piped() -> (LineWriter, PipeReader, std::sync::mpsc::Receiver<u64>) {
        let (reader, writer) = io::pipe().unwrap();
        let (told, lost) = std::sync::mpsc::channel();
        let open = move || writer.try_clone().unwrap();
        (LineWriter::start("test", open, move |count| told.send(count).unwrap()), reader, lost)
    }

    #[test]
    fn stalled_stream_loses_lines_counted() {
        const LINES: u64 = 1000;
        let (writer, reader, lost) = piped();
        // More than the queue and the pipe hold together.
        let text = "x".repeat(1023) + "\n";
        (0..LINES).for_each(|_| writer.push(text.clone().into_bytes()));
        writer.flush(Duration::from_millis(1));
        let read = std::thread::spawn(move || {
            let mut reader = BufReader::new(reader);
            let mut count = 0;
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 0 && !line.ends_with("the end\n") {
                assert_eq!(line, text, "a line was torn");
                line.clear();
                count += 1;
            }
            count
        });
        let first = lost.recv_timeout(LONG).unwrap();
        writer.flush(LONG);
        writer.push(b"the end\n".to_vec());
        let read = read.join().unwrap();
        // The pipe may have taken lines between two losses.
        let lost = first + lost.try_iter().sum::<u64>();
        assert_eq!(read + lost, LINES);
        assert!(lost > 100, "{lost}");
    }

    #[test]
    fn failing_stream_loses_lines_without_noise() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let writer = LineWriter::start("test", move || full.try_clone().unwrap(), |_| panic!("nothing was written"));
        for _ in 0..10 {
            writer.push(b"a line\n".to_vec());
        }
        writer.flush(LONG);
        assert_eq!(writer.shared.queue().lost, 10);
    }

    #[test]
    fn stream_without_a_thread_is_written_while_it_has_room() {
        const LINES: u64 = 1000;
        let (mut reader, writer) = io::pipe().unwrap();
        let writer = LineWriter::without_thread(writer);
        writer.push(b"the first\n".to_vec());
        (1..LINES).for_each(|_| writer.push(vec![b'\n'; 1024]));
        writer.flush(LONG);
        let lost = writer.shared.queue().lost;
        assert!(lost > 100, "{lost}");
        drop(writer);
        let mut text = String::new();
        io::Read::read_to_string(&mut reader, &mut text).unwrap();
        assert!(text.starts_with("the first\n"));
        assert_eq!(text.len() as u64, 10 + (LINES - 1 - lost) * 1024);
    }

    #[test]
    fn nonblocking_stream_is_waited_for() {
        const LINES: usize = 200;
        let (reader, writer) = io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
        let writer =
            LineWriter::start("test", move || writer.try_clone().unwrap(), |lost| panic!("{lost} lines were lost"));
        (0..LINES).for_each(|_| writer.push(vec![b'\n'; 1000]));
        let mut reader = BufReader::new(reader);
        for _ in 0..LINES * 1000 {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
        }
        writer.flush(LONG);
    }
}
