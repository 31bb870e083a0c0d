//! Thousands of exports of one daemon: they start in seconds, take little memory and no thread each, and those whose
//! front-ends stop in the middle of a message delay no other.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::guest::Guest;

/// Longer than any test on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);
const EXPORTS: usize = 2000;
const QUEUES: usize = 4;
/// Exports whose front-ends send half a message, and as many whose front-ends never read.
const HOSTILE: usize = 100;
/// Memory of an export without a connection.
const EXPORT_KIB_MAX: usize = 100;

/// Whether a well-behaved front-end is to connect to this export.
fn is_used(number: usize) -> bool {
    number == EXPORTS - 1 || (2 * HOSTILE..2 * HOSTILE + 10).contains(&number)
}

/// A daemon that does not outlive its test.
struct Daemon {
    child: Child,
    /// Time until it was ready.
    start: Duration,
}

impl Daemon {
    /// One of so many exports, from a file.
    fn serve(folder: &Path, exports: usize) -> Daemon {
        let mut plan = String::from("lanes = 2\ncontrol = \"none\"\n");
        for number in 0..exports {
            let device = if is_used(number) { "ram:1M" } else { "null:1M" };
            writeln!(plan, "[[device]]\nspec = \"{device}\"\n[[device.export]]").unwrap();
            writeln!(plan, "spec = \"vhost-user-blk:{number}.sock\"\nqueues = {QUEUES}").unwrap();
        }
        std::fs::write(folder.join("plan.toml"), plan).unwrap();
        let begin = Instant::now();
        let mut command = Command::new(env!("CARGO_BIN_EXE_blkyard"));
        command.args(["serve", "--config", "plan.toml"]).current_dir(folder).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        assert!(lines.any(|line| line == "ready"), "it does not start");
        let start = begin.elapsed();
        // Its later output is not needed, and must not fill a pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Daemon { child, start }
    }

    /// A number of its status, such as its threads or its memory in KiB.
    fn status(&self, name: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Threads, once those without work have ended: their number has not changed for a while.
    fn threads(&self) -> usize {
        let begin = Instant::now();
        let (mut threads, mut since) = (self.status("Threads"), Instant::now());
        while since.elapsed() < Duration::from_secs(5) && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(100));
            if self.status("Threads") != threads {
                (threads, since) = (self.status("Threads"), Instant::now());
            }
        }
        threads
    }

    fn stop(mut self) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success(), "it does not end in order");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn thousands_of_exports_take_no_thread_and_little_memory_each() {
    let folder = tempfile::tempdir().unwrap();
    let few = Daemon::serve(folder.path(), 1);
    let (threads, memory) = (few.threads(), few.status("VmRSS"));
    few.stop();
    let many = Daemon::serve(folder.path(), EXPORTS);
    let each = many.status("VmRSS").saturating_sub(memory) / EXPORTS;
    println!("{EXPORTS} exports: ready after {:?}, {each} KiB each, {threads} threads", many.start);
    assert!(each < EXPORT_KIB_MAX, "an idle export takes {each} KiB");
    assert!(many.start < PATIENCE, "it is ready after {:?}", many.start);
    assert_eq!(many.threads(), threads, "threads of {EXPORTS} exports and of one");

    let socket = |number: usize| folder.path().join(format!("{number}.sock"));
    let mut guest = Guest::connect(&socket(EXPORTS - 1), QUEUES);
    guest.check_all(1);

    // Half a message, and requests whose replies are never read.
    let header = [1_u32, 1, 0].map(u32::to_ne_bytes).concat();
    let connect = |number| UnixStream::connect(socket(number)).unwrap();
    let halves: Vec<_> = (0..HOSTILE).map(connect).collect();
    halves.iter().for_each(|mut front_end| front_end.write_all(&header[..6]).unwrap());
    let deaf: Vec<_> = (HOSTILE..2 * HOSTILE).map(connect).collect();
    for mut front_end in &deaf {
        front_end.set_nonblocking(true).unwrap();
        while front_end.write(&header).is_ok_and(|bytes| bytes == header.len()) {}
    }
    let begin = Instant::now();
    for number in 2 * HOSTILE..2 * HOSTILE + 10 {
        Guest::connect(&socket(number), QUEUES).check_all(2);
    }
    guest.check_all(3);
    println!("ten front-ends beside {} hostile ones: {:?}", 2 * HOSTILE, begin.elapsed());
    // One more writes the log, which has begun.
    let beside = many.threads();
    assert!(beside <= threads + 1, "{beside} threads beside front-ends that stop in the middle");
    drop((halves, deaf, guest));
    many.stop();
}

#[test]
fn hundreds_of_exports_are_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_blkyard"));
    serve.args(["serve", "--control", "c"]).current_dir(folder.path());
    for number in 0..300 {
        serve.args(["--device", "null:1M", "--export", &format!("vhost-user-blk:{number}.sock?queues=4")]);
    }
    let old = crate::common::Daemon::launch(&mut serve);
    let mut takes = Command::new(env!("CARGO_BIN_EXE_blkyard"));
    let new = crate::common::Daemon::launch(takes.args(["serve", "--takeover", "c"]).current_dir(folder.path()));
    drop(old);
    Guest::connect(&folder.path().join("299.sock"), 4);
    drop(new);
}

#[test]
fn too_few_open_files_are_named_with_the_cure() {
    let folder = tempfile::tempdir().unwrap();
    let mut words = String::new();
    for number in 0..200 {
        write!(words, " --device null:1M --export vhost-user-blk:{number}.sock").unwrap();
    }
    let command = format!("ulimit -n 64 && exec \"$B\" serve --control none{words}");
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]).env("B", env!("CARGO_BIN_EXE_blkyard")).current_dir(folder.path());
    let done = shell.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success());
    assert!(said.contains("raise the limit on open files"), "{said}");
}
