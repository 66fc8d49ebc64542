//! What the artifact says: the same scenarios through the checkpoint in f32, through the artifact,
//! and through the checkpoint in bf16 arithmetic, which is the floor that nothing can be expected to
//! be below.

use std::time::Instant;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::cache::Cache;
use super::layers::{Layers, Live, Residuals, check_layers, layer_tokens};
use super::passes::{Passes, tokens_fed};
use super::said::{ActionReport, ActionTally, Said, Speech};
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::metrics::{Comparison, Greedy, Histogram, Position, Summary};
use crate::runtime::{Model, State, argmax};
use crate::scenario::Prompt;

/// Positions whose logits are held at a time, of both models.
const POSITIONS: usize = 16;

/// What a scenario came to: all its prompts together, and one by one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScenarioReport {
    /// Name of the scenario.
    pub scenario: String,
    /// Tokens of its prompts.
    pub prompt_tokens: usize,
    /// The artifact against f32.
    pub artifact: Summary,
    /// Its greedy continuations against those of f32.
    pub greedy: Greedy,
    /// bf16 arithmetic on the source's weights against f32.
    pub floor: Summary,
    /// The floor's greedy continuations.
    pub floor_greedy: Greedy,
    /// Tool calls against those of f32, where f32 makes some.
    pub actions: Option<ActionTally>,
    /// The prompts, in order.
    pub prompts: Vec<PromptReport>,
}

/// What a prompt came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PromptReport {
    /// The scenario's name, and of several prompts the number.
    pub prompt: String,
    /// Its tokens.
    pub prompt_tokens: usize,
    /// The artifact's greedy continuation.
    pub greedy: Greedy,
    /// What both want done, of a chat.
    pub action: Option<ActionReport>,
}

/// Scenarios and their totals.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Behaviour {
    /// One by one.
    pub scenarios: Vec<ScenarioReport>,
    /// All positions together.
    pub total: Summary,
    /// All greedy tokens together.
    pub greedy: Greedy,
    /// Share of the greedy tokens kept, over all scenarios; a divergence at a tie counts as a match
    /// of the rest, since the reference itself was undecided.
    pub greedy_share: f64,
    /// All positions of the floor.
    pub floor_total: Summary,
    /// All greedy tokens of the floor.
    pub floor_greedy: Greedy,
    /// All tool calls together.
    pub actions: Option<ActionTally>,
    /// Every layer fed the reference's own input.
    pub layers: Option<Layers>,
    /// How the divergences of all positions spread.
    pub kl_histogram: Histogram,
    /// The same of the floor.
    pub floor_kl_histogram: Histogram,
    /// Seconds that the artifact's own passes took in this runtime on this machine.
    pub seconds: f64,
}

/// A prompt of the reference, run once for all artifacts.
pub struct Reference {
    scenario: String,
    prompt: Prompt,
    /// Prompt and greedy continuation, less its last token: what every model is fed.
    tokens: Vec<u32>,
    /// The greedy continuation.
    continuation: Vec<u32>,
    /// Final-norm hidden states of the reference, `[tokens, hidden]`: its logits are made from them
    /// when they are needed.
    hidden: Vec<f32>,
    floor: Comparison,
    floor_greedy: Greedy,
    /// What the continuation says, of a chat.
    said: Option<Said>,
}

/// What comparing a model on one prompt gives.
struct Compared {
    comparison: Comparison,
    greedy: Greedy,
    /// The model's state after the prompt, if it was asked for.
    after_prompt: Option<State>,
    /// Time in the other model.
    seconds: f64,
}

impl Reference {
    /// Runs the f32 model on the prompt, lets it continue greedily until a stop token or the prompt's
    /// limit, and measures the floor.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or on an interrupt.
    pub fn run(
        scenario: &str,
        prompt: Prompt,
        model: &Model<'_>,
        floor: &Model<'_>,
        speech: &Speech<'_>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let passes = Passes::run(&prompt, model, floor, speech.stop, interrupt)?;
        Self::of(scenario, prompt, passes, model, floor, speech, interrupt)
    }

