//! End-to-end tests on checkpoints made at run time: the real binary, and the forward pass against
//! goldens of PyTorch.

mod behaviour;
mod calibration;
mod export_dialects;
mod export_npu;
mod export_npu_run;
mod export_prefill;
mod forward;
mod four_bits;
mod known_failures;
mod quantize;
mod readme;
mod runs;
mod tamper;
mod trained;
mod verify;
mod workflow;
