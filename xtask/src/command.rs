//! The command line of each task, one module a task.

pub(crate) mod fixtures;
