//! The header of a checkpoint's weights.

#![no_main]

xtask_fuzz::target!("safetensors");
