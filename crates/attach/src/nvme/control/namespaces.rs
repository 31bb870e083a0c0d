//! Namespaces of a controller: which are in use, and whether they are still what their users were given.

use blkyard_nvme::ScannedNamespace;

use super::NvmeControl;
use crate::nvme::NvmeTransport;

impl<T: NvmeTransport> NvmeControl<T> {
    /// The namespaces of the live controller have changed.
    pub(super) fn namespaces_changed(&mut self) {
        let Some(session) = &self.session else { return };
        let sectors_of = |known: &ScannedNamespace| {
            let nsid = known.namespace.nsid;
            let found = session.host.namespaces().iter().find(|found| found.namespace.nsid == nsid);
            let found = found.ok_or_else(|| format!("namespace {nsid} was removed; attach it again"))?;
            check_same(known, found).map(|()| (nsid, found.info.capacity_sectors))
        };
        match self.namespaces.iter().map(sectors_of).collect::<Result<Vec<_>, String>>() {
            Ok(sizes) => {
                for (index, (nsid, sectors)) in sizes.into_iter().enumerate() {
                    let old = self.shared.set_capacity(index, sectors);
                    if old != sectors
                        && let Some(held_back) = self.pass()
                    {
                        tracing::info!(
                            "{}: the capacity of namespace {nsid} changed from {old} to {sectors} sectors{held_back}",
                            self.name()
                        );
                    }
                }
            }
            Err(why) => {
                if let Some(held_back) = self.pass() {
                    tracing::error!("{}: {why}; I/O fails until it is as before{held_back}", self.name());
                }
                // The controller stays: the next session finds out whether the namespace is as before.
                let now_ns = self.ns(self.now());
                self.session.iter_mut().for_each(|session| session.host.remove(now_ns));
            }
        }
    }
}

/// Identifiers that an error lists, at most.
const NUMBERS_MAX: usize = 16;

/// The namespace of this number; the only one if unset. `active` has the identifiers of all, also of those that were
/// not identified or cannot be used.
pub(crate) fn find_namespace(
    usable: &[ScannedNamespace],
    active: &[u32],
    nsid: Option<u32>,
) -> Result<ScannedNamespace, String> {
    let Some(nsid) = nsid else {
        return match usable {
            [] => Err("the controller has no namespace that can be used; attach one there".into()),
            [only] => Ok(only.clone()),
            _ => {
                let numbers: Vec<_> = usable.iter().map(|found| found.namespace.nsid).collect();
                Err(format!("the controller has namespaces {}; choose one by ?namespace=N", list(&numbers)))
            }
        };
    };
    if let Some(found) = usable.iter().find(|found| found.namespace.nsid == nsid) {
        return Ok(found.clone());
    }
    Err(if active.contains(&nsid) {
        format!("namespace {nsid} of the controller has another command set, metadata or block size; choose another")
    } else if active.is_empty() {
        "the controller has no namespace; attach one there".into()
    } else {
        format!("the controller has no namespace {nsid}; it has {}", list(active))
    })
}

fn list(numbers: &[u32]) -> String {
    let shown = &numbers[..numbers.len().min(NUMBERS_MAX)];
    let text = shown.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    match numbers.len() - shown.len() {
        0 => text,
        further => format!("{text} and {further} more"),
    }
}

/// Checks that users of a namespace can go on with it. Its size may differ.
pub(crate) fn check_same(known: &ScannedNamespace, found: &ScannedNamespace) -> Result<(), String> {
    let look = |scanned: &ScannedNamespace| {
        let info = &scanned.info;
        (info.limits, info.read_only, info.volatile_cache, info.fua)
    };
    let changed = |what: &str| Err(format!("the controller changed {what}; serve the same namespace as before"));
    if known.ids != found.ids {
        return changed("the identity of its namespace");
    }
    if known.namespace != found.namespace || look(known) != look(found) {
        return changed("the format or the limits of its namespace");
    }
    Ok(())
}
