//! The threads of a daemon: detection of those that have ended by themselves.

use crate::control::ControlServer;
use crate::daemon::{Daemon, ServedServer};
use crate::log;

/// Says which thread has ended by itself, if one has: the daemon is not whole any more, and is to end. `servers` are
/// the exports of the daemon, in their order.
pub fn ended(daemon: &Daemon, servers: &[ServedServer], control: Option<&ControlServer>) -> Option<String> {
    // Known before the thread ends, which may take as long as its I/O in flight.
    if let Some(name) = log::panicked_thread() {
        return Some(format!("thread {name} panicked"));
    }
    let exports = servers.iter().zip(&daemon.exports);
    let exports = exports.filter(|(server, _)| server.is_finished()).map(|(_, export)| export.name.clone());
    let controls = control.filter(|control| control.is_finished()).map(|_| "control socket".to_owned());
    let devices = daemon.devices.iter().filter(|served| served.device.has_ended());
    let devices = devices.map(|served| served.info().name.clone());
    let lanes = daemon.lanes.lanes();
    let lanes = lanes.threads().iter().find(|lane| lane.is_finished()).map(|lane| lane.name().to_owned());
    let name = lanes.or_else(|| exports.chain(controls).chain(devices).next())?;
    Some(format!("{name}: its thread ended by itself"))
}
