#!/usr/bin/env python3
"""Run a w4a16 artifact of spark-convert with PyTorch's int4 kernel, straight from its files.

No reader of the tinygemm layout is published, so this is one: it maps the shards and hands the stored bytes to
`aten::_weight_int4pack_mm_for_cpu` without repacking, and runs the model's decode step, one token at a time. It shows
how the format is to be read, and it is the referee of the project's own runtime.

What a reader has to know:
  * `quantization_config.layout` says which vector width the bytes are packed for; torch's kernel picks its own by the
    processor, so the two must agree. This program refuses to guess.
  * `weight_packed` [N/B, K, B/2] viewed as [N, K/2] is what the kernel takes; `scales_and_zeros` [K/g, N, 2] as it is.
  * The head is a quantized module of its own (or int8 when `lm_head_bits` is 8), the embedding a plain bf16 table,
    of which a row is looked up; `g_proj` and the norms are plain.
  * Activations are bf16 at every quantized matrix, sums f32; the residual stream stays f32.

Needs torch (2.13 was tried) and nothing else.
Usage: tinygemm_decode.py ARTIFACT --tokens 3,17,42 [--max-new-tokens 16] [--top 20]
Prints JSON: the prompt, the new tokens (greedy), and per position the most likely ids with their log-probabilities.
Exit status 2 when the artifact is not one for this processor.
"""
import argparse
import json
import mmap
import pathlib
import struct
import sys

import torch

BLOCK_ROWS = {"AVX512": 64, "AVX2": 32}
LAYOUTS = {"tinygemm-avx512-n64": 64, "tinygemm-avx2-n32": 32}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8, "I8": torch.int8}


class Artifact:
    """The tensors of a directory, mapped; nothing is read before it is used."""

    def __init__(self, path):
        path = pathlib.Path(path)
        self.config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self.tensors = {}
        for file in sorted(path.glob("*.safetensors")):
            with open(file, "rb") as f:
                data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants to be able to write
            (length,) = struct.unpack("<Q", data[:8])
            for name, entry in json.loads(data[8:8 + length]).items():
                if name != "__metadata__":
                    self.tensors[name] = (data, 8 + length, entry)

    def get(self, name):
        data, start, entry = self.tensors[name]
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start + begin)
        return flat.reshape(entry["shape"])


class Int4Linear:
    def __init__(self, artifact, module, group_size):
        packed = artifact.get(f"{module}.weight_packed")
        blocks, k, half = packed.shape
        self.weight = packed.view(blocks * half * 2, k // 2)  # the same bytes, the kernel's two dimensions
        self.scales_and_zeros = artifact.get(f"{module}.scales_and_zeros")
        self.group_size = group_size

    def __call__(self, x):
        x = x.to(torch.bfloat16)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, self.group_size, self.scales_and_zeros).float()


class Int8Linear:
    def __init__(self, artifact, module):
        # The kernel crashes on weights that do not start at a vector boundary, as mapped ones may not: a copy.
        self.weight = artifact.get(f"{module}.weight").clone()
        self.scale = artifact.get(f"{module}.weight_scale").reshape(-1).to(torch.bfloat16)

    def __call__(self, x):
        return torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), self.weight, self.scale).float()


class PlainLinear:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return (x.to(torch.bfloat16) @ self.weight.T).float()


