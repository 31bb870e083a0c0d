//! `blkyard nvme` beside nvme-cli, in a guest with an NVMe disk: the same questions to the same device.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::pci::program_folder;
use super::{MIB, RunsIn, Scenario, ScenarioContext};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "nvme-cli",
    sentence: "blkyard nvme says of a kernel's NVMe disk what nvme-cli says, key by key, and passes the same commands through, with metadata",
    place: RunsIn::Guest,
    ours: true,
    tell: same_as_nvme_cli,
}];

/// Questions whose answers are equal as JSON.
const JSON: &[&str] = &[
    "list -o json",
    "id-ctrl /dev/nvme0 -o json",
    "id-ctrl /dev/nvme0n1 -o json",
    "id-ctrl /dev/ng0n1 -o json",
    "id-ns /dev/nvme0n1 -o json",
    "id-ns /dev/nvme0 -n 1 -o json",
    "id-ns /dev/nvme0n2 -o json",
    "id-ctrl /dev/nvme0 -H -o json",
    "id-ns /dev/nvme0n2 -H -o json",
    "smart-log /dev/nvme0 -o json",
    "smart-log /dev/nvme0 -H -o json",
    "error-log /dev/nvme0 -o json",
    "get-feature /dev/nvme0 -f 1 -o json",
    "get-feature /dev/nvme0 -f 2 -o json",
    "get-feature /dev/nvme0 -f 4 -o json",
    "get-feature /dev/nvme0n1 -f 5 -o json",
    "get-feature /dev/nvme0 -f 6 -o json",
    "get-feature /dev/nvme0 -f 7 -o json",
    "get-feature /dev/nvme0 -f 8 -o json",
    "get-feature /dev/nvme0 -f 9 -o json",
    "get-feature /dev/nvme0 -f 0xa -o json",
    "get-feature /dev/nvme0 -f 0xb -o json",
    "get-feature /dev/nvme0 -f 6 -s 3 -o json",
];

/// Questions whose answers are equal byte by byte.
const BYTES: &[&str] = &[
    "list",
    "id-ctrl /dev/nvme0",
    "id-ctrl /dev/nvme0 -V",
    "id-ctrl /dev/nvme0 -b",
    "id-ns /dev/nvme0n1",
    "id-ns /dev/nvme0n1 -b",
    "id-ns /dev/nvme0n2",
    "id-ctrl /dev/nvme0 -H",
    "id-ctrl /dev/nvme0 --human-readable --vendor-specific",
    "id-ns /dev/nvme0n1 -H",
    "id-ns /dev/nvme0n2 -H -V",
    "smart-log /dev/nvme0",
    "smart-log /dev/nvme0 -H",
    "error-log /dev/nvme0",
    "error-log /dev/nvme0 -e 3",
    "get-feature /dev/nvme0 -f 7",
    "get-feature /dev/nvme0 -f 0xb",
    "get-feature /dev/nvme0 -f 6 -s 3",
    "get-feature /dev/nvme0 -f 1 -H",
    "get-feature /dev/nvme0 -f 2 -H",
    "get-feature /dev/nvme0 -f 4 -H",
    "get-feature /dev/nvme0n1 -f 5 -H",
    "get-feature /dev/nvme0 -f 6 -H",
    "get-feature /dev/nvme0 -f 7 -H",
    "get-feature /dev/nvme0 -f 8 -H",
    "get-feature /dev/nvme0 -f 9 -H",
    "get-feature /dev/nvme0 -f 0xa -H",
    "get-feature /dev/nvme0 -f 0xb --human-readable",
    "get-feature /dev/nvme0 -f 0x16 -H",
    "get-feature /dev/nvme0 -f 6 -s 3 -H",
    "admin-passthru /dev/nvme0 -O 6 -l 4096 -r --cdw10=1",
    "admin-passthru /dev/nvme0 --opcode=0x02 --data-len=512 --cdw10=0x007f0002 --namespace-id=0xffffffff -r -b",
    "io-passthru /dev/nvme0n1 -O 2 -n 1 -l 65536 -r -b --cdw12=127",
    "io-passthru /dev/ng0n1 -O 2 -n 1 -l 4096 -r --cdw10=8 --cdw12=7",
    "io-passthru /dev/nvme0n2 -O 2 -n 2 -l 4096 -m 64 -r --cdw12=7",
    "io-passthru /dev/ng0n2 -O 2 -n 2 -l 4096 --metadata-len=64 -r -b --cdw10=8 --cdw12=7",
];

