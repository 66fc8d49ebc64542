#!/usr/bin/env python3
"""Make the goldens of the forward pass (tests/it/forward.rs) with PyTorch.

    cargo xtask fixtures --preset square --out target/square
    python spark_goldens.py --model target/square --name square --out fixtures/goldens/runtime

The model is written for reading: whole prompts, one head after the other, a plain [T, T] mask, no
cache; greedy text is made by running everything again for each token. It shares no code with the
Rust runtime, nor with any other implementation. Needs `torch` and `safetensors`.

Two files per checkpoint:

    NAME.json   versions, SHA-256 of the shards, tokens, greedy continuations, and the distance to the
                same model computed in f64
    NAME.bin    little-endian f32 logits: a row for each of the tokens, then the row of the last
                position of the long prompt

In f64 the rotary angles (inverse frequency and its product with the position) stay f32: they are
part of the definition of the model, not an error of rounding.

    python spark_goldens.py --model DIR --truth FILE --tokens 3,17,42

writes f64 logits of any checkpoint instead, as little-endian f64, [tokens, vocab].
"""

import argparse
import hashlib
import json
import math
import platform
from pathlib import Path

import safetensors
import torch
from safetensors import safe_open

WINDOWS = 5
GREEDY = 24
LONG = 2500


class Weights:
    """The tensors of a checkpoint directory, widened."""

    def __init__(self, directory, dtype):
        self.shards = sorted(Path(directory).glob("*.safetensors"))
        self.tensors = {}
        for shard in self.shards:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():
                    self.tensors[name] = file.get_tensor(name).to(dtype)

    def hashes(self):
        return {s.name: hashlib.sha256(s.read_bytes()).hexdigest() for s in self.shards}

    def __getitem__(self, name):
        return self.tensors[name + ".weight"]


def rms(x, weight, eps):
    mean = (x * x).mean(dim=1, keepdim=True)
    return weight * (x / torch.sqrt(mean + eps))


