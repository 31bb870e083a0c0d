//! In-band authentication against Linux: its host on our target, and our host on its target, in one guest.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};

use super::nvme_tcp::{HOST_NQN, NQN, guest_port};
use super::pci::{SHELL, program_folder};
use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process;
use crate::server::ReadyServer;
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "nvme-tcp-auth",
    sentence: "Linux and our target authenticate each other, as do our host and the target of Linux, with each hash and three groups; a wrong secret opens nothing on either",
    place: RunsIn::Guest,
    ours: true,
    tell: auth,
}];

fn auth(ground: &ScenarioContext) -> Result<()> {
    let secret = |hash: &str| -> Result<String> {
        let mut make = ground.program.command()?;
        make.args(["nvme", "gen-dhchap-key", "--hmac", hash]);
        Ok(process::succeed("blkyard nvme gen-dhchap-key", &make, CLIENT_LIMIT)?.trim().to_owned())
    };
    let (host, target, wrong) = (secret("1")?, secret("3")?, secret("0")?);
    let secrets = ground.path("secrets");
    fs::write(&secrets, format!("{HOST_NQN} {host} {target}\n"))?;
    fs::set_permissions(&secrets, fs::Permissions::from_mode(0o600))?;
    let (port, image) = (guest_port(0)?, ground.image("disk.img", 64 * MIB)?);
    let mut command = ground.program.command()?;
    command.args(["serve", "--device", &format!("file:{}", image.path.display()), "--export"]);
    command.arg(format!("nvme-tcp://127.0.0.1:{port}?nqn={NQN}&secrets={}", secrets.display()));
    let running = ReadyServer::start_command(&command, &[], &ground.log)?;
    let task = format!(
        "{SHELL}
        modprobe -a nvme_tcp nvmet_tcp brd
        exec 2>&1
        on() {{ nvme connect -t tcp -a 10.0.2.2 -s {port} -n {NQN} --hostnqn={HOST_NQN} --nr-io-queues=2 $* >/tmp/connect 2>&1; }}
        load='--bs 4k --iodepth 16 --numjobs 2 --size 4m --verify crc32c --rw randwrite'
        on && exit 1
        on --dhchap-secret={wrong} && exit 1
        on --dhchap-secret={host} --dhchap-ctrl-secret={wrong} && exit 1
        echo refused
        for secrets in '' --dhchap-ctrl-secret={target}; do
            on --dhchap-secret={host} $secrets || {{ cat /tmp/connect; dmesg | tail -n 20; exit 1; }}
            until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
            blkyard bench file:/dev/nvme0n1 $load
            echo 1 >/sys/class/nvme/nvme0/reset_controller
            blkyard bench file:/dev/nvme0n1 $load
            nvme disconnect -n {NQN} >/dev/null
            echo verified
        done
        # The other way round.
        ip link set lo up
        umask 077
        echo {host} >/tmp/host
        echo {target} >/tmp/target
        echo {wrong} >/tmp/wrong
        mount -t configfs configfs /sys/kernel/config
        cd /sys/kernel/config/nvmet
        mkdir -p hosts/{HOST_NQN} subsystems/{NQN}/namespaces/1
        echo {host} >hosts/{HOST_NQN}/dhchap_key
        echo {target} >hosts/{HOST_NQN}/dhchap_ctrl_key
        ln -s $PWD/hosts/{HOST_NQN} subsystems/{NQN}/allowed_hosts/
        echo /dev/ram0 >subsystems/{NQN}/namespaces/1/device_path
        echo 1 >subsystems/{NQN}/namespaces/1/enable
        mkdir ports/1
        echo tcp >ports/1/addr_trtype
        echo ipv4 >ports/1/addr_adrfam
        echo 127.0.0.1 >ports/1/addr_traddr
        echo 4420 >ports/1/addr_trsvcid
        ln -s $PWD/subsystems/{NQN} ports/1/subsystems/{NQN}
        disk=\"nvme-tcp://127.0.0.1:4420/{NQN}?queues=2&host_nqn={HOST_NQN}\"
        for kind in 'sha256 null' 'sha384 ffdhe2048' 'sha512 ffdhe3072'; do
            echo \"hmac(${{kind% *}})\" >hosts/{HOST_NQN}/dhchap_hash
            echo ${{kind#* }} >hosts/{HOST_NQN}/dhchap_dhgroup
            for options in '' '&ctrl_secret=/tmp/target'; do
                blkyard bench \"$disk&secret=/tmp/host$options\" $load
            done
            echo $kind
        done
        refused 'asks for authentication' blkyard bench \"$disk\" $load
        refused 'refuses the authentication' blkyard bench \"$disk&secret=/tmp/wrong\" $load
        refused 'does not know its own secret' blkyard bench \"$disk&secret=/tmp/host&ctrl_secret=/tmp/wrong\" $load
        echo refused"
    );
    let vm = Vm::new(ground.guest, 2).network(&[]).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    let expected = "refused\nverified\nverified\nsha256 null\nsha384 ffdhe2048\nsha512 ffdhe3072\nrefused\n";
    ensure!(output == expected, "the guest says:\n{output}");
    running.stop().map(drop).context("the target")
}
