//! `blkyard nvme` with a controller that `blkyard serve` offers over vfio-user.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::common::{Process, program, run};

const SERIAL: &str = "nvme-test";
/// Blocks of the disk.
const BLOCKS: u64 = 16384;

/// A daemon with an NVMe controller at `nvme.sock`.
fn serve(folder: &Path) -> Process {
    let (device, export) = ("ram:8M?cache=writeback", format!("vfio-user:nvme.sock?serial={SERIAL}"));
    let arguments = ["serve", "--device", device, "--export", &export, "--control", "none"];
    let mut daemon = Process::spawn(program(folder, &arguments).stdout(Stdio::null()).stderr(Stdio::null()));
    daemon.wait_for(&folder.join("nvme.sock"));
    daemon
}

/// Runs a command on the served controller.
fn nvme(folder: &Path, words: &[&str]) -> Output {
    let (command, rest) = words.split_first().unwrap();
    run(folder, &[&["nvme", command, "vfio-user:nvme.sock"], rest].concat())
}

fn bytes(folder: &Path, words: &[&str]) -> Vec<u8> {
    let output = nvme(folder, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn text(folder: &Path, words: &[&str]) -> String {
    String::from_utf8(bytes(folder, words)).unwrap()
}

fn json(folder: &Path, words: &[&str]) -> Value {
    serde_json::from_slice(&bytes(folder, &[words, &["-o", "json"]].concat())).unwrap()
}

/// The message of a command that fails.
fn failure(folder: &Path, words: &[&str]) -> String {
    let output = nvme(folder, words);
    assert_eq!(output.status.code(), Some(1), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.is_empty(), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_controller_is_shown_in_each_form() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder);

    let data = bytes(folder, &["id-ctrl", "-o", "binary"]);
    assert_eq!((data.len(), &data[4..4 + SERIAL.len()]), (4096, SERIAL.as_bytes()));
    let controller = json(folder, &["id-ctrl"]);
    assert_eq!(controller["sn"].as_str().unwrap().trim_end(), SERIAL);
    assert_eq!((&controller["nn"], &controller["mdts"]), (&data[516].into(), &data[77].into()));
    assert!(text(folder, &["id-ctrl"]).contains(&format!("\nsn        : {SERIAL}")));
    assert!(text(folder, &["id-ctrl", "-V"]).contains("\nvs[]:\n"));

    let namespace = json(folder, &["id-ns"]);
    assert_eq!((&namespace["nsze"], &namespace["lbafs"][0]["ds"]), (&BLOCKS.into(), &9.into()));
    assert_eq!(namespace, json(folder, &["id-ns", "-n", "1"]));
    assert!(text(folder, &["id-ns"]).contains("\nlbaf  0 : ms:0   lbads:9  rp:0 (in use)\n"));

    let health = json(folder, &["smart-log"]);
    assert_eq!((&health["critical_warning"], &health["media_errors"]), (&0.into(), &0.into()));
    assert!(
        text(folder, &["smart-log", "-H"])
            .starts_with("Smart Log for NVME device:vfio-user:nvme.sock namespace-id:ffffffff\n")
    );

    let features = json(folder, &["get-feature"]);
    assert_eq!(features["feature: 0x06"][0]["name"], "Volatile Write Cache");
    assert_eq!(features["Feature: 0x06"][0]["Volatile Write Cache Enable (WCE)"], "Enabled");
    let shown = text(folder, &["get-feature", "-f", "6", "-H"]);
    assert!(shown.starts_with("get-feature:0x06 (Volatile Write Cache), Current value:0x00000001\n\t"), "{shown}");
    assert_eq!(bytes(folder, &["get-feature", "-f", "0xe", "-b"]).len(), 8);
}

#[test]
fn errors_are_in_the_error_log() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder);
    let entries = json(folder, &["error-log"])["errors"].as_array().unwrap().len();
    let kept = json(folder, &["id-ctrl"])["elpe"].as_u64().unwrap() + 1;
    assert_eq!(entries as u64, kept.min(64));
    assert_eq!(json(folder, &["error-log", "-e", "1"])["errors"].as_array().unwrap().len(), 1);
    assert!(text(folder, &["error-log"]).contains(" Entry[ 0]\n"));
    assert!(failure(folder, &["error-log", "-e", "0"]).contains("give a number"));
}

