//! End-to-end tests on checkpoints made at run time: the real binary, and the forward pass against
//! goldens of PyTorch.

mod agent_suite;
mod behaviour;
mod calibration;
mod crash;
mod end_to_end;
mod export_dialects;
mod export_npu;
mod export_npu_run;
mod export_prefill;
mod forward;
mod four_bits;
mod gguf;
mod gguf_llama;
mod gguf_source;
mod gptq;
mod hostile;
mod imatrix;
mod known_failures;
mod metrics;
mod overrides;
mod plan;
mod poison;
mod quantize;
mod readme;
mod runs;
mod shell;
mod smooth;
mod tamper;
mod target_bytes;
mod trained;
mod verify;
mod verify_cache;
mod verify_export;
mod verify_report;
mod verify_suite;
mod workflow;

/// What `hostile` measures with.
#[global_allocator]
static ALLOCATOR: xtask::fuzz::Counting = xtask::fuzz::Counting;
