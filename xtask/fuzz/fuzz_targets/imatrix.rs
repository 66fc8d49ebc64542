//! An importance matrix.

#![no_main]

xtask_fuzz::target!("imatrix");
