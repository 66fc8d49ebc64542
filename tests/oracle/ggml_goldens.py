#!/usr/bin/env python3
"""Make the goldens of ggml's blocks and of the GGUF container (src/ggml, src/gguf) with the `gguf` package.

    pip install gguf==0.19.0
    python ggml_goldens.py --out fixtures/goldens/ggml

The bytes come from a counter through SHA-256, so the files are the same wherever they are made. Blocks are
random bytes with finite scales: that reaches every code, every 6-bit scale and every bit plane, which the
blocks of a quantizer do not. Two files per type, and a model in small:

    TYPE.blocks   blocks as they lie in a file
    TYPE.f32      what the package decodes them to, little-endian f32
    small.gguf    a model of two layers, of several types, written by the package
    small.json    its tensors: type, shape (rows first) and the SHA-256 of their values as f32
"""

import argparse
import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

BLOCKS = {T.Q8_0: 24, T.Q4_K: 4, T.Q5_K: 4, T.Q6_K: 4}
# Where the f16 numbers of a block are.
HALVES = {T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}


def noise(name, count):
    """`count` bytes that depend on the name alone."""
    digests = (hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count // 32 + 1))
    return np.frombuffer(b"".join(digests)[:count], dtype=np.uint8).copy()


def random_blocks(kind, count):
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = noise(kind.name, count * size).reshape(count, size)
    for at in HALVES[kind]:
        scale = blocks[:, at : at + 2].copy().view(np.uint16)
        # An exponent of all ones would be an infinity or NaN.
        scale &= np.where((scale & 0x7C00) == 0x7C00, 0xBFFF, 0xFFFF).astype(np.uint16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks


def write_blocks(out):
    for kind, count in BLOCKS.items():
        blocks = random_blocks(kind, count)
        values = gguf.dequantize(blocks, kind)
        assert np.isfinite(values).all()
        (out / f"{kind.name}.blocks").write_bytes(blocks.tobytes())
        (out / f"{kind.name}.f32").write_bytes(values.astype("<f4").tobytes())


HIDDEN, FFN, HEADS, KV, DIM, VOCAB, LAYERS = 32, 64, 2, 1, 16, 48, 2


def write_model(out):
    w = gguf.GGUFWriter(out / "small.gguf", "spark2_5")
    key = lambda name: f"spark2_5.{name}"
    w.add_type("model")
    w.add_name("Small")
    w.add_file_type(7)
    for name, value in {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "vocab_size": VOCAB,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.sliding_window": 8,
        "rope.dimension_count": DIM // 4,
        "rope.dimension_count_swa": DIM,
    }.items():
        w.add_uint32(key(name), value)
    w.add_float32(key("attention.layer_norm_rms_epsilon"), 1e-6)
    w.add_float32(key("rope.freq_base"), 5e6)
    w.add_float32(key("rope.freq_base_swa"), 1e4)
    w.add_array(key("attention.sliding_window_pattern"), [True, False])
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"t{i}" for i in range(VOCAB - 1)] + ["世界"])
    w.add_token_types([1] * VOCAB)
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    w.add_pad_token_id(2)
    # Types that this model does not use, for the reader of pairs.
    w.add_key_value("test.i8", -7, gguf.GGUFValueType.INT8)
    w.add_key_value("test.i64", -(2**60), gguf.GGUFValueType.INT64)
    w.add_key_value("test.u64", 2**64 - 1, gguf.GGUFValueType.UINT64)
    w.add_key_value("test.f64", 0.1, gguf.GGUFValueType.FLOAT64)
    w.add_key_value("test.bool", True, gguf.GGUFValueType.BOOL)
    w.add_array("test.floats", [0.5, -2.0])

    expected = {}

    def add(name, shape, kind):
        values = noise(name, 4 * int(np.prod(shape))).view(np.uint32)
        values = ((values >> 8).astype(np.float32) / np.float32(2**23) - np.float32(1)).reshape(shape)
        data = gguf.quantize(values, kind)
        w.add_tensor(name, data, raw_dtype=kind)
        stored = gguf.dequantize(data, kind).astype("<f4")
        assert stored.shape == tuple(shape)
        digest = hashlib.sha256(stored.tobytes()).hexdigest()
        expected[name] = {"type": kind.name, "shape": list(shape), "f32_sha256": digest}

    add("token_embd.weight", (VOCAB, HIDDEN), T.Q8_0)
    for i in range(LAYERS):
        blk = lambda part: f"blk.{i}.{part}.weight"
        add(blk("attn_norm"), (HIDDEN,), T.F32)
        add(blk("attn_qkv"), ((HEADS + 2 * KV) * DIM, HIDDEN), T.Q8_0)
        add(blk("attn_gate"), (HEADS, HIDDEN), T.F16)
        add(blk("attn_output"), (HIDDEN, HEADS * DIM), T.BF16)
        add(blk("ffn_norm"), (HIDDEN,), T.F32)
        add(blk("ffn_gate"), (FFN, HIDDEN), T.F32)
        add(blk("ffn_up"), (FFN, HIDDEN), T.F16)
        add(blk("ffn_down"), (HIDDEN, FFN), T.Q8_0)
    add("output_norm.weight", (HIDDEN,), T.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    (out / "small.json").write_text(json.dumps(expected, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_blocks(args.out)
    write_model(args.out)


main()
