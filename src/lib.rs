//! x
pub mod tokenize;
