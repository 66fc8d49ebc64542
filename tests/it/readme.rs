//! Every command of the README is run as it stands there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, run};

/// The `sh` blocks of the README, with the word after `sh` that says how they are run.
fn blocks() -> Vec<(String, Vec<String>)> {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let mut blocks = Vec::new();
    let mut lines = readme.lines();
    while let Some(line) = lines.next() {
        if let Some(info) = line.strip_prefix("```sh") {
            let mut commands: Vec<String> = Vec::new();
            for line in lines.by_ref().take_while(|l| *l != "```") {
                // A quoted text may go on on the next line.
                match commands.last_mut().filter(|c| !c.matches('"').count().is_multiple_of(2)) {
                    Some(open) => *open += &format!("\n{line}"),
                    None if line.trim().is_empty() || line.starts_with('#') => {}
                    None => commands.push(line.to_owned()),
                }
            }
            blocks.push((info.trim().to_owned(), commands));
        }
    }
    blocks
}

/// Runs a line in a shell with the built binary on the path.
#[track_caller]
fn shell(dir: &Path, line: &str) {
    let binary = assert_cmd::cargo::cargo_bin!("spark-convert");
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let output = Command::new("sh")
        .args(["-euc", line])
        .current_dir(dir)
        .env("PATH", path)
        .env_remove("SPARK_CHECKPOINT")
        .output()
        .unwrap();
    assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Keys of the table of `--json`, by the command in front of them.
fn documented_keys() -> BTreeMap<String, BTreeSet<String>> {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let rows = readme.lines().skip_while(|l| !l.starts_with("| `--json` of")).skip(2);
    let code = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    rows.take_while(|l| l.starts_with('|'))
        .map(|row| {
            let (command, keys) = row[1..].split_once('|').unwrap();
            // What stands in brackets is of what is inside, or there sometimes.
            let keys = keys.split('(').next().unwrap();
            (command.trim().to_owned(), code(keys).into_iter().collect())
        })
        .collect()
}

#[test]
fn json_has_the_keys_that_are_documented() {
    let documented = documented_keys();
    assert_eq!(documented.len(), 9);
    let model = Model::new(FixtureSpec::tiny());
    let dir = model.dir.to_str().unwrap();
    let quantize = ["quantize", dir, "--scheme", "w8a8", "--out", "out"];
    let export = ["export-npu", dir, "--precision", "fp32", "--context", "40", "--out", "npu"];
    let runs: [(&str, &[&str]); 9] = [
        ("`inspect` of a checkpoint", &["inspect", dir]),
        ("`plan`", &["plan", dir]),
        ("`quantize --dry-run`", &[&quantize[..], &["--dry-run"]].concat()),
        ("`quantize`", &quantize),
        ("`inspect` of an artifact", &["inspect", "out"]),
        ("`export-npu --dry-run`", &[&export[..], &["--dry-run"]].concat()),
        ("`export-npu`", &export),
        ("`verify`", &["verify", "out", "--reference", dir, "--scenario", "none"]),
        ("`generate`", &["generate", dir, "--tokens", "3,4", "--max-new-tokens", "2"]),
    ];
    for (name, args) in runs {
        let json = run(model.root.path(), args.iter().chain(&["--json"])).expect(0).json();
        let found: BTreeSet<String> = json.as_object().unwrap().keys().cloned().collect();
        assert_eq!(found, documented[name], "{name}");
    }
}

#[test]
fn exactly_two_commands_set_everything_up() {
    let setup: Vec<_> = blocks().into_iter().filter(|b| b.0 == "setup").collect();
    assert_eq!(setup.len(), 1);
    let commands = &setup[0].1;
    assert_eq!(commands.len(), 2, "{commands:?}");
    // The first is the main job: cargo runs the binary that this test has built already.
    let job = commands[0].strip_prefix("cargo run --release -- ").expect("the main job is a cargo run");
    assert_eq!(commands[1], "cargo test");
    let checkout = tempfile::tempdir().unwrap();
    lay_out_checkout(checkout.path());
    shell(checkout.path(), &format!("spark-convert {job}"));
    assert!(fs::read_dir(checkout.path().join("artifacts")).unwrap().next().is_some());
    shell(checkout.path(), &format!("spark-convert {job} | grep -q 'up to date'"));
}

#[test]
fn every_other_command_runs_in_order() {
    let checkout = tempfile::tempdir().unwrap();
    lay_out_checkout(checkout.path());
    // The README's real checkpoint, in small: trained weights, so that the gates mean something.
    copy_bundled(&checkout.path().join("Spark-X2.5-1.7B"));
    let mut ran = 0;
    for (info, commands) in blocks() {
        match info.as_str() {
            "setup" => {}
            // Needs another program (vLLM); the referees run it where it is installed.
            "consumer" => {}
            "" => {
                for line in commands {
                    shell(checkout.path(), &line);
                    ran += 1;
                }
            }
            other => panic!("README: a block of unknown kind {other:?}"),
        }
    }
    assert!(ran >= 5, "only {ran} commands were found");
}

/// As much of a checkout as the binary looks at.
fn lay_out_checkout(dir: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::copy(root.join("Cargo.toml"), dir.join("Cargo.toml")).unwrap();
    copy_bundled(&dir.join("fixtures/spark-tiny"));
}

fn copy_bundled(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spark-tiny")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
}
