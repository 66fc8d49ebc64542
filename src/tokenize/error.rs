//! What can go wrong in this room, one line a case.

/// Why a tokenizer could not be built or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The file is no `tokenizer.json` this version understands.
    #[error("tokenizer.json can't be read: {0}")]
    Load(String),
    /// The text could not be split into tokens.
    #[error("text can't be tokenized: {0}")]
    Encode(String),
    /// The ids could not be turned into text.
    #[error("token ids can't be decoded: {0}")]
    Decode(String),
    /// An id the model has no embedding row for.
    #[error(
        "token id {id}{} is not below the model's vocabulary size {vocab_size}",
        .token.as_ref().map(|t| format!(" (`{t}`)")).unwrap_or_default()
    )]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// Its token, if the file gives it one.
        token: Option<String>,
        /// The first id that is too large.
        vocab_size: u32,
    },
}

/// Why a chat template could not be read or rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// `tokenizer_config.json` is not what it should be.
    #[error("tokenizer_config.json can't be used: {0}")]
    Config(String),
    /// Neither `tokenizer_config.json` nor a template of its own.
    #[error("the model has no chat template")]
    Missing,
    /// The template does not parse, or uses something Jinja has and this engine has not.
    #[error("the chat template can't be parsed: {0}")]
    Syntax(String),
    /// The template is larger than any real one.
    #[error("the chat template has {size} bytes, more than the limit of {limit}")]
    TemplateTooLarge {
        /// Bytes of the template.
        size: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The template called `raise_exception`: the messages are not what it expects.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The template failed while it was being rendered.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The template ran for too long or made too much data.
    #[error("the chat template used up its budget of {0} steps")]
    OutOfSteps(u64),
    /// The system has no room for the thread templates are rendered on.
    #[error("can't start the thread that renders chat templates: {0}")]
    Thread(#[source] std::io::Error),
    /// The rendered text is too long.
    #[error("the chat template wrote more than the limit of {0} bytes")]
    OutputTooLarge(usize),
}

/// An error's text on one line, for libraries that write several, and for what a file says.
pub(super) fn one_line(e: &dyn std::fmt::Display) -> String {
    crate::error::one_line(&e.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}
