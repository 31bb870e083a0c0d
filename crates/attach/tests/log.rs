//! The lines that a back-end causes are limited, however often it comes and goes.
#![forbid(unsafe_code)]

mod common;

use std::io::Seek;
use std::sync::Arc;

use blkyard_attach::Attached;
use blkyard_mq::{Op, QueueKind};
use common::{Fake, Ill, User, blk_config, config, disk_info, place, until};

#[test]
fn back_end_that_comes_and_goes_causes_few_lines() {
    const SESSIONS: usize = 20;
    let mut said = tempfile::tempfile().unwrap();
    let log = tracing_subscriber::fmt().with_writer(Arc::new(said.try_clone().unwrap())).with_ansi(false).finish();
    tracing::subscriber::set_global_default(log).unwrap();
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Swallows, SESSIONS);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    user.submit(Op::Write, 7, 0);
    until("all have gone", || {
        user.turn_idle();
        fake.is_over()
    });
    said.rewind().unwrap();
    let said = std::io::read_to_string(said).unwrap();
    // Two a session, but for the deaths that the queue tells of.
    let lines =
        said.lines().filter(|line| line.contains("closed the connection") || line.contains("connected again")).count();
    assert!((20..=31).contains(&lines), "{lines} lines: {said}");
}
