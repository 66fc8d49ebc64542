#!/usr/bin/env python3
"""Compute every figure of `verify` from logits, with numpy and the definitions alone.

    python tests/oracle/metrics_goldens.py --make fixtures/goldens/metrics
    python tests/oracle/metrics_goldens.py --check DIR

`--make` makes logits of two models up (`synthetic.bin`) and writes what they come to (`synthetic.json`).
`--check` recomputes every `NAME.json` of a directory from the `NAME.bin` beside it, and compares. The
logits of `trained` are those of the bundled checkpoint and of its w4a8 artifact; `cargo xtask
goldens` writes them, and this script, with `--make`, what they come to.

`NAME.bin` is little-endian f32, `[2, positions, vocab]`: the reference, then the other. `NAME.json` says
what the text goes on with after each position of the prompt, and where the prompt ends.

Shares no code with the Rust side. Needs numpy.
"""

import argparse
import json
from pathlib import Path

import numpy as np

TOP = 20
TIE = 0.05


def log_softmax(x):
    m = x.max(axis=-1, keepdims=True)
    return x - m - np.log(np.exp(x - m).sum(axis=-1, keepdims=True))


def mean_and_sem(values):
    values = np.asarray(values, dtype=np.float64)
    sem = None if len(values) < 2 else float(values.std(ddof=1) / np.sqrt(len(values)))
    return float(values.mean()), sem


def quantile(values, p):
    """The smallest value that at least the share p of all values do not exceed."""
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    return float(ordered[np.argmax(shares >= p - 1e-12)])


def top(row):
    """The likeliest tokens; of equal ones the lower id."""
    return set(np.argsort(-row, kind="stable")[:TOP].tolist())


def figures(ref, other, nexts, prompt_tokens):
    r, y = ref.astype(np.float64), other.astype(np.float64)
    p, q = log_softmax(r), log_softmax(y)
    kl = (np.exp(p) * (p - q)).sum(axis=-1).clip(min=0)
    same = ref.argmax(axis=-1) == other.argmax(axis=-1)
    vocab = r.shape[1]
    overlap = [len(top(a) & top(b)) / min(TOP, vocab) for a, b in zip(r, y)]
    largest = max(abs(p[i, t] - q[i, t]) for i in range(len(r)) for t in top(r[i]))
    noise = ((r - y) ** 2).sum()
    out = {
        "positions": len(r),
        "not_finite": 0,
        "logits_snr_db": None if noise == 0 else float(10 * np.log10((r**2).sum() / noise)),
    }
    mean, sem = mean_and_sem(kl)
    out["kl"] = {"mean": mean, "sem": sem, "median": quantile(kl, 0.5), "p99": quantile(kl, 0.99),
                 "p999": quantile(kl, 0.999), "max": float(kl.max())}
    out["same_top"], out["same_top_sem"] = mean_and_sem(same)
    out["top20_overlap"], out["top20_overlap_sem"] = mean_and_sem(overlap)
    out["max_logprob_diff"] = float(largest)
    at = np.arange(len(nexts))
    nll_r, nll_y = -p[at, nexts], -q[at, nexts]
    mean, sem = mean_and_sem(nll_y - nll_r)
    out["perplexity"] = {"tokens": len(nexts), "reference": float(np.exp(nll_r.mean())),
                         "other": float(np.exp(nll_y.mean())), "ln_ratio": {"mean": mean, "sem": sem}}
    choices = list(zip(ref.argmax(axis=-1), other.argmax(axis=-1)))[prompt_tokens - 1:]
    greedy = {"matched": len(choices), "kept": len(choices), "of": len(choices), "divergence": None}
    for i, (a, b) in enumerate(choices):
        if a != b:
            row = r[prompt_tokens - 1 + i]
            margin = float(row[a] - row[b])
            tie = margin <= TIE
            greedy.update(matched=i, kept=len(choices) if tie else i, divergence={
                "index": i, "margin_nats": margin, "tie": tie, "reference_token": int(a), "other_token": int(b)})
            break
    return out, greedy


def synthetic(rng):
    """Peaked and flat positions, small and large differences, one tie, one equal row."""
    positions, vocab, prompt_tokens = 48, 320, 30
    sharpness = rng.uniform(0.5, 6.0, size=(positions, 1))
    ref = (sharpness * rng.standard_normal((positions, vocab))).astype(np.float32)
    noise = 10.0 ** rng.uniform(-3, -0.3, size=(positions, 1))
    other = (ref + noise * rng.standard_normal((positions, vocab))).astype(np.float32)
    other[5] = ref[5]
    # The reference's choice at the fourth token of the continuation is nearly undecided.
    at = prompt_tokens - 1 + 3
    first, second = np.argsort(-ref[at])[:2]
    ref[at, second] = ref[at, first] - np.float32(0.03)
    other[at] = ref[at]
    other[at, second] += np.float32(0.0625)
    for i in range(prompt_tokens - 1, at):
        other[i] = ref[i]
        other[i, ref[i].argmax()] += np.float32(0.5)
    nexts = rng.integers(0, vocab, size=prompt_tokens - 1).tolist()
    return ref, other, nexts, prompt_tokens


def read(directory, name, shape):
    flat = np.fromfile(directory / f"{name}.bin", dtype="<f4")
    return flat.reshape([2, *shape])


def close(path, found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            close(f"{path}.{key}", found[key], expected[key])
    elif isinstance(expected, float):
        assert abs(found - expected) <= 1e-9 * max(1.0, abs(expected)), (path, found, expected)
    else:
        assert found == expected, (path, found, expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="DIR")
    parser.add_argument("--check", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.make:
        ref, other, nexts, prompt_tokens = synthetic(np.random.default_rng(8))
        np.stack([ref, other]).astype("<f4").tofile(args.make / "synthetic.bin")
        text = {"vocab": ref.shape[1], "prompt_tokens": prompt_tokens, "next": nexts}
        (args.make / "synthetic.json").write_text(json.dumps(text))
        for path in sorted(args.make.glob("*.json")):
            text = json.loads(path.read_text())
            logits = read(args.make, path.stem, [-1, text["vocab"]])
            summary, greedy = figures(*logits, text["next"], text["prompt_tokens"])
            path.write_text(json.dumps({**text, "summary": summary, "greedy": greedy}, indent=1) + "\n")
            print(path, json.dumps(summary["kl"]), json.dumps(greedy))
    directory = args.check or args.make
    for path in sorted(directory.glob("*.json")):
        text = json.loads(path.read_text())
        logits = read(directory, path.stem, [-1, text["vocab"]])
        summary, greedy = figures(*logits, text["next"], text["prompt_tokens"])
        close(path.stem, summary, text["summary"])
        close(path.stem, greedy, text["greedy"])
        print(f"{path.stem}: {summary['positions']} positions agree")


if __name__ == "__main__":
    main()
