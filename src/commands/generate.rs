//! `generate`: greedy text from a checkpoint, an artifact or a GGUF file.

use std::io::Write;

use serde_json::json;

use super::{gguf, model_arg, on_threads, print_json};
use crate::checkpoint::ModelDir;
use crate::cli::GenerateArgs;
use crate::error::{Exit, Failure, InputError};
use crate::interrupt::Interrupt;
use crate::opened::{Opened, chat_template, no_chat_template, tokenizer};
use crate::runtime::{State, argmax};
use crate::tokenize::{Chat, DecodeStream, Tokenizer};

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<Exit> {
    let path = model_arg::resolve(args.model.as_deref(), "MODEL|ARTIFACT")?;
    let opened = Opened::open(&path)?;
    if args.gelu.is_some() && !matches!(opened, Opened::Gguf(_)) {
        return Err(gguf::gelu_of_others().into());
    }
    let dir = args.tokenizer.as_deref().map_or_else(|| Ok(opened.dir().clone()), ModelDir::open)?;
    if let Opened::Gguf(file) = &opened
        && args.tokens.is_none()
        && !dir.has("tokenizer.json")
    {
        let error = InputError::file(&file.file_name)
            .expected("tokenizer.json of the checkpoint that it was made from")
            .found(format!("none in {}", dir.path().display()))
            .hint("pass that checkpoint with --tokenizer");
        return Err(Failure::from(error).into());
    }
    // Ids in, ids out: then a missing tokenizer only costs the text.
    let tokenizer = match tokenizer(&dir, opened.config()) {
        Ok(tokenizer) => Some(tokenizer),
        Err(_) if args.tokens.is_some() && args.tokenizer.is_none() && !dir.has("tokenizer.json") => None,
        Err(e) => return Err(e.into()),
    };
    if let (Opened::Gguf(file), Some(tokenizer)) = (&opened, &tokenizer) {
        file.check_vocabulary(|id| tokenizer.token(id))?;
    }
    let prompt = prompt(args, &dir, &opened, tokenizer.as_ref())?;
    let interrupt = Interrupt::install()?;
    on_threads(args.threads, || generate(args, &opened, tokenizer.as_ref(), &prompt, &interrupt))??;
    Ok(Exit::Done)
}

/// The ids of the prompt.
fn prompt(
    args: &GenerateArgs,
    dir: &ModelDir,
    opened: &Opened,
    tokenizer: Option<&Tokenizer>,
) -> anyhow::Result<Vec<u32>> {
    if let Some(ids) = &args.tokens {
        let vocab = opened.config().vocab_size;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(
                Failure::usage(format!("--tokens: {id} is not below the vocabulary's {vocab}")).into()
            );
        }
        return Ok(ids.clone());
    }
    let (Some(text), Some(tokenizer)) = (&args.prompt, tokenizer) else {
        return Err(Failure::usage("one of --prompt and --tokens is needed").into());
    };
    let unusable = |e: &dyn std::fmt::Display| Failure::from(InputError::file("tokenizer.json").found(e));
    let ids = if args.raw {
        tokenizer.encode(text).map_err(|e| unusable(&e))?
    } else {
        let messages = [json!({"role": "user", "content": text})];
        let chat = Chat {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            enable_thinking: args.no_think.then_some(false),
        };
        let template = chat_template(dir)?;
        let template = template.ok_or_else(|| no_chat_template("plain text needs none: pass --raw"))?;
        let rendered = template.render(&chat);
        let rendered =
            rendered.map_err(|e| Failure::from(InputError::file("tokenizer_config.json").found(e)))?;
        tokenizer.encode_chat(&rendered).map_err(|e| unusable(&e))?
    };
    match ids.is_empty() {
        true => Err(Failure::usage("--prompt is empty").into()),
        false => Ok(ids),
    }
}

fn generate(
    args: &GenerateArgs,
    opened: &Opened,
    tokenizer: Option<&Tokenizer>,
    prompt: &[u32],
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let model = opened.model()?.with_gelu(gguf::gelu(args.gelu));
    let mut state = State::new(model.config());
    let mut out =
        Output { stream: tokenizer.map(|t| t.decode_stream(false)), live: !args.json, text: String::new() };
    let mut tokens = Vec::new();
    let mut hidden = model.forward_last(&mut state, prompt)?;
    for n in 1..=args.max_new_tokens {
        interrupt.check()?;
        let next = argmax(&model.logits(&hidden));
        tokens.push(next);
        if model.config().eos_token_ids.contains(&next) {
            break;
        }
        out.push(next)?;
        if n < args.max_new_tokens {
            hidden = model.forward_last(&mut state, &[next])?;
        }
    }
    let text = out.finish()?;
    if args.json {
        print_json(&json!({"prompt_tokens": prompt, "tokens": tokens, "text": text}))?;
    }
    Ok(())
}

/// Text as it comes, or ids where there is no tokenizer.
struct Output<'t> {
    stream: Option<DecodeStream<'t>>,
    live: bool,
    text: String,
}

impl Output<'_> {
    fn push(&mut self, id: u32) -> anyhow::Result<()> {
        let piece = match &mut self.stream {
            Some(stream) => stream.push(id).map_err(|e| InputError::file("tokenizer.json").found(e))?,
            None if self.live => format!("{id} "),
            None => String::new(),
        };
        self.show(&piece)?;
        self.text += &piece;
        Ok(())
    }

    fn show(&self, piece: &str) -> std::io::Result<()> {
        if !self.live || piece.is_empty() {
            return Ok(());
        }
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(piece.as_bytes())?;
        stdout.flush()
    }

    /// The whole text, if there is a tokenizer.
    fn finish(mut self) -> anyhow::Result<Option<String>> {
        let stream = self.stream.take();
        let decoded = stream.is_some();
        if let Some(stream) = stream {
            let rest = stream.finish().map_err(|e| InputError::file("tokenizer.json").found(e))?;
            self.show(&rest)?;
            self.text += &rest;
        }
        self.show("\n")?;
        Ok(decoded.then_some(self.text))
    }
}
