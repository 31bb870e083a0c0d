//! The floors of the house: which of our crates may import which.
//!
//! The table is compared with the manifests, for programs, build scripts and tests alike; a second table has the
//! further imports of tests. A crate outside the table has no floor yet: its author adds a line here.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;

/// Folder of each crate in `crates/`, and the crates it may import.
const FLOORS: &[(&str, &[&str])] = &[
    ("mem", &[]),
    ("wire", &[]),
    ("mq", &["mem"]),
    ("sys", &["mem"]),
    ("tls", &[]),
    ("virtio", &["mem", "mq"]),
    ("nvme", &["mem", "wire", "mq"]),
    ("mpath", &["mq"]),
    ("export", &["mem", "wire", "mq", "sys", "tls", "virtio", "nvme"]),
    ("attach", &["mem", "wire", "mq", "sys", "tls", "virtio", "nvme", "mpath"]),
    ("os", &["mem", "mq", "sys"]),
    ("sim", &["mem", "mq"]),
    ("stack", &["mem", "mq", "sys", "virtio", "nvme", "mpath", "export", "attach", "sim"]),
    ("blkyard", &["mem", "wire", "mq", "sys", "tls", "virtio", "nvme", "mpath", "export", "attach", "os", "sim"]),
    ("lab", &["mem", "wire", "mq", "sys", "virtio", "nvme", "mpath", "export", "attach", "os", "sim", "blkyard"]),
    (
        "cli",
        &["mem", "wire", "mq", "sys", "virtio", "nvme", "mpath", "export", "attach", "os", "sim", "blkyard", "lab"],
    ),
];

/// Further imports of a crate's tests: the queue core is tested over the simulation's chaos device, path
/// policies over its model paths, an export on real
/// lanes, attached disks against an export, the program against strangers.
const TESTS: &[(&str, &[&str])] = &[
    ("mq", &["sim"]),
    ("mpath", &["sim"]),
    ("export", &["os", "attach"]),
    ("attach", &["export", "os"]),
    ("cli", &["tls"]),
];

/// Crates of the command line, and who may import them: a program that embeds the library has its own.
const COMMAND_LINE: (&[&str], &[&str]) = (&["clap", "indicatif"], &["lab", "cli"]);

pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let folder = root.join("crates");
    let mut findings = Vec::new();
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    for name in names {
        let manifest = Path::new("crates").join(&name).join("Cargo.toml");
        let path = root.join(&manifest);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        compare(&name, &text, &manifest, &mut findings);
    }
    let manifest = Path::new("xtask/Cargo.toml");
    if let Ok(text) = fs::read_to_string(root.join(manifest)) {
        for (_, import) in text.parse().map(|parsed| ours(&parsed)).unwrap_or_default() {
            findings.push(Finding::new(
                manifest,
                0,
                format!("the chores may not import the product, and import {import}"),
            ));
        }
    }
    Ok(findings)
}

fn compare(name: &str, manifest_text: &str, manifest: &Path, findings: &mut Vec<Finding>) {
    let Some((_, allowed)) = FLOORS.iter().find(|(known, _)| *known == name) else {
        findings.push(Finding::new(
            manifest,
            0,
            format!("crate {name} has no floor: add it to FLOORS in xtask/src/tidy/floors.rs"),
        ));
        return;
    };
    let Ok(parsed) = manifest_text.parse::<toml::Table>() else {
        findings.push(Finding::new(manifest, 0, "is not TOML"));
        return;
    };
    let expected = package(name);
    let found = parsed.get("package").and_then(|package| package.get("name")).and_then(toml::Value::as_str);
    if found != Some(&expected) {
        findings.push(Finding::new(manifest, 0, format!("the package in crates/{name} should be called {expected}")));
    }
    let (crates, users) = COMMAND_LINE;
    for import in dependencies(&parsed).into_iter().map(|(_, import)| import) {
        if crates.contains(&import.as_str()) && !users.contains(&name) {
            findings.push(Finding::new(manifest, 0, format!("{expected} may not import {import}")));
        }
    }
    let for_tests = TESTS.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, imports)| imports);
    for (kind, import) in ours(&parsed) {
        let more = if kind == "dev-dependencies" { for_tests } else { &[] };
        if !allowed.iter().chain(more).any(|below| package(below) == import) {
            findings.push(Finding::new(manifest, 0, format!("{expected} may not import {import}")));
        }
    }
}

