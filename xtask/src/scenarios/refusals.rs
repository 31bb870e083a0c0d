//! Refusals of the daemon at its start, and their error messages.
//!
//! An error names the object, the cause and the cure. The object is checked by its name, the other two by groups of
//! words of which at least one must occur, so the wording is free.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{CLIENT_LIMIT, MIB, RunsIn, Scenario, ScenarioContext};
use crate::process;
use crate::server::{OfferedDevice, ReadyServer};

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "refuse-image-in-use",
        sentence: "a second daemon on the same image is refused, and the first goes on",
        place: RunsIn::Host,
        ours: true,
        tell: image_in_use,
    },
    Scenario {
        name: "refuse-live-socket",
        sentence: "a socket at which someone listens is left to them",
        place: RunsIn::Host,
        ours: true,
        tell: live_socket,
    },
    Scenario {
        name: "refuse-not-a-socket",
        sentence: "a file in the place of the socket is neither replaced nor removed",
        place: RunsIn::Host,
        ours: true,
        tell: not_a_socket,
    },
    Scenario {
        name: "replace-dead-socket",
        sentence: "a socket left behind by a daemon that was killed is in nobody's way",
        place: RunsIn::Host,
        ours: true,
        tell: dead_socket,
    },
    Scenario {
        name: "refuse-unknown-key",
        sentence: "a misspelt key of a device, of an export or of a file of settings is refused by its name",
        place: RunsIn::Host,
        ours: true,
        tell: unknown_key,
    },
    Scenario {
        name: "refuse-missing-image",
        sentence: "an image that is not there is refused, and not made",
        place: RunsIn::Host,
        ours: true,
        tell: missing_image,
    },
    Scenario {
        name: "refuse-unwritable-image",
        sentence: "an image that may only be read is refused to someone who asks to write, and served read-only",
        place: RunsIn::Host,
        ours: true,
        tell: unwritable_image,
    },
    Scenario {
        name: "refuse-odd-size",
        sentence: "an image that is no whole number of sectors, or empty, is refused",
        place: RunsIn::Host,
        ours: true,
        tell: odd_size,
    },
    Scenario {
        name: "refuse-nonsense",
        sentence: "devices and exports that cannot be understood are refused",
        place: RunsIn::Host,
        ours: true,
        tell: nonsense,
    },
];

/// Time limit of a refusal, which takes at most a third of a second on an idle machine.
const REFUSAL_LIMIT: Duration = Duration::from_mins(1);

/// Serves `device` at `export` and checks that the refusal has one of each group of words in it.
fn refused(ground: &ScenarioContext, device: &str, export: &str, words: &[&[&str]]) -> Result<()> {
    let error = ground.program.refusal(&["--device", device, "--export", export])?;
    explained(&error, words).with_context(|| format!("serve --device {device} --export {export}"))
}

fn explained(error: &str, words: &[&[&str]]) -> Result<()> {
    let lower = error.to_lowercase();
    for group in words {
        let there = group.iter().any(|word| lower.contains(&word.to_lowercase()));
        ensure!(there, "the error should say one of {group:?}, and says:\n{error}");
    }
    Ok(())
}

fn spec(socket: &Path) -> String {
    format!("vhost-user-blk:{}", socket.display())
}

fn image_in_use(ground: &ScenarioContext) -> Result<()> {
    let (image, export, mut server) = ground.serve_image(8 * MIB, 1)?;
    let path = image.path.display().to_string();
    let cure: &[&str] = &["stop", "end", "close", "another", "first", "readonly"];
    let device = OfferedDevice::File(image.path.clone()).spec();
    refused(ground, &device, &spec(&ground.path("second.sock")), &[&[&path], &["in use", "locked", "lock"], cure])?;
    ensure!(!ground.path("second.sock").exists(), "the refused daemon left a socket");
    server.check_alive()?;
    ground.qemu_io(&export.socket, &["write -P 0x31 0 64k".into(), "read -P 0x31 0 64k".into()])?;
    server.stop()?;
    Ok(())
}

