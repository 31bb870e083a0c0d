//! Limits of two CPUs that exchange cache lines: a single line, a pair of NVMe queues, a virtqueue.
//!
//! The rings here have the cache lines of the real ones and their order of stores and loads, so that as many lines
//! move; their content is meaningless. Neither side checks the other.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::cpus::led;
use super::windows::Variant;

/// A cache line, as eight words.
#[derive(Debug, Default)]
#[repr(align(64))]
struct LineWords([AtomicU64; 8]);

/// Lines that the CPU does not fetch along with their neighbours.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Alone(AtomicU64);

fn lines(count: usize) -> Box<[LineWords]> {
    (0..count).map(|_| LineWords::default()).collect()
}

/// There and back, one word in one line.
pub(super) fn serial() -> Result<Variant<'static>, String> {
    let (ours, theirs) = shared(Alone::default());
    let mut turn = 0;
    led(
        move || {
            turn += 2;
            ours.0.store(turn - 1, Release);
            await_word(&ours.0, turn);
            2
        },
        move || {
            let turn = theirs.0.load(Acquire);
            if turn % 2 == 1 {
                theirs.0.store(turn + 1, Release);
            }
        },
    )
}

/// No hint that this is a wait: on some CPUs it takes as long as a line needs to come.
#[inline]
fn await_word(word: &AtomicU64, value: u64) {
    loop {
        if word.load(Acquire) == value {
            return;
        }
    }
}

fn shared<T>(what: T) -> (Arc<T>, Arc<T>) {
    let ours = Arc::new(what);
    (Arc::clone(&ours), ours)
}

/// A stream of lines, published in batches: earlier lines transfer while later ones are written.
pub(super) fn pipelined() -> Result<Variant<'static>, String> {
    const LINES: u64 = 256;
    const BATCH: u64 = 64;
    struct LineStream {
        tail: Alone,
        head: Alone,
        lines: Box<[LineWords]>,
    }
    let stream = LineStream { tail: Alone::default(), head: Alone::default(), lines: lines(LINES as usize) };
    let (ours, theirs) = shared(stream);
    let (mut tail, mut head_seen, mut head) = (0_u64, 0_u64, 0_u64);
    led(
        move || {
            while tail + BATCH - head_seen > LINES {
                head_seen = ours.head.0.load(Acquire);
            }
            for index in tail..tail + BATCH {
                ours.lines[(index % LINES) as usize].0[0].store(index, Relaxed);
            }
            tail += BATCH;
            ours.tail.0.store(tail, Release);
            BATCH
        },
        move || {
            let tail = theirs.tail.0.load(Acquire);
            if tail != head {
                let lines = (head..tail).map(|index| &theirs.lines[(index % LINES) as usize]);
                black_box(lines.map(|line| line.0[0].load(Relaxed)).sum::<u64>());
                head = tail;
                theirs.head.0.store(head, Release);
            }
        },
    )
}

/// Entries of the rings below; the largest depth.
const ENTRIES: u64 = 128;

/// A submission and a completion queue as in NVMe: entries of 64 and 16 bytes, a doorbell, and a phase bit in the
/// completion, so that the host reads only its line.
struct NvmePair {
    doorbell: Alone,
    submissions: Box<[LineWords]>,
    /// Four completions to a line, two words each: result; cid and phase.
    completions: Box<[LineWords]>,
}

impl NvmePair {
    /// Words of a submission that a read needs: command and cid, namespace, address, position, length.
    const WORDS: usize = 5;

    fn submission(&self, index: u64) -> &[AtomicU64] {
        &self.submissions[(index % ENTRIES) as usize].0[..NvmePair::WORDS]
    }

    fn completion(&self, index: u64) -> (&AtomicU64, &AtomicU64) {
        let place = (index % ENTRIES) as usize;
        let line = &self.completions[place / 4].0;
        (&line[place % 4 * 2], &line[place % 4 * 2 + 1])
    }

    /// Set in every other round of the ring, beginning with the first.
    fn phase(index: u64) -> u64 {
        (index / ENTRIES + 1) % 2
    }
}

