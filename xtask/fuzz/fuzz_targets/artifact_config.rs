//! The configuration of a quantized artifact.

#![no_main]

xtask_fuzz::target!("artifact-config");
