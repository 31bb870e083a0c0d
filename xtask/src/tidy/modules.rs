//! Modules of a crate that stand on each other: no circle in the crates that are free of them, and no protocol named by
//! the core that serves all protocols.
//!
//! An edge is a `crate::NAME` in a module's files, comments excepted. Names that a crate's root exports hide edges, so
//! this suits crates whose modules name each other, as the program's do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Finding;

/// Folders in `crates/` whose modules form no circle.
const FREE: &[&str] = &["attach", "lab", "cli"];

/// Folders in `crates/` with a core for every protocol, and their modules that are one protocol each. The core names
/// neither these nor what the crate exports of them.
const PROTOCOLS: &[(&str, &[&str])] = &[("attach", &["vhost_user"]), ("export", &["vhost_user"])];

/// The modules that each module of a crate names.
type ModuleEdges = BTreeMap<String, BTreeSet<String>>;

pub fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for name in FREE {
        let folder = Path::new("crates").join(name).join("src");
        let mut edges = ModuleEdges::new();
        for file in files {
            let Some(module) = file.strip_prefix(&folder).ok().and_then(module) else { continue };
            let text =
                fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {}", file.display()))?;
            edges.entry(module).or_default().extend(named(&text));
        }
        for (module, _) in edges.iter().filter(|(module, _)| reached(&edges, module).contains(module.as_str())) {
            findings.push(Finding::new(&folder, 0, format!("module {module} stands on itself, through others")));
        }
    }
    for (name, protocols) in PROTOCOLS {
        check_core(root, &Path::new("crates").join(name).join("src"), protocols, files, &mut findings)?;
    }
    Ok(findings)
}

/// Finds files of a crate's core that name one of its protocols.
fn check_core(
    root: &Path,
    folder: &Path,
    protocols: &[&str],
    files: &[PathBuf],
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let read = |file: &Path| {
        fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {}", root.join(file).display()))
    };
    let mut forbidden: BTreeSet<String> = protocols.iter().map(|&protocol| protocol.to_owned()).collect();
    if files.iter().any(|file| *file == folder.join("lib.rs")) {
        for line in read(&folder.join("lib.rs"))?.lines() {
            let Some((module, names)) = line.strip_prefix("pub use ").and_then(|used| used.split_once("::")) else {
                continue;
            };
            if protocols.contains(&module) {
                let names = names.trim_matches(['{', '}', ';']).split(", ");
                forbidden.extend(names.map(|name| name.trim_matches(['{', '}', ';']).to_owned()));
            }
        }
    }
    for file in files {
        let Some(module) = file.strip_prefix(folder).ok().and_then(module) else { continue };
        if protocols.contains(&&*module) {
            continue;
        }
        for name in named(&read(file)?).intersection(&forbidden) {
            findings.push(Finding::new(file, 0, format!("the core names {name}, which is of one protocol")));
        }
    }
    Ok(())
}

/// The module at the top of its crate that a file belongs to, unless it is the root.
fn module(file: &Path) -> Option<String> {
    let first = Path::new(file.components().next()?.as_os_str()).file_stem()?.to_str()?;
    (!["lib", "main"].contains(&first)).then(|| first.to_owned())
}

/// What a source file names of its crate: `x` and `y` of `use crate::x::..;` and `use crate::{x, y::z};`.
fn named(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for (at, found) in line.match_indices("crate::") {
            let rest = &line[at + found.len()..];
            let group = rest.strip_prefix('{').map(|group| group.split('}').next().unwrap_or(group));
            for path in group.unwrap_or(rest).split(", ") {
                let end = path.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(path.len());
                names.insert(path[..end].to_owned());
                if group.is_none() {
                    break;
                }
            }
        }
    }
    names
}

/// The modules that one stands on, directly or through others; itself only if there is a circle.
fn reached<'a>(edges: &'a ModuleEdges, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut left = vec![from];
    while let Some(module) = left.pop() {
        for next in edges.get(module).into_iter().flatten().filter(|next| *next != module) {
            if found.insert(next.as_str()) {
                left.push(next);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes these files, and returns their paths.
    fn write(root: &Path, files: &[(&str, &str)]) -> Vec<PathBuf> {
        for (file, text) in files {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), text).unwrap();
        }
        files.iter().map(|(file, _)| PathBuf::from(file)).collect()
    }

    #[test]
    fn core_that_names_a_protocol_is_found() {
        let root = tempfile::tempdir().unwrap();
        let core = "crates/attach/src/control.rs";
        let files = [
            ("crates/attach/src/lib.rs", "mod vhost_user;\npub use vhost_user::{Attached, QUEUE_SIZE_MAX};\n"),
            (core, "use crate::queue::RemoteQueue;\n// Not crate::vhost_user.\n"),
            ("crates/attach/src/vhost_user/mod.rs", "use crate::vhost_user::rings;\nuse crate::Attached;\n"),
        ];
        let paths = write(root.path(), &files);
        assert_eq!(check(root.path(), &paths).unwrap(), []);
        for text in ["use crate::vhost_user::rings;\n", "fn f() -> u16 { crate::QUEUE_SIZE_MAX }\n"] {
            write(root.path(), &[(core, text)]);
            let found = check(root.path(), &paths).unwrap();
            assert!(found.len() == 1 && found[0].to_string().starts_with(core), "{text}: {found:?}");
        }
    }

    #[test]
    fn circle_of_modules_is_found() {
        let root = tempfile::tempdir().unwrap();
        let files = [
            ("crates/cli/src/lib.rs", "use crate::a;\n"),
            ("crates/cli/src/a/mod.rs", "use crate::a::deep;\nuse crate::{b, c::D};\n"),
            ("crates/cli/src/b.rs", "//! See `crate::a`.\nfn f() { crate::c::g() }\n"),
            ("crates/cli/src/c.rs", ""),
            ("crates/mq/src/x.rs", "use crate::x::y;\n"),
        ];
        let paths = write(root.path(), &files);
        assert_eq!(check(root.path(), &paths).unwrap(), []);
        fs::write(root.path().join("crates/cli/src/c.rs"), "use crate::a::E;\n").unwrap();
        let findings = check(root.path(), &paths).unwrap();
        let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            ["a", "b", "c"].map(|name| format!("crates/cli/src: module {name} stands on itself, through others"))
        );
    }
}
