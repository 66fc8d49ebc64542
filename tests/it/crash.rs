//! What can happen to a run while it writes. The whole sweep is `cargo xtask faults`.

use std::process::Command;

use crate::runs::{Model, run};

/// Every sort of fault, at one system call in ten or so.
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
#[test]
fn whatever_happens_to_a_run_the_target_is_absent_or_whole() {
    let binary = assert_cmd::cargo::cargo_bin!("spark-convert");
    let sweep = xtask::faults::sweep(binary, 17).unwrap();
    assert!(sweep.faults >= 60, "{sweep:?}");
    assert!(sweep.bad.is_empty(), "{:#?}", sweep.bad);
    // Each of them did what it is for.
    for ending in ["Kill: signal 9", "Fail(28): exit 4", "Fail(5): exit 4", "Signal(15): exit 5"] {
        assert!(sweep.endings.contains_key(ending), "{ending}: {:?}", sweep.endings);
    }
}

/// A user's limit on the size of a file ends a program by a signal, unless it is expected.
#[test]
fn a_limit_on_file_sizes_is_a_failed_write() {
    let model = Model::tiny();
    let binary = assert_cmd::cargo::cargo_bin!("spark-convert");
    let line = format!(
        "ulimit -f 16; exec '{}' quantize model --scheme w8a8 --out new/out --progress none",
        binary.display()
    );
    let output = Command::new("sh").args(["-c", &line]).current_dir(model.root.path()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    assert!(stderr.contains("File too large") && stderr.lines().count() == 1, "{stderr}");
    assert!(!model.root.path().join("new").exists());
}

/// A mapped file that ends early is no reason to die without a word.
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
#[test]
fn an_input_that_is_cut_short_while_it_is_read_is_told() {
    use xtask::faults::Fault;
    let model = Model::tiny();
    let shard = model.file("model-00001-of-00002.safetensors");
    let cut = || std::fs::File::options().write(true).open(&shard).unwrap().set_len(100).unwrap();
    for (format, begins) in [("text", "error: "), ("json", "{\"level\":\"ERROR\"")] {
        let whole = std::fs::read(&shard).unwrap();
        let mut command = crate::runs::command(model.root.path());
        command.args(["quantize", "model", "--scheme", "w8a8", "--out", "out", "--threads", "1"]);
        command.args(["--log-format", format]);
        let traced = xtask::faults::run(&mut command, Some((3, Fault::Meanwhile(&cut)))).unwrap();
        assert_eq!(traced.ended, Ok(4), "{traced:?}");
        let errors: Vec<_> = traced.stderr.lines().filter(|line| line.starts_with(begins)).collect();
        assert!(errors.len() == 1 && errors[0].contains("became shorter"), "{}", traced.stderr);
        if format == "json" {
            serde_json::from_str::<serde_json::Value>(errors[0]).unwrap();
        }
        assert!(!model.out().exists());
        std::fs::write(&shard, whole).unwrap();
    }
    // What it left is cleared.
    model.quantize(&[]).expect(0);
    assert!(!model.root.path().join(".out.partial").exists());
    run(model.root.path(), ["inspect", "out"]).expect(0);
}