class Spark:
    """The decode step, with the keys and values of earlier positions."""

    def __init__(self, artifact):
        c = self.c = artifact.config
        block = c["quantization_config"]
        self.check(block)
        group_size = block["group_size"]

        def linear(module):
            if f"{module}.weight_packed" in artifact.tensors:
                return Int4Linear(artifact, module, group_size)
            return PlainLinear(artifact.get(f"{module}.weight"))

        self.embedding = artifact.get("model.embedding.weight")
        if not block["lm_head"]:
            self.head = PlainLinear(self.embedding)
        elif block.get("lm_head_bits", 4) == 8:
            self.head = Int8Linear(artifact, "lm_head")
        else:
            self.head = Int4Linear(artifact, "lm_head", group_size)
        self.final_norm = artifact.get("model.norm.weight").float()
        self.layers = []
        for i, kind in enumerate(c["layer_types"]):
            p = f"model.layers.{i}"
            self.layers.append({
                "kind": kind,
                "norms": [artifact.get(f"{p}.{n}.weight").float() for n in ("input_layernorm", "post_attention_layernorm")],
                "g_proj": PlainLinear(artifact.get(f"{p}.self_attn.g_proj.weight")),
                **{n: linear(f"{p}.self_attn.{n}") for n in ("q_k_v_proj", "out_proj")},
                **{n: linear(f"{p}.mlp.{n}") for n in ("gate_proj", "up_proj", "down_proj")},
                "keys": [], "values": [],
            })
        self.inverse_frequencies = {}
        for kind, rope in c["rope_parameters"].items():
            dims = int(c["head_dim"] * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
            self.inverse_frequencies[kind] = 1.0 / float(rope["rope_theta"]) ** exponents
        self.position = 0

    @staticmethod
    def check(block):
        here = torch.backends.cpu.get_cpu_capability()
        rows = LAYOUTS.get(block.get("layout"))
        if block.get("quant_method") != "cpu_int4" or rows is None:
            sys.exit(refuse(f"not an artifact in one of the layouts {sorted(LAYOUTS)}"))
        if BLOCK_ROWS.get(here) != rows:
            sys.exit(refuse(f"its blocks are of {rows} rows, and torch on this processor ({here}) takes {BLOCK_ROWS.get(here)}"))

    def norm(self, x, weight):
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]))

    def rotate(self, x, kind):
        """x [heads, head_dim]: pairs (i, i + rotated/2) of the leading dimensions."""
        angles = float(self.position) * self.inverse_frequencies[kind]
        cos, sin, half = angles.cos(), angles.sin(), len(angles)
        a, b, rest = x[:, :half], x[:, half:2 * half], x[:, 2 * half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(self, layer, x):
        c, d = self.c, self.c["head_dim"]
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        q, k, v = layer["q_k_v_proj"](x).reshape(-1, d).split([heads, kv, kv])
        q, k = self.rotate(q, layer["kind"]), self.rotate(k, layer["kind"])
        layer["keys"].append(k)
        layer["values"].append(v)
        if layer["kind"] == "sliding_attention":  # the window counts the current token
            for cache in (layer["keys"], layer["values"]):
                del cache[:-c["sliding_window"]]
        keys, values = torch.stack(layer["keys"], 1), torch.stack(layer["values"], 1)  # [kv, positions, d]
        q = q.reshape(kv, heads // kv, d)
        weights = torch.softmax(q @ keys.transpose(1, 2) * d ** -0.5, -1)
        gates = torch.sigmoid(layer["g_proj"](x)).reshape(heads, 1)
        return layer["out_proj"](((weights @ values).reshape(heads, d) * gates).reshape(1, -1))

    def step(self, token):
        """Logits after a token."""
        h = self.embedding[token].float()[None]
        for layer in self.layers:
            h = h + self.attention(layer, self.norm(h, layer["norms"][0]))
            x = self.norm(h, layer["norms"][1])
            gate = torch.nn.functional.gelu(layer["gate_proj"](x))
            h = h + layer["down_proj"](gate * layer["up_proj"](x))
        self.position += 1
        return self.head(self.norm(h, self.final_norm))[0]


def refuse(why):
    print(f"error: {why}", file=sys.stderr)
    return 2


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("artifact")
    ap.add_argument("--tokens", required=True, help="ids, separated by commas")
    ap.add_argument("--max-new-tokens", type=int, default=16)
    ap.add_argument("--top", type=int, default=20)
    a = ap.parse_args()
    model = Spark(Artifact(a.artifact))
    prompt = [int(t) for t in a.tokens.split(",")]
    tokens, new, top = prompt, [], []
    with torch.no_grad():
        while len(new) < a.max_new_tokens:
            for token in tokens:
                logits = model.step(token)
            log_probabilities = torch.log_softmax(logits.double(), -1)
            best = log_probabilities.topk(min(a.top, len(logits)))
            top.append([[int(i), float(p)] for p, i in zip(*best)])
            tokens = [int(logits.argmax())]
            new += tokens
    print(json.dumps({"prompt": prompt, "tokens": new, "top": top}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