/// Questions that both answer with a failure.
const FAILURES: &[&str] = &[
    "admin-passthru /dev/nvme0 -O 0xc0",
    "id-ns /dev/nvme0 -n 0x200",
    "get-feature /dev/nvme0 -f 0x7c",
    "io-passthru /dev/nvme0n1 -O 2 -n 1 -l 4096 -r --cdw10=0xffffffff --cdw11=0xff --cdw12=7",
    "io-passthru /dev/nvme0n1 -O 2 -n 1 -l 4096 -m 64 -r --cdw12=7",
    "id-ctrl /dev/nvme7",
    "id-ctrl /dev/null",
];

/// A line of the guest before each answer.
const MARK: &str = "=====";

/// Shell functions: both programs, and an answer with its status. Both write data with metadata, each elsewhere.
const PREPARE: &str = "export TMPDIR=/tmp
    modprobe -a nvme vfio_pci vfio_iommu_type1 || exit 1
    device=0000:01:00.0
    driver=/sys/bus/pci/drivers/nvme
    # The kernel finds namespaces in any order, and numbers their devices so.
    ready() {
        while true; do
            until [ -e /dev/nvme0n1 ] && [ -e /dev/ng0n1 ] && [ -e /dev/nvme0n2 ] && [ -e /dev/ng0n2 ]; do
                sleep 0.1
            done
            [ $(cat /sys/block/nvme0n2/nsid) = 2 ] && break
            echo $device >$driver/unbind
            echo $device >$driver/bind
        done
    }
    ready
    blkyard() { /host/blkyard nvme \"$@\"; }
    answer() {
        program=$1; shift
        $program \"$@\" >/tmp/answer 2>/tmp/errors
        status=$?
        echo; echo \"===== $program $status $*\"
        xxd -p /tmp/answer
        [ $program = nvme ] || { echo errors; cat /tmp/errors; }
    }
    tr '\\0' 'Q' </dev/zero | dd of=/dev/nvme0n1 bs=4k count=16 oflag=direct iflag=fullblock 2>/dev/null
    dd if=/usr/sbin/nvme of=/tmp/metadata bs=1 skip=1000 count=64 2>/dev/null
    write='-O 1 -n 2 -l 4096 -m 64 -w --cdw12=7 -i /usr/sbin/nvme'
    nvme io-passthru /dev/nvme0n2 $write --metadata=/tmp/metadata || exit 1
    blkyard io-passthru /dev/nvme0n2 $write -M /tmp/metadata --cdw10=8 || exit 1
";

/// The same with a controller that blkyard drives itself: reads what was written, and writes elsewhere.
const OWN_DRIVER: &str = "
    read='-O 2 -n 2 -l 4096 -m 64 -r -b --cdw12=7'
    answer blkyard io-passthru pci:$device?unbind=on $read --cdw10=8
    answer blkyard io-passthru pci:$device $write -M /tmp/metadata --cdw10=16
    echo $device >/sys/bus/pci/drivers/vfio-pci/unbind
    echo >/sys/bus/pci/devices/$device/driver_override
    echo $device >/sys/bus/pci/drivers_probe
    ready
    answer nvme io-passthru /dev/nvme0n2 $read --cdw10=16
    blkyard io-passthru /dev/nvme0n2 $read --cdw10=16 -M /tmp/back >/dev/null 2>&1 && cmp /tmp/back /tmp/metadata || exit 1
";

/// An answer of a program.
struct ToolAnswer {
    status: i32,
    output: Vec<u8>,
    errors: String,
}

fn same_as_nvme_cli(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("nvme.img", 64 * MIB)?;
    let metadata_image = ground.image("metadata.img", 64 * MIB)?;

    let mut task = PREPARE.to_owned();
    for question in JSON.iter().chain(BYTES).chain(FAILURES) {
        task.extend(["answer nvme ", question, "\nanswer blkyard ", question, "\n"]);
    }
    // Erases nothing without being forced to.
    task.push_str("answer blkyard admin-passthru /dev/nvme0 -O 0x80 -n 1\n");
    task.push_str(
        "answer blkyard io-passthru /dev/nvme0n1 -O 1 -n 1 -l 4096 -w --cdw10=64 --cdw12=7 -i /usr/sbin/nvme\n",
    );
    task.push_str(OWN_DRIVER);
    let vm = Vm::new(ground.guest, 1).nvme(&image.path).nvme_metadata(&metadata_image.path);
    let output = vm.folder(program_folder(ground)?).succeed(&task)?;
    let answers = parse(&output)?;
    let of = |program: &str, question: &str| {
        let key = format!("{program} {question}");
        answers.get(&key).with_context(|| format!("the guest did not answer {key}:\n{output}"))
    };

    let mut differences = vec![];
    for question in JSON {
        let parsed = |program| {
            let answer = of(program, question)?;
            ensure!(answer.status == 0, "{program} {question} ended with {}: {}", answer.status, answer.errors);
            serde_json::from_slice::<Value>(&answer.output)
                .with_context(|| format!("{program} {question}: {}", String::from_utf8_lossy(&answer.output)))
        };
        compare(question, &parsed("nvme")?, &parsed("blkyard")?, &mut differences);
    }
    for question in BYTES {
        let [theirs, ours] = [of("nvme", question)?, of("blkyard", question)?];
        let [theirs_bytes, ours_bytes] = [theirs, ours].map(|answer| without_names(question, &answer.output));
        if (theirs.status, &theirs_bytes) != (ours.status, &ours_bytes) {
            let [theirs_text, ours_text] = [&theirs_bytes, &ours_bytes].map(|bytes| String::from_utf8_lossy(bytes));
            let line = theirs_text.lines().zip(ours_text.lines()).find(|(theirs, ours)| theirs != ours);
            differences.push(format!("{question}: {} {} {line:?} {}", theirs.status, ours.status, ours.errors));
        }
    }
    for question in FAILURES {
        let [theirs, ours] = [of("nvme", question)?, of("blkyard", question)?];
        if theirs.status != ours.status || ours.status != 1 || !ours.errors.contains("; ") {
            differences.push(format!("{question}: {} {} {}", theirs.status, ours.status, ours.errors));
        }
    }
    ensure!(differences.is_empty(), "nvme-cli and blkyard differ:\n{}", differences.join("\n"));

    let refused = of("blkyard", "admin-passthru /dev/nvme0 -O 0x80 -n 1")?;
    ensure!(refused.status == 1 && refused.errors.contains("--force"), "Format NVM: {}", refused.errors);
    let written = fs::read(ground.guest.root_tree().join("usr/sbin/nvme"))?;
    ensure!(image.read(64 * 512, 4096)? == written[..4096], "what io-passthru wrote is not in the image");
    image.check_pattern(0, 64 * 1024 / 2, b'Q')?;
    let whole = [&written[..4096], &written[1000..1064]].concat();
    let read = "-O 2 -n 2 -l 4096 -m 64 -r -b --cdw12=7";
    for (program, question) in [
        ("blkyard", format!("io-passthru pci:0000:01:00.0?unbind=on {read} --cdw10=8")),
        ("nvme", format!("io-passthru /dev/nvme0n2 {read} --cdw10=16")),
    ] {
        let answer = of(program, &question)?;
        ensure!(answer.output == whole, "{program} {question} does not read what was written: {}", answer.errors);
    }
    ground.measured(format!("{} answers equal", JSON.len() + BYTES.len() + FAILURES.len()));
    Ok(())
}

/// The output of `error-log` without the names of statuses and transports: each program has words of its own for them.
fn without_names(question: &str, output: &[u8]) -> Vec<u8> {
    if !question.starts_with("error-log") {
        return output.to_vec();
    }
    let is_named = |line: &&[u8]| [&b"status_field"[..], b"trtype\t"].iter().any(|label| line.starts_with(label));
    let numbers = |line: &[u8]| line.split(|byte| *byte == b'(').next().unwrap_or(line).to_vec();
    let lines = output.split(|byte| *byte == b'\n');
    let lines = lines.map(|line| Some(line).filter(is_named).map_or_else(|| line.to_vec(), numbers));
    lines.collect::<Vec<_>>().join(&b'\n')
}

/// The answers by program and question.
fn parse(output: &str) -> Result<BTreeMap<String, ToolAnswer>> {
    let mut answers = BTreeMap::new();
    for section in output.split(MARK).skip(1) {
        let (head, body) = section.split_once('\n').context("an answer without an end")?;
        let mut words = head.split_whitespace();
        let (program, status) = (words.next().context("no program")?, words.next().context("no status")?);
        let question = words.collect::<Vec<_>>().join(" ");
        let (bytes, errors) = body.split_once("errors\n").unwrap_or((body, ""));
        let output = unhex(bytes).with_context(|| format!("{program} {question}: {bytes}"))?;
        let answer = ToolAnswer { status: status.parse()?, output, errors: errors.to_owned() };
        answers.insert(format!("{program} {question}"), answer);
    }
    Ok(answers)
}

/// Bytes from their hexadecimal digits, on lines of any length.
fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<_> = text.chars().filter(|char| !char.is_whitespace()).map(|char| char.to_digit(16)).collect();
    let digits: Vec<u32> = digits.into_iter().collect::<Option<_>>()?;
    Some(digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | *digit as u8)).collect())
}

