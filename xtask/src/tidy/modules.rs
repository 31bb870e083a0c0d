//! Modules of a crate and their dependencies: no circle in the crates that are free of them, and no protocol named by
//! the core that serves all protocols.
//!
//! An edge is a `crate::NAME` in a module's files, comments excepted. Names that a crate's root exports hide edges, so
//! this suits crates whose modules name each other, as the program's do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Finding;
use super::source::{Source, is_word};
use super::words::defined_type;

/// Folders in `crates/` whose modules form no circle.
const FREE: &[&str] = &["attach", "lab", "cli"];

/// Folders in `crates/` with a core for every protocol, their modules that are one protocol each, and the crates of
/// protocols. The core names none of these, nor what the crate exports of its protocols.
const PROTOCOLS: &[(&str, &[&str], &[&str])] = &[
    ("attach", &["nvme", "nvme_tcp", "vfio_user", "vhost_user"], &["vhost", "blkyard_wire", "blkyard_nvme"]),
    ("export", &["nvme_tcp", "vfio_user", "vhost_user"], &["vhost", "blkyard_wire", "blkyard_virtio", "blkyard_nvme"]),
];

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
    for (name, protocols, imports) in PROTOCOLS {
        check_core(root, &Path::new("crates").join(name).join("src"), protocols, imports, files, &mut findings)?;
    }
    Ok(findings)
}

/// Finds files of a crate's core that name one of its protocols, or a crate of one.
fn check_core(
    root: &Path,
    folder: &Path,
    protocols: &[&str],
    imports: &[&str],
    files: &[PathBuf],
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let read = |file: &Path| {
        fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {}", root.join(file).display()))
    };
    let mut forbidden: BTreeSet<String> = protocols.iter().map(|&protocol| protocol.to_owned()).collect();
    let read_if_there = |file: PathBuf| if files.contains(&file) { read(&file) } else { Ok(String::new()) };
    for (module, names) in exported(&read_if_there(folder.join("lib.rs"))?) {
        if !protocols.contains(&&*module) {
            continue;
        }
        if names.contains("*") {
            // All that the module itself exports.
            let text = read_if_there(folder.join(&module).join("mod.rs"))?;
            forbidden.extend(exported(&text).into_iter().flat_map(|(_, names)| names));
            forbidden.extend(text.lines().filter_map(defined_type).map(ToOwned::to_owned));
        }
        forbidden.extend(names);
    }
    for file in files {
        let Some(module) = file.strip_prefix(folder).ok().and_then(module) else { continue };
        if protocols.contains(&&*module) {
            continue;
        }
        let text = read(file)?;
        for name in named(&text).intersection(&forbidden) {
            findings.push(Finding::new(file, 0, format!("the core names {name}, which is of one protocol")));
        }
        let words: BTreeSet<String> =
            Source::split(&text).code.iter().flat_map(|line| words(line)).map(ToOwned::to_owned).collect();
        for name in imports.iter().filter(|name| words.contains(**name)) {
            findings.push(Finding::new(file, 0, format!("the core imports {name}, which is of one protocol")));
        }
    }
    Ok(())
}

/// What a file exports of its modules, by module: `x` and `Y`, `Z` of `pub use x::{Y, Z};`.
fn exported(text: &str) -> Vec<(String, BTreeSet<String>)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("pub use ").filter(|(at, _)| *at == 0 || text[..*at].ends_with('\n')) {
        let used = text[at..].trim_start_matches("pub use ");
        let Some((module, names)) = used.split(';').next().and_then(|used| used.split_once("::")) else { continue };
        let names = names.split([',', '{', '}']).map(str::trim).filter(|name| !name.is_empty());
        found.push((module.to_owned(), names.map(ToOwned::to_owned).collect()));
    }
    found
}

/// The words of a line.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|character| !is_word(character))
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
        for text in [
            "use crate::vhost_user::rings;\n",
            "fn f() -> u16 { crate::QUEUE_SIZE_MAX }\n",
            "use vhost::vhost_user::Error;\n",
        ] {
            write(root.path(), &[(core, text)]);
            let found = check(root.path(), &paths).unwrap();
            assert!(found.len() == 1 && found[0].to_string().starts_with(core), "{text}: {found:?}");
        }
    }

    #[test]
    fn core_that_names_what_a_protocol_exports_by_a_glob_is_found() {
        let root = tempfile::tempdir().unwrap();
        let core = "crates/export/src/core/server.rs";
        let files = [
            ("crates/export/src/lib.rs", "mod core;\nmod vhost_user;\npub use core::*;\npub use vhost_user::*;\n"),
            (core, "use blkyard_mq::Bio;\nuse crate::core::QueuePoller;\n// blkyard_virtio is not imported.\n"),
            (
                "crates/export/src/vhost_user/mod.rs",
                "pub use wire::{\n    MESSAGE_BYTES_MAX,\n    Message,\n};\npub type VirtqueuePoller<D> = core::QueuePoller<D>;\n",
            ),
        ];
        let paths = write(root.path(), &files);
        assert_eq!(check(root.path(), &paths).unwrap(), []);
        for text in
            ["crate::Message", "crate::VirtqueuePoller<D>", "crate::vhost_user::wire", "blkyard_virtio::Features"]
        {
            write(root.path(), &[(core, &format!("type T = {text};\n"))]);
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
