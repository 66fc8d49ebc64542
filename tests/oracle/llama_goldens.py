#!/usr/bin/env python3
"""Make the goldens of GGUF models in llama.cpp (tests/it/gguf_llama.rs): what it computes, and what it stores.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0
    cargo xtask gguf --model fixtures/spark-tiny --kind f32 --out F32.gguf       (and q8-0, q4-k-m)
    python llama_goldens.py --f32 F32.gguf --q8-0 Q8_0.gguf --q4-k-m Q4_K_M.gguf --out fixtures/goldens/llama

The files themselves are made again by the test, so only what llama.cpp says about them is kept:

    trained.json  tokens, the SHA-256 of each file and of each of its tensors as f32 (decoded by the package
                  `gguf`), that of the Q8_0 and Q4_K tensors that llama.cpp's own quantizer makes of the F32
                  file, the columns that logits are kept of, and the order of trained.bin
    trained.bin   logits, little-endian f32, [case, position, column]
    argmax        (in trained.json) the token with the highest of all logits, per case and position

`--digests FILE` prints what `cargo xtask gguf --digests FILE` prints, where both decode the same values.

A case is a file and how it was run: as it is, or after llama.cpp had turned it back to F32, so that its own
rounding of activations to int8 is out of the way. Caches are f32, flash attention is off.
"""

import argparse
import ctypes
import hashlib
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as llama
import numpy as np

COUNT = 96
STRIDE = 64
ALL_F32, Q8_0, Q4_K_M = 0, 7, 15


def tokens(vocabulary):
    """Ids from a counter through SHA-256: the same wherever this runs; special ids are below 16."""
    digests = (hashlib.sha256(f"token {i}".encode()).digest() for i in range(COUNT))
    return [16 + int.from_bytes(d[:4], "little") % (vocabulary - 16) for d in digests]


def logits(path, ids):
    """[position, token] of the model in a file."""
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, path
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 256, 2, 2
    params.type_k = params.type_v = 0  # GGML_TYPE_F32
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, params)
    assert context
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
        batch.seq_id[i][0] = 0
    assert llama.llama_decode(context, batch) == 0
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    out = np.ctypeslib.as_array(llama.llama_get_logits(context), shape=(len(ids), vocabulary)).copy()
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return out


def quantize(path, to, kind):
    """Runs llama.cpp's quantizer."""
    params = llama.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 2, kind, True
    assert llama.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(params)) == 0


def tensors(path, digest):
    """Type and SHA-256 of every tensor of a file."""
    return {t.name: [t.tensor_type.name, digest(t)] for t in gguf.GGUFReader(path).tensors}


def as_f32(tensor):
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return hashlib.sha256(np.ascontiguousarray(values).astype("<f4").tobytes()).hexdigest()


def as_stored(tensor):
    return hashlib.sha256(tensor.data.tobytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--f32", "--q8-0", "--q4-k-m", "--out", "--digests"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    if args.digests:
        print(json.dumps(dict(sorted(tensors(args.digests, as_f32).items())), indent=2))
        return
    files = {"f32": args.f32, "q8_0": args.q8_0, "q4_k_m": args.q4_k_m}
    vocabulary = next(t.shape[1] for t in gguf.GGUFReader(args.f32).tensors if t.name == "token_embd.weight")
    ids = tokens(int(vocabulary))
    columns = list(range(0, int(vocabulary), STRIDE))
    golden = {"tokens": ids, "columns": columns, "files": {}, "quantizer": {}, "cases": [], "argmax": []}
    kept = []
    with tempfile.TemporaryDirectory() as temp:
        for name, path in files.items():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            golden["files"][name] = {"sha256": digest, "tensors": tensors(path, as_f32)}
            cases = [(name, path)]
            if name != "f32":
                plain = Path(temp) / f"{name}.gguf"
                quantize(path, plain, ALL_F32)
                cases.append((f"{name} as f32", plain))
            for case, file in cases:
                found = logits(file, ids)
                assert np.isfinite(found).all()
                golden["cases"].append(case)
                golden["argmax"].append(found.argmax(axis=1).tolist())
                kept.append(found[:, columns].astype("<f4"))
        for name, kind in (("q8_0", Q8_0), ("q4_k_m", Q4_K_M)):
            made = Path(temp) / f"made-{name}.gguf"
            quantize(args.f32, made, kind)
            golden["quantizer"][name] = tensors(made, as_stored)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "trained.bin").write_bytes(np.stack(kept).tobytes())
    (args.out / "trained.json").write_text(json.dumps(golden, separators=(",", ":")).replace('],"', '],\n"') + "\n")


main()
