//! The configuration of a checkpoint.

#![no_main]

xtask_fuzz::target!("config");
