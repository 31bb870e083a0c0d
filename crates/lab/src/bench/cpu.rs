//! CPU time that the process has used, kernel threads that work for it included.

/// User and system time, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuTime {
    pub(crate) user_ns: u64,
    pub(crate) system_ns: u64,
}

/// Length of the ticks in which /proc counts: `USER_HZ` is 100 on all architectures we build for (proc(5)).
const TICK_NS: u64 = 10_000_000;

impl CpuTime {
    /// So far; zero where the system does not tell.
    pub(crate) fn now() -> CpuTime {
        std::fs::read_to_string("/proc/self/stat").ok().and_then(|stat| parse(&stat)).unwrap_or_default()
    }

    /// Since an earlier moment.
    pub(crate) fn since(self, earlier: CpuTime) -> CpuTime {
        CpuTime {
            user_ns: self.user_ns.saturating_sub(earlier.user_ns),
            system_ns: self.system_ns.saturating_sub(earlier.system_ns),
        }
    }
}

/// Fields 14 and 15 of /proc/self/stat. The second may hold anything, so counting starts at its closing bracket.
fn parse(stat: &str) -> Option<CpuTime> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(CpuTime { user_ns: ticks()? * TICK_NS, system_ns: ticks()? * TICK_NS })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_program_does_not_confuse() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 31 0 0 20 0 1 0 99";
        let time = parse(stat).unwrap();
        assert_eq!((time.user_ns, time.system_ns), (2_500_000_000, 310_000_000));
        assert!(parse("nonsense").is_none());
    }
}
