//! What verify reads of an export: manifest and graph.

#![no_main]

xtask_fuzz::target!("export-contract");