/// The package that lives in a folder; the roof has the plain name.
fn package(folder: &str) -> String {
    if folder == "blkyard" { folder.to_owned() } else { format!("blkyard-{folder}") }
}

/// Which of our crates a manifest imports, and in which of its tables.
fn ours(manifest: &toml::Table) -> Vec<(&'static str, String)> {
    let is_ours = |import: &str| import == "blkyard" || import.starts_with("blkyard-");
    dependencies(manifest).into_iter().filter(|(_, import)| is_ours(import)).collect()
}

/// All that a manifest imports, by whatever name and for whatever target, and in which of its tables.
fn dependencies(manifest: &toml::Table) -> Vec<(&'static str, String)> {
    let mut places = vec![manifest];
    if let Some(targets) = manifest.get("target").and_then(toml::Value::as_table) {
        places.extend(targets.values().filter_map(toml::Value::as_table));
    }
    let mut found = Vec::new();
    for place in places {
        for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(table) = place.get(kind).and_then(toml::Value::as_table) else { continue };
            for (name, value) in table {
                let real = value.get("package").and_then(toml::Value::as_str).unwrap_or(name);
                found.push((kind, real.to_owned()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, rest: &str) -> Vec<String> {
        let text = format!("[package]\nname = \"{}\"\n{rest}", package(name));
        let mut findings = Vec::new();
        compare(name, &text, Path::new("Cargo.toml"), &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn imports_from_below_are_fine() {
        let text = "[dependencies]\nblkyard-mem.workspace = true\nlibc = \"0.2\"\n[dev-dependencies]\nblkyard-mq = { path = \"../mq\" }\n";
        assert!(findings("virtio", text).is_empty());
    }

    #[test]
    fn imports_from_above_or_beside_are_found() {
        for text in [
            "[dependencies]\nblkyard-os.workspace = true\n",
            "[dev-dependencies]\nblkyard-os.workspace = true\n",
            "[build-dependencies]\nblkyard-os.workspace = true\n",
            "[target.'cfg(loom)'.dependencies]\nblkyard-os.workspace = true\n",
            "[dependencies]\nrenamed = { package = \"blkyard-os\", path = \"../os\" }\n",
            "[dependencies]\nblkyard-os = \"1\"\n",
        ] {
            assert_eq!(findings("virtio", text), ["Cargo.toml: blkyard-virtio may not import blkyard-os"], "{text}");
        }
        assert_eq!(findings("mem", "[dependencies]\nblkyard = \"1\"\n").len(), 1);
    }

    #[test]
    fn what_tests_alone_may_import_is_found_elsewhere() {
        assert!(findings("export", "[dev-dependencies]\nblkyard-os.workspace = true\n").is_empty());
        assert_eq!(findings("export", "[dependencies]\nblkyard-os.workspace = true\n").len(), 1);
    }

    #[test]
    fn only_programs_import_crates_of_the_command_line() {
        let text = "[dependencies]\nclap.workspace = true\n";
        assert_eq!(findings("blkyard", text), ["Cargo.toml: blkyard may not import clap"]);
        assert!(findings("cli", text).is_empty());
    }

    #[test]
    fn a_crate_needs_a_floor_and_its_name() {
        assert!(findings("attic", "")[0].contains("no floor"));
        let mut findings = Vec::new();
        compare("mem", "[package]\nname = \"memory\"\n", Path::new("Cargo.toml"), &mut findings);
        assert!(findings[0].to_string().contains("should be called blkyard-mem"));
    }

    #[test]
    fn the_table_has_no_circle() {
        for (place, (name, below)) in FLOORS.iter().enumerate() {
            for import in *below {
                assert!(FLOORS[..place].iter().any(|(earlier, _)| earlier == import), "{name} imports {import}");
            }
        }
    }
}
