//! What a shell and a pipeline see: completions, manual pages, pipes, colours.

use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};

use clap::CommandFactory;
use spark_convert::cli::Cli;
use xtask::fixtures::FixtureSpec;

use crate::runs::{Model, command, edit_json, run};

fn verbs() -> Vec<clap::Command> {
    let mut cli = Cli::command();
    cli.build();
    cli.get_subcommands().filter(|verb| verb.get_name() != "help").cloned().collect()
}

#[test]
fn manual_pages_and_completions_have_every_command_and_option() {
    let dir = tempfile::tempdir().unwrap();
    let written = xtask::docs::write(dir.path()).unwrap();
    assert_eq!(written.len(), 4 + verbs().len() + 1);
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let main = read("man/spark-convert.1");
    assert!(main.contains("Exit codes"), "{main}");
    let completions: Vec<_> =
        ["spark-convert.bash", "_spark-convert", "spark-convert.fish", "_spark-convert.ps1"]
            .map(|name| read(&format!("completions/{name}")))
            .into();
    for verb in verbs() {
        let name = verb.get_name();
        let page = read(&format!("man/spark-convert-{name}.1")).replace("\\-", "-");
        assert!(main.replace("\\-", "-").contains(&format!("spark-convert-{name}")), "{name}");
        assert!(page.contains("Examples:"), "{name}");
        for option in verb.get_arguments().filter_map(clap::Arg::get_long) {
            assert!(page.contains(&format!("--{option}")), "man page of {name}: --{option}");
            for text in &completions {
                assert!(text.contains(option), "completions of {name}: --{option}");
            }
        }
        for value in verb.get_arguments().flat_map(clap::Arg::get_possible_values) {
            assert!(page.contains(value.get_name()), "man page of {name}: {}", value.get_name());
        }
    }
    // Read by the shells themselves, where they are.
    for (shell, file) in
        [("bash", "spark-convert.bash"), ("zsh", "_spark-convert"), ("fish", "spark-convert.fish")]
    {
        let checked = Command::new(shell).arg("-n").arg(dir.path().join("completions").join(file)).output();
        match checked {
            Ok(output) => {
                assert!(output.status.success(), "{shell}: {}", String::from_utf8_lossy(&output.stderr))
            }
            Err(_) => eprintln!("{shell} is not there to check its completions"),
        }
    }
}

#[test]
fn bash_completes_a_command_an_option_and_a_value() {
    let dir = tempfile::tempdir().unwrap();
    xtask::docs::write(dir.path()).unwrap();
    let script = "source completions/spark-convert.bash
        FUNCTION=$(complete -p spark-convert | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        complete_to() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            $FUNCTION spark-convert \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD-1]}\"
            echo \"${COMPREPLY[@]}\"; }
        complete_to spark-convert qu
        complete_to spark-convert quantize --asy
        complete_to spark-convert quantize --scheme w4";
    let Ok(output) = Command::new("bash").args(["-c", script]).current_dir(dir.path()).output() else {
        eprintln!("bash is not there");
        return;
    };
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text.lines().collect::<Vec<_>>(),
        ["quantize", "--asymmetric", "w4a8 w4a16"],
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn every_example_of_a_help_text_is_a_command_line() {
    let mut seen = 0;
    for verb in verbs() {
        let help =
            verb.get_after_help().unwrap_or_else(|| panic!("{}: no examples", verb.get_name())).to_string();
        for line in help.lines().map(str::trim).filter(|line| line.starts_with("spark-convert ")) {
            let line = line.split(" | ").next().unwrap();
            // Quoted texts hold no blanks that matter to the parser.
            let mut quoted = false;
            let words: String = line
                .chars()
                .filter_map(|c| match c {
                    '"' => {
                        quoted = !quoted;
                        None
                    }
                    ' ' if quoted => Some('_'),
                    c => Some(c),
                })
                .collect();
            if let Err(e) = <Cli as clap::Parser>::try_parse_from(words.split(' ')) {
                panic!("{line}: {e}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 15, "{seen}");
}

/// `spark-convert ... | head -1`: whoever reads has seen enough, which is no failure.
#[test]
fn a_closed_pipe_ends_it_quietly() {
    let model = Model::tiny();
    for args in [
        &["inspect", "model", "--tensors"][..],
        &["inspect", "model", "--json"],
        &["plan", "model", "--target", "gpu"],
        &["quantize", "model", "--scheme", "w8a8", "--dry-run"],
        &["--help"],
    ] {
        let mut child = command(model.root.path())
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Closed before anything is read.
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let code = child.wait().unwrap().code();
        assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{args:?}: {stderr}");
        assert_eq!(code, Some(0), "{args:?}");
    }
}

/// Neither stdout nor stderr of a pipe, nor a terminal whose user said so, gets escapes.
#[test]
fn there_are_no_escapes_where_nobody_asked_for_them() {
    let model = Model::tiny();
    for args in
        [&["quantize", "--no-such-flag"][..], &["--help"], &["inspect", "nowhere"], &["inspect", "model"]]
    {
        for variables in [&[][..], &[("NO_COLOR", "1")], &[("TERM", "xterm-256color")], &[("CLICOLOR", "1")]]
        {
            let output = command(model.root.path())
                .args(args)
                .env_remove("NO_COLOR")
                .env_remove("CLICOLOR_FORCE")
                .envs(variables.iter().copied())
                .output()
                .unwrap();
            for bytes in [&output.stdout, &output.stderr] {
                assert!(!bytes.contains(&0x1b), "{args:?} {variables:?}: {}", String::from_utf8_lossy(bytes));
            }
        }
        let forced = command(model.root.path())
            .args(args)
            .envs([("NO_COLOR", "1"), ("CLICOLOR_FORCE", "1")])
            .output()
            .unwrap();
        // The user's own word on colours wins.
        assert!(!forced.stderr.contains(&0x1b) || args[0] != "inspect", "{args:?}");
    }
}

#[test]
fn a_closed_stderr_changes_nothing() {
    let model = Model::tiny();
    let script = "exec 2>&-; spark-convert quantize model --scheme w8a8 --out out --progress plain";
    let binary = assert_cmd::cargo::cargo_bin!("spark-convert");
    let status = Command::new("sh")
        .args(["-c", &script.replace("spark-convert", &binary.display().to_string())])
        .current_dir(model.root.path())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0));
    run(model.root.path(), ["inspect", "out"]).expect(0);
}

/// A name out of a file can neither break a line nor drive the terminal that shows it; JSON keeps it.
#[test]
fn names_out_of_files_are_shown_without_control_characters() {
    const KEY: &str = "key\n\u{1b}[31m\u{7f}\u{9b}x";
    let model = Model::new(FixtureSpec::tiny());
    edit_json(&model.dir.join("config.json"), |config| config[KEY] = serde_json::json!(1));
    for args in [["inspect", "model"].as_slice(), &["quantize", "model", "--scheme", "w8a8", "--dry-run"]] {
        let run = run(model.root.path(), args).expect(0);
        let shown = format!("{}{}", run.stdout, run.stderr);
        assert!(shown.contains("key\u{fffd}\u{fffd}[31m\u{fffd}\u{fffd}x is not a key"), "{shown:?}");
        assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
    }
    let run = run(model.root.path(), ["inspect", "model", "--json"]).expect(0);
    assert!(!run.stdout.contains(|c: char| c.is_control() && c != '\n'), "{:?}", run.stdout);
}
