#!/usr/bin/env python3
"""Make the golden of the GPTQ solver (src/quant/gptq/tests.rs) with NumPy in f64.

    python gptq_goldens.py fixtures/goldens/gptq.json

Written after the paper and for reading: the inverse Hessian and its Cholesky factor as they are, one row
and one column at a time, no blocks. The grid of a group is given (largest absolute value on 7 steps, rounded
to bf16), so that only the solver is compared. Inputs and weights come from a generator that the test
repeats, not from the file. Needs `numpy`.
"""

import json
import sys

import numpy as np

ROWS, COLUMNS, GROUP, INPUTS = 12, 192, 32, 400
DAMPING = 0.01


def values(n, seed):
    """n numbers in [-1, 1): the top 24 bits of a 64-bit linear congruential generator."""
    out, state = [], seed
    for _ in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 40) / 2**23 - 1.0)
    return np.array(out)


def to_bf16(x):
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def problem():
    x = values(INPUTS * COLUMNS, 1).reshape(INPUTS, COLUMNS)
    # Neighbours depend on each other, some columns are large, one is never used.
    for j in range(1, COLUMNS):
        x[:, j] = (x[:, j] + x[:, j - 1]) / 2
    x[:, ::17] *= 8
    x[:, 40] = 0
    w = values(ROWS * COLUMNS, 2).reshape(ROWS, COLUMNS)
    return x.astype(np.float32).astype(np.float64), w.astype(np.float32).astype(np.float64)


def solve(x, w):
    h = x.T @ x
    diagonal = np.diag(h).copy()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean
    h[np.diag_indices(COLUMNS)] = diagonal + DAMPING * mean
    order = np.argsort(-diagonal, kind="stable")
    u = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T
    scales = to_bf16(np.abs(w).reshape(ROWS, -1, GROUP).max(2).astype(np.float32) / np.float32(7))
    codes = np.zeros((ROWS, COLUMNS), dtype=int)
    noise, margin = 0.0, 1.0
    for r in range(ROWS):
        row = w[r, order].copy()
        for i, column in enumerate(order):
            scale = float(scales[r, column // GROUP])
            steps = row[i] / scale
            code = int(np.clip(np.rint(steps), -8, 7))
            if -8 <= steps <= 7:
                margin = min(margin, abs(abs(steps - np.floor(steps)) - 0.5))
            codes[r, column] = code + 8
            error = (row[i] - code * scale) / u[i, i]
            row[i + 1:] -= error * u[i, i + 1:]
            noise += error**2
    return scales, codes, noise, margin


def main():
    x, w = problem()
    scales, codes, noise, margin = solve(x, w)
    decoded = (codes - 8) * np.repeat(scales.astype(np.float64), GROUP, axis=1)
    nearest = np.clip(np.rint(w / np.repeat(scales, GROUP, axis=1)), -8, 7) * np.repeat(scales, GROUP, axis=1)
    error = lambda q: float((((w - q) @ x.T) ** 2).sum())
    golden = {
        "numpy": np.__version__, "rows": ROWS, "columns": COLUMNS, "group_size": GROUP, "inputs": INPUTS,
        "closest_tie_in_steps": margin, "output_noise_with_damping": noise,
        "output_noise": error(decoded), "output_noise_of_rounding": error(nearest),
        "scales": [[float(s) for s in row] for row in scales],
        "codes": ["".join("%x" % c for c in row) for row in codes],
    }
    with open(sys.argv[1], "w") as f:
        json.dump(golden, f, indent=1)
        f.write("\n")
    print({k: v for k, v in golden.items() if k not in ("scales", "codes")})


if __name__ == "__main__":
    main()