def gelu(x):
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def angles(config, kind, count):
    """f32 angles [positions, pairs]."""
    rope = config["rope_parameters"][kind]
    rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
    exponents = torch.tensor([2 * n for n in range(rotated // 2)], dtype=torch.float32) / rotated
    frequencies = 1.0 / torch.pow(torch.tensor(float(rope["rope_theta"])), exponents)
    return torch.outer(torch.tensor(range(count), dtype=torch.float32), frequencies)


def rotate(x, angle):
    """Turns the pairs (i, i + pairs) of the leading dims of one head, [positions, head_dim]."""
    pairs = angle.shape[1]
    cos, sin = torch.cos(angle.to(x.dtype)), torch.sin(angle.to(x.dtype))
    out = x.clone()
    out[:, :pairs] = x[:, :pairs] * cos - x[:, pairs : 2 * pairs] * sin
    out[:, pairs : 2 * pairs] = x[:, pairs : 2 * pairs] * cos + x[:, :pairs] * sin
    return out


def attention(config, weights, layer, x):
    """What the attention of a layer adds to the residual stream."""
    kind = config["layer_types"][layer]
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    count = x.shape[0]
    at = f"model.layers.{layer}.self_attn."
    matrix = weights[at + "q_k_v_proj"]
    key_rows, value_rows = heads * dim, (heads + kv_heads) * dim
    angle = angles(config, kind, count)

    query, key = torch.arange(count)[:, None], torch.arange(count)[None, :]
    visible = key <= query
    if kind == "sliding_attention":
        visible &= query - key < config["sliding_window"]

    gates = torch.sigmoid(x @ weights[at + "g_proj"].T)
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        q = rotate(x @ matrix[head * dim : (head + 1) * dim].T, angle)
        k = rotate(x @ matrix[key_rows + shared * dim : key_rows + (shared + 1) * dim].T, angle)
        v = x @ matrix[value_rows + shared * dim : value_rows + (shared + 1) * dim].T
        scores = torch.where(visible, q @ k.T / math.sqrt(dim), -math.inf)
        outputs.append(torch.softmax(scores, dim=1) @ v * gates[:, head : head + 1])
    return torch.cat(outputs, dim=1) @ weights[at + "out_proj"].T


def mlp(weights, layer, x):
    at = f"model.layers.{layer}.mlp."
    product = gelu(x @ weights[at + "gate_proj"].T) * (x @ weights[at + "up_proj"].T)
    return product @ weights[at + "down_proj"].T


def logits(config, weights, tokens, last=False):
    """Logits [positions, vocab] of a prompt, or of its last position only."""
    eps = config["rms_norm_eps"]
    h = weights["model.embedding"][torch.tensor(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = h + attention(config, weights, layer, rms(h, weights[at + "input_layernorm"], eps))
        h = h + mlp(weights, layer, rms(h, weights[at + "post_attention_layernorm"], eps))
    head = "model.embedding" if config["tie_word_embeddings"] else "lm_head"
    return rms(h[-1:] if last else h, weights["model.norm"], eps) @ weights[head].T


def greedy(config, weights, prompt):
    """The continuation, and the smallest distance between the best two logits on the way."""
    text, margin = list(prompt), math.inf
    for _ in range(GREEDY):
        best = torch.topk(logits(config, weights, text, last=True)[0], 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        text.append(int(best.indices[0]))
    return text[len(prompt) :], margin


def short_prompt(count, vocab):
    """Tokens from a 32-bit linear congruential generator."""
    tokens, state = [], 1
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        tokens.append((state >> 16) % vocab)
    return tokens


def snr(truth, found):
    truth, found = truth.double(), found.double()
    return round(float(10 * torch.log10((truth**2).sum() / ((found - truth) ** 2).sum())), 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--name", help="how the goldens are called")
    parser.add_argument("--out", help="directory of the goldens")
    parser.add_argument("--truth", help="file for f64 logits, in place of goldens")
    parser.add_argument("--tokens", help="their tokens, with commas")
    args = parser.parse_args()
    if not (args.truth and args.tokens or args.name and args.out):
        parser.error("either --name and --out or --truth and --tokens")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)

    config = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "spark2_5" and config["hidden_act"] == "gelu"
    assert config["gate_attn_act_mode"] == "sigmoid" and config["headwise_attn_output_gate"]
    if args.truth:
        tokens = [int(token) for token in args.tokens.split(",")]
        rows = logits(config, Weights(args.model, torch.float64), tokens)
        Path(args.truth).write_bytes(rows.contiguous().numpy().astype("<f8").tobytes())
        return
    window, vocab = config["sliding_window"], config["vocab_size"]
    lengths = [window - 1, window, window + 1, 3 * window, WINDOWS * window]
    tokens = short_prompt(WINDOWS * window, vocab)
    long = [(i * i * 31 + i * 17 + 7) % vocab for i in range(LONG)]

    results = {}
    for kind, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        weights = Weights(args.model, dtype)
        continuations = {n: greedy(config, weights, tokens[:n]) for n in lengths}
        rows = torch.cat([logits(config, weights, tokens), logits(config, weights, long, last=True)])
        results[kind] = rows, continuations

    (f32, text), (f64, exact_text) = results["f32"], results["f64"]
    assert {n: t[0] for n, t in text.items()} == {n: t[0] for n, t in exact_text.items()}
    golden = {
        "made_by": f"spark_goldens.py --model {args.name} --name {args.name}",
        "made_with": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
        },
        "shards": weights.hashes(),
        "window": window,
        "vocab": vocab,
        "tokens": tokens,
        "greedy": {str(n): text[n][0] for n in lengths},
        "smallest_greedy_margin": {str(n): round(text[n][1], 5) for n in lengths},
        "long_prompt": {"rule": "(i * i * 31 + i * 17 + 7) % vocab", "tokens": LONG},
        "f32_to_f64_snr_db": {
            **{str(n): snr(f64[:n], f32[:n]) for n in lengths},
            str(LONG): snr(f64[-1], f32[-1]),
        },
    }
    (Path(args.out) / f"{args.name}.bin").write_bytes(f32.contiguous().numpy().astype("<f4").tobytes())
    # One line for each key.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    text = "{\n  " + ",\n  ".join(lines) + "\n}\n"
    (Path(args.out) / f"{args.name}.json").write_text(text, encoding="utf-8")
    print(args.name, golden["f32_to_f64_snr_db"], golden["smallest_greedy_margin"])


if __name__ == "__main__":
    main()
