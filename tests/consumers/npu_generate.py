#!/usr/bin/env python3
"""Generate text from an export of spark-convert with ONNX Runtime, OpenVINO or MNN.

    npu_generate.py EXPORT --engine onnxruntime|openvino|mnn (--prompt TEXT | --tokens 3,17,42)

One program for every engine, because everything that an engine does not do is here, and all of it follows from
`manifest.json`: it is what a runner on a phone has to be written after. In a step, for position p:

  1. `hidden_in` is the row of the token in `embed_tokens.bin`.
  2. The rotary inputs are cos and sin of p * theta^(-2j/rotary_dim), one pair of inputs per layer type.
  3. The masks, one per layer type, say which slots of the cache hold a token that the new one may see. The
     new token stands behind the slots, at `current_index`.
  4. Caches start as zeros (their `zero_point`), go in, and are moved on by `layout` and `returns`: an entry is
     written into slot p mod capacity (ring) or p (roll; never past the end), a returned cache takes the
     old one's place.
  5. Real numbers become codes by the `encoding` of the input, logits become real by that of the output. Caches
     are never decoded: what comes out has the encoding of what goes in.
  6. Graphs run in the order of the manifest; `hidden_out` of one is `hidden_in` of the next.

Where the export has prefill graphs, the prompt goes through them, up to its last token.

Needs numpy and the engine; `--prompt` needs tokenizers, and jinja2 unless `--raw`. `aimet` exports run as the float
graphs that they are; their encodings are for Qualcomm's tools.
Prints JSON. Exit status 2 when the export, the engine or the prompt is not what this can run.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


class Refused(Exception):
    pass


# ---- engines: a model file becomes a function from inputs by name to outputs by name -------------------------


def onnxruntime(path, graph):
    import onnxruntime as ort

    options = ort.SessionOptions()
    # Otherwise int8 weights may be multiplied by activations of 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o["name"] for o in graph["outputs"]]
    return lambda feed: dict(zip(names, session.run(names, feed)))


def openvino(path, graph):
    import openvino as ov

    # The CPU plugin may otherwise choose bf16 where the processor has it.
    config = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    request = ov.Core().compile_model(ov.Core().read_model(path), "CPU", config).create_infer_request()
    names = [o["name"] for o in graph["outputs"]]

    def run(feed):
        request.infer({name: ov.Tensor(value) for name, value in feed.items()})
        return {name: request.get_tensor(name).data.copy() for name in names}

    return run


def mnn(path, graph):
    if any(i["dtype"] != "float32" for i in graph["inputs"]):
        raise Refused("MNN takes float graphs: export with --dialect float18")
    import MNN
    import MNN.expr
    import MNN.nn
    from _tools import mnnconvert  # the command of that name installs telemetry first

    with tempfile.TemporaryDirectory() as temp:
        model = str(Path(temp) / "model.mnn")
        mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", str(path), "--MNNModel", model, "--bizCode", "spark"])
        inputs, outputs = [i["name"] for i in graph["inputs"]], [o["name"] for o in graph["outputs"]]
        module = MNN.nn.load_module_from_file(model, inputs, outputs, precision_mode=MNN.expr.PrecisionMode.High)
    formats = MNN.expr.data_format.NCHW

    def run(feed):
        given = [MNN.expr.const(feed[n], list(feed[n].shape), formats, MNN.expr.dtype.float) for n in inputs]
        got = [MNN.expr.convert(o, formats) for o in module.onForward(given)]
        shapes = {o["name"]: o["shape"] for o in graph["outputs"]}
        return {n: np.array(o.read(), np.float32).reshape(shapes[n]) for n, o in zip(outputs, got)}

    return run


@contextlib.contextmanager
def stdout_to_stderr():
    """Engines announce themselves on stdout, which is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


ENGINES = {"onnxruntime": onnxruntime, "openvino": openvino, "mnn": mnn}


# ---- what the manifest asks of a runtime -----------------------------------------------------------------------


def encode(info, values):
    """Real numbers as the input wants them: code = clamp(round_half_even(real / scale) + zero_point)."""
    values = np.asarray(values, np.float64).reshape(info["shape"])
    if info["dtype"] == "float32":
        return values.astype(np.float32)
    encoding, limits = info["encoding"], np.iinfo(info["dtype"])
    codes = np.rint(values / encoding["scale"]) + encoding["zero_point"]
    return np.clip(codes, limits.min, limits.max).astype(info["dtype"])


