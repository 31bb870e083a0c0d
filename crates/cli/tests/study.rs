//! The studies as a user runs them: quick, checked, as JSON and as a picture.
//!
//! Virtual time is the same everywhere. CPU time depends on the machine and on the build, so the test only checks that
//! verdicts and exit code agree.

use std::fs;
use std::process::Command;

use serde_json::Value;

#[test]
fn the_first_study_prints_both_tables_and_its_verdicts_decide_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("study.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .args(["study", "mq-vs-bio", "--quick", "--check", "--json", "--svg"])
        .arg(&picture)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    let rows = report["rows"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let points: Vec<_> = rows.iter().map(|row| (number(&row["jobs"]) as u32, number(&row["depth"]) as u32)).collect();
    let depths = [1, 2, 4, 8, 16, 128, 1024, 2048];
    assert_eq!(points, [1, 4].into_iter().flat_map(|jobs| depths.map(|depth| (jobs, depth))).collect::<Vec<_>>());
    for row in rows {
        for mode in ["bio", "bio_no_tick", "single", "mq"] {
            for figure in ["iops", "user_ns", "min_us", "mean_us", "max_us", "stdev_us"] {
                assert!(number(&row[mode][figure]) > 0.0, "{mode}, {figure}: {row}");
            }
        }
    }

    let goals = report["goals"].as_array().unwrap();
    for goal in goals {
        let met = goal["met"].as_bool().unwrap();
        assert!(met || goal["what"].as_str().unwrap().starts_with("CPU"), "missed in virtual time: {goal}");
    }
    let all_met = goals.iter().all(|goal| goal["met"] == true);
    assert_eq!(output.status.code(), Some(i32::from(!all_met)));
    let picture = fs::read_to_string(picture).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    assert_eq!(
        picture.matches("<circle").count(),
        2 + 3 * 2 * 16,
        "a claim and a replay for each point of three panels"
    );
}

#[test]
fn the_second_study_says_what_is_simulated_and_its_verdicts_decide_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("study.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .args(["study", "multi-vq", "--quick", "--check", "--json", "--svg"])
        .arg(&picture)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let points = report["simulated_grid"].as_array().unwrap();
    assert_eq!(points.len(), 2 * 3 * 3);
    assert!(points.iter().all(|point| point["iops"].as_f64().unwrap() > 0.0), "{points:?}");
    assert!(report["costs"]["live"]["alone_ns"].as_f64().unwrap() > 0.0);
    let served = report["served"].as_array().unwrap();
    assert_eq!(served.len(), 3);
    let ours = served[0]["measured"]["iops"].as_array().unwrap().iter().flat_map(|of_jobs| of_jobs.as_array().unwrap());
    assert!(ours.clone().all(|point| point["median"].as_f64().unwrap() > 0.0), "{served:?}");
    assert_eq!(ours.count(), 3 * 3);
    for theirs in &served[1..] {
        // It may not be installed; then the report says so, with the cure.
        let cure = theirs["not_measured"].as_str();
        assert!(theirs["measured"].is_object() || cure.unwrap().contains("--qemu-storage-daemon"), "{theirs}");
    }
    let all_met = report["goals"].as_array().unwrap().iter().all(|goal| goal["met"] == true);
    assert_eq!(output.status.code(), Some(i32::from(!all_met)));
    let picture = fs::read_to_string(picture).unwrap();
    assert_eq!(picture.matches("<circle").count(), 2 * 3 * 3, "a point for each of both panels");
}

#[test]
fn a_back_end_that_is_not_there_is_named_with_the_cure_and_its_goal_is_missed() {
    let output = Command::new(env!("CARGO_BIN_EXE_blkyard"))
        .args(["study", "multi-vq", "--quick", "--check", "--json", "--qemu-storage-daemon", "/nonexistent/daemon"])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let why = report["served"][1]["not_measured"].as_str().unwrap();
    assert!(why.contains("/nonexistent/daemon") && why.contains("qemu-utils"), "{why}");
    let goals = report["goals"].as_array().unwrap();
    assert!(goals.iter().any(|goal| goal["value"].is_null() && goal["met"] == false), "{goals:?}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_third_study_is_the_same_to_the_last_digit_and_its_verdicts_decide_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("study.svg");
    let study = || {
        Command::new(env!("CARGO_BIN_EXE_blkyard"))
            .args(["study", "time-slice", "--quick", "--check", "--json", "--seed", "5", "--svg"])
            .arg(&picture)
            .output()
            .unwrap()
    };
    let output = study();
    assert_eq!(output.stdout, study().stdout, "all of it is virtual time");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let parts = report["parts"].as_array().unwrap();
    let rows: Vec<&Value> = parts.iter().flat_map(|part| part["rows"].as_array().unwrap()).collect();
    assert!(rows.iter().all(|row| row["name"].is_string()), "{rows:?}");
    let readers = parts.iter().find(|part| part["name"] == "readers").unwrap()["rows"].as_array().unwrap();
    let seconds = |name| {
        let row = readers.iter().find(|row| row["name"] == name).unwrap();
        row["seconds"].as_f64().unwrap()
    };
    assert!(seconds("fair") < 0.75 * seconds("none"), "{readers:?}");
    let all_met = report["goals"].as_array().unwrap().iter().all(|goal| goal["met"] == true);
    assert_eq!(output.status.code(), Some(i32::from(!all_met)));
    let picture = fs::read_to_string(picture).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    assert_eq!(picture.matches("class=\"bar\"").count(), rows.len(), "a bar for each row");
}
