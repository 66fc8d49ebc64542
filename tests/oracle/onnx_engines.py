#!/usr/bin/env python3
"""Who runs what: one export in several engines, against the float export in ONNX Runtime and the given tokens.

    python onnx_engines.py --reference FLOAT_EXPORT --tokens 3,17,.. --new 42,100,.. EXPORT...

`cargo xtask oracle --set engines` runs it; the packages are those of `tests/consumers/requirements.txt`. `--new` is
the continuation that the checkpoint's own forward pass chose. Every engine is fed it whatever it says itself, so that
one wrong token is one. Each pair runs in a process of its own, because engines abort.

ncnn is tried here, where it is installed, and not offered to users: it takes the float graphs and answers wrongly.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "consumers"))
import npu_generate  # the program that users are given, and so it is tried here


def ncnn(path, graph):
    """By its converter pnnx, which takes the shapes of the inputs from the file."""
    import ncnn as library
    import onnx
    from onnx import external_data_helper

    if any(i["dtype"] != "float32" for i in graph["inputs"]):
        raise npu_generate.Refused("float graphs only: its converter makes nothing of the quantize nodes")
    temp = tempfile.mkdtemp()
    model = onnx.load(str(path))
    external_data_helper.convert_model_from_external_data(model)
    onnx.save(model, f"{temp}/model.onnx")
    pnnx = str(Path(sys.executable).with_name("pnnx"))
    subprocess.run([pnnx, "model.onnx"], cwd=temp, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    net = library.Net()
    net.opt.use_fp16_storage = net.opt.use_fp16_packed = net.opt.use_fp16_arithmetic = False
    if net.load_param(f"{temp}/model.ncnn.param") or net.load_model(f"{temp}/model.ncnn.bin"):
        raise npu_generate.Refused("ncnn does not load what its converter made")
    # pnnx names inputs and outputs by their order.
    inputs, outputs = graph["inputs"], graph["outputs"]

    def run(feed):
        extractor = net.create_extractor()
        for i, info in enumerate(inputs):
            value = feed[info["name"]]
            extractor.input(f"in{i}", library.Mat(np.ascontiguousarray(value.reshape(value.shape[-3:] if value.shape[0] == 1 else value.shape))))
        got = {}
        for i, info in enumerate(outputs):
            status, value = extractor.extract(f"out{i}")
            got[info["name"]] = np.array(value).reshape(info["shape"])
        return got

    return run


ENGINES = npu_generate.ENGINES | {"ncnn": ncnn}


def teacher_forced(directory, engine, tokens, new):
    """Logits of the positions that `new` was chosen at, `[len(new), vocab]`."""
    export = npu_generate.Export(directory, ENGINES[engine])
    caches = npu_generate.Caches(export.manifest)
    export.take_in(caches, tokens[:-1])
    return np.stack([export.call(caches, [token]) for token in [tokens[-1], *new[:-1]]])


def apart(directory, engine, arguments):
    """The same in a process of its own; or the last line of what it said."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        command = [sys.executable, __file__, "--child", engine, file.name, "--tokens", arguments.tokens, "--new", arguments.new]
        done = subprocess.run([*command, "--reference", directory, directory], capture_output=True, text=True)
        if done.returncode == 0:
            return np.load(file.name), None
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing said"]
        return None, f"exit {done.returncode}: {said[-1].removeprefix('npu_generate.Refused: ')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+")
    parser.add_argument("--reference", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--new", required=True)
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "NPY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tokens, new = ([int(t) for t in ids.split(",")] for ids in (arguments.tokens, arguments.new))
    if arguments.child:
        engine, file = arguments.child
        np.save(file, teacher_forced(arguments.exports[0], engine, tokens, new))
        return
    here = [name for name in ENGINES if name != "ncnn" or importlib.util.find_spec("ncnn")]
    exact, failure = apart(arguments.reference, "onnxruntime", arguments)
    if failure:
        sys.exit(f"{arguments.reference}: {failure}")
    for directory in arguments.exports:
        manifest = json.loads((Path(directory) / "manifest.json").read_text(encoding="utf-8"))
        for engine in arguments.engine or here:
            got, failure = apart(directory, engine, arguments)
            row = {"engine": engine, "export": Path(directory).name, "dialect": manifest["dialect"]}
            row |= {"precision": manifest["precision"], "failure": failure}
            if got is not None:
                noise = ((exact - got) ** 2).sum()
                # null where nothing differs, which is no number.
                db = None if noise == 0 else round(float(10 * np.log10((exact**2).sum() / noise)), 2)
                if not np.isfinite(got).all():
                    db, row["failure"] = -300.0, "NaN or infinite logits"
                row |= {"snr_db": db, "greedy": int((got.argmax(1) == new).sum()), "of": len(new)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