def decode(info, values):
    if info["dtype"] == "float32":
        return values.astype(np.float64)
    return (values.astype(np.float64) - info["encoding"]["zero_point"]) * info["encoding"]["scale"]


class Caches:
    """Tensors by input name, and which position lies in every slot of a layer type (-1: none)."""

    def __init__(self, manifest):
        self.manifest, self.position = manifest, 0
        inputs = {i["name"]: i for g in manifest["graphs"] for i in g["inputs"]}
        self.tensors, self.slots = {}, {}
        for cache in manifest["caches"]:
            self.slots[cache["type"]] = np.full(cache["capacity"], -1)
            for part in (cache["key"], cache["value"]):
                info = inputs[part["input"]]
                self.tensors[part["input"]] = encode(info, np.zeros(info["shape"]))

    def mask(self, kind, mask, rows, count):
        """A row per token, over the slots and then the tokens of this call. Padding rows see themselves."""
        seen = np.concatenate([self.slots[kind], self.position + np.arange(rows)])
        out = np.full((rows, mask["length"]), float(mask["blocked"]))
        if out.shape[1] != len(seen) or mask["current_index"] != len(self.slots[kind]):
            raise Refused(f"masks.{kind}: length {mask['length']} is not that of the cache and {rows} tokens")
        for row in range(rows):
            own = self.position + row
            # A ring still holds entries that fell out of the window of the later tokens of a call.
            visible = (seen >= 0) & (seen <= own) & (own - seen <= len(self.slots[kind]))
            if row >= count:
                visible = np.arange(len(seen)) == mask["current_index"] + row
            out[row, visible] = mask["attend"]
        return out

    def keep(self, outputs, count):
        """Moves every cache on by the `count` tokens of a call."""
        new = self.position + np.arange(count)
        kinds = {c["type"]: c for c in self.manifest["caches"]}
        for kind, cache in kinds.items():
            if cache["returns"] == "cache":
                self.slots[kind] = np.concatenate([self.slots[kind], new])[-cache["capacity"]:]
            else:
                self.slots[kind][self.written(cache, new)[0]] = self.written(cache, new)[1]
        for cache in self.manifest["caches"]:
            for part in (cache["key"], cache["value"]):
                got, axis = outputs[part["output"]], part["seq_axis"]
                if cache["returns"] == "cache":
                    self.tensors[part["input"]] = got
                    continue
                slots, positions = self.written(cache, new)
                held = np.moveaxis(self.tensors[part["input"]], axis, 0)
                held[slots] = np.moveaxis(got, axis, 0)[positions - self.position]
        self.position += count

    @staticmethod
    def written(cache, positions):
        """The slots that entries go to, and the positions that end up there."""
        if cache["layout"] == "ring":
            positions = positions[-cache["capacity"]:]
            return positions % cache["capacity"], positions
        positions = positions[positions < cache["capacity"]]
        return positions, positions


class Export:
    """The files of a directory, and its graphs in an engine."""

    def __init__(self, directory, engine):
        directory = Path(directory)
        try:
            self.manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        except OSError as e:
            raise Refused(f"{directory}: no export of spark-convert: {e}") from e
        if (self.manifest.get("format"), self.manifest.get("version")) != ("spark-npu-decode", 1):
            raise Refused(f"{directory}/manifest.json: expected format spark-npu-decode, version 1")
        self.prefill = self.manifest.get("prefill")
        prefill = self.prefill["graphs"] if self.prefill else []
        with stdout_to_stderr():
            self.graphs = [(g, engine(directory / g["file"], g)) for g in self.manifest["graphs"]]
            self.prefill_graphs = [(g, engine(directory / g["file"], g)) for g in prefill]
        embedding = self.manifest["embedding"]
        self.rows = np.memmap(directory / embedding["file"], embedding["dtype"], "r", shape=tuple(embedding["shape"]))

    def call(self, caches, tokens, prefill=False):
        """One call: a token through the decode graphs, or several through the prefill graphs. Logits of the
        token, nothing of a prefill."""
        side, graphs = (self.prefill, self.prefill_graphs) if prefill else (self.manifest, self.graphs)
        rows = side["rows"] if prefill else 1
        if caches.position + len(tokens) > self.manifest["context"]:
            raise Refused(f"the context of {self.manifest['context']} tokens is full")
        stream = np.zeros((rows, self.rows.shape[1]))
        stream[: len(tokens)] = self.rows[tokens]
        positions = caches.position + np.arange(rows)
        outputs, logits = {}, None
        for graph, run in graphs:
            feed = {}
            for info in graph["inputs"]:
                kind = info.get("layer_type")
                if info["role"] == "hidden":
                    feed[info["name"]] = encode(info, stream)
                elif info["role"] in ("rope_cos", "rope_sin"):
                    rope = self.manifest["rope"][kind]
                    frequencies = rope["theta"] ** (-np.arange(0, rope["rotary_dim"], 2) / rope["rotary_dim"])
                    angles = positions[:, None] * frequencies
                    feed[info["name"]] = encode(info, np.cos(angles) if info["role"] == "rope_cos" else np.sin(angles))
                elif info["role"] == "mask":
                    feed[info["name"]] = encode(info, caches.mask(kind, side["masks"][kind], rows, len(tokens)))
                else:
                    feed[info["name"]] = caches.tensors[info["name"]]
            outputs |= run(feed)
            for info in graph["outputs"]:
                if info["role"] == "hidden":
                    stream = decode(info, outputs[info["name"]])
                elif info["role"] == "logits":
                    logits = decode(info, outputs[info["name"]]).reshape(-1)
        caches.keep(outputs, len(tokens))
        return logits

    def take_in(self, caches, tokens):
        """A prompt but for its last token, by prefill graphs where there are any."""
        rows = self.prefill["rows"] if self.prefill else 1
        while len(tokens):
            chunk, tokens = tokens[:rows], tokens[rows:]
            if self.prefill and (self.prefill["partial_chunks"] or len(chunk) == rows):
                self.call(caches, chunk, prefill=True)
            else:
                for token in chunk:
                    self.call(caches, [token])


