//! The header of a quantized artifact's weights.

#![no_main]

xtask_fuzz::target!("artifact-weights");
