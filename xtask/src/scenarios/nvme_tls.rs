//! Encrypted connections against Linux: its host on our target, and our host on its target.
//!
//! In the guest tlshd shakes hands for the kernel, and nvme-cli derives keys as those without `--compat` do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::nvme_tcp::{HOST_NQN, NQN, guest_port};
use super::pci::SHELL;
use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext};
use crate::server::ReadyServer;
use crate::test::build_as_tested;
use crate::vm::Vm;
use crate::{process, repository};

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "nvme-tcp-tls",
    sentence: "Linux connects to our target by TLS, as does our host to the target of Linux, with identities of both versions; without the key nothing is opened on either, and a program without TLS says so",
    place: RunsIn::Guest,
    ours: true,
    tell: tls,
}];

/// A folder for the guest: the program, and the handshakes of its kernel with their libraries, and those of OpenSSL.
fn folder(ground: &ScenarioContext, program: &Path) -> Result<std::path::PathBuf> {
    let folder = ground.path("programs");
    let libraries = folder.join("lib");
    fs::create_dir_all(&libraries).with_context(|| format!("cannot make {}", libraries.display()))?;
    ground.guest.copy_program("usr/sbin/tlshd", &["libssl.so.3", "libcrypto.so.3"], &libraries)?;
    fs::copy(program, folder.join("blkyard")).with_context(|| format!("cannot copy {}", program.display()))?;
    Ok(folder)
}

fn tls(ground: &ScenarioContext) -> Result<()> {
    let program = build_as_tested("blkyard", &repository()?, &ground.log)?;
    let key = || -> Result<String> {
        let mut make = Command::new(&program);
        make.args(["nvme", "gen-tls-key"]);
        Ok(process::succeed("blkyard nvme gen-tls-key", &make, CLIENT_LIMIT)?.trim().to_owned())
    };
    let (key, wrong) = (key()?, key()?);
    let keys = ground.path("keys");
    fs::write(&keys, format!("{HOST_NQN} {key} compat\n"))?;
    fs::set_permissions(&keys, fs::Permissions::from_mode(0o600))?;
    let (port, image) = (guest_port(0)?, ground.image("disk.img", 64 * MIB)?);
    let serve = |mut command: Command| {
        command.args(["serve", "--device", &format!("file:{}", image.path.display()), "--export"]);
        command.arg(format!("nvme-tcp://127.0.0.1:{port}?nqn={NQN}&tls_keys={}", keys.display()));
        command
    };
    let without = process::run("blkyard", &serve(ground.program.command()?), CLIENT_LIMIT)?;
    ensure!(
        !without.status.success() && without.stderr.contains("built without TLS"),
        "a program without TLS says:\n{}",
        without.stderr
    );
    let running = ReadyServer::start_command(&serve(Command::new(&program)), &[], &ground.log)?;
    let task = format!(
        "{SHELL}
        export LD_LIBRARY_PATH=/host/lib
        modprobe -a tls nvme_tcp nvmet_tcp brd
        exec 2>&1
        printf '[debug]\\nloglevel=1\\n[authenticate]\\nkeyrings=.nvme\\n[authenticate.client]\\n[authenticate.server]\\n' >/tmp/tlshd.conf
        /host/lib/tlshd -s -c /tmp/tlshd.conf >/tmp/tlshd 2>&1 &
        sleep 1
        said() {{ cat /tmp/connect; tail -n 20 /tmp/tlshd; dmesg | tail -n 20; exit 1; }}
        on() {{ nvme connect -t tcp -a 10.0.2.2 -s {port} -n {NQN} --hostnqn={HOST_NQN} --nr-io-queues=2 $* >/tmp/connect 2>&1; }}
        insert() {{ nvme check-tls-key --insert --hostnqn={HOST_NQN} --subsysnqn={NQN} --keydata=$1 --identity=$2 >/tmp/connect 2>&1 || said; }}
        load='--bs 4k --iodepth 16 --numjobs 2 --size 4m --verify crc32c --rw randwrite'
        on && exit 1
        on --tls && exit 1
        echo refused
        for version in 0 1; do
            insert {key} $version
            on --tls || said
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
        echo {key} compat >/tmp/key
        echo {key} compat v1 >/tmp/key-v1
        echo {wrong} compat >/tmp/wrong
        mount -t configfs configfs /sys/kernel/config
        cd /sys/kernel/config/nvmet
        mkdir -p hosts/{HOST_NQN} subsystems/{NQN}/namespaces/1
        ln -s $PWD/hosts/{HOST_NQN} subsystems/{NQN}/allowed_hosts/
        echo /dev/ram0 >subsystems/{NQN}/namespaces/1/device_path
        echo 1 >subsystems/{NQN}/namespaces/1/enable
        mkdir ports/1
        echo tcp >ports/1/addr_trtype
        echo ipv4 >ports/1/addr_adrfam
        echo 127.0.0.1 >ports/1/addr_traddr
        echo 4420 >ports/1/addr_trsvcid
        echo tls1.3 >ports/1/addr_tsas
        echo required >ports/1/addr_treq
        ln -s $PWD/subsystems/{NQN} ports/1/subsystems/{NQN}
        disk=\"nvme-tcp://127.0.0.1:4420/{NQN}?queues=2&host_nqn={HOST_NQN}\"
        for file in key key-v1; do
            blkyard bench \"$disk&tls_key=/tmp/$file\" $load || said
            echo $file
        done
        refused 'TLS with' blkyard bench \"$disk&tls_key=/tmp/wrong\" $load
        refused 'whether it wants TLS' blkyard bench \"$disk\" $load
        echo refused"
    );
    let vm = Vm::new(ground.guest, 2).network(&[]).folder(folder(ground, &program)?);
    let output = vm.succeed(&task)?;
    let expected = "refused\nverified\nverified\nkey\nkey-v1\nrefused\n";
    ensure!(output == expected, "the guest says:\n{output}");
    running.stop().map(drop).context("the target")
}