    /// The same from forward passes that were made before.
    ///
    /// # Errors
    /// When the continuation cannot be decoded, or on an interrupt.
    ///
    /// # Panics
    /// When the passes are not of this prompt and these models.
    pub fn of(
        scenario: &str,
        prompt: Prompt,
        passes: Passes,
        model: &Model<'_>,
        floor: &Model<'_>,
        speech: &Speech<'_>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let Passes { continuation, hidden, floor: rounded } = passes;
        let fed = tokens_fed(prompt.tokens.len(), continuation.len());
        assert_eq!([hidden.len(), rounded.len()], [fed * model.config().hidden_size; 2], "another prompt's");
        let mut tokens = prompt.tokens.clone();
        tokens.extend(&continuation[..continuation.len() - 1]);
        let said = speech.said(&prompt, &continuation)?;
        let mut this = Self {
            scenario: scenario.to_owned(),
            prompt,
            tokens,
            continuation,
            hidden,
            floor: Comparison::default(),
            floor_greedy: Greedy::start(),
            said,
        };
        (this.floor, this.floor_greedy) = this.against(model, floor, &rounded, interrupt)?;
        Ok(this)
    }

    /// Positions that are compared.
    pub fn positions(&self) -> usize {
        self.tokens.len()
    }

    /// Feeds the same tokens to another model and compares the logits of every position.
    fn compare(
        &self,
        model: &Model<'_>,
        other: &Model<'_>,
        keep_state: bool,
        interrupt: &Interrupt,
    ) -> Result<Compared> {
        let prompt_tokens = self.prompt.tokens.len();
        let began = Instant::now();
        let mut state = State::new(other.config());
        let mut theirs = other.forward(&mut state, &self.prompt.tokens)?;
        let after_prompt = keep_state.then(|| state.clone());
        if self.tokens.len() > prompt_tokens {
            interrupt.check()?;
            theirs.extend(other.forward(&mut state, &self.tokens[prompt_tokens..])?);
        }
        let seconds = began.elapsed().as_secs_f64();
        let (comparison, greedy) = self.against(model, other, &theirs, interrupt)?;
        Ok(Compared { comparison, greedy, after_prompt, seconds })
    }

    /// Compares the logits that the heads of both models make of their final-norm hidden states.
    fn against(
        &self,
        model: &Model<'_>,
        other: &Model<'_>,
        theirs: &[f32],
        interrupt: &Interrupt,
    ) -> Result<(Comparison, Greedy)> {
        let (width, vocab) = (model.config().hidden_size, model.config().vocab_size);
        let prompt_tokens = self.prompt.tokens.len();
        let (mut comparison, mut greedy) = (Comparison::default(), Greedy::start());
        for (block, (ours, theirs)) in
            self.hidden.chunks(POSITIONS * width).zip(theirs.chunks(POSITIONS * width)).enumerate()
        {
            interrupt.check()?;
            let (ours, theirs) = (model.logits(ours), other.logits(theirs));
            let positions: Vec<Position> = ours
                .par_chunks_exact(vocab)
                .zip(theirs.par_chunks_exact(vocab))
                .enumerate()
                .map(|(i, (r, y))| {
                    // The text is the prompt; the rest the reference has written itself.
                    let next = self.prompt.tokens.get(block * POSITIONS + i + 1).copied();
                    Position::before(r, y, next)
                })
                .collect();
            positions.into_iter().for_each(|position| comparison.add(position));
            for (i, (r, y)) in ours.chunks_exact(vocab).zip(theirs.chunks_exact(vocab)).enumerate() {
                if block * POSITIONS + i + 1 >= prompt_tokens {
                    greedy.add(r, y);
                }
            }
        }
        Ok((comparison, greedy))
    }

    /// What another model wants done, which had kept to the reference's continuation up to where `greedy`
    /// says: from there on it goes its own way.
    fn action(
        &self,
        other: &Model<'_>,
        compared: &Compared,
        speech: &Speech<'_>,
        interrupt: &Interrupt,
    ) -> Result<Option<ActionReport>> {
        let Some(said) = &self.said else { return Ok(None) };
        let Some(divergence) = compared.greedy.divergence else {
            return Ok(Some(ActionReport::new(said, said, self.prompt.expected.as_ref())));
        };
        let mut continuation = self.continuation[..divergence.index].to_vec();
        continuation.push(divergence.other_token);
        if let Some(mut state) = compared.after_prompt.clone() {
            let mut fed = 0;
            while continuation.len() < self.prompt.new_tokens
                && !continuation.last().is_some_and(|t| speech.is_stop(*t))
            {
                interrupt.check()?;
                let hidden = other.forward_last(&mut state, &continuation[fed..])?;
                fed = continuation.len();
                continuation.push(argmax(&other.logits(&hidden)));
            }
        }
        let theirs = speech.said(&self.prompt, &continuation)?;
        Ok(theirs.map(|theirs| ActionReport::new(said, &theirs, self.prompt.expected.as_ref())))
    }
}

