//! Whether a file and a checkpoint are of one architecture.

use crate::spark::{LayerType, SparkConfig};

/// A property in which a file differs from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The property.
    pub what: &'static str,
    /// What the checkpoint has.
    pub expected: String,
    /// What the file has.
    pub found: String,
}

/// The first property of the arithmetic in which the configuration of a file differs from a checkpoint's.
/// Numbers that the container keeps in 32 bits are compared in 32 bits. A file may have a head of its own
/// where the checkpoint's is tied, not the other way round.
pub fn first_difference(file: &SparkConfig, checkpoint: &SparkConfig) -> Option<Difference> {
    let kinds = |c: &SparkConfig| c.layer_types.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
    #[expect(clippy::cast_possible_truncation, reason = "as stored")]
    let rope = |c: &SparkConfig, kind: LayerType| {
        let rope = match kind {
            LayerType::Sliding => c.rope_sliding,
            LayerType::Full => c.rope_full,
        };
        rope.map_or_else(
            || "none".to_owned(),
            |r| format!("{} dimensions, base {}", r.rotary_dims, r.theta as f32),
        )
    };
    #[expect(clippy::cast_possible_truncation, reason = "as stored")]
    let properties = |c: &SparkConfig| {
        [
            ("hidden size", c.hidden_size.to_string()),
            ("width of the MLP", c.intermediate_size.to_string()),
            ("number of layers", c.num_hidden_layers().to_string()),
            ("types of layers", kinds(c)),
            ("query heads", c.num_attention_heads.to_string()),
            ("key-value heads", c.num_key_value_heads.to_string()),
            ("width of a head", c.head_dim.to_string()),
            ("vocabulary", c.vocab_size.to_string()),
            ("epsilon of norms", (c.rms_norm_eps as f32).to_string()),
            ("sliding window", c.sliding_window.to_string()),
            ("rotary embedding of sliding layers", rope(c, LayerType::Sliding)),
            ("rotary embedding of full layers", rope(c, LayerType::Full)),
            ("activation of the gates", format!("{:?}", c.gate_activation)),
        ]
    };
    let differs = properties(file)
        .into_iter()
        .zip(properties(checkpoint))
        .find(|((_, found), (_, expected))| found != expected)
        .map(|((what, found), (_, expected))| Difference { what, expected, found });
    let headless = file.tie_word_embeddings && !checkpoint.tie_word_embeddings;
    differs.or_else(|| {
        headless.then(|| Difference {
            what: "head",
            expected: "a tensor of its own".to_owned(),
            found: "none".to_owned(),
        })
    })
}
