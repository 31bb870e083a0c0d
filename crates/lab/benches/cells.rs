//! Figures of `cargo xtask bench`, cell by cell.
//!
//! `cargo xtask bench [CELL...] [--json] [--quick]` measures the cells whose names contain one of the words, or all.
//! Each line has value, unit, 10th and 90th percentile of the windows, and two references: the floor, which is the
//! limit of the machine that `limits` names for the cell, and the baseline, which is the value of another program or
//! state.
//!
//! It gives no verdict: goals are in docs/goals.md.

#[path = "cells/asleep.rs"]
mod asleep;
#[path = "cells/beside.rs"]
mod beside;
#[path = "cells/clients.rs"]
mod clients;
#[path = "cells/core.rs"]
mod core;
#[path = "cells/file.rs"]
mod file;
#[path = "cells/idle.rs"]
mod idle;
#[path = "cells/limits.rs"]
mod limits;
#[path = "cells/lines.rs"]
mod lines;
#[path = "cells/load.rs"]
mod load;
#[path = "cells/neighbour.rs"]
mod neighbour;
#[path = "cells/nvme.rs"]
mod nvme;
#[path = "cells/queue_pairs.rs"]
mod queue_pairs;
#[path = "cells/report.rs"]
mod report;
#[path = "cells/ring.rs"]
mod ring;
#[path = "cells/sched.rs"]
mod sched;
#[path = "cells/servers.rs"]
mod servers;
#[path = "cells/shared.rs"]
mod shared;
#[path = "cells/tcp.rs"]
mod tcp;
#[path = "cells/vfio_user.rs"]
mod vfio_user;
#[path = "cells/vhost.rs"]
mod vhost;
#[path = "cells/waiting.rs"]
mod waiting;

use blkyard_lab::floor::{WindowPlan, pin};

use report::CellReport;

fn main() {
    let (mut json, mut quick, mut filters) = (false, false, Vec::new());
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            "--quick" => quick = true,
            // Cargo says so to every bench it runs.
            "--bench" => {}
            flag if flag.starts_with('-') => {
                eprintln!("{flag}: no such flag; those known are --json and --quick");
                std::process::exit(2);
            }
            cell => filters.push(cell.to_string()),
        }
    }
    pin();
    let plan = if quick {
        WindowPlan { window_ns: 2_000_000, windows: 150, warm_up: 10 }
    } else {
        WindowPlan { window_ns: 3_000_000, windows: 400, warm_up: 20 }
    };
    let mut report = CellReport::new(filters, json);
    core::null_cells(plan, &mut report);
    core::two_queues_cell(plan, &mut report);
    core::scheduler_cells(plan, &mut report);
    shared::null_cells(plan, &mut report);
    core::ram_cells(plan, &mut report);
    core::ring_cells(plan, &mut report);
    queue_pairs::queue_pair_cells(plan, &mut report);
    file::tmpfs_cells(plan, quick, &mut report);
    vhost::driver_cells(plan, &mut report);
    vfio_user::nvme_cells(plan, &mut report);
    tcp::host_cells(plan, &mut report);
    clients::client_cells(quick, &mut report);
    asleep::asleep_cells(quick, &mut report);
    beside::beside_cells(quick, &mut report);
    waiting::waiting_cells(quick, &mut report);
    neighbour::neighbour_cells(quick, &mut report);
    idle::idle_cells(plan, quick, &mut report);
}
