//! Development tasks of the project, as a library, so that integration tests can build their
//! inputs at run time with the same code as `cargo xtask`.

pub mod docs;
// By system calls and registers of the one kind of machine that the sweep is run on.
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
pub mod faults;
pub mod fixtures;
pub mod fuzz;
pub mod gguf;