/// Runs an artifact on prompts that the reference has run; those of a scenario stand together. What layers
/// alone are fed comes from `cache`, or from running the reference.
///
/// # Errors
/// On an interrupt, or when the cache cannot be written.
pub fn check_behaviour(
    references: &[Reference],
    reference: &Model<'_>,
    artifact: &Model<'_>,
    speech: &Speech<'_>,
    cache: Option<&Cache>,
    interrupt: &Interrupt,
) -> Result<Behaviour> {
    let vocab = reference.config().vocab_size;
    let mut total = Sums::default();
    let mut seconds = 0.0;
    let mut scenarios = Vec::new();
    for runs in references.chunk_by(|a, b| a.scenario == b.scenario) {
        let mut sums = Sums::default();
        for run in runs {
            let compared = run.compare(reference, artifact, run.said.is_some(), interrupt)?;
            seconds += compared.seconds;
            let action = run.action(artifact, &compared, speech, interrupt)?;
            sums.add(run, &compared, action);
        }
        total.merge(&sums);
        scenarios.push(sums.report(&runs[0].scenario, vocab));
    }
    let longest = references.iter().max_by_key(|run| run.tokens.len());
    let layers = longest
        .map(|run| {
            let tokens = &run.tokens[..layer_tokens(run.tokens.len(), reference.config().sliding_window)];
            let layers = |stream: &dyn Residuals| check_layers(&run.scenario, tokens.len(), stream, artifact);
            match cache {
                Some(cache) => layers(&cache.residuals(tokens, reference, interrupt)?),
                None => layers(&Live { model: reference, tokens, interrupt }),
            }
        })
        .transpose()?;
    Ok(Behaviour {
        scenarios,
        total: total.artifact.summary(vocab),
        greedy: total.greedy,
        greedy_share: total.greedy.share(),
        floor_total: total.floor.summary(vocab),
        floor_greedy: total.floor_greedy,
        actions: ActionTally::of(total.actions()),
        layers,
        kl_histogram: total.artifact.kl_histogram(),
        floor_kl_histogram: total.floor.kl_histogram(),
        seconds,
    })
}

/// Prompts added up.
#[derive(Default)]
struct Sums {
    artifact: Comparison,
    greedy: Greedy,
    floor: Comparison,
    floor_greedy: Greedy,
    prompts: Vec<PromptReport>,
}

impl Sums {
    fn add(&mut self, run: &Reference, compared: &Compared, action: Option<ActionReport>) {
        self.artifact.merge(&compared.comparison);
        self.greedy.merge(&compared.greedy);
        self.floor.merge(&run.floor);
        self.floor_greedy.merge(&run.floor_greedy);
        self.prompts.push(PromptReport {
            prompt: run.prompt.name.clone(),
            prompt_tokens: run.prompt.tokens.len(),
            greedy: compared.greedy,
            action,
        });
    }

    fn merge(&mut self, other: &Self) {
        self.artifact.merge(&other.artifact);
        self.greedy.merge(&other.greedy);
        self.floor.merge(&other.floor);
        self.floor_greedy.merge(&other.floor_greedy);
        self.prompts.extend(other.prompts.iter().cloned());
    }

    fn actions(&self) -> impl Iterator<Item = &ActionReport> {
        self.prompts.iter().filter_map(|p| p.action.as_ref())
    }

    fn report(self, scenario: &str, vocab: usize) -> ScenarioReport {
        ScenarioReport {
            scenario: scenario.to_owned(),
            prompt_tokens: self.prompts.iter().map(|p| p.prompt_tokens).sum(),
            artifact: self.artifact.summary(vocab),
            greedy: self.greedy,
            floor: self.floor.summary(vocab),
            floor_greedy: self.floor_greedy,
            actions: ActionTally::of(self.actions()),
            prompts: self.prompts,
        }
    }
}
