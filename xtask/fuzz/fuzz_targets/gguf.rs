//! The header of a GGUF file.

#![no_main]

xtask_fuzz::target!("gguf");