/// Adds a line for each place where two documents differ.
fn compare(place: &str, theirs: &Value, ours: &Value, differences: &mut Vec<String>) {
    match (theirs, ours) {
        (Value::Object(left), Value::Object(right)) => {
            for key in left.keys().chain(right.keys().filter(|key| !left.contains_key(*key))) {
                let [left, right] = [left, right].map(|map| map.get(key).unwrap_or(&Value::Null));
                compare(&format!("{place} {key}"), left, right, differences);
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (number, (left, right)) in left.iter().zip(right).enumerate() {
                compare(&format!("{place} {number}"), left, right, differences);
            }
        }
        _ if theirs == ours => {}
        _ => differences.push(format!("{place}: nvme-cli has {theirs}, blkyard {ours}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_are_split_by_their_marks() {
        let output = "\n===== nvme 0 list -o json\n 7b\n7d\n\n===== blkyard 1 id-ctrl x\nerrors\nx: absent; look\n";
        let answers = parse(output).unwrap();
        assert_eq!(answers["nvme list -o json"].output, b"{}");
        let failed = &answers["blkyard id-ctrl x"];
        assert_eq!((failed.status, failed.errors.as_str()), (1, "x: absent; look\n"));
    }

    #[test]
    fn only_names_of_numbers_are_left_out() {
        let log = b"sqid\t: 1 (a)\nstatus_field\t: 0x4002 (invalid field)\n";
        assert_eq!(without_names("error-log x", log), b"sqid\t: 1 (a)\nstatus_field\t: 0x4002 \n");
        assert_eq!(without_names("smart-log x", log), log);
    }

    #[test]
    fn each_difference_is_named() {
        let mut differences = vec![];
        compare("q", &json!({"a": 1, "b": [1, 2], "c": 3}), &json!({"a": 1, "b": [1, 4], "d": 3}), &mut differences);
        let expected = [
            "q b 1: nvme-cli has 2, blkyard 4",
            "q c: nvme-cli has 3, blkyard null",
            "q d: nvme-cli has null, blkyard 3",
        ];
        assert_eq!(differences, expected);
    }
}
