//! The manifest of an export.

#![no_main]

xtask_fuzz::target!("npu-manifest");
