//! The daemon on the oldest kernel that is tested: inside a guest that has it, with an image on a file system there.

use anyhow::{Result, ensure};

use super::pci::{SHELL, program_folder};
use super::{MIB, RunsIn, Scenario, ScenarioContext};
use crate::guest::Kernel;
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "old-kernel",
    sentence: "on Linux 6.1 an image on ext4 is served to programs, over two NVMe/TCP paths, through a takeover and through a kill amid verified writes",
    place: RunsIn::Guest,
    ours: true,
    tell: old_kernel,
}];

fn old_kernel(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 512 * MIB)?;
    let task = format!(
        "{SHELL}
        modprobe -a nvme ext4
        until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
        uname -r | grep -o '^[0-9]*[.][0-9]*'
        ip addr add 127.0.0.1/8 dev lo
        ip link set lo up
        mkfs.ext4 -q /dev/nvme0n1
        mkdir /disk
        mount /dev/nvme0n1 /disk
        cd /disk
        serve() {{
            : >/tmp/serve
            /host/blkyard serve \"$@\" >>/tmp/serve 2>&1 &
            serve=$!
            until grep -q ready /tmp/serve; do kill -0 $serve || {{ cat /tmp/serve; exit 1; }}; sleep 0.1; done
        }}
        load='--bs 4k --iodepth 16 --numjobs 2 --size 4m --verify crc32c'
        # What a user types first: a new image, and all defaults.
        serve
        grep -o 'bypassing the page cache' /tmp/serve || {{ cat /tmp/serve; exit 1; }}
        blkyard bench vhost-user:blkyard.sock --rw randwrite --bs 128k --iodepth 4 --size 16m --verify crc32c
        blkyard bench vhost-user:blkyard.sock --rw trim --bs 1m --size 64m
        until_end() {{
            until [ -e /tmp/end ]; do
                if /host/blkyard bench vhost-user:blkyard.sock --rw randwrite $load >/tmp/bench 2>&1; then
                    grep -q ' 0 differ' /tmp/bench || return 1
                else
                    # It began between the kill and the restart: none but a client that has connected waits for a daemon.
                    grep -q 'no process listens on it' /tmp/bench || return 1
                fi
            done
        }}
        until_end &
        loads=$!
        sleep 1
        serve --takeover /run/blkyard/$serve.sock
        sleep 1
        kill -9 $serve
        # After a crash it is started as before.
        serve --device blkyard.img --export vhost-user-blk:blkyard.sock
        sleep 1
        touch /tmp/end
        wait $loads || {{ cat /tmp/bench /tmp/serve; exit 1; }}
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        echo local
        nqn=nqn.2026-11.example:disk
        port() {{ echo nvme-tcp://127.0.0.1:$1; }}
        serve --device 'blkyard.img?scheduler=fair&share=on' \\
            --export \"$(port 4420)?nqn=$nqn\" --export \"$(port 4421)?nqn=$nqn\"
        blkyard bench $(port 4420)/$nqn --rw randwrite $load
        blkyard bench multipath:$(port 4420)/$nqn,$(port 4421)/$nqn --rw randread $load
        kill $serve
        wait $serve || {{ cat /tmp/serve; exit 1; }}
        echo remote"
    );
    let vm =
        Vm::new(ground.guest, 2).kernel(Kernel::Old).nvme_image(image.path.clone()).folder(program_folder(ground)?);
    let output = vm.succeed(&task)?;
    ensure!(output == "6.1\nbypassing the page cache\nlocal\nremote\n", "the guest says:\n{output}");
    Ok(())
}