#[test]
fn data_of_a_whole_transfer_is_passed_through() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder);
    let data: Vec<u8> = (0..128 << 10).map(|at: u32| (at / 512 * 7 + at) as u8).collect();
    fs::write(folder.join("in"), &data).unwrap();
    let part = ["-n", "1", "-l", "131072", "--cdw10", "8", "--cdw12", "255"];
    let write = [&["io-passthru", "-O", "1", "-w", "-i", "in"], &part[..]].concat();
    let output = nvme(folder, &write);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stderr, b"IO Command Write is Success and result: 0x00000000\n");
    let read = [&["io-passthru", "-O", "2", "-r"], &part[..]].concat();
    assert!(bytes(folder, &[&read[..], &["-b"]].concat()) == data, "what was written is not read");
    assert!(text(folder, &read).contains("\n0000: 00 01 02 03 "));
    bytes(folder, &[&read[..], &["-i", "out"]].concat());
    assert!(fs::read(folder.join("out")).unwrap() == data);

    let identify = ["admin-passthru", "-O", "6", "-r", "-l", "4096", "--cdw10=1", "-b"];
    assert_eq!(bytes(folder, &identify), bytes(folder, &["id-ctrl", "-b"]));
    assert_eq!(bytes(folder, &["passthru", "-O", "6", "-r", "-l", "4096", "--cdw10=1", "-b"]).len(), 4096);
}

#[test]
fn a_failed_command_names_its_status() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder);
    for (words, parts) in [
        (&["admin-passthru", "-O", "0xc0"][..], ["Vendor Specific failed", "invalid opcode (001h)"]),
        (&["id-ns", "-n", "77"], ["Identify failed", "give a namespace"]),
        (
            &["io-passthru", "-O", "2", "-n", "1", "-r", "-l", "512", "--cdw11=1"],
            ["Read failed", "LBA out of range (080h)"],
        ),
        (&["get-feature", "-f", "0x7c"], ["Get Features failed", "invalid field (002h)"]),
        (&["get-feature", "-s", "4"], ["-s 4", "give 0 to 3"]),
        (&["io-passthru", "-O", "2", "-r", "-l", "0xffffffff"], ["a command transfers 1 to", "bytes"]),
        (&["admin-passthru", "-O", "0xc0", "-l", "8"], ["without a direction", "--read"]),
    ] {
        let message = failure(folder, words);
        assert!(parts.iter().all(|part| message.contains(part)), "{words:?}: {message}");
        assert!(message.contains("; "), "{message}");
    }
}

#[test]
fn a_command_that_erases_is_sent_only_with_force() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Refused before the device is opened: there is none.
    for opcode in ["0x80", "0x84"] {
        let message = failure(folder, &["admin-passthru", "-O", opcode, "-n", "1"]);
        assert!(message.contains("cannot be recovered; add --force"), "{message}");
        let message = failure(folder, &["admin-passthru", "-O", opcode, "-n", "1", "--force"]);
        assert!(message.contains("start the server"), "{message}");
    }
    let shown = text(folder, &["admin-passthru", "-O", "0xc1", "--dry-run", "--cdw15=0x1234"]);
    assert!(shown.contains("opcode       : c1\n") && shown.contains("cdw15        : 00001234\n"), "{shown}");
}

#[test]
fn a_late_command_is_aborted() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let _daemon = serve(folder);
    // It waits for an event that does not come.
    let message = failure(folder, &["admin-passthru", "-O", "0xc", "-t", "300"]);
    let expected = "Asynchronous Event Request failed, NVMe status: abort requested (007h); it exceeded its timeout";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn a_device_that_is_none_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("file.sock"), "").unwrap();
    for (name, part) in [
        ("vfio-user:absent.sock", "start the server"),
        ("vfio-user:file.sock", "start the server"),
        ("disk.img", "give vfio-user:SOCKET"),
        ("/dev/nvme999", "No such file"),
    ] {
        let output = run(folder, &["nvme", "id-ctrl", name]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && message.contains(part), "{name}: {message}");
    }
    let listed = run(folder, &["nvme", "list", "-o", "json"]);
    assert!(listed.status.success() && serde_json::from_slice::<Value>(&listed.stdout).unwrap()["Devices"].is_array());
}
