//! NVMe over TCP: our host on the target of Linux, over QEMU's user network, and on one of ours that is killed.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Context, Result, ensure};

use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process::{self, Running};
use crate::server::ReadyServer;
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "nvme-tcp-host",
        sentence: "our NVMe/TCP host verifies what it wrote to a Linux target over two queues, also in a later connection, with digests and without",
        place: RunsIn::Guest,
        ours: true,
        tell: host,
    },
    Scenario {
        name: "nvme-tcp-restart",
        sentence: "a disk over TCP that is served on survives two kills of its target amid writes, and every block is verified",
        place: RunsIn::Host,
        ours: true,
        tell: restart,
    },
];

const NQN: &str = "nqn.2026-11.test:disk";

fn restart(ground: &ScenarioContext) -> Result<()> {
    const KILLS: usize = 2;
    let address = free_address()?;
    let image = ground.image("disk.img", 64 * MIB)?;
    let mut command = ground.program.command()?;
    command.args(["serve", "--device", &format!("file:{}", image.path.display())]);
    command.args(["--export", &format!("nvme-tcp://{address}?nqn={NQN}")]);
    let target = || ReadyServer::start_command(&command, &[], &ground.log);
    let mut running = target()?;
    let socket = ground.path("onward.sock");
    let mut onward = ground.program.command()?;
    onward.args(["serve", "--device", &format!("nvme-tcp://{address}/{NQN}?keep_alive_s=1")]);
    // So slow that the target is killed several times meanwhile.
    onward.args(["--export", &format!("vhost-user-blk:{}?queues=2&iops_max=4000", socket.display())]);
    let onward = ReadyServer::start_command(&onward, std::slice::from_ref(&socket), &ground.log)?;
    let mut bench = ground.program.command()?;
    bench.args(["bench", &format!("vhost-user:{}?queues=2&timeout_s=120", socket.display())]);
    bench.args(["--rw", "randwrite", "--verify", "crc32c", "--size", "32m", "--numjobs", "2", "--iodepth", "16"]);
    let mut bench = Running::start("blkyard bench", &bench)?;
    let mut allocated = 0;
    for kill in 0..KILLS {
        let writes = bench.wait_until(CLIENT_LIMIT, |_| Ok(image.allocated()? > allocated + MIB))?;
        ensure!(writes, "the load ended before kill {kill}: {}{}", bench.stdout()?, bench.stderr()?);
        drop(running);
        allocated = image.allocated()?;
        running = target()?;
    }
    let ended = bench.wait(CLIENT_LIMIT)?;
    ensure!(ended.status.success(), "the load failed ({}):\n{}", ended.status, ended.said());
    onward.stop()?;
    running.stop()?;
    Ok(())
}

/// An address with a free port. Its loopback address is of this process alone: of 127.0.0.1 any other program could
/// get the port before the target listens to it, or while it is restarted.
fn free_address() -> Result<SocketAddr> {
    let [low, high, ..] = std::process::id().to_le_bytes();
    let address = Ipv4Addr::new(127, 1, high, low);
    let listener = TcpListener::bind((address, 0)).with_context(|| format!("no port of {address} is free"))?;
    Ok(listener.local_addr()?)
}

fn host(ground: &ScenarioContext) -> Result<()> {
    const PORT: u16 = 4420;
    let address = free_address()?;
    let task = format!(
        "set -e
        modprobe brd rd_nr=1 rd_size=65536
        modprobe nvmet_tcp
        mount -t configfs configfs /sys/kernel/config
        cd /sys/kernel/config/nvmet
        mkdir -p subsystems/{NQN}/namespaces/1
        echo 1 >subsystems/{NQN}/attr_allow_any_host
        echo /dev/ram0 >subsystems/{NQN}/namespaces/1/device_path
        echo 1 >subsystems/{NQN}/namespaces/1/enable
        mkdir ports/1
        echo tcp >ports/1/addr_trtype
        echo ipv4 >ports/1/addr_adrfam
        echo 0.0.0.0 >ports/1/addr_traddr
        echo {PORT} >ports/1/addr_trsvcid
        ln -s $PWD/subsystems/{NQN} ports/1/subsystems/{NQN}
        echo listens
        # Until its plug is pulled.
        sleep 1000"
    );
    let mut machine = Vm::new(ground.guest, 2).network(&[(address, PORT)]).start(&task)?;
    machine.wait_for_output(|output| output.contains("listens\n"))?;
    for options in ["", "&header_digest=on&data_digest=on"] {
        let device = format!("nvme-tcp://{address}/{NQN}?queues=2{options}");
        for pattern in ["randwrite", "randread"] {
            let mut bench = ground.program.command()?;
            bench.args(["bench", &device, "--rw", pattern, "--verify", "crc32c", "--size", "32m"]);
            bench.args(["--numjobs", "2", "--iodepth", "16"]);
            process::succeed("blkyard bench", &bench, CLIENT_LIMIT).with_context(|| format!("{pattern} {device}"))?;
        }
    }
    drop(machine);
    Ok(())
}
