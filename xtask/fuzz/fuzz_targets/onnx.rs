//! The graph of an export.

#![no_main]

xtask_fuzz::target!("onnx");
