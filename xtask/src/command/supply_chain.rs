//! What the project depends on: where it comes from, under which licence, and on which compiler it builds.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::process::{cargo, output, program, root, run};

/// Licences under which code may be linked or run at build time. `deny.toml` has the same list.
const LICENCES: [&str; 9] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSL-1.0",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// The one registry that packages come from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// What the binary must not link: network clients, a second TLS, anything that compiles C.
const REFUSED: [&str; 11] = [
    "reqwest",
    "ureq",
    "hyper",
    "hf-hub",
    "openssl-sys",
    "rustls",
    "native-tls",
    "curl-sys",
    "onig_sys",
    "cc",
    "cmake",
];

/// Checks the dependency tree, sources and licences, and runs cargo-deny where it is installed.
pub(super) fn check() -> Result<()> {
    linked()?;
    let metadata: Value =
        serde_json::from_str(&output(cargo().args(["metadata", "--locked", "--format-version=1"]))?)?;
    let packages = metadata["packages"].as_array().context("cargo metadata: no packages")?;
    let promised = version(&promised_compiler()?);
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let source = package["source"].as_str();
        // The workspace's own have no source.
        ensure!(source.is_none_or(|s| s == REGISTRY), "{name}: comes from {source:?}");
        let licence = package["license"].as_str().with_context(|| format!("{name}: no licence is stated"))?;
        ensure!(is_allowed(licence), "{name}: {licence:?} is none of {LICENCES:?}");
        if let Some(needed) = package["rust_version"].as_str() {
            ensure!(
                version(needed) <= promised,
                "{name}: needs Rust {needed}, which is newer than Cargo.toml's"
            );
        }
    }
    let denies = cargo().args(["deny", "--version"]).output().is_ok_and(|o| o.status.success());
    if denies {
        let mut deny = cargo();
        deny.args(["deny", "--offline", "check", "bans", "licenses", "sources"]);
        // Their database is fetched, which is not for the gate to do.
        match advisories_at_hand() {
            true => drop(deny.arg("advisories")),
            false => println!("SKIPPED: no database of advisories (cargo deny fetch)"),
        }
        run(&mut deny)?;
    } else {
        println!(
            "SKIPPED: cargo-deny is not installed (its lists of licences, sources and crates were checked here)"
        );
    }
    Ok(())
}

/// Whether cargo-deny has fetched a database of advisories.
fn advisories_at_hand() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    let databases = home.and_then(|home| std::fs::read_dir(home.join("advisory-dbs")).ok());
    databases.is_some_and(|mut entries| entries.next().is_some())
}

fn linked() -> Result<()> {
    let tree = output(cargo().args([
        "tree",
        "--locked",
        "--package",
        "spark-convert",
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]))?;
    let found: Vec<_> =
        tree.lines().filter(|l| REFUSED.contains(&l.split(' ').next().unwrap_or_default())).collect();
    ensure!(found.is_empty(), "the binary would link {found:?}");
    Ok(())
}

/// Whether one way to read an SPDX expression takes listed licences only. A slash is the old OR; AND binds
/// tighter, and parentheses are around alternatives.
fn is_allowed(expression: &str) -> bool {
    let mut todo = expression.trim();
    let mut all = true;
    // (A OR B) AND C: every part that AND joins.
    while !todo.is_empty() {
        let (part, rest) = match todo.strip_prefix('(').and_then(|t| t.split_once(')')) {
            Some((inner, rest)) => (inner, rest.trim_start().strip_prefix("AND ").unwrap_or_default()),
            None => match todo.split_once(" AND ") {
                Some((part, rest)) => (part, rest.trim_start()),
                None => (todo, ""),
            },
        };
        all &= part.replace(" OR ", "/").split('/').any(|licence| LICENCES.contains(&licence.trim()));
        todo = rest;
    }
    all
}

/// The oldest compiler that Cargo.toml promises.
fn promised_compiler() -> Result<String> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml"))?;
    let promised = manifest.lines().find_map(|line| line.strip_prefix("rust-version = "));
    Ok(promised.context("Cargo.toml: no rust-version")?.trim_matches('"').to_owned())
}

/// A version in the order of versions; 1.89 is 1.89.0.
fn version(text: &str) -> Vec<u32> {
    let mut parts: Vec<u32> = text.split('.').map(|part| part.parse().unwrap_or(u32::MAX)).collect();
    parts.resize(3, 0);
    parts
}

/// Builds the binary with the oldest compiler that Cargo.toml promises, where rustup has it. Elsewhere clippy
/// has looked for newer parts of the standard library, and [`check`] at what dependencies ask for.
pub(super) fn oldest_compiler() -> Result<()> {
    let version = promised_compiler()?;
    let toolchains = program("rustup").args(["toolchain", "list"]).output();
    let toolchains = toolchains.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let Some(toolchain) = toolchains
        .split_whitespace()
        .find(|t| t.strip_prefix(&version).is_some_and(|rest| rest.starts_with(['.', '-'])))
    else {
        println!(
            "SKIPPED: rustup has no Rust {version} (rustup toolchain install {version} --profile minimal)"
        );
        return Ok(());
    };
    let rustup = |args: &[&str]| {
        let mut rustup = program("rustup");
        // The variables of this run's own toolchain would win.
        rustup.env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
        rustup.args(args);
        rustup
    };
    // One that was left half way is listed as well.
    let works = rustup(&["run", toolchain, "rustc", "--version"]).output();
    if !works.is_ok_and(|o| o.status.success()) {
        println!("SKIPPED: rustup lists {toolchain}, but its compiler does not start");
        return Ok(());
    }
    let mut check = rustup(&[]);
    check.args([
        "run",
        toolchain,
        "cargo",
        "check",
        "--locked",
        "--package",
        "spark-convert",
        "--target-dir",
    ]);
    run(check.arg(root().join("target/oldest-compiler")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_they_are_meant() {
        for allowed in [
            "MIT",
            "MIT OR Apache-2.0",
            "Apache-2.0/MIT",
            "Apache-2.0 / MIT",
            "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
            "MIT AND Zlib",
        ] {
            assert!(is_allowed(allowed), "{allowed}");
        }
        for refused in [
            "GPL-3.0",
            "GPL-3.0 OR AGPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT OR Apache-2.0) AND GPL-3.0",
            "(GPL-2.0 OR GPL-3.0) AND MIT",
            "Apache-2.0 WITH Commons-Clause",
        ] {
            assert!(!is_allowed(refused), "{refused}");
        }
    }

    #[test]
    fn versions_are_in_their_order() {
        assert!(version("1.9") < version("1.89"));
        assert!(version("1.89") < version("1.89.1"));
        assert_eq!(version("1.89"), version("1.89.0"));
        assert!(version("1.90-nightly") > version("1.95"));
    }

    #[test]
    fn the_lists_of_cargo_deny_are_the_same() {
        let deny = include_str!("../../../deny.toml");
        for listed in LICENCES.iter().chain(&REFUSED) {
            assert!(deny.contains(&format!("    \"{listed}\",\n")), "{listed}");
        }
        let listed = deny.lines().filter(|line| line.starts_with("    \"")).count();
        assert_eq!(listed, LICENCES.len() + REFUSED.len());
    }
}
