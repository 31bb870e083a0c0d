//! Wake-ups of the control thread of a controller that hangs. The only test of its program, since it counts those of a
//! thread by its name.
#![forbid(unsafe_code)]

mod common;
#[expect(dead_code, reason = "the only server here has faults")]
#[path = "nvme_rig/server.rs"]
mod server;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use blkyard_attach::{NamespaceConfig, RemoteNamespace, VfioUserConfig, VfioUserController};
use blkyard_mem::Region;
use blkyard_mq::{Op, QueueKind, Status};
use blkyard_os::SystemClock;
use common::{SLOTS, User, place, until};
use server::{ServerFaults, serve_with};

/// Sleeps of the control thread so far.
fn sleeps() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let text = |name| move |thread: &std::path::PathBuf| std::fs::read_to_string(thread.join(name)).ok();
    let control = threads.map(|thread| thread.unwrap().path());
    let control = control.filter(|thread| text("comm")(thread).is_some_and(|name| name.trim() == "nvme"));
    let counts = control.filter_map(|thread| {
        let status = text("status")(&thread)?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok())
    });
    counts.sum()
}

#[test]
fn controller_that_hangs_is_seldom_looked_at_once_its_io_fails() {
    const SHORT: Duration = Duration::from_millis(200);
    let (_folder, path) = place();
    let faults = Arc::new(ServerFaults::default());
    let server = serve_with(&path, true, Arc::clone(&faults));
    let mut config = NamespaceConfig::new("vfio-user:test", Arc::new(SystemClock));
    (config.options.reply_max, config.options.io_max, config.options.gone_max) = (SHORT, SHORT, SHORT);
    let mut transport = VfioUserConfig::new(&path, Arc::new(SystemClock)).unwrap();
    transport.reply_max = SHORT;
    let attached = RemoteNamespace::open::<VfioUserController>(transport, config).unwrap();
    let region = Region::shared(SLOTS as usize * 4096).unwrap();
    let mut user = User::of(attached.queue(QueueKind::Default, 32).unwrap(), 32, attached.info(), region);
    assert_eq!(user.one(Op::Write, 0, 0), Status::Ok);
    faults.hangs.store(true, Relaxed);
    user.submit(Op::Write, 1, 1);
    until("the loss is noticed", || {
        user.turn();
        !attached.view().is_connected
    });
    until("I/O fails", || {
        user.submit(Op::Read, 2, 2);
        user.turn();
        user.ended.drain(..).any(|bio| bio.status != Status::Ok)
    });
    let before = sleeps();
    std::thread::sleep(Duration::from_secs(2));
    let count = sleeps() - before;
    // One each second.
    assert!((1..=20).contains(&count), "{count} sleeps within two seconds");
    faults.hangs.store(false, Relaxed);
    user.drain();
    drop((user, attached));
    // It may fail to answer a client that has gone.
    let _ = server.join();
}
