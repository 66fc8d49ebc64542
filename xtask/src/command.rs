//! The command line of each task, one module a task.

pub(crate) mod bench;
pub(crate) mod ci;
pub(crate) mod docs;
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
pub(crate) mod faults;
pub(crate) mod fixtures;
pub(crate) mod fuzz;
pub(crate) mod gguf;
pub(crate) mod goldens;
pub(crate) mod oracle;
mod process;
mod supply_chain;
