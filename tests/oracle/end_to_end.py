#!/usr/bin/env python3
"""Compute what `verify` reports of written artifacts, from their bytes on disk, with numpy alone.

    python tests/oracle/end_to_end.py --make fixtures/goldens/end-to-end --artifacts DIR
    python tests/oracle/end_to_end.py --check fixtures/goldens/end-to-end --artifacts DIR

DIR holds artifacts of the bundled checkpoint, `DIR/NAME` for every NAME in `ARTIFACTS` below, made by
`spark-convert quantize --scheme NAME`; `cargo xtask oracle --set end-to-end` makes them and checks.

The checkpoint is computed in f64. Of an artifact every quantized matrix is decoded as its format's documents
say, and multiplied as the program does that it is for: float activations (w4a16), or int8 codes of them with a scale
per token in f32 and exact sums of integers; everything else in f64.

Codes of activations jump: where a value lies near a half, the last bit of an f32 decides its code, and the next layers
make another sample of the same noise of it. So the figures of w8a8 and w4a8 have a spread that no care with arithmetic
takes away, and it is measured: the same passes with every matrix's and norm's output off by up to half a bit of f32,
`RUNS` times. w4a16 has no such codes, and no spread.

Prompts are the plain texts of `calibration/suite/`, cut as the
suite says; the continuation is the checkpoint's own. What the logits come to is computed by
metrics_goldens.py, from the definitions.

`--make` also takes the prompts' tokens from the `tokenizers` library. Shares no code with the Rust side.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path

import numpy as np
from metrics_goldens import close, figures

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "fixtures/spark-tiny"
SUITE = ROOT / "calibration/suite"
# Name, and whether activations become codes.
ARTIFACTS = {"w8a8": True, "w4a8": True, "w4a16": False}
# Perturbed passes that a spread is measured by.
RUNS = 6
SCENARIOS = ["window+1", "long", "code"]

erf = np.vectorize(math.erf, otypes=[np.float64])


def bf16(raw):
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


DECODE = {
    "BF16": bf16,
    "F32": lambda raw: np.frombuffer(raw, "<f4"),
    "I8": lambda raw: np.frombuffer(raw, "i1"),
    "I32": lambda raw: np.frombuffer(raw, "<u4"),
    "U8": lambda raw: np.frombuffer(raw, "u1"),
}


class Files:
    """Tensors of all .safetensors files of a directory, by name."""

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.tensors, self.hashes = {}, {}
        for path in sorted(directory.glob("*.safetensors")):
            data = path.read_bytes()
            self.hashes[path.name] = hashlib.sha256(data).hexdigest()
            length = int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8 : 8 + length]).items():
                if name != "__metadata__":
                    start, end = (8 + length + x for x in entry["data_offsets"])
                    self.tensors[name] = DECODE[entry["dtype"]](data[start:end]).reshape(entry["shape"])

    def has(self, name):
        return name in self.tensors

    def __getitem__(self, name):
        return self.tensors[name]


def nibbles(words, axis):
    """The eight 4-bit codes of every word, least significant first, along an axis."""
    parts = np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=axis + 1)
    shape = list(words.shape)
    shape[axis] *= 8
    return parts.reshape(shape).astype(np.float64)


def token_codes(x):
    """int8 codes of activations and the scale of each token, in f32."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scale == 0, np.float32(1), scale)).astype(np.float64), scale.astype(np.float64)


