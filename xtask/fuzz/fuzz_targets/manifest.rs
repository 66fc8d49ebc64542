//! The manifest of a quantized artifact.

#![no_main]

xtask_fuzz::target!("manifest");
