//! What the artifact says: the same scenarios through the checkpoint in f32, through the artifact,
//! and through the checkpoint in bf16 arithmetic, which is the floor that nothing can be expected to
//! be below.

use rayon::prelude::*;
use serde::Serialize;

use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::metrics::{Comparison, Greedy, Position, Summary};
use crate::runtime::{Model, State, argmax};

/// Positions whose logits are held at a time, of both models.
const POSITIONS: usize = 16;

/// What a scenario came to.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioReport {
    /// Name of the scenario.
    pub scenario: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The artifact against f32.
    pub artifact: Summary,
    /// Its greedy continuation against that of f32.
    pub greedy: Greedy,
    /// bf16 arithmetic on the source's weights against f32.
    pub floor: Summary,
    /// The floor's greedy continuation.
    pub floor_greedy: Greedy,
}

/// Scenarios and their totals.
#[derive(Clone, Debug, Serialize)]
pub struct Behaviour {
    /// One by one.
    pub scenarios: Vec<ScenarioReport>,
    /// All positions together.
    pub total: Summary,
    /// Share of the greedy tokens matched, over all scenarios; a divergence at a tie counts as a match
    /// of the rest, since the reference itself was undecided.
    pub greedy_share: f64,
    /// All positions of the floor.
    pub floor_total: Summary,
}

/// A scenario of the reference, run once for all artifacts.
pub struct Reference {
    name: String,
    prompt_tokens: usize,
    /// Prompt and greedy continuation, less its last token: what every model is fed.
    tokens: Vec<u32>,
    /// Final-norm hidden states of the reference, `[tokens, hidden]`: its logits are made from them
    /// when they are needed.
    hidden: Vec<f32>,
    floor: Comparison,
    floor_greedy: Greedy,
}

impl Reference {
    /// Runs the f32 model on the prompt, lets it continue greedily, and measures the floor.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, or on an interrupt.
    pub fn run(
        name: &str,
        prompt: &[u32],
        new_tokens: usize,
        model: &Model<'_>,
        floor: &Model<'_>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let mut state = State::new(model.config());
        let mut tokens = prompt.to_vec();
        let mut hidden = model.forward(&mut state, prompt)?;
        let width = model.config().hidden_size;
        // The last new token would only be fed to find one more.
        for _ in 1..new_tokens {
            interrupt.check()?;
            let next = argmax(&model.logits(&hidden[hidden.len() - width..]));
            tokens.push(next);
            hidden.extend(model.forward(&mut state, &[next])?);
        }
        interrupt.check()?;
        let mut this = Self {
            name: name.to_owned(),
            prompt_tokens: prompt.len(),
            tokens,
            hidden,
            floor: Comparison::default(),
            floor_greedy: Greedy::start(),
        };
        let (comparison, greedy) = this.compare(model, floor, interrupt)?;
        (this.floor, this.floor_greedy) = (comparison, greedy);
        Ok(this)
    }

    /// Feeds the same tokens to another model and compares the logits of every position.
    fn compare(
        &self,
        model: &Model<'_>,
        other: &Model<'_>,
        interrupt: &Interrupt,
    ) -> Result<(Comparison, Greedy)> {
        let (width, vocab) = (model.config().hidden_size, model.config().vocab_size);
        let theirs = other.forward(&mut State::new(other.config()), &self.tokens)?;
        let (mut comparison, mut greedy) = (Comparison::default(), Greedy::start());
        for (block, (ours, theirs)) in
            self.hidden.chunks(POSITIONS * width).zip(theirs.chunks(POSITIONS * width)).enumerate()
        {
            interrupt.check()?;
            let (ours, theirs) = (model.logits(ours), other.logits(theirs));
            let positions: Vec<Position> = ours
                .par_chunks_exact(vocab)
                .zip(theirs.par_chunks_exact(vocab))
                .map(|(r, y)| Position::of(r, y))
                .collect();
            positions.into_iter().for_each(|position| comparison.add(position));
            for (i, (r, y)) in ours.chunks_exact(vocab).zip(theirs.chunks_exact(vocab)).enumerate() {
                if block * POSITIONS + i + 1 >= self.prompt_tokens {
                    greedy.add(r, y);
                }
            }
        }
        Ok((comparison, greedy))
    }
}

/// Runs an artifact on scenarios that the reference has run.
///
/// # Errors
/// On an interrupt.
pub fn check_behaviour(
    references: &[Reference],
    reference: &Model<'_>,
    artifact: &Model<'_>,
    interrupt: &Interrupt,
) -> Result<Behaviour> {
    let vocab = reference.config().vocab_size;
    let (mut total, mut floor_total) = (Comparison::default(), Comparison::default());
    let mut scenarios = Vec::new();
    for run in references {
        let (comparison, greedy) = run.compare(reference, artifact, interrupt)?;
        total.merge(&comparison);
        floor_total.merge(&run.floor);
        scenarios.push(ScenarioReport {
            scenario: run.name.clone(),
            prompt_tokens: run.prompt_tokens,
            artifact: comparison.summary(vocab),
            greedy,
            floor: run.floor.summary(vocab),
            floor_greedy: run.floor_greedy,
        });
    }
    let of: usize = scenarios.iter().map(|s| s.greedy.of).sum();
    let kept = |g: &Greedy| if g.divergence.is_some_and(|d| d.tie) { g.of } else { g.matched };
    let matched: usize = scenarios.iter().map(|s| kept(&s.greedy)).sum();
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let greedy_share = matched as f64 / of.max(1) as f64;
    Ok(Behaviour {
        scenarios,
        total: total.summary(vocab),
        greedy_share,
        floor_total: floor_total.summary(vocab),
    })
}