/// A command through such a pair, with `depth` of them under way.
pub(super) fn queue_pair(depth: u64) -> Result<Variant<'static>, String> {
    let (ours, theirs) = shared(NvmePair {
        doorbell: Alone::default(),
        submissions: lines(ENTRIES as usize),
        completions: lines(ENTRIES as usize / 4),
    });
    let (mut submitted, mut completed, mut taken) = (0_u64, 0_u64, 0_u64);
    led(
        move || {
            let before = completed;
            while completed < submitted && ours.completion(completed).1.load(Acquire) & 1 == NvmePair::phase(completed)
            {
                black_box(ours.completion(completed).0.load(Relaxed));
                completed += 1;
            }
            let from = submitted;
            while submitted - completed < depth {
                ours.submission(submitted).iter().for_each(|word| word.store(submitted, Relaxed));
                submitted += 1;
            }
            if submitted != from {
                ours.doorbell.0.store(submitted, Release);
            }
            completed - before
        },
        move || {
            let doorbell = theirs.doorbell.0.load(Acquire);
            while taken < doorbell {
                let read = theirs.submission(taken).iter().map(|word| word.load(Relaxed)).sum();
                let (result, status) = theirs.completion(taken);
                result.store(read, Relaxed);
                status.store(taken << 1 | NvmePair::phase(taken), Release);
                taken += 1;
            }
        },
    )
}

/// A split virtqueue with requests of three descriptors in the table, header and status in one line, and indexes
/// published once a batch.
struct Virtqueue {
    /// The three descriptors of a request, and room for a fourth.
    table: Box<[LineWords]>,
    /// Header and status of each request.
    requests: Box<[LineWords]>,
    /// Words: flags and index, then four heads to a word.
    avail: Box<[LineWords]>,
    /// Words: flags and index, then an element to a word.
    used: Box<[LineWords]>,
}

impl Virtqueue {
    const HEADS_TO_WORD: u64 = 4;
    const DESCRIPTOR_WORDS: usize = 6;
    const STATUS: usize = 2;

    fn index(ring: &[LineWords]) -> &AtomicU64 {
        &ring[0].0[0]
    }

    fn head(&self, head: u64) -> &AtomicU64 {
        let word = (1 + head / Virtqueue::HEADS_TO_WORD) as usize;
        &self.avail[word / 8].0[word % 8]
    }

    fn element(&self, index: u64) -> &AtomicU64 {
        let word = (1 + index % ENTRIES) as usize;
        &self.used[word / 8].0[word % 8]
    }

    fn descriptors(&self, head: u64) -> &[AtomicU64] {
        &self.table[head as usize].0[..Virtqueue::DESCRIPTOR_WORDS]
    }

    fn request(&self, head: u64) -> &[AtomicU64; 8] {
        &self.requests[head as usize].0
    }
}

/// A request through such a queue, with `depth` of them under way.
pub(super) fn virtqueue(depth: u64) -> Result<Variant<'static>, String> {
    let (ours, theirs) = shared(Virtqueue {
        table: lines(ENTRIES as usize),
        requests: lines(ENTRIES as usize),
        avail: lines((1 + ENTRIES / Virtqueue::HEADS_TO_WORD).div_ceil(8) as usize),
        used: lines((1 + ENTRIES).div_ceil(8) as usize),
    });
    let (mut offered, mut ended, mut fetched) = (0_u64, 0_u64, 0_u64);
    led(
        move || {
            let before = ended;
            let used = Virtqueue::index(&ours.used).load(Acquire);
            while ended < used {
                let head = ours.element(ended).load(Relaxed) % ENTRIES;
                black_box(ours.request(head)[Virtqueue::STATUS].load(Relaxed));
                ended += 1;
            }
            let from = offered;
            while offered - ended < depth {
                let head = offered % ENTRIES;
                ours.request(head)[..=Virtqueue::STATUS].iter().for_each(|word| word.store(offered, Relaxed));
                ours.descriptors(head).iter().for_each(|word| word.store(offered, Relaxed));
                ours.head(head).store(head, Relaxed);
                offered += 1;
            }
            if offered != from {
                Virtqueue::index(&ours.avail).store(offered, Release);
            }
            ended - before
        },
        move || {
            let avail = Virtqueue::index(&theirs.avail).load(Acquire);
            if fetched == avail {
                return;
            }
            while fetched < avail {
                let head = fetched % ENTRIES;
                let mut read = theirs.head(head).load(Relaxed);
                read += theirs.descriptors(head).iter().map(|word| word.load(Relaxed)).sum::<u64>();
                let request = theirs.request(head);
                read += request[..Virtqueue::STATUS].iter().map(|word| word.load(Relaxed)).sum::<u64>();
                request[Virtqueue::STATUS].store(read, Relaxed);
                theirs.element(fetched).store(head, Relaxed);
                fetched += 1;
            }
            Virtqueue::index(&theirs.used).store(fetched, Release);
        },
    )
}
