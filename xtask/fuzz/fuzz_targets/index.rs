//! The index of a checkpoint's shards.

#![no_main]

xtask_fuzz::target!("index");
