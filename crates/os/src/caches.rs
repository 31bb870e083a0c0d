//! Sizes of a CPU's caches, for measurements whose data must exceed one of them.

use std::path::Path;

/// Bytes of the data cache of this level that the first CPU uses; `None` if the system does not report it.
pub fn cache_bytes(level: u32) -> Option<u64> {
    find(Path::new("/sys/devices/system/cpu/cpu0/cache"), level)
}

fn find(folder: &Path, level: u32) -> Option<u64> {
    std::fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let read = |name: &str| std::fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let fits = read("level").trim() == level.to_string() && read("type").trim() != "Instruction";
        fits.then(|| bytes(read("size").trim())).flatten()
    })
}

/// A size as sysfs writes it: "1024K".
fn bytes(size: &str) -> Option<u64> {
    let digits = size.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &size[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        for (text, size) in
            [("32K", Some(32 << 10)), ("1M", Some(1 << 20)), ("512", Some(512)), ("", None), ("3X", None)]
        {
            assert_eq!(bytes(text), size, "{text:?}");
        }
    }

    #[test]
    fn data_is_not_kept_in_a_cache_for_instructions() {
        let folder = tempfile::tempdir().unwrap();
        for (index, level, kind, size) in
            [("index0", "1", "Instruction", "64K"), ("index1", "1", "Data", "32K"), ("index2", "2", "Unified", "1024K")]
        {
            let place = folder.path().join(index);
            std::fs::create_dir(&place).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size)] {
                std::fs::write(place.join(name), format!("{text}\n")).unwrap();
            }
        }
        assert_eq!(find(folder.path(), 1), Some(32 << 10));
        assert_eq!(find(folder.path(), 2), Some(1 << 20));
        assert_eq!(find(folder.path(), 3), None);
    }
}
