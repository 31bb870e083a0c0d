//! The studies as a user runs them: quick, checked, as JSON and as a picture.
//!
//! Virtual time is the same everywhere. CPU time depends on the machine and on the build, so only the agreement of
//! verdicts and exit code is required of it. The built program runs them: without optimisation they take minutes.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{CLIENT_LIMIT, RunsIn, Scenario, ScenarioContext};
use crate::process;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "study-mq-vs-bio",
        sentence: "the first study has a row for each load, misses nothing in virtual time, and its verdicts decide the exit code",
        place: RunsIn::Host,
        ours: true,
        tell: mq_vs_bio,
    },
    Scenario {
        name: "study-multi-vq",
        sentence: "the second study says what is simulated and what was served, and its verdicts decide the exit code",
        place: RunsIn::Host,
        ours: true,
        tell: multi_vq,
    },
    Scenario {
        name: "study-back-end-missing",
        sentence: "a back-end that is missing is named with the cure, and its goal is missed",
        place: RunsIn::Host,
        ours: true,
        tell: back_end_missing,
    },
    Scenario {
        name: "study-time-slice",
        sentence: "the third study is the same to the last digit, and its verdicts decide the exit code",
        place: RunsIn::Host,
        ours: true,
        tell: time_slice,
    },
    Scenario {
        name: "study-premapped",
        sentence: "the fourth study measures every row, and its verdicts decide the exit code",
        place: RunsIn::Host,
        ours: true,
        tell: premapped,
    },
    Scenario {
        name: "study-latency-policy",
        sentence: "the fifth study is the same to the last digit, has each policy on sockets beside its simulation, and its verdicts decide the exit code",
        place: RunsIn::Host,
        ours: true,
        tell: latency_policy,
    },
];

/// A study that ended.
struct EndedStudy {
    report: Value,
    /// The report as it was written.
    text: String,
    exit_code: Option<i32>,
    picture: String,
}

impl EndedStudy {
    fn array(&self, key: &str) -> Result<&Vec<Value>> {
        self.report[key].as_array().with_context(|| format!("the report has no list {key}"))
    }

    /// The exit code is 1 if a goal is missed, else 3 if one is undecided.
    fn check_exit_code(&self) -> Result<()> {
        let goals = self.array("goals")?;
        let any = |verdicts: &[&str]| {
            goals.iter().any(|goal| goal["verdict"].as_str().is_some_and(|verdict| verdicts.contains(&verdict)))
        };
        let expected = Some(if any(&["missed", "no"]) {
            1
        } else if any(&["undecided"]) {
            3
        } else {
            0
        });
        ensure!(self.exit_code == expected, "exit code {:?}, goals: {}", self.exit_code, self.report["goals"]);
        Ok(())
    }

    fn check_picture(&self, mark: &str, marks: usize) -> Result<()> {
        let picture = &self.picture;
        ensure!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "no picture: {picture:.80}");
        let found = picture.matches(mark).count();
        ensure!(found == marks, "{found} of {mark} in the picture, not {marks}");
        Ok(())
    }
}

fn study(ground: &ScenarioContext, arguments: &[&str]) -> Result<EndedStudy> {
    let picture = ground.path("study.svg");
    let mut command = ground.program.command()?;
    command.arg("study").args(arguments).args(["--quick", "--check", "--json", "--svg"]).arg(&picture);
    let ended = process::run("blkyard study", &command, CLIENT_LIMIT)?;
    let report = serde_json::from_str(&ended.stdout).with_context(|| format!("no JSON:\n{}", ended.said()))?;
    let picture = fs::read_to_string(&picture).with_context(|| format!("cannot read {}", picture.display()))?;
    Ok(EndedStudy { report, text: ended.stdout, exit_code: ended.status.code(), picture })
}

fn is_positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number > 0.0)
}

