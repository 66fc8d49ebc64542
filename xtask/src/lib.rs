//! Development tasks of the project, as a library, so that integration tests can build their
//! inputs at run time with the same code as `cargo xtask`.

pub mod fixtures;
pub mod gguf;
