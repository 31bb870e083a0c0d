//! Rules of the house that a compiler does not check: floors, circles of modules, unsafe, size, heads, leftovers,
//! words, and names in documents.
//!
//! Reads files and reports findings; changes nothing. Each rule is a function that its own tests make fail.

mod docs;
mod floors;
mod modules;
mod rules;
mod source;
mod words;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use self::docs::Names;
use self::words::Words;

/// The project's folders; files at the top are checked, too.
const FOLDERS: &[&str] = &["crates", "xtask", "docs", ".cargo", ".ci"];

/// Extensions of hand-written files.
const EXTENSIONS: &[&str] = &["rs", "toml", "md", "sh"];

/// A violation of a rule, and its location.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    file: PathBuf,
    /// Counted from 1; 0 stands for the file as a whole.
    line: usize,
    text: String,
}

impl Finding {
    fn new(file: &Path, line: usize, text: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, text: text.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file.display(), self.text),
            line => write!(f, "{}:{line}: {}", self.file.display(), self.text),
        }
    }
}

/// All findings in the checkout at `root`.
pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = floors::check(root)?;
    let files = files(root)?;
    findings.extend(modules::check(root, &files)?);
    let (mut words, mut names) = (Words::default(), Names::default());
    for file in &files {
        let path = root.join(file);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8_lossy(&bytes);
        rules::check(file, &text, &mut findings);
        if file.extension().is_some_and(|extension| extension == "rs") {
            words.read(file, &text, &mut findings);
            if !file.starts_with("xtask/src/tidy") {
                names.read_code(&text);
            }
        } else if file.extension().is_some_and(|extension| extension == "md") {
            words::check_document(file, &text, &mut findings);
            names.read_document(file, &text);
        }
    }
    words.repeated(&mut findings);
    names.missing(&files, &mut findings);
    Ok(findings)
}

/// The hand-written files below `root`, relative to it, in order.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let path = root.join(&folder);
        for entry in fs::read_dir(&path).with_context(|| format!("cannot read {}", path.display()))? {
            let entry = entry?;
            let name = folder.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                let ours = !folder.as_os_str().is_empty() || FOLDERS.iter().any(|known| Path::new(known) == name);
                if ours && !name.ends_with("target") {
                    folders.push(name);
                }
            } else if is_ours(&name) {
                found.push(name);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn is_ours(file: &Path) -> bool {
    file.extension().is_none_or(|extension| EXTENSIONS.iter().any(|known| extension == *known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_untidy_checkout_is_found_out() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "crates/mq/Cargo.toml",
            "[package]\nname = \"blkyard-mq\"\n[dependencies]\nblkyard-os.workspace = true\n",
        );
        write("crates/mq/src/lib.rs", "//! Queues.\nfn f() { todo!() }\n");
        write("target/debug/generated.rs", "fn f() { todo!() }\n");
        let findings: Vec<_> = check(root.path()).unwrap().iter().map(ToString::to_string).collect();
        let has = |text: &str| findings.iter().any(|finding| finding.contains(text));
        assert!(has("blkyard-os"), "{findings:?}");
        assert!(has("crates/mq/src/lib.rs:2: todo!"), "{findings:?}");
        assert!(has("crates/mq/src/lib.rs: does not say #![forbid(unsafe_code)]"), "{findings:?}");
        assert!(!has("target"), "{findings:?}");
    }
}
