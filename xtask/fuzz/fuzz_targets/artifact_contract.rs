//! What verify reads of a quantized artifact: configuration and headers.

#![no_main]

xtask_fuzz::target!("artifact-contract");
