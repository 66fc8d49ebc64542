//! tokenizer.json.

#![no_main]

xtask_fuzz::target!("tokenizer");
