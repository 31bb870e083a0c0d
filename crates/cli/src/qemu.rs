//! The QEMU command that attaches the disks of `serve`: one line, to be pasted into a shell.
//!
//! Starts no program and does not check which QEMU is installed.

use std::path::Path;

use serde_json::json;

/// Interval at which QEMU reconnects to a restarted daemon, ms: hardly noticeable for a guest, and the attempts cost
/// nothing.
const RECONNECT_MS: u32 = 20;

/// Disks with automatic slots. QEMU gives each a slot of the machine's root bus, which has 32; the host bridge, the
/// chipset, a display and a network card have four, and users add devices of their own.
const SLOTS_MAX: usize = 16;
/// Functions of a PCI device.
const FUNCTIONS: usize = 8;
/// Slots for more disks than that, in order of use: first those that leave room before and behind them. The USB
/// controllers that `-usb` adds have 0x1a and 0x1d.
const SLOTS: [u8; 26] = [
    0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1b,
    0x1c, 0x1e, 0x07, 0x06, 0x05, 0x04, 0x03,
];
/// Disks that the machine has room for.
pub const DISKS_MAX: usize = SLOTS.len() * FUNCTIONS;

/// A disk of the virtual machine.
#[derive(Clone, Copy, Debug)]
pub struct QemuDisk<'a> {
    /// Absolute path of its socket.
    pub socket: &'a Path,
    /// Number of its queues.
    pub queues: usize,
    /// Whether it is NVMe over vfio-user, not vhost-user-blk.
    pub is_nvme: bool,
}

/// The QEMU versions that accept the [command] for these disks.
pub fn versions<'a>(mut disks: impl Iterator<Item = QemuDisk<'a>>) -> &'static str {
    if disks.any(|disk| disk.is_nvme) {
        "QEMU 10.1 or newer"
    } else {
        "QEMU 9.2 or newer; for an older one, such as Debian 12's 7.2, write reconnect=1 instead of reconnect-ms=20"
    }
}

/// A command that starts a virtual machine with these disks, up to [`DISKS_MAX`].
pub fn command<'a>(disks: impl ExactSizeIterator<Item = QemuDisk<'a>>) -> String {
    let mut of_disks = String::new();
    let mut processors = 1;
    let shares_slots = disks.len() > SLOTS_MAX;
    for (index, disk) in disks.take(DISKS_MAX).enumerate() {
        // So many legacy interfaces would take more I/O ports than there are.
        let slot = shares_slots.then(|| format!("{:#04x}.{}", SLOTS[index / FUNCTIONS], index % FUNCTIONS));
        of_disks.push_str(&if disk.is_nvme {
            vfio_user_device(&disk, slot)
        } else {
            vhost_user_device(&disk, index, slot)
        });
        processors = processors.max(disk.queues);
    }
    // KVM where there is one. The disks' server maps the guest's memory, which must be shared with it.
    format!(
        "qemu-system-x86_64 -machine q35,accel=kvm:tcg,memory-backend=mem -cpu max -smp {processors} -m 1G \
         -object memory-backend-memfd,id=mem,size=1G,share=on{of_disks}"
    )
}

fn vhost_user_device(disk: &QemuDisk<'_>, index: usize, slot: Option<String>) -> String {
    // In a list of options two commas are one that belongs to the value.
    let path = disk.socket.to_string_lossy().replace(',', ",,");
    let chardev = quote(&format!("socket,id=disk{index},path={path},reconnect-ms={RECONNECT_MS}"));
    let slot = slot.map(|slot| format!(",disable-legacy=on,multifunction=on,addr={slot}")).unwrap_or_default();
    let queues = disk.queues;
    format!(" -chardev {chardev} -device vhost-user-blk-pci,chardev=disk{index},num-queues={queues}{slot}")
}

