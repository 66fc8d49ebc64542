"""The script one would write in an afternoon: per-channel symmetric int8, rounded to nearest, shard by shard.

    plain_torch.py MODEL OUT THREADS

`cargo xtask bench --python` measures it beside `quantize --scheme w8a8 --method rtn`; nothing is checked with it.
"""

import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

model, out, threads = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
out.mkdir(parents=True)
for path in sorted(model.glob("*.safetensors")):
    tensors = {}
    with safe_open(path, "pt") as shard:
        for name in shard.keys():
            weight = shard.get_tensor(name)
            if not name.endswith("_proj.weight"):
                tensors[name] = weight
                continue
            weight = weight.float()
            scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
            tensors[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, out / path.name)
