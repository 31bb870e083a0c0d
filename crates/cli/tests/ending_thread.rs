//! A daemon with a panicking thread. A separate process, since the daemon detects panics of all threads of its process.

use std::time::{Duration, Instant};

use blkyard_cli::{log, serve};
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    serve: serve::ServeArgs,
}

/// The daemon runs its own program again as the receiver, with one argument, which libtest takes for the name of a
/// test. Called as a test, there is no daemon behind standard input, and nothing to receive.
#[test]
fn receiver() {
    if std::env::args().nth(1).is_some_and(|name| name == "receiver") {
        let _ = blkyard_os::receive_for_daemon();
    }
}

#[test]
fn thread_that_panics_ends_the_daemon_in_order() {
    /// Longer than anything takes on a busy machine.
    const PATIENCE: Duration = Duration::from_mins(1);
    let folder = tempfile::tempdir().unwrap();
    let [socket, control, file] = ["s", "c", "serve.toml"].map(|name| folder.path().join(name));
    let text = format!(
        "control = {control:?}\n[[device]]\nspec = \"ram:1M\"\n[[device.export]]\nspec = \"vhost-user-blk:{}\"\n",
        socket.display()
    );
    std::fs::write(&file, text).unwrap();
    log::install(tracing::Level::INFO);
    let args = Cli::parse_from(["serve".as_ref(), "--config".as_ref(), file.as_os_str()]).serve;
    let daemon = std::thread::spawn(move || serve::run(&args, &[]));
    let begin = Instant::now();
    while !control.exists() {
        assert!(!daemon.is_finished() && begin.elapsed() < PATIENCE, "it does not serve");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert!(!daemon.is_finished(), "it ended by itself");
    let part = std::thread::Builder::new().name("lane7".into()).spawn(|| panic!("as the test wants it")).unwrap();
    assert!(part.join().is_err());
    while !daemon.is_finished() {
        assert!(begin.elapsed() < PATIENCE, "the daemon goes on without one of its threads");
        std::thread::sleep(Duration::from_millis(10));
    }
    let error = daemon.join().unwrap().unwrap_err();
    assert!(error.to_string().starts_with("thread lane7 panicked"), "{error}");
    assert!(!socket.exists() && !control.exists(), "a socket is left behind");
}