fn mq_vs_bio(ground: &ScenarioContext) -> Result<()> {
    let study = study(ground, &["mq-vs-bio"])?;
    let rows = study.array("rows")?;
    let points: Vec<_> = rows.iter().map(|row| (row["jobs"].as_u64(), row["depth"].as_u64())).collect();
    let depths = [1, 2, 4, 8, 16, 128, 1024, 2048];
    let expected: Vec<_> = [1, 4].iter().flat_map(|jobs| depths.map(|depth| (Some(*jobs), Some(depth)))).collect();
    ensure!(points == expected, "jobs and depths: {points:?}");
    for row in rows {
        for mode in ["bio", "bio_no_tick", "single", "mq"] {
            for figure in ["iops", "user_ns", "min_us", "mean_us", "max_us", "stdev_us"] {
                ensure!(is_positive(&row[mode][figure]), "{mode}, {figure}: {row}");
            }
        }
    }
    for goal in study.array("goals")? {
        let is_of_cpu = goal["what"].as_str().is_some_and(|what| what.starts_with("CPU"));
        let holds = goal["verdict"] == "met" || goal["verdict"] == "by-construction";
        ensure!(holds || is_of_cpu, "missed in virtual time: {goal}");
    }
    let claims = study.array("claims")?;
    let verdicts = ["reproduced", "not-reproduced", "undecided", "not-applicable"];
    let is_judged = |claim: &Value| claim["verdict"].as_str().is_some_and(|verdict| verdicts.contains(&verdict));
    ensure!(claims.len() >= 12 && claims.iter().all(is_judged), "{claims:?}");
    study.check_exit_code()?;
    // A claim and a replay for each point of three panels.
    study.check_picture("<circle", 2 + 3 * 2 * 16)
}

fn multi_vq(ground: &ScenarioContext) -> Result<()> {
    let study = study(ground, &["multi-vq"])?;
    let points = study.array("simulated_grid")?;
    ensure!(points.len() == 2 * 3 * 3 && points.iter().all(|point| is_positive(&point["iops"])), "{points:?}");
    ensure!(is_positive(&study.report["costs"]["live"]["alone_ns"]), "{}", study.report["costs"]);
    let served = study.array("served")?;
    ensure!(served.len() == 3, "{served:?}");
    let ours = served[0]["measured"]["iops"].as_array().context("our own export was not measured")?;
    let ours: Vec<_> = ours.iter().filter_map(Value::as_array).flatten().collect();
    ensure!(ours.len() == 3 * 3 && ours.iter().all(|point| is_positive(&point["median"])), "{ours:?}");
    for theirs in &served[1..] {
        // It may not be installed; then the report says so, with the cure.
        let has_cure = theirs["not_measured"].as_str().is_some_and(|why| why.contains("--qemu-storage-daemon"));
        ensure!(theirs["measured"].is_object() || has_cure, "{theirs}");
    }
    let guest = &study.report["guest"];
    let points = guest["points"].as_array().context("no points of the guest")?;
    ensure!(points.len() == 5 * 3 && points.iter().all(|point| is_positive(&point["iops"])), "{points:?}");
    // A prediction stands beside what was fitted: the guest's calls, and the lines between two CPUs.
    let gain = &guest["ratios"][1];
    let [low, median, high] = ["low", "median", "high"].map(|key| gain[key].as_f64());
    ensure!(low.is_some() && low <= median && median <= high, "{gain}");
    ensure!(study.report["fitted"].as_array().is_some_and(|fitted| fitted.len() == 2), "{}", study.report["fitted"]);
    for goal in study.array("goals")? {
        let is_virtual = goal["at"].as_str().is_some_and(|at| at.starts_with("virtual time"));
        ensure!(!is_virtual || goal["verdict"] == "by-construction", "twice the threads are no finding: {goal}");
    }
    study.check_exit_code()?;
    // Three gains, and four points of the curves that they imply.
    study.check_picture("class=\"post\"", 3 + 4)
}

fn back_end_missing(ground: &ScenarioContext) -> Result<()> {
    let study = study(ground, &["multi-vq", "--qemu-storage-daemon", "/nonexistent/daemon"])?;
    let why = study.report["served"][1]["not_measured"].as_str().context("it was measured")?;
    ensure!(why.contains("/nonexistent/daemon") && why.contains("qemu-utils"), "{why}");
    let goals = study.array("goals")?;
    ensure!(goals.iter().any(|goal| goal["value"].is_null() && goal["verdict"] == "missed"), "{goals:?}");
    study.check_exit_code()
}