fn live_socket(ground: &ScenarioContext) -> Result<()> {
    let (_image, export, mut server) = ground.serve_image(8 * MIB, 1)?;
    let socket = export.socket.display().to_string();
    refused(
        ground,
        "ram:16M",
        &spec(&export.socket),
        &[
            &[&socket],
            &["in use", "alive", "listen", "already", "serves", "served"],
            &["stop", "another", "other", "choose", "remove"],
        ],
    )?;
    server.check_alive()?;
    ground.qemu_io(&export.socket, &["read 0 64k".into()])?;
    server.stop()?;
    // Two exports at one socket cannot both have it.
    let twice = spec(&ground.path("twice.sock"));
    let arguments = ["--device", "ram:16M", "--export", &twice, "--device", "ram:16M", "--export", &twice];
    explained(&ground.program.refusal(&arguments)?, &[&["twice.sock"]])
}

fn not_a_socket(ground: &ScenarioContext) -> Result<()> {
    let path = ground.path("precious");
    fs::write(&path, "do not remove")?;
    let name = path.display().to_string();
    refused(ground, "ram:16M", &spec(&path), &[&[&name], &["not a socket", "no socket", "exists", "a file"]])?;
    ensure!(fs::read_to_string(&path)? == "do not remove", "the file was changed");
    Ok(())
}

fn dead_socket(ground: &ScenarioContext) -> Result<()> {
    let (image, export, server) = ground.serve_image(8 * MIB, 1)?;
    ground.qemu_io(&export.socket, &["write -P 0x32 0 64k".into()])?;
    server.kill();
    let left = fs::symlink_metadata(&export.socket).is_ok_and(|metadata| metadata.file_type().is_socket());
    if !left {
        // The next server must handle a leftover socket in any case.
        drop(UnixListener::bind(&export.socket)?);
    }
    // The lock of a killed process is held until the kernel has released its rings. Serve waits for that, but not as
    // long as the kernel may need on a busy machine.
    let start = Instant::now();
    let server = loop {
        match ground.serve(std::slice::from_ref(&export)) {
            Err(error) if format!("{error:#}").contains("holds a lock") && start.elapsed() < CLIENT_LIMIT => {}
            started => break started.context("with a dead socket in the way")?,
        }
    };
    ground.qemu_io(&export.socket, &["read -P 0x32 0 64k".into()])?;
    image.check_pattern(0, 64 * 1024, 0x32)?;
    server.stop()?;
    Ok(())
}

fn unknown_key(ground: &ScenarioContext) -> Result<()> {
    let image = ground.image("disk.img", 8 * MIB)?;
    let file = OfferedDevice::File(image.path.clone()).spec();
    let export = spec(&ground.path("disk.sock"));
    let unknown: &[&str] = &["unknown", "no key", "no option", "not know", "unexpected"];
    refused(ground, &format!("{file}?redonly=on"), &export, &[&["redonly"], unknown, &["readonly"]])?;
    refused(ground, &file, &format!("{export}?queue=4"), &[&["queue"], unknown, &["queues"]])?;
    refused(ground, &file, &format!("{export}?queues=many"), &[&["queues"], &["many"]])?;
    refused(ground, &file, &format!("{export}?queues=0"), &[&["queues"]])?;
    let config = ground.path("disks.toml");
    for (word, text) in [
        ("colour", format!("[[device]]\nspec = \"ram:16M\"\ncolour = 3\n[[device.export]]\nspec = \"{export}\"\n")),
        ("queue", format!("[[device]]\nspec = \"ram:16M\"\n[[device.export]]\nspec = \"{export}\"\nqueue = 4\n")),
        ("disk", format!("[[disk]]\nspec = \"ram:16M\"\n[[disk.export]]\nspec = \"{export}\"\n")),
    ] {
        fs::write(&config, &text)?;
        let error = ground.program.refusal(&["--config", &config.display().to_string()])?;
        explained(&error, &[&[&format!("{word}'"), &format!("{word}`")], unknown]).context(text)?;
    }
    Ok(())
}

