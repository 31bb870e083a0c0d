//! The side of the daemon that hands over.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blkyard::scheduler::put_device_scheduler;
use blkyard::secrets::make_files_absolute;
use blkyard::tracker::put_tracker;
use blkyard::{DeviceHandover, put_path_rules};
use blkyard_export::{BoundSocket, Handed, QuiescedExport};
use blkyard_mq::IdlePolicy;
use serde_json::Value;

use super::VERSION;
use super::handover::{
    DeviceExport, DevicePart, ExportPart, HandoverSettings, HandoverState, IdentityPart, PassedFiles, SocketPart,
};
use super::wire::{receive, send};
use crate::control::{ControlRequest, answer_line, parse_request};
use crate::daemon::{ClientSessionState, ClientWatch, Daemon, ServedExport};
use crate::log;

/// Time limit for exports to respond. No export is quiesced meanwhile.
const HEAR_TIME: Duration = Duration::from_secs(5);
/// Time limit for exports to drain, as for any other change.
const REST_TIME: Duration = Duration::from_secs(20);
/// How long the new daemon may take from one word to the next. Guests wait meanwhile.
const WORD_TIME: Duration = Duration::from_secs(5);
/// Upper bound of the new daemon's messages, bytes.
const WORD_BYTES_MAX: usize = 1 << 10;

/// Result of a handover.
pub enum Given {
    /// The other daemon continues with everything: this one ends.
    Gone,
    /// Unchanged.
    Kept(String),
}

/// Hands everything over to the requesting daemon. `control` is the socket of the request.
pub fn give(daemon: &Daemon, control: &BoundSocket, client: &UnixStream, version: u32) -> Given {
    if version != VERSION {
        return Given::Kept(format!(
            "its handover protocol has version {VERSION}, and version {version} was requested; stop it, and start the new one without --takeover"
        ));
    }
    let may_wait = client.set_nonblocking(false).map_err(|error| error.to_string());
    match may_wait.and_then(|()| try_give(daemon, control, client)) {
        Ok(spent) => {
            tracing::info!("handed over to another daemon after {:.1} ms", spent.as_secs_f64() * 1e3);
            Given::Gone
        }
        Err(why) => {
            let _ = client.set_nonblocking(true);
            tracing::warn!("the handover failed, and this daemon continues: {why}");
            Given::Kept(why)
        }
    }
}

fn try_give(daemon: &Daemon, control: &BoundSocket, client: &UnixStream) -> Result<Duration, String> {
    // Unsupported devices are found before any guest waits.
    for served in &daemon.devices {
        served.device.can_be_handed_over().map_err(|error| error.to_string())?;
    }
    all_hear(daemon)?;
    none_hangs(daemon)?;
    let (lanes, policy) = (daemon.lanes.count() as u64, daemon.lanes.idle_policy());
    let spin_us = (policy != IdlePolicy::default()).then_some(policy.spin_ns / 1000);
    let begin = Instant::now();
    let asked: Vec<_> = daemon.exports.iter().map(|export| export.front_end.hand_over()).collect();
    let mut handed = Vec::new();
    for (answer, export) in asked.into_iter().zip(&daemon.exports) {
        let left = REST_TIME.saturating_sub(begin.elapsed());
        let rested = answer.wait(left).ok_or_else(|| {
            format!("{export}: not drained within {REST_TIME:?}; blkyard inspect shows the requests at its device")
        })?;
        handed.push(rested.map_err(|why| format!("{export}: {why}; see blkyard inspect"))?);
    }
    let rested = begin.elapsed();
    let mut files = PassedFiles::new();
    let cpus = (!daemon.cpus.is_empty()).then(|| daemon.cpus.clone());
    let habits = HandoverSettings {
        spin_us,
        stats: daemon.stats_every(),
        cpus,
        drain_s: Some(daemon.drain_s),
        log_format: Some(log::format()),
    };
    let (socket, devices, rests) = pack(daemon, control, handed, &mut files)?;
    let handover = HandoverState { lanes, habits, control: socket, devices };
    let handover = serde_json::to_value(handover).map_err(|error| error.to_string())?;
    let left = |error| format!("the new daemon does not read: {error}; see its messages");
    send(client, &files, &answer_line(&Ok(handover)), WORD_TIME).map_err(left)?;
    drop(files);
    let silent = |error| format!("the new daemon does not answer: {error}; see its messages");
    let (_, word) = receive(client, WORD_BYTES_MAX, WORD_TIME).map_err(silent)?;
    match parse_request(&word)? {
        ControlRequest::Taken => {}
        other => {
            return Err(format!("the new daemon answered {other:?} instead of confirming; check which program it is"));
        }
    }
    // Last point of return: if the message cannot be sent, this daemon continues.
    let yours = answer_line(&Ok(Value::from(rested.as_micros() as u64)));
    send(client, &PassedFiles::new(), &yours, WORD_TIME).map_err(left)?;
    // Before any of them ends.
    daemon.is_handed.store(true, Ordering::SeqCst);
    rests.into_iter().for_each(QuiescedExport::let_go);
    control.set_owned(false);
    Ok(begin.elapsed())
}

