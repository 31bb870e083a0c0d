//! Daemons that take over from one another under a writing guest.
//!
//! The guest's QEMU does not reconnect: if the connection were lost, the disk would be, too.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{MIB, RunsIn, Scenario, ScenarioContext, control, crash};
use crate::server::{OfferedDevice, ReadyServer};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "takeover-guest-fio",
        sentence: "a guest goes on as eight daemons take over one from another amid its writes, and fio finds every checksum intact",
        place: RunsIn::Guest,
        ours: true,
        tell: |ground| guest_fio(ground, false),
    },
    Scenario {
        name: "takeover-guest-packed",
        sentence: "a guest with packed rings goes on through eight takeovers as well",
        place: RunsIn::Guest,
        ours: true,
        tell: |ground| guest_fio(ground, true),
    },
];

/// Number of daemons after the first.
pub(super) const HEIRS: usize = 8;

fn guest_fio(ground: &ScenarioContext, packed: bool) -> Result<()> {
    let image = ground.image("disk.img", 64 * MIB)?;
    let export = ground.export(OfferedDevice::File(image.path.clone()), "disk.sock", 4);
    let mut server = control::serve(ground, std::slice::from_ref(&export))?;
    let vm = Vm::new(ground.guest, 4).disk(&export.socket, 4);
    let mut machine = if packed { vm.packed() } else { vm }.start(&crash::load())?;
    crash::wait_for_writes(&mut machine, &image)?;
    let mut rests = Vec::new();
    for heir in 0..HEIRS {
        crash::go_on(&mut machine)?;
        let (taker, rested) = take_over(ground, &export.socket).with_context(|| format!("heir {heir}"))?;
        std::mem::replace(&mut server, taker).end().context("the daemon before")?;
        rests.push(rested);
    }
    crash::end_load(machine, &image)?;
    server.stop()?;
    ground.measured(format!("the guest rested {rests:.1?}"));
    Ok(())
}

/// Starts a daemon that replaces the serving one of this socket, and returns the length of the guests' pause.
pub(super) fn take_over(ground: &ScenarioContext, socket: &Path) -> Result<(ReadyServer, Duration)> {
    const SAID: &str = "took over: guests were paused for ";
    let mut command = ground.program.command()?;
    command.args(["serve", "--takeover"]).arg(ground.path("control.sock"));
    let server = ReadyServer::start_command(&command, &[socket.to_owned()], &ground.log)?;
    let said = server.said()?;
    let rested = said.lines().find_map(|line| line.strip_prefix(SAID)?.split(' ').next()?.parse::<f64>().ok());
    let rested = rested.with_context(|| format!("the new daemon does not say how long guests rested:\n{said}"))?;
    ensure!(rested < 1e4, "guests rested {rested} ms");
    Ok((server, Duration::from_secs_f64(rested / 1e3)))
}
