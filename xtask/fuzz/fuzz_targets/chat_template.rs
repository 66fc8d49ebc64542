//! tokenizer_config.json, for its chat template.

#![no_main]

xtask_fuzz::target!("chat-template");
