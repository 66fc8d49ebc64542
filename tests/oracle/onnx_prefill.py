#!/usr/bin/env python3
"""Prefill graphs of an export in ONNX Runtime: a prompt at once against the same prompt token by token.

    python onnx_prefill.py EXPORT_DIR [--qnn]

`cargo xtask oracle --set light` runs it. Needs `numpy`, `onnx` and `onnxruntime`; `--qnn` compiles the
prefill graphs for HTP without a fallback to the CPU, which needs `onnxruntime-qnn`.

The caches are owned by the manifest alone, by `tests/consumers/npu_generate.py`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

sys.path.append(str(Path(__file__).resolve().parents[1] / "consumers"))
import npu_generate  # the program that users are given, and so it is tried here

MIN_FLOAT_DB, MIN_CODES_DB = 100.0, 40.0


def after(export, tokens, prompt, prefill):
    """Logits from the last token of the prompt on, what is before it taken in at once or one by one."""
    caches = npu_generate.Caches(export.manifest)
    if prefill:
        export.take_in(caches, tokens[: prompt - 1])
    else:
        for token in tokens[: prompt - 1]:
            export.call(caches, [token])
    return np.stack([export.call(caches, [token]) for token in tokens[prompt - 1 :]])


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
    export = npu_generate.Export(arguments.directory, npu_generate.onnxruntime)
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
        one, many = (after(export, tokens[:end], prompt, prefill) for prefill in (False, True))
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
