//! Seeds of the walks.

use std::ops::Range;

/// Seeds by `BLKYARD_SEED`: one, or FIRST..END for a test of hours.
pub fn seeds() -> Option<Range<u64>> {
    let asked = std::env::var("BLKYARD_SEED").ok()?;
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("BLKYARD_SEED={asked}: use SEED or FIRST..END"));
    Some(match asked.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => number(&asked)..number(&asked) + 1,
    })
}