fn time_slice(ground: &ScenarioContext) -> Result<()> {
    let run = || study(ground, &["time-slice", "--seed", "5"]);
    let (study, again) = (run()?, run()?);
    ensure!(study.text == again.text, "all of it is virtual time, and two runs differ");
    let parts = study.array("parts")?;
    let rows: Vec<&Value> = parts.iter().filter_map(|part| part["rows"].as_array()).flatten().collect();
    ensure!(rows.iter().all(|row| row["name"].is_string()), "{rows:?}");
    let readers = parts.iter().find(|part| part["name"] == "readers").context("no part `readers`")?;
    let readers = readers["rows"].as_array().context("readers has no rows")?;
    let seconds = |name: &str| readers.iter().find(|row| row["name"] == name)?["seconds"].as_f64();
    let (Some(fair), Some(none)) = (seconds("fair"), seconds("none")) else {
        bail!("no rows `fair` and `none`: {readers:?}");
    };
    ensure!(fair < 0.75 * none, "{readers:?}");
    study.check_exit_code()?;
    study.check_picture("class=\"bar\"", rows.len())
}

fn premapped(ground: &ScenarioContext) -> Result<()> {
    let study = study(ground, &["premapped"])?;
    let rows = study.array("rows")?;
    // Beds, sizes, batches and kinds of memory.
    ensure!(rows.len() == 2 * 6 * 4 * 3, "{} rows", rows.len());
    let is_counted = study.report["not_counted"].is_null();
    for row in rows {
        ensure!(row["samples"]["submit_ns"].as_array().is_some_and(|samples| samples.len() >= 6), "{row}");
        ensure!(is_positive(&row["polled_ns"]["low"]), "{row}");
        ensure!(row["instructions"].is_array() == (is_counted && row["bed"] == "one"), "{row}");
    }
    // Without a disk that does direct I/O, the report has the reason.
    let is_measured = study.report["host"]["pairs"].as_array().is_some_and(|pairs| {
        pairs.len() >= 5
            && pairs.iter().all(|pair| pair["samples"].as_u64() >= Some(6) && is_positive(&pair["cpu_ratio"]["low"]))
    });
    ensure!(is_measured || study.report["no_host"].is_string(), "{}", study.report["host"]);
    study.check_exit_code()?;
    ensure!(study.picture.ends_with("</svg>\n"), "no picture");
    Ok(())
}

fn latency_policy(ground: &ScenarioContext) -> Result<()> {
    let run = |seed| study(ground, &["latency-policy", "--seed", seed]);
    let (study, again, other) = (run("5")?, run("5")?, run("6")?);
    ensure!(study.text == again.text, "all of it is virtual time, and two runs differ");
    ensure!(study.text != other.text, "the seed changes nothing");
    let parts = study.array("parts")?;
    let rows = |name: &str| -> Result<&Vec<Value>> {
        let part = parts.iter().find(|part| part["name"] == name).with_context(|| format!("no part {name}"))?;
        part["rows"].as_array().with_context(|| format!("{name} has no rows"))
    };
    let counts =
        [("sequential write", 6), ("decay", 11), ("capacity", 6), ("published", 13), ("drawn", 6), ("hedged", 2)];
    for (name, count) in counts {
        ensure!(rows(name)?.len() == count, "{name}: {} rows, not {count}", rows(name)?.len());
    }
    // Virtual time depends on the seed alone: what must hold for each of them.
    let equal = &rows("published")?[0];
    ensure!(equal["adaptive"].as_f64().is_some_and(|regret| regret < 2.0), "{equal}");
    ensure!(equal["latency"].as_f64().is_some_and(|regret| regret > 5.0), "the herding is not shown: {equal}");
    study.check_exit_code()?;
    let all: usize = parts.iter().filter_map(|part| part["rows"].as_array()).map(Vec::len).sum();
    study.check_picture("class=\"bar\"", all)?;
    latency_policy_on_sockets(ground)
}

/// Real time on this machine: whether it agrees with the simulation is a verdict, and no requirement.
fn latency_policy_on_sockets(ground: &ScenarioContext) -> Result<()> {
    let study = study(ground, &["latency-policy", "--sockets"])?;
    let parts = study.array("parts")?;
    ensure!(parts.len() == 2 && study.array("goals")?.len() == 10, "{} scenes", parts.len());
    let mut rows = 0;
    for row in parts.iter().filter_map(|part| part["rows"].as_array()).flatten() {
        for figure in ["iops", "mean_us", "stdev_us", "fast_percent"] {
            let simulated = format!("simulated_{figure}");
            ensure!(is_positive(&row[figure]) && is_positive(&row[&simulated]), "{figure}: {row}");
        }
        rows += 1;
    }
    ensure!(rows == 10, "five policies in two scenes, and {rows} rows");
    study.check_exit_code()?;
    study.check_picture("class=\"bar\"", rows)
}
