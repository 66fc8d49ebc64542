#!/usr/bin/env python3
"""Prefill graphs of an export in ONNX Runtime: a prompt at once against the same prompt token by token.

    python onnx_prefill.py EXPORT_DIR [--qnn]

`cargo xtask oracle --set light` runs it. Needs `numpy`, `onnx` and `onnxruntime`; `--qnn` compiles the
prefill graphs for HTP without a fallback to the CPU, which needs `onnxruntime-qnn`.

The caches are owned here by the manifest alone, as a list of which position lies in which slot: a token
sees a slot or another token of its call if that is not after it and at most `capacity` before it.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

MIN_FLOAT_DB, MIN_CODES_DB = 100.0, 40.0


class Caches:
    """Tensors by input name, and the position in every slot of a layer type; -1 is empty."""

    def __init__(self, manifest):
        self.manifest, self.position = manifest, 0
        inputs = {i["name"]: i for g in manifest["graphs"] for i in g["inputs"]}
        self.tensors, self.slots = {}, {}
        for cache in manifest["caches"]:
            self.slots[cache["type"]] = np.full(cache["capacity"], -1)
            for part in (cache["key"], cache["value"]):
                info = inputs[part["input"]]
                zero = info["encoding"]["zero_point"] if info["dtype"] != "float32" else 0
                self.tensors[part["input"]] = np.full(info["shape"], zero, info["dtype"])

    def mask(self, kind, mask, rows, count):
        seen = np.concatenate([self.slots[kind], self.position + np.arange(rows)])
        out = np.full((rows, mask["length"]), float(mask["blocked"]))
        assert out.shape[1] == len(seen) and mask["current_index"] == len(self.slots[kind])
        for row in range(rows):
            own = self.position + row
            visible = (seen >= 0) & (seen <= own) & (own - seen <= len(self.slots[kind]))
            if row >= count:
                visible = np.arange(len(seen)) == mask["current_index"] + row
            out[row, visible] = mask["attend"]
        return out

    def keep(self, outputs, count):
        new = self.position + np.arange(count)
        for kind in self.slots:
            cache = next(c for c in self.manifest["caches"] if c["type"] == kind)
            capacity = cache["capacity"]
            if cache["returns"] == "cache":
                self.slots[kind] = np.concatenate([self.slots[kind], new])[-capacity:]
                continue
            for position in new:
                slot = position % capacity if cache["layout"] == "ring" else position
                if slot < capacity:
                    self.slots[kind][slot] = position
        for cache in self.manifest["caches"]:
            for part in (cache["key"], cache["value"]):
                got, axis = outputs[part["output"]], part["seq_axis"]
                if cache["returns"] == "cache":
                    self.tensors[part["input"]] = got
                    continue
                held = np.moveaxis(self.tensors[part["input"]], axis, 0)
                entries = np.moveaxis(got, axis, 0)
                for row, position in enumerate(new):
                    slot = position % cache["capacity"] if cache["layout"] == "ring" else position
                    if slot < cache["capacity"]:
                        held[slot] = entries[row]
        self.position += count


def encode(info, values):
    if info["dtype"] == "float32":
        return np.asarray(values, np.float32).reshape(info["shape"])
    encoding, limits = info["encoding"], np.iinfo(info["dtype"])
    codes = np.rint(np.asarray(values, np.float64) / encoding["scale"]) + encoding["zero_point"]
    return np.clip(codes, limits.min, limits.max).astype(info["dtype"]).reshape(info["shape"])


def decode(info, values):
    if info["dtype"] == "float32":
        return values.astype(np.float64)
    return (values.astype(np.float64) - info["encoding"]["zero_point"]) * info["encoding"]["scale"]


class Export:
    def __init__(self, directory, session):
        self.manifest = json.loads((directory / "manifest.json").read_text())
        self.prefill = self.manifest["prefill"]
        sessions = lambda graphs: [session(str(directory / g["file"])) for g in graphs]
        self.sessions = [sessions(self.manifest["graphs"]), sessions(self.prefill["graphs"])]
        embedding = self.manifest["embedding"]
        self.rows = np.memmap(directory / embedding["file"], embedding["dtype"], "r", shape=tuple(embedding["shape"]))

    def call(self, caches, tokens, prefill):
        """Logits of the token, or nothing of a prefill."""
        side = self.prefill if prefill else self.manifest
        rows = self.prefill["rows"] if prefill else 1
        stream = np.zeros((rows, self.rows.shape[1]))
        stream[: len(tokens)] = self.rows[tokens]
        positions = caches.position + np.arange(rows)
        outputs, logits = {}, None
        for graph, session in zip(side["graphs"], self.sessions[prefill]):
            feed = {}
            for info in graph["inputs"]:
                kind = info.get("layer_type")
                if info["role"] == "hidden":
                    values = encode(info, stream)
                elif info["role"].startswith("rope"):
                    rope = self.manifest["rope"][kind]
                    frequencies = rope["theta"] ** (-np.arange(0, rope["rotary_dim"], 2) / rope["rotary_dim"])
                    angles = positions[:, None] * frequencies
                    values = encode(info, np.cos(angles) if info["role"] == "rope_cos" else np.sin(angles))
                elif info["role"] == "mask":
                    values = encode(info, caches.mask(kind, side["masks"][kind], rows, len(tokens)))
                else:
                    values = caches.tensors[info["name"]]
                feed[info["name"]] = values
            names = [o["name"] for o in graph["outputs"]]
            got = dict(zip(names, session.run(names, feed)))
            outputs |= got
            for info in graph["outputs"]:
                if info["role"] == "hidden":
                    stream = decode(info, got[info["name"]])
                elif info["role"] == "logits":
                    logits = decode(info, got[info["name"]]).reshape(-1)
        caches.keep(outputs, len(tokens))
        return logits

    def after(self, tokens, prompt, rows):
        """Logits from the last token of the prompt on; calls of so many tokens before it."""
        caches = Caches(self.manifest)
        before = tokens[: prompt - 1]
        while len(before):
            chunk, before = before[:rows], before[rows:]
            if rows > 1 and (self.prefill["partial_chunks"] or len(chunk) == rows):
                self.call(caches, chunk, True)
            else:
                for token in chunk:
                    self.call(caches, [token], False)
        return np.stack([self.call(caches, [token], False) for token in tokens[prompt - 1 :]])


def cpu(path):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def compile_for_htp(directory, graphs):
    import onnxruntime_qnn

    ort.register_execution_provider_library("QNN", onnxruntime_qnn.get_library_path())
    devices = [d for d in ort.get_ep_devices() if d.ep_name == "QNN"]
    for graph in graphs:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        backend = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), "htp_arch": "79", "soc_model": "69"}
        options.add_provider_for_devices(devices, backend)
        ort.InferenceSession(str(directory / graph["file"]), options)
        print(f"{graph['name']}: compiled for HTP v79, no fallback to the CPU")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--qnn", action="store_true")
    arguments = parser.parse_args()
    export = Export(arguments.directory, cpu)
    manifest, rows = export.manifest, export.prefill["rows"]
    for graph in export.prefill["graphs"]:
        path = str(arguments.directory / graph["file"])
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    context, window = manifest["context"], manifest["model"]["sliding_window"]
    tokens = np.random.default_rng(5).integers(0, manifest["model"]["vocab"], context)
    failed = False
    for prompt in sorted({rows - 1, rows, rows + 1, window + rows + 3, context - 8, context}):
        end = min(prompt + 6, context)
        one, many = export.after(tokens[:end], prompt, 1), export.after(tokens[:end], prompt, rows)
        noise = ((one - many) ** 2).sum()
        db = np.inf if noise == 0 else 10 * np.log10((one**2).sum() / noise)
        same = (one.argmax(1) == many.argmax(1)).mean()
        least = MIN_FLOAT_DB if manifest["io"] == "float" else MIN_CODES_DB
        bad = db < least or same < 1
        failed |= bad
        print(f"prompt of {prompt}: {db:.1f} dB, same tokens {same:.2f}{'  MISSED' if bad else ''}")
    if arguments.qnn:
        compile_for_htp(arguments.directory, export.prefill["graphs"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
