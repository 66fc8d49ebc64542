//! From rows of tokens to heads and back. One token needs no element moved: a row of heads is already a
//! matrix of them, `[kv, 1, group, ..]`. Several tokens are transposed, so that the tokens of a head lie
//! together, `[1, heads, rows, ..]`.
//!
//! Products with a cache have one matrix per key head, `[kv, 1, queries, ..]`, whatever the number of
//! tokens; masks, gates and rotary tables have an axis of tokens, and repeat along one axis only. From the
//! one shape to the other elements stay where they are.

use super::Builder;
use crate::npu::logical::TensorId;

impl Builder<'_> {
    /// `[rows, count * width]` as `[1, count, rows, width]`; of one row `[kv, 1, count / kv, width]`.
    ///
    /// Query head h uses key head h / group: the heads of a group are neighbours.
    pub(super) fn split_heads(&mut self, x: TensorId, name: &str, count: usize, width: usize) -> TensorId {
        let (rows, kv) = (self.rows, self.config.num_key_value_heads);
        if rows == 1 {
            return self.g.reshape(x, name, [kv, 1, count / kv, width]);
        }
        let tokens = self.g.reshape(x, format!("{name}_by_token"), [1, rows, count, width]);
        self.g.transpose(tokens, name, 1, 2)
    }

    /// `[1, heads, rows, width]` as one matrix per key head, `[kv, 1, heads / kv * rows, width]`.
    pub(super) fn stack(&mut self, x: TensorId, name: String) -> TensorId {
        if self.rows == 1 {
            return x;
        }
        let kv = self.config.num_key_value_heads;
        let shape = &self.g.tensor(x).shape;
        let (heads, width) = (shape[1], shape[3]);
        self.g.reshape(x, name, [kv, 1, heads / kv * self.rows, width])
    }

    /// The inverse of [`Builder::stack`] for query heads.
    pub(super) fn unstack(&mut self, x: TensorId, name: String) -> TensorId {
        if self.rows == 1 {
            return x;
        }
        let width = self.g.tensor(x).shape[3];
        self.g.reshape(x, name, [1, self.config.num_attention_heads, self.rows, width])
    }

    /// Heads of keys as columns, `[kv, 1, dim, rows]`.
    pub(super) fn key_columns(&mut self, i: usize, heads: TensorId, name: String) -> TensorId {
        if self.rows > 1 {
            let rows = self.stack(heads, format!("layer_{i:02}_key_rows"));
            return self.g.transpose(rows, name, 2, 3);
        }
        let (kv, dim) = (self.config.num_key_value_heads, self.config.head_dim);
        self.g.reshape(heads, name, [kv, 1, dim, 1])
    }

    /// Values `[rows, kv * dim]` as rows of each key head, `[kv, 1, rows, dim]`.
    pub(super) fn value_rows(&mut self, i: usize, values: TensorId, name: String) -> TensorId {
        let (kv, dim) = (self.config.num_key_value_heads, self.config.head_dim);
        if self.rows == 1 {
            return self.split_heads(values, &name, kv, dim);
        }
        let heads = self.split_heads(values, &format!("layer_{i:02}_value_heads"), kv, dim);
        self.stack(heads, name)
    }

    /// Heads side by side, `[rows, q_rows]`.
    pub(super) fn join_heads(&mut self, x: TensorId, name: String) -> TensorId {
        let (rows, q_rows) = (self.rows, self.config.q_rows());
        let tokens = match rows {
            1 => x,
            _ => self.g.transpose(x, format!("{name}_by_token"), 1, 2),
        };
        self.g.reshape(tokens, name, [rows, q_rows])
    }
}
