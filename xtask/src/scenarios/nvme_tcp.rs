//! NVMe over TCP: our host on the target of Linux and Linux' host on ours, over QEMU's user network, and both ends ours
//! with a target that is killed.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::pci::{SHELL, program_folder};
use super::takeover::{HEIRS, take_over};
use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext, crash};
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
    Scenario {
        name: "nvme-tcp-target",
        sentence: "Linux finds two disks over two ports of our target, and its fio verifies them through a discard, resets, ANA changes and a lost port; then mkfs",
        place: RunsIn::Guest,
        ours: true,
        tell: target,
    },
    Scenario {
        name: "nvme-tcp-takeover",
        sentence: "Linux keeps its connections to our target as eight daemons take over one from another, and verifies what it wrote",
        place: RunsIn::Guest,
        ours: true,
        tell: takeover,
    },
    Scenario {
        name: "nvme-tcp-policies",
        sentence: "adaptive keeps to the fast one of two paths over TCP, measured beside the policies of Linux in the same guest",
        place: RunsIn::Guest,
        ours: true,
        tell: policies,
    },
];

pub(super) const NQN: &str = "nqn.2026-11.test:disk";
pub(super) const HOST_NQN: &str = "nqn.2026-11.test:host";

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
pub(super) fn free_address() -> Result<SocketAddr> {
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
    let (ip, port) = (address.ip().to_string(), address.port().to_string());
    let mut discover = ground.program.command()?;
    discover.args(["nvme", "discover", "-a", &ip, "-s", &port, "-o", "json"]);
    let said = process::succeed("blkyard nvme discover", &discover, CLIENT_LIMIT)?;
    let log: Value = serde_json::from_str(&said)?;
    let mut nqns = log["records"].as_array().into_iter().flatten().map(|record| &record["subnqn"]);
    ensure!(nqns.any(|nqn| nqn == NQN), "the discovery service of Linux names no {NQN}:\n{said}");
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

fn target(ground: &ScenarioContext) -> Result<()> {
    let ports = [guest_port(0)?, guest_port(1)?];
    let images = [ground.image("a.img", 64 * MIB)?, ground.image("b.img", 64 * MIB)?];
    let mut command = ground.program.command()?;
    command.arg("serve");
    for (image, options) in images.iter().zip([format!("?nqn={NQN}"), String::new()]) {
        command.args(["--device", &format!("file:{}?share=on", image.path.display())]);
        for port in ports {
            command.args(["--export", &format!("nvme-tcp://127.0.0.1:{port}{options}")]);
        }
    }
    let control = ground.path("control.sock");
    command.arg("--control").arg(&control);
    let running = ReadyServer::start_command(&command, std::slice::from_ref(&control), &ground.log)?;
    let [first, second] = ports;
    let task = format!(
        "{SHELL}
        modprobe -a nvme_tcp ext4
        exec 2>&1
        at() {{ what=$1 port=$2; shift 2; nvme $what -t tcp -a 10.0.2.2 -s $port --hostnqn={HOST_NQN} $*; }}
        on() {{ at connect $1 -n {NQN} --nr-io-queues=2 >/dev/null; }}
        # States of all paths, those that are equal once.
        states() {{ cat /sys/class/nvme/nvme*/nvme*c*n*/ana_state | sort -u | tr '\\n' ' '; }}
        until_states() {{ until [ \"$(states)\" = \"$1\" ]; do sleep 0.1; done; }}
        paths() {{ cat /sys/class/nvme/nvme*/state | tr '\\n' ' '; }}
        ready() {{ until [ -b /dev/nvme0n1 ] && [ -b /dev/nvme0n2 ]; do sleep 0.1; done; }}
        # Linux numbers disks as it finds them, in no order.
        disk() {{ echo /dev/$(basename $(dirname $(grep -lx $1 /sys/block/nvme0n*/nsid))); }}
        at discover {first} >/tmp/discovered
        for port in {first} {second}; do
            grep -q \"trsvcid: $port\" /tmp/discovered || {{ cat /tmp/discovered; exit 1; }}
        done
        # Ours shows the same, but for flags of entries.
        blkyard nvme discover -a 10.0.2.2 -s {first} -q {HOST_NQN}
        grep -v ^eflags: /tmp/discovered | diff /tmp/said -
        on {first}
        on {second}
        ready
        until_states 'optimized '
        # Two jobs of 4 MiB each write theirs at random, and read it back.
        fio_on() {{
            fio --filename=$1 --direct=1 --ioengine=libaio --thread --group_reporting --name=load --rw=randwrite \
                --bs=4k --iodepth=16 --size=4m --numjobs=2 --offset_increment=4m --randrepeat=0 \
                --verify=crc32c --verify_fatal=1 --output-format=terse --output=/tmp/fio-said \
                || {{ cat /tmp/fio-said; return 1; }}
        }}
        for disk in 1 2; do fio_on $(disk $disk); done
        /usr/sbin/blkdiscard $(disk 2)
        echo verified
        (while [ ! -e /tmp/enough ]; do fio_on $(disk 1) || exit 1; done) &
        loads=$!
        for n in 1 2 3; do
            for control in /sys/class/nvme/nvme*/reset_controller; do echo 1 >$control; sleep 0.3; done
        done
        until [ \"$(paths)\" = 'live live ' ]; do sleep 0.1; done
        until_states 'optimized '
        echo reset
        until_states 'inaccessible optimized '
        echo first is away
        until_states 'inaccessible non-optimized '
        echo second alone
        until_states 'optimized '
        nvme disconnect -d nvme1 >/dev/null
        touch /tmp/enough
        wait $loads
        echo loads verified
        mkfs.ext4 -q $(disk 1) 32m
        nvme disconnect -n {NQN} >/dev/null
        on {first}
        ready
        mkdir /tmp/mounted
        mount -t ext4 $(disk 1) /tmp/mounted
        umount /tmp/mounted
        echo again"
    );
    let mut machine = Vm::new(ground.guest, 2).network(&[]).folder(program_folder(ground)?).start(&task)?;
    for (said, settings) in [
        ("reset\n", &[("export:0", "inaccessible")][..]),
        ("first is away\n", &[("export:1", "non-optimized")]),
        ("second alone\n", &[("export:0", "optimized"), ("export:1", "optimized")]),
    ] {
        machine.wait_for_output(|output| output.ends_with(said))?;
        for (export, state) in settings {
            let mut set = ground.program.command()?;
            set.arg("set").arg("--control").arg(&control).args([export, &format!("ana_state={state}")[..]]);
            process::succeed("blkyard set", &set, CLIENT_LIMIT)?;
        }
    }
    let output = machine.wait()?.success()?;
    let expected = "verified\nreset\nfirst is away\nsecond alone\nloads verified\nagain\n";
    ensure!(output == expected, "the guest says:\n{output}");
    ensure!(images[1].allocated()? == 0, "the discard of Linux left {} bytes", images[1].allocated()?);
    running.stop()?;
    Ok(())
}

fn takeover(ground: &ScenarioContext) -> Result<()> {
    let port = guest_port(0)?;
    let image = ground.image("disk.img", 64 * MIB)?;
    let control = ground.path("control.sock");
    let mut command = ground.program.command()?;
    // So slow that requests are in flight at each takeover.
    command.args(["serve", "--device", &format!("file:{}?bytes_per_s_max=2M", image.path.display())]);
    command.args(["--export", &format!("nvme-tcp://127.0.0.1:{port}?nqn={NQN}"), "--control"]).arg(&control);
    let mut server = ReadyServer::start_command(&command, std::slice::from_ref(&control), &ground.log)?;
    let task = format!(
        "{SHELL}
        modprobe nvme_tcp
        exec 2>&1
        nvme connect -t tcp -a 10.0.2.2 -s {port} -n {NQN} --nr-io-queues=2 --hostnqn={HOST_NQN} -k 5 >/dev/null
        until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
        before=$(dmesg | grep -c nvme)
        echo at work
        until {ends}; do
            blkyard bench file:/dev/nvme0n1 --rw randwrite --bs 4k --iodepth 16 --numjobs 2 --size 8m --verify crc32c \
                || exit
        done
        echo verified, $(cat /sys/class/nvme/nvme0/state)
        # Each loss of a connection is a message of the kernel.
        dmesg | grep nvme | tail -n +$((before + 1))",
        ends = crash::is_ended("/dev/nvme0n1")
    );
    let mut machine = Vm::new(ground.guest, 2).network(&[]).folder(program_folder(ground)?).start(&task)?;
    machine.wait_for_output(|output| output.ends_with("at work\n"))?;
    let mut rests = Vec::new();
    for heir in 0..HEIRS {
        std::thread::sleep(Duration::from_millis(200));
        let (taker, rested) = take_over(ground, &control).with_context(|| format!("heir {heir}"))?;
        std::mem::replace(&mut server, taker).end().context("the daemon before")?;
        rests.push(rested);
    }
    crash::set_ended(&image, true)?;
    let output = machine.wait()?.success()?;
    ensure!(output == "at work\nverified, live\n", "the guest says:\n{output}");
    server.stop()?;
    ground.measured(format!("the host rested {rests:.1?}"));
    Ok(())
}

/// Linux and we as hosts of the same two ports, one of a device of 20 ms.
fn policies(ground: &ScenarioContext) -> Result<()> {
    let ports = [guest_port(0)?, guest_port(1)?];
    let mut targets = Vec::new();
    for (port, options) in ports.into_iter().zip(["", "?latency_us=20000"]) {
        let mut command = ground.program.command()?;
        command.args(["serve", "--device", &format!("null:1G{options}"), "--control", "none", "--export"]);
        // Identifiers of controllers must differ between daemons.
        let first = if options.is_empty() { 1 } else { 2000 };
        command.arg(format!("nvme-tcp://127.0.0.1:{port}?nqn={NQN}&controller_ids={first}"));
        targets.push(ReadyServer::start_command(&command, &[], &ground.log)?);
    }
    let [fast, slow] = ports;
    let task = format!(
        "{SHELL}
        modprobe nvme_tcp
        exec 2>&1
        on() {{ nvme connect -t tcp -a 10.0.2.2 -s $1 -n {NQN} --nr-io-queues=2 --hostnqn={HOST_NQN} >/dev/null; }}
        run() {{
            blkyard bench $1 --rw randread --bs 4k --iodepth 8 --runtime 1
            sed -n 's/.*IOPS=\\([^, ]*\\).*/\\1/p' /tmp/said | head -n 1
        }}
        path=nvme-tcp://10.0.2.2
        paths=multipath:$path:{fast}/{NQN},$path:{slow}/{NQN}
        on {fast}
        until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
        echo \"fast path: Linux $(run file:/dev/nvme0n1), blkyard $(run $path:{fast}/{NQN}?queues=2)\"
        on {slow}
        until [ $(cat /sys/class/nvme/nvme*/nvme*c*n*/ana_state | grep -c optimized) = 2 ]; do sleep 0.1; done
        for policy in round-robin queue-depth; do
            echo $policy >/sys/class/nvme-subsystem/nvme-subsys0/iopolicy
            echo \"$policy: Linux $(run file:/dev/nvme0n1), blkyard $(run $paths?queues=2\\&policy=$policy)\"
        done
        for policy in latency adaptive; do
            echo \"$policy: blkyard $(run $paths?queues=2\\&policy=$policy)\"
        done"
    );
    let vm = Vm::new(ground.guest, 2).network(&[]).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    ensure!(output.lines().count() == 5, "the guest says:\n{output}");
    let ours = |policy: &str| {
        let line = output.lines().find(|line| line.starts_with(policy));
        let iops = line.and_then(|line| line.split("blkyard ").nth(1)).context("a policy has no figure")?;
        let (number, unit) = iops.strip_suffix('k').map_or((iops, 1.0), |thousands| (thousands, 1e3));
        anyhow::Ok(number.parse::<f64>().with_context(|| format!("{iops} IOPS"))? * unit)
    };
    // Half of the I/O of round-robin takes 20 ms.
    ensure!(ours("adaptive")? > 1.5 * ours("round-robin")?, "adaptive does not avoid the slow path:\n{output}");
    ground.measured(format!("IOPS at depth 8: {}", output.lines().collect::<Vec<_>>().join("; ")));
    targets.into_iter().try_for_each(|target| target.stop().map(drop))
}

/// A free port of 127.0.0.1, the only address of this machine that a guest's user network reaches. It is below those
/// that the kernel gives to connections, so that none of theirs takes it before the target does.
pub(super) fn guest_port(number: u16) -> Result<u16> {
    let first = 10_000 + (std::process::id() % 5_000) as u16 * 4 + 2 * number;
    let mut free = (first..first + 2).filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.next().with_context(|| format!("ports {first} and {} of 127.0.0.1 are in use", first + 1))
}