/// Checks that no export is held up: all others would rest for as long as it is.
fn all_hear(daemon: &Daemon) -> Result<(), String> {
    let begin = Instant::now();
    let asked: Vec<_> = daemon.exports.iter().map(|export| export.front_end.hears()).collect();
    for (answer, export) in asked.into_iter().zip(&daemon.exports) {
        answer.recv_timeout(HEAR_TIME.saturating_sub(begin.elapsed())).map_err(|_| {
            format!(
                "{export}: it has not responded for {HEAR_TIME:?}, delayed by its device or its front-end, so no export was \
                 paused; see blkyard inspect, and end that front-end if it is the cause"
            )
        })?;
    }
    Ok(())
}

/// Checks that no device hangs: its export would not drain, and all others would rest until the time for that is over.
fn none_hangs(daemon: &Daemon) -> Result<(), String> {
    let is_slow = |queue: &ClientWatch| queue.stats().iter().any(|stats| stats.snapshot().slow_now > 0);
    let slow = daemon.exports.iter().find(|export| export.queues().iter().any(is_slow));
    slow.map_or(Ok(()), |export| {
        Err(format!(
            "{export}: its device has not answered requests for seconds, so no export was paused; see blkyard inspect, \
             and end its front-end or wait for the device"
        ))
    })
}

fn pack(
    daemon: &Daemon,
    control: &BoundSocket,
    handed: Vec<Handed<ClientSessionState>>,
    files: &mut PassedFiles,
) -> Result<(SocketPart, Vec<DevicePart>, Vec<QuiescedExport>), String> {
    let text = |error: std::io::Error| error.to_string();
    files.push_back(control.listener().as_fd().try_clone_to_owned().map_err(text)?);
    let path = std::path::absolute(control.path()).map_err(text)?;
    let control = SocketPart { path, identity: control.identity() };
    let (mut handed, mut rests) = (handed.into_iter(), Vec::new());
    let (mut devices, mut of_daemon) = (Vec::new(), daemon.exports.iter().peekable());
    for (number, (served, plan)) in daemon.devices.iter().zip(&daemon.plans).enumerate() {
        let DeviceHandover { file, claim, sync_failed, ids } = served.device.handover()?;
        let info = served.info();
        for file in [file, claim].into_iter().flatten() {
            files.push_back(file.try_clone_to_owned().map_err(text)?);
        }
        let mut exports = Vec::new();
        // Exports are in the order of the plan, and belong to their first device there.
        for spec in &plan.exports {
            let mut spec = spec.clone();
            let name = format!("{}:{}", spec.scheme, spec.body);
            let is_it = |export: &&ServedExport| export.devices[0].device == number && export.name == name;
            let whole = of_daemon.next_if(is_it).and_then(|export| Some((export, handed.next()?)));
            let Some((export, Handed { state, rest })) = whole else {
                exports.push(DeviceExport::Namespace { namespace: spec });
                continue;
            };
            make_files_absolute(&mut spec).map_err(text)?;
            export.rate.put_into(&mut spec);
            export.weight.put_into(&mut spec);
            exports.push(DeviceExport::Whole(Box::new(ExportPart::pack(spec, state, files)?)));
            rests.push(rest);
        }
        let mut spec = plan.device.clone();
        make_files_absolute(&mut spec).map_err(text)?;
        served.rate.put_into(&mut spec);
        put_tracker(&mut spec, daemon.trackers.config(number));
        if let Some(settings) = served.device.path_settings() {
            put_path_rules(&mut spec, settings.rules());
        }
        put_device_scheduler(&mut spec, served.scheduler()).map_err(|error| error.to_string())?;
        devices.push(DevicePart {
            spec,
            has_file: file.is_some(),
            has_claim: claim.is_some(),
            sync_failed,
            capacity_sectors: info.capacity_sectors,
            sectors_max: info.limits.sectors_max,
            identity: ids.map(|ids| IdentityPart::of(&ids, served.device.info())),
            exports,
        });
    }
    // Otherwise a guest would lose its disk.
    match of_daemon.next() {
        Some(export) => Err(format!("{export}: it is not in the configuration; stop this daemon instead")),
        None => Ok((control, devices, rests)),
    }
}