/// The address of the socket is a structure, which `-device` accepts as JSON only. QEMU does not reconnect.
fn vfio_user_device(disk: &QemuDisk<'_>, slot: Option<String>) -> String {
    let path = disk.socket.to_string_lossy();
    let mut device = json!({"driver": "vfio-user-pci", "socket": {"type": "unix", "path": path}});
    if let Some(slot) = slot {
        (device["multifunction"], device["addr"]) = (true.into(), slot.into());
    }
    format!(" -device {}", quote(&device.to_string()))
}

/// A word as a shell reads it.
fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const ODD_PATH: &str = "/run/it's $HOME, \"a\\b\"; *&.sock";

    fn disk(socket: &str, queues: usize) -> QemuDisk<'_> {
        QemuDisk { socket: Path::new(socket), queues, is_nvme: false }
    }

    fn nvme(socket: &str) -> QemuDisk<'_> {
        QemuDisk { is_nvme: true, ..disk(socket, 3) }
    }

    /// The words of a line, as the shell that it is pasted into has them.
    fn words(line: &str) -> Vec<String> {
        let ended = Command::new("sh").args(["-c", &format!("printf '%s\\n' {line}")]).output().unwrap();
        String::from_utf8(ended.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn one_line_has_all_disks_and_the_memory_once() {
        let line = command([disk("/run/a.sock", 2), disk("/run/b.sock", 4)].into_iter());
        assert_eq!(
            line,
            "qemu-system-x86_64 -machine q35,accel=kvm:tcg,memory-backend=mem -cpu max -smp 4 -m 1G \
             -object memory-backend-memfd,id=mem,size=1G,share=on \
             -chardev socket,id=disk0,path=/run/a.sock,reconnect-ms=20 \
             -device vhost-user-blk-pci,chardev=disk0,num-queues=2 \
             -chardev socket,id=disk1,path=/run/b.sock,reconnect-ms=20 \
             -device vhost-user-blk-pci,chardev=disk1,num-queues=4"
        );
    }

    #[test]
    fn any_path_survives_the_shell_and_the_option_list() {
        let line = command([disk(ODD_PATH, 1)].into_iter());
        let words = words(&line);
        let chardev = &words[words.iter().position(|word| word == "-chardev").unwrap() + 1];
        assert_eq!(chardev, "socket,id=disk0,path=/run/it's $HOME,, \"a\\b\"; *&.sock,reconnect-ms=20");
    }

    #[test]
    fn nvme_disk_is_a_device_in_json() {
        let line = command([disk("/run/a.sock", 1), nvme(ODD_PATH)].into_iter());
        assert!(line.contains(" -smp 3 ") && line.contains(",num-queues=1 -device "), "{line}");
        let words = words(&line);
        let device: serde_json::Value = serde_json::from_str(words.last().unwrap()).unwrap();
        assert_eq!(device, json!({"driver": "vfio-user-pci", "socket": {"type": "unix", "path": ODD_PATH}}));
        let line = command(std::iter::repeat_n(nvme("/run/a.sock"), SLOTS_MAX + 1));
        assert!(line.contains(r#""addr":"0x09.0""#) && line.contains(r#""multifunction":true"#), "{line}");
        assert_eq!(versions([disk("a", 1), nvme("b")].into_iter()), "QEMU 10.1 or newer");
    }

    #[test]
    fn many_disks_share_slots_and_each_has_a_function_of_its_own() {
        let addresses = |count| -> Vec<String> {
            let line = command((0..count).map(|_| disk("/run/a.sock", 1)));
            let found = line.split(' ').filter_map(|word| Some(word.split_once(",addr=")?.1.to_owned()));
            found.collect()
        };
        assert!(addresses(SLOTS_MAX).is_empty());
        for count in [SLOTS_MAX + 1, 40, DISKS_MAX, DISKS_MAX + 1] {
            let mut found = addresses(count);
            assert_eq!((found[0].as_str(), found[8].as_str()), ("0x08.0", "0x09.0"));
            found.sort();
            found.dedup();
            assert_eq!(found.len(), count.min(DISKS_MAX));
        }
    }
}
