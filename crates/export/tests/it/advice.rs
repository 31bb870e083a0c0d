//! Common mistakes of front-ends are logged within a second, with the cure.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock};

use vhost::vhost_user::VhostUserFrontend;

use crate::common::{Front, Ram, Raw, Request, Vq, World, one_queue, until};

/// All that was logged in this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// The one there is, from now on.
    fn get() -> &'static Log {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Log::default();
            let writer = log.clone();
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
            log
        })
    }

    fn says(&self, words: &[&str]) -> bool {
        let text = String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned();
        text.lines().any(|line| words.iter().all(|word| line.contains(word)))
    }
}

#[test]
fn a_ring_outside_of_all_shared_memory_names_share_on() {
    let (log, world) = (Log::get(), World::pair());
    let front = Front::connect(&world.exports[0]);
    // QEMU shares only some ROM.
    let rom = Ram::at(0xfff0_0000, 1 << 16);
    front.share(&[&rom]).unwrap();
    let vq = Vq::new(&Ram::new(1 << 20), 0);
    front.set_ring(0, &vq);
    front.set_event(Request::SetVringKick, 0, Some(&vq.kick));
    let _ = front.raw.accepts(Request::SetVringEnable, &[0_u32, 1].map(u32::to_ne_bytes).concat(), &[]);
    until("the cure is in the log", || {
        log.says(&["WARN", "memory is not shared", "1 regions", "share=on", "memory-backend=mem"])
    });
    drop(front);
    world.stop();
}

#[test]
fn memory_that_the_guest_never_wrote_to_names_share_on() {
    let (log, world) = (Log::get(), World::pair());
    let connect = |fill: bool| {
        let ram = Ram::at(0, 4 << 20);
        if fill {
            ram.write(0x400, &[1]);
        }
        let mut front = Front::connect(&world.exports[0]);
        front.share(&[&ram]).unwrap();
        front.start(0, &Vq::new(&ram, 1));
        drop(front);
    };
    let words = ["WARN", "memory is probably not shared", "zeros", "share=on"];
    connect(true);
    connect(true);
    assert!(!log.says(&words), "a guest that has written");
    connect(false);
    until("the cure is in the log", || log.says(&words));
    world.stop();
}

#[test]
fn a_front_end_that_wants_more_queues_is_told_how_many_there_are() {
    let (log, world) = (Log::get(), World::pair());
    // QEMU leaves when it is told; others continue with a queue that does not exist.
    let mut polite = Front::connect(&world.exports[0]);
    assert_eq!(polite.get_queue_num().unwrap(), 2);
    drop(polite);
    until("the cure is in the log", || {
        log.says(&["WARN", "disconnected", "2 queues are served", "num-queues=2", "queues=N"])
    });
    let rude = Front::connect(&world.exports[0]);
    let _ = rude.raw.accepts(Request::SetVringNum, &[5_u32, 64].map(u32::to_ne_bytes).concat(), &[]);
    until("the cure is in the log", || log.says(&["WARN", "no queue 5", "num-queues=2", "queues=N"]));
    drop(rude);
    world.stop();
}

#[test]
fn a_second_front_end_is_told_of_with_the_first_ones_process() {
    let (log, world) = (Log::get(), World::pair());
    let (first, mut vq) = one_queue(&world.exports[1]);
    let process = format!("process {}", std::process::id());
    let words = ["WARN", "another front-end waits", &process, "export of its own"];
    assert!(!log.says(&words), "there is none yet");
    let second = Raw::over(UnixStream::connect(&world.exports[1].path).unwrap());
    until("the cure is in the log", || log.says(&words));
    assert_eq!(vq.write(0, &[1; 512]), 0);
    drop(first);
    assert!(second.ask(Request::GetFeatures, &[], &[]).is_some(), "it is served in the end");
    drop(second);
    world.stop();
}