fn missing_image(ground: &ScenarioContext) -> Result<()> {
    let path = ground.path("absent.img");
    let name = path.display().to_string();
    let cause: &[&str] = &["no such", "not found", "does not exist", "missing", "not there"];
    let cure: &[&str] = &["create", "make", "truncate", "check"];
    refused(
        ground,
        &OfferedDevice::File(path.clone()).spec(),
        &spec(&ground.path("a.sock")),
        &[&[&name], cause, cure],
    )?;
    ensure!(!path.exists(), "the image was made");
    ensure!(!ground.path("a.sock").exists(), "the refused daemon left a socket");
    Ok(())
}

fn unwritable_image(ground: &ScenarioContext) -> Result<()> {
    /// Number of the user nobody on Debian; root may write regardless of permissions.
    const NOBODY: &str = "65534";
    let image = ground.image("disk.img", 8 * MIB)?;
    let all_may = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    all_may(&image.path, 0o444)?;
    all_may(&ground.path(""), 0o777)?;
    // The user nobody may have no access to the build folder.
    let program = ground.path("blkyard");
    fs::copy(ground.program.command()?.get_program(), &program).context("cannot copy the program")?;
    let serve = |option: &str| {
        let mut command = Command::new(&program);
        if rustix::process::geteuid().is_root() {
            command = Command::new("setpriv");
            command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]).arg(&program);
        }
        let device = format!("{}{option}", OfferedDevice::File(image.path.clone()).spec());
        command.args(["serve", "--device", &device, "--export", &spec(&ground.path("disk.sock"))]);
        command
    };
    let ended = process::run("blkyard serve", &serve(""), REFUSAL_LIMIT)?;
    ensure!(!ended.status.success(), "an image that cannot be written to was served:\n{}", ended.said());
    let name = image.path.display().to_string();
    explained(&ended.stderr, &[&[&name], &["permission", "read-only", "not be written"], &["readonly"]])?;
    ReadyServer::start_command(&serve("?readonly=on"), &[ground.path("disk.sock")], &ground.log)?.stop()?;
    Ok(())
}

fn odd_size(ground: &ScenarioContext) -> Result<()> {
    for bytes in [8 * MIB + 1, 1000, 0] {
        let image = ground.image(&format!("odd-{bytes}.img"), bytes)?;
        let name = image.path.display().to_string();
        let words: &[&[&str]] =
            &[&[&name], &["512", "sector", "empty", "multiple"], &["truncate", "resize", "grow", "make"]];
        refused(ground, &OfferedDevice::File(image.path.clone()).spec(), &spec(&ground.path("odd.sock")), words)?;
        ensure!(image.path.metadata()?.len() == bytes, "the image was resized");
    }
    Ok(())
}

fn nonsense(ground: &ScenarioContext) -> Result<()> {
    let export = spec(&ground.path("disk.sock"));
    refused(ground, "tape:x", &export, &[&["tape"], &["file:", "ram:", "null:"]])?;
    refused(ground, "ram:plenty", &export, &[&["plenty"]])?;
    refused(ground, "ram:0", &export, &[&["ram:0", "0"]])?;
    refused(ground, "ram:16M", "carrier-pigeon:coop", &[&["carrier-pigeon"], &["vhost-user-blk"]])?;
    let folder = ground.path("");
    refused(ground, &OfferedDevice::File(folder.clone()).spec(), &export, &[&["directory", "folder"]])?;
    let nowhere = spec(&ground.path("nowhere").join("disk.sock"));
    refused(ground, "ram:16M", &nowhere, &[&["nowhere"]])
}
