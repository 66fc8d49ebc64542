//! The command line of each task, one module a task.

pub(crate) mod bench;
pub(crate) mod ci;
pub(crate) mod fixtures;
pub(crate) mod oracle;
mod process;
