//! The QEMU command that attaches what `serve` serves: one line, to be pasted into a shell as it is.
//!
//! Starts nothing and does not look which QEMU is installed.

use std::fmt::Write;
use std::path::Path;

/// How often QEMU looks for a daemon that was restarted, ms: a guest hardly notices, and looking costs nothing.
const RECONNECT_MS: u32 = 20;

/// Which QEMU takes the line; for [`command`].
pub const VERSIONS: &str =
    "QEMU 9.2 or newer; for an older one, such as Debian 12's 7.2, write reconnect=1 instead of reconnect-ms=20";

/// A command that starts a virtual machine with all these disks: the socket of each, as an absolute path, and how many
/// queues are served there.
pub fn command<'a>(disks: impl IntoIterator<Item = (&'a Path, usize)>) -> String {
    let mut of_disks = String::new();
    let mut processors = 1;
    for (index, (socket, queues)) in disks.into_iter().enumerate() {
        // In a list of options two commas are one that belongs to the value.
        let path = socket.to_string_lossy().replace(',', ",,");
        let chardev = quote(&format!("socket,id=disk{index},path={path},reconnect-ms={RECONNECT_MS}"));
        let _ =
            write!(of_disks, " -chardev {chardev} -device vhost-user-blk-pci,chardev=disk{index},num-queues={queues}");
        processors = processors.max(queues);
    }
    // KVM where there is one. The disks' server maps the guest's memory, which must be shared with it.
    format!(
        "qemu-system-x86_64 -machine q35,accel=kvm:tcg,memory-backend=mem -cpu max -smp {processors} -m 1G \
         -object memory-backend-memfd,id=mem,size=1G,share=on{of_disks}"
    )
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

    /// The words of a line, as the shell that it is pasted into has them.
    fn words(line: &str) -> Vec<String> {
        let ended = Command::new("sh").args(["-c", &format!("printf '%s\\n' {line}")]).output().unwrap();
        String::from_utf8(ended.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn one_line_has_all_disks_and_the_memory_once() {
        let line = command([(Path::new("/run/a.sock"), 2), (Path::new("/run/b.sock"), 4)]);
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
        let line = command([(Path::new("/run/it's $HOME, \"a\\b\"; *&.sock"), 1)]);
        let words = words(&line);
        let chardev = &words[words.iter().position(|word| word == "-chardev").unwrap() + 1];
        assert_eq!(chardev, "socket,id=disk0,path=/run/it's $HOME,, \"a\\b\"; *&.sock,reconnect-ms=20");
    }
}
