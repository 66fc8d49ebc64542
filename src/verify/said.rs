//! What a continuation wants done: from tokens to text to tool calls, and those of two models compared.

use serde::{Deserialize, Serialize};

use crate::actions::{Agreement, Call, Reading, read};
use crate::error::{InputError, Result};
use crate::scenario::Prompt;
use crate::tokenize::Tokenizer;

/// How tokens become text, and which end a reply.
pub struct Speech<'a> {
    /// Without one only tokens are compared.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Tokens that end a reply.
    pub stop: &'a [u32],
}

/// What a continuation says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// The text.
    pub text: String,
    /// The calls in it, and what had to be assumed to read them.
    pub reading: Reading,
    /// Whether it broke off inside a call, at the limit of tokens.
    pub cut: bool,
}

/// What the reference and another model want done after the same prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActionReport {
    /// The reference's reply.
    pub reference: Said,
    /// The other's.
    pub artifact: Said,
    /// Whether they want the same; null where the reference wants nothing, or its call is cut off: then
    /// there is nothing to agree with.
    pub agreement: Option<Agreement>,
    /// Whether the reference does what the scenario says is right, where it says so.
    pub reference_is_right: Option<bool>,
    /// Whether the other does.
    pub artifact_is_right: Option<bool>,
}

/// How often the reference's actions are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActionTally {
    /// Same tools, same arguments.
    pub same: usize,
    /// Same tools, whatever the arguments.
    pub same_tool: usize,
    /// Prompts after which the reference makes a call.
    pub of: usize,
    /// Replies of the other model that took more than reading the published form.
    pub recovered: usize,
    /// Of the prompts whose right call is known, how many the reference gets right.
    pub reference_right: usize,
    /// How many the other gets right.
    pub artifact_right: usize,
    /// Prompts whose right call is known.
    pub known: usize,
}

impl Speech<'_> {
    /// Whether a token ends a reply.
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop.contains(&token)
    }

    /// What a continuation of a prompt says, if the prompt is a chat.
    pub(super) fn said(&self, prompt: &Prompt, continuation: &[u32]) -> Result<Option<Said>> {
        let (Some(tokenizer), Some(thinking)) = (self.tokenizer, prompt.thinking) else { return Ok(None) };
        let ended = continuation.last().is_some_and(|t| self.is_stop(*t));
        let spoken = &continuation[..continuation.len() - usize::from(ended)];
        let text = tokenizer
            .decode(spoken)
            .map_err(|e| InputError::file(format!("scenario {}", prompt.name)).subject("reply").found(e))?;
        let reading = read(&text, thinking);
        Ok(Some(Said { cut: !ended && reading.is_cut(), text, reading }))
    }
}

impl ActionReport {
    pub(super) fn new(reference: &Said, artifact: &Said, expected: Option<&Call>) -> Self {
        let comparable = !reference.reading.calls.is_empty() && !reference.cut;
        let right = |said: &Said| expected.map(|call| said.reading.calls == std::slice::from_ref(call));
        Self {
            agreement: comparable.then(|| Agreement::of(&reference.reading.calls, &artifact.reading.calls)),
            reference_is_right: right(reference),
            artifact_is_right: right(artifact),
            reference: reference.clone(),
            artifact: artifact.clone(),
        }
    }
}

impl ActionTally {
    /// Counts; `None` where the reference makes no call at all.
    pub(super) fn of<'a>(reports: impl Iterator<Item = &'a ActionReport>) -> Option<Self> {
        let mut tally = Self {
            same: 0,
            same_tool: 0,
            of: 0,
            recovered: 0,
            reference_right: 0,
            artifact_right: 0,
            known: 0,
        };
        for report in reports {
            tally.known += usize::from(report.reference_is_right.is_some());
            tally.reference_right += usize::from(report.reference_is_right == Some(true));
            tally.artifact_right += usize::from(report.artifact_is_right == Some(true));
            let Some(agreement) = report.agreement else { continue };
            tally.of += 1;
            tally.same += usize::from(agreement == Agreement::Same);
            tally.same_tool += usize::from(agreement != Agreement::Different);
            tally.recovered += usize::from(!report.artifact.reading.recoveries.is_empty());
        }
        (tally.of > 0).then_some(tally)
    }

    /// Share of the reference's actions kept.
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    pub fn share(self) -> f64 {
        self.same as f64 / self.of.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str, cut: bool) -> Said {
        Said { text: text.to_owned(), reading: read(text, false), cut }
    }

    #[test]
    fn only_whole_calls_of_the_reference_count() {
        let tap = "<tool_call>tap<arg_key>i</arg_key><arg_value>1</arg_value></tool_call>";
        let other = tap.replace('1', "2");
        let bare = r#"{"name": "tap", "arguments": {"i": 1}}"#;
        let expected = read(&other, false).calls[0].clone();
        let report = |r: &Said, a: &Said| ActionReport::new(r, a, Some(&expected));
        let reports = [
            report(&said(tap, false), &said(tap, false)),
            report(&said(tap, false), &said(bare, false)),
            report(&said(tap, false), &said(&other, false)),
            report(&said(tap, false), &said("", false)),
            report(&said("hello", false), &said(tap, false)),
            report(&said(tap, true), &said(tap, false)),
        ];
        let tally = ActionTally::of(reports.iter()).unwrap();
        assert_eq!((tally.same, tally.same_tool, tally.of, tally.recovered), (2, 3, 4, 1));
        assert_eq!((tally.reference_right, tally.artifact_right, tally.known), (0, 1, 6));
        assert_eq!(tally.share(), 0.5);
        assert_eq!(ActionTally::of(reports[4..].iter()), None);
    }
}