def linear(files, name):
    """What a module does to rows of activations."""
    if files.has(name + ".qweight"):
        # GPTQ: codes [in / 8, out] and zeros [groups, out / 8]; version 1 stores the zero less one.
        codes = nibbles(files[name + ".qweight"], 0)
        zeros = nibbles(files[name + ".qzeros"], 1) + 1
        scales = files[name + ".scales"].astype(np.float64)
        groups = files[name + ".g_idx"].astype(np.int64)
        weights = codes - zeros[groups]
        size = len(groups) // len(scales)
        assert (groups == np.arange(len(groups)) // size).all(), name

        def grouped(x):
            q, token = token_codes(x)
            total = 0
            for j, scale in enumerate(scales):
                part = slice(j * size, (j + 1) * size)
                total = total + (q[:, part] @ weights[part]) * scale
            return total * token

        return grouped
    if files.has(name + ".weight_packed"):
        # Blocks of 64 rows [block, in, 32]: byte d holds row d in its low half and row d + 32 in its high one.
        packed = files[name + ".weight_packed"]
        codes = np.concatenate([packed & 15, packed >> 4], axis=2).transpose(0, 2, 1)
        grids = np.repeat(files[name + ".scales_and_zeros"].astype(np.float64), packed.shape[1] //
                          len(files[name + ".scales_and_zeros"]), axis=0)
        weights = (codes.reshape(-1, packed.shape[1]) - 8.0) * grids[..., 0].T + grids[..., 1].T
        return lambda x: x @ weights.T
    weight = files[name + ".weight"].astype(np.float64)
    if not files.has(name + ".weight_scale"):
        return lambda x: x @ weight.T
    scale = files[name + ".weight_scale"].astype(np.float64)[:, 0]

    def per_channel(x):
        q, token = token_codes(x)
        return (q @ weight.T) * token * scale

    return per_channel


def rms(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps)


class Spark:
    """The forward pass on whole texts."""

    def __init__(self, files, seed=None):
        self.c = files.config
        rng = np.random.default_rng(seed)
        # Off by up to half a bit of f32.
        self.off = (lambda x: x) if seed is None else (lambda x: x * (1 + rng.uniform(-1, 1, x.shape) * 2.0**-24))
        self.embedding = files["model.embedding.weight"].astype(np.float64)
        head = "model.embedding" if self.c["tie_word_embeddings"] else "lm_head"
        self.head = linear(files, head)
        self.norm = lambda name: files[name + ".weight"].astype(np.float64)
        self.layers = []
        for i in range(self.c["num_hidden_layers"]):
            at, names = f"model.layers.{i}.", ["self_attn.q_k_v_proj", "self_attn.g_proj", "self_attn.out_proj",
                                               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
            matrices = {n.split(".")[1]: linear(files, at + n) for n in names}
            self.layers.append({n: (lambda x, f=f: self.off(f(x))) for n, f in matrices.items()})

    def rotate(self, x, kind):
        """x [tokens, heads, dim]; pairs (i, i + pairs) of the leading dims turn, the rest stays."""
        rope = self.c["rope_parameters"][kind]
        dims = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        # Frequencies and angles are f32 in the published code, and so part of what the model is.
        exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
        frequencies = np.float32(1) / np.float32(rope["rope_theta"]) ** exponents
        angle = np.arange(len(x), dtype=np.float32)[:, None] * frequencies[None, :]
        cos, sin = (f(angle.astype(np.float64))[:, None, :] for f in (np.cos, np.sin))
        a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def attention(self, i, x):
        c, layer, n = self.c, self.layers[i], len(x)
        kind, dim = c["layer_types"][i], c["head_dim"]
        heads, shared = c["num_attention_heads"], c["num_key_value_heads"]
        qkv = layer["q_k_v_proj"](x).reshape(n, heads + 2 * shared, dim)
        q, k, v = np.split(qkv, [heads, heads + shared], axis=1)
        q, k = self.rotate(q, kind), self.rotate(k, kind)
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        hidden = distance < 0
        if kind == "sliding_attention":
            hidden |= distance >= c["sliding_window"]
        gates = 1 / (1 + np.exp(-layer["g_proj"](x)))
        out = []
        for h in range(heads):
            kv = h // (heads // shared)
            scores = np.where(hidden, -np.inf, q[:, h] @ k[:, kv].T / math.sqrt(dim))
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(p / p.sum(axis=1, keepdims=True) @ v[:, kv] * gates[:, h : h + 1])
        return layer["out_proj"](np.concatenate(out, axis=1))

    def mlp(self, i, x):
        layer = self.layers[i]
        gate = layer["gate_proj"](x)
        return layer["down_proj"](gate / 2 * (1 + erf(gate / math.sqrt(2))) * layer["up_proj"](x))

    def logits(self, tokens, last=False):
        eps, h = self.c["rms_norm_eps"], self.embedding[tokens]
        for i in range(len(self.layers)):
            at = f"model.layers.{i}."
            h = h + self.attention(i, self.off(rms(h, self.norm(at + "input_layernorm"), eps)))
            h = h + self.mlp(i, self.off(rms(h, self.norm(at + "post_attention_layernorm"), eps)))
        return self.head(self.off(rms(h[-1:] if last else h, self.norm("model.norm"), eps)))


def prompts(config):
    """Tokens of the scenarios' texts, and how long they are continued."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    for name in SCENARIOS:
        file = json.loads((SUITE / f"{name}.json").read_text(encoding="utf-8"))
        text = file.get("text") or json.loads((SUITE / f"{file['text_of']}.json").read_text(encoding="utf-8"))["text"]
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if "windows" in file:
            tokens = tokens[: file["windows"] * config["sliding_window"] + file.get("plus", 0)]
        yield name, tokens, file["new_tokens"]


def total(parts):
    """The figures of several texts together: positions of all of them, text by text."""
    ref, other = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    # `figures` takes what the text goes on with to stand at the beginning: the prompts' positions first.
    order, at = [[], []], 0
    for r, _, tokens in parts:
        known = len(tokens) - 1
        order[0] += range(at, at + known)
        order[1] += range(at + known, at + len(r))
        at += len(r)
    order = order[0] + order[1]
    nexts = [t for _, _, tokens in parts for t in tokens[1:]]
    return figures(ref[order], other[order], nexts, len(ref))[0]


def on_prompts(model, golden, references):
    """Summaries and greedy choices of a model on every prompt, and the summary of all."""
    parts, scenarios = [], {}
    for name, prompt in golden["prompts"].items():
        logits = model.logits(prompt["tokens"] + prompt["continuation"][:-1])
        summary, greedy = figures(references[name], logits, prompt["tokens"][1:], len(prompt["tokens"]))
        scenarios[name] = {"artifact": summary, "greedy": greedy}
        parts.append((references[name], logits, prompt["tokens"]))
    return scenarios, total(parts)


def scalars(summary):
    """The figures whose spread is of interest."""
    return {"kl": summary["kl"]["mean"], "logits_snr_db": summary["logits_snr_db"], "same_top": summary["same_top"],
            "top20_overlap": summary["top20_overlap"], "perplexity": summary["perplexity"]["other"]}


def compute(directory, golden, runs):
    """What every artifact comes to on the prompts of `golden`, and of perturbed passes."""
    source = Spark(Files(SOURCE))
    references = {}
    for name, prompt in golden["prompts"].items():
        tokens = prompt["tokens"]
        if "continuation" not in prompt:
            text = list(tokens)
            while len(text) < len(tokens) + prompt["new_tokens"]:
                text.append(int(source.logits(text, last=True)[0].argmax()))
                if text[-1] == source.c["eos_token_id"]:
                    break
            prompt["continuation"] = text[len(tokens) :]
        references[name] = source.logits(tokens + prompt["continuation"][:-1])
    found = {}
    for artifact, codes in ARTIFACTS.items():
        files = Files(directory / artifact)
        scenarios, everything = on_prompts(Spark(files), golden, references)
        found[artifact] = {"shards": files.hashes, "scenarios": scenarios, "total": everything}
        if codes and runs:
            perturbed = {name: [] for name in [*golden["prompts"], "total"]}
            for seed in range(runs):
                others, all_of_them = on_prompts(Spark(files, seed), golden, references)
                for name, figure in others.items():
                    perturbed[name].append(scalars(figure["artifact"]))
                perturbed["total"].append(scalars(all_of_them))
            found[artifact]["perturbed"] = perturbed
        print(artifact, everything["kl"]["mean"], flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--make", type=Path, metavar="DIR")
    action.add_argument("--check", type=Path, metavar="DIR")
    parser.add_argument("--artifacts", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    path = (args.make or args.check) / "figures.json"
    if args.make:
        config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
        golden = {"prompts": {n: {"tokens": t, "new_tokens": k} for n, t, k in prompts(config)}}
        golden["artifacts"] = compute(args.artifacts, golden, RUNS)
        text = json.dumps(golden, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return
    golden = json.loads(path.read_text(encoding="utf-8"))
    found = compute(args.artifacts, golden, 0)
    for artifact, expected in golden["artifacts"].items():
        assert found[artifact]["shards"] == expected["shards"], f"{artifact}: written otherwise; make the goldens again"
        expected.pop("perturbed", None)
        close(artifact, found[artifact], expected)
    print("all figures agree")


if __name__ == "__main__":
    main()