# ---- text ------------------------------------------------------------------------------------------------------


def tokenizer_of(directory):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))


def prompt_tokens(directory, prompt, raw):
    if not raw:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        files = [Path(directory) / "chat_template.jinja", Path(directory) / "tokenizer_config.json"]
        if files[0].is_file():
            template = files[0].read_text(encoding="utf-8")
        else:
            template = json.loads(files[1].read_text(encoding="utf-8")).get("chat_template")
        if not template:
            raise Refused("the checkpoint had no chat template: use --raw")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        messages = [{"role": "user", "content": prompt}]
        prompt = environment.from_string(template).render(messages=messages, add_generation_prompt=True)
    return tokenizer_of(directory).encode(prompt, add_special_tokens=raw).ids


def stop_tokens(directory):
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        if path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if ids is not None:
                return set(ids) if isinstance(ids, list) else {ids}
    return set()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--engine", choices=ENGINES, default="onnxruntime")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text, through the checkpoint's chat template")
    given.add_argument("--tokens", help="ids, separated by commas")
    parser.add_argument("--raw", action="store_true", help="leave the chat template out")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--ignore-stop", action="store_true", help="go on after a stop token")
    parser.add_argument("--logits", type=Path, help="write the logits of every generated position, .npy")
    arguments = parser.parse_args()
    export = Export(arguments.export, ENGINES[arguments.engine])
    if arguments.tokens:
        tokens = [int(t) for t in arguments.tokens.split(",")]
    else:
        tokens = prompt_tokens(arguments.export, arguments.prompt, arguments.raw)
    vocab = export.manifest["model"]["vocab"]
    if not tokens or any(not 0 <= t < vocab for t in tokens):
        raise Refused(f"the prompt: expected at least one token, all below {vocab}")
    stops = set() if arguments.ignore_stop else stop_tokens(arguments.export)
    caches, new, kept = Caches(export.manifest), [], []
    start = time.perf_counter()
    export.take_in(caches, tokens[:-1])
    decode_start, token = time.perf_counter(), tokens[-1]
    while len(new) < arguments.max_new_tokens and caches.position < export.manifest["context"]:
        kept.append(export.call(caches, [token]))
        token = int(kept[-1].argmax())
        new.append(token)
        if token in stops:
            break
    seconds = time.perf_counter() - decode_start
    said = {
        "engine": arguments.engine,
        "dialect": export.manifest["dialect"],
        "precision": export.manifest["precision"],
        "prompt": tokens,
        "new_tokens": new,
        "prompt_seconds": round(decode_start - start, 4),
        "tokens_per_second": round(len(new) / seconds, 2) if new else None,
    }
    if not arguments.tokens:
        said["text"] = tokenizer_of(arguments.export).decode(new)
    if arguments.logits:
        np.save(arguments.logits, np.array(kept, np.float32))
    print(json.dumps(said, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as e:
        print(f"npu_generate: {e}", file=sys.stderr)
        sys.exit(2)
