//! The block size of an image, as a guest sees it, from start to start.

use std::fs;

use crate::common::{Daemon, inspect, succeed};
use crate::fuse::Fuse;

#[test]
fn a_disk_has_the_blocks_that_it_had_when_it_was_empty() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("mounted")).unwrap();
    // What direct I/O needs on this file system shows only in data.
    let Some(served) = Fuse::mount(&folder.join("mounted"), &[]) else { return };
    served.empty();
    let words = ["--control", "c", "--device", "mounted/file", "--export", "vhost-user-blk:s"];
    let starts: Vec<_> = ["through the page cache", "bypassing the page cache"]
        .into_iter()
        .map(|mode| {
            let daemon = Daemon::start(folder, &words);
            let device = inspect(folder, &[])["devices"][0].clone();
            assert!(device["reached"].as_str().unwrap().starts_with(mode), "{device}");
            succeed(folder, &["bench", "vhost-user:s", "--rw", "write", "--bs", "512", "--size", "4k"]);
            daemon.stop();
            device["limits"]["logical_block_bytes"].as_u64()
        })
        .collect();
    assert_eq!(starts, [Some(512), Some(512)]);
}
