#!/usr/bin/env python3
"""Small graphs of the operators that the NPU export emits, run by ONNX Runtime.

    python onnx_nodes.py make --out DIR     a directory per graph: model, data, inputs, every tensor
    python onnx_nodes.py check --out DIR    models that were read and written again by the converter

`cargo xtask oracle --set light` runs both and has the interpreter compute the same in between
(xtask/src/command/oracle/nodes.rs). Needs `numpy`, `onnx`, `onnxruntime` and `safetensors`.

Every graph is described once, in float. A first run finds the range of each tensor; then the graph is
written as it is, or between QuantizeLinear and DequantizeLinear as the export does it: data movement
keeps an encoding, second operands of products of activations are int16, weights int8 per row.

In a directory:

    model.onnx, model.data   shapes of all tensors declared by ONNX's own shape inference
    tensors.safetensors      `in.NAME`: inputs, `node.NAME`: what each node makes, in f32 or codes
    again.onnx               written by the converter; check wants the same outputs from it

ONNX Runtime runs with basic optimisations and every tensor an output, so that nothing is fused away.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, external_data_helper, helper, numpy_helper, shape_inference
from safetensors.numpy import save_file

PAGE = 4096
INLINE_LIMIT = 1024
MOVEMENT = {"Concat", "Slice", "Reshape", "Transpose", "Identity"}


class Net:
    """A graph in float, and how its tensors are to be quantized."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.inputs, self.constants, self.weights, self.nodes, self.outputs = {}, {}, {}, [], []
        self.signed = set()  # tensors of int16
        self.islands = set()  # tensors that stay float between unquantized nodes

    def input(self, name, shape, scale=1.0, signed=False):
        self.inputs[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        if signed:
            self.signed.add(name)
        return name

    def constant(self, values, dtype=np.float32):
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(values, dtype)
        return name

    def weight(self, rows, columns, bits=8):
        name = f"w{len(self.weights)}"
        values = self.rng.standard_normal((rows, columns)) / np.sqrt(columns)
        self.weights[name] = (values.astype(np.float32), bits)
        return name

    def node(self, op, inputs, name=None, **attributes):
        name = name or f"t{len(self.nodes)}"
        self.nodes.append((op, list(inputs), name, attributes))
        return name

    def recode(self, x):
        """The same tensor in int16, for the second operand of a product."""
        name = self.node("Recode", [x])
        self.signed.add(name)
        return name

    def output(self, name):
        self.outputs.append(name)

    def linear(self, x, rows, columns, bits=8):
        return self.node("Gemm", [x, self.weight(rows, columns, bits)], transB=1)

    def reshape(self, x, shape):
        return self.node("Reshape", [x, self.constant(shape, np.int64)])

    def slice(self, x, start, end, axis):
        bounds = [self.constant([v], np.int64) for v in (start, end, axis)]
        return self.node("Slice", [x, *bounds])

    # To ONNX.

    def float_model(self, opset, all_outputs=True):
        nodes = []
        for op, inputs, name, attributes in self.nodes:
            op = "Identity" if op == "Recode" else op
            nodes.append(helper.make_node(op, inputs, [name], name=f"node_{name}", **attributes))
        initializers = dict(self.constants) | {n: w for n, (w, _) in self.weights.items()}
        infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in self.inputs.items()]
        return finish(nodes, infos, initializers, opset, {n for _, _, n, _ in self.nodes} if all_outputs else None)

    def groups(self):
        """Which tensors share an encoding: those that data is moved between."""
        parent = {}

        def find(x):
            while parent.setdefault(x, x) != x:
                x = parent[x]
            return x

        for op, inputs, name, _ in self.nodes:
            if op in MOVEMENT:
                moved = inputs if op == "Concat" else inputs[:1]
                for x in moved:
                    parent[find(x)] = find(name)
        return find

    def encodings(self, bits):
        """Scale and zero point of every float tensor."""
        values = run(self.float_model(23), self.inputs) | self.inputs
        find = self.groups()
        ranges, signed = {}, set()
        for name, x in values.items():
            low, high = ranges.get(find(name), (0.0, 0.0))
            ranges[find(name)] = (min(low, float(x.min())), max(high, float(x.max())))
            if name in self.signed:
                signed.add(find(name))
        ops = {name: op for op, _, name, _ in self.nodes}
        levels = 2**bits - 1
        result = {}
        for name in values:
            low, high = (1.25 * v for v in ranges[find(name)])
            if find(name) in signed:
                dtype = np.int16 if bits == 16 else np.int8
                scale, zero = max(-low, high, 1e-6) / (levels // 2), 0
            else:
                dtype = np.uint16 if bits == 16 else np.uint8
                if ops.get(name) == "Softmax":
                    scale, zero = 1 / levels, 0
                elif ops.get(name) == "Sigmoid":
                    scale, zero = 1 / (levels + 1), 0
                else:
                    scale = max(high - low, 1e-6) / levels
                    zero = int(np.clip(round(-low / scale), 0, levels))
            result[name] = (np.float32(scale), dtype(zero))
        return result

    def quantized_model(self, opset, bits=16):
        encodings = self.encodings(bits)
        nodes, initializers, infos, made = [], {}, [], set()

        def encode(prefix, scale, zero):
            initializers[prefix + "_scale"] = np.asarray(scale, np.float32)
            initializers[prefix + "_zero"] = np.asarray(zero)
            return [prefix + "_scale", prefix + "_zero"]

        def q(source, name):
            nodes.append(helper.make_node("QuantizeLinear", [source, *encode(name, *encodings[name])], [name], name=f"q_{name}"))

        def dq(codes, encoding, out, **attributes):
            nodes.append(helper.make_node("DequantizeLinear", [codes, *encoding], [out], name=f"dq_{out}", **attributes))

        for name, x in self.inputs.items():
            infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(encodings[name][1].dtype), x.shape))
            dq(name, encode(name, *encodings[name]), name + "_f")
        for name, (w, weight_bits) in self.weights.items():
            limit = 2 ** (weight_bits - 1) - 1
            dtype = np.int8 if weight_bits == 8 else np.int16
            # Eight bits per row, sixteen per tensor: both forms of the export.
            amax = np.abs(w).max(axis=1) if weight_bits == 8 else np.abs(w).max()
            scale = (amax / limit).astype(np.float32)
            initializers[name] = np.clip(np.rint(w / (scale[:, None] if weight_bits == 8 else scale)), -limit, limit).astype(dtype)
            axis = {"axis": 0} if weight_bits == 8 else {}
            dq(name, encode(name, scale, np.zeros_like(scale, dtype)), name + "_f", **axis)
        for name, x in self.constants.items():
            if x.dtype != np.float32 or self.feeds_islands_only(name):
                initializers[name] = x
                continue
            low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
            scale = np.float32(max(high - low, 1e-6) / 65535)
            zero = np.uint16(np.clip(round(-low / scale), 0, 65535))
            initializers[name] = np.clip(np.rint(x / scale) + zero, 0, 65535).astype(np.uint16)
            dq(name, encode(name, scale, zero), name + "_f")
        for op, inputs, name, attributes in self.nodes:
            def operand(x):
                known = x in self.inputs or x in self.weights or x in encodings
                quantized = known or (x in self.constants and self.constants[x].dtype == np.float32 and not self.feeds_islands_only(x))
                return x + "_f" if quantized and x not in self.islands else x

            sources = [operand(x) for x in inputs]
            if op == "Recode":
                q(sources[0], name)
            elif name in self.islands:
                nodes.append(helper.make_node(op, sources, [name], name=f"node_{name}", **attributes))
                made.add(name)
                continue
            else:
                raw = name + "_raw"
                nodes.append(helper.make_node(op, sources, [raw], name=f"node_{name}", **attributes))
                made.add(raw)
                q(raw, name)
            made.add(name)
            dq(name, [name + "_scale", name + "_zero"], name + "_f")
        outputs = made | {name + "_f" for name in self.outputs}
        quantized = {}
        for name, x in self.inputs.items():
            scale, zero = encodings[name]
            limits = np.iinfo(zero.dtype)
            quantized[name] = np.clip(np.rint(x / scale) + int(zero), limits.min, limits.max).astype(zero.dtype)
        return finish(nodes, infos, initializers, opset, outputs), quantized

    def feeds_islands_only(self, constant):
        return all(name in self.islands or name in self.island_ends for _, inputs, name, _ in self.nodes if constant in inputs)

    @property
    def island_ends(self):
        """Nodes that read an unquantized tensor."""
        return {name for _, inputs, name, _ in self.nodes if any(x in self.islands for x in inputs)}


def finish(nodes, infos, initializers, opset, outputs):
    """A model whose shapes are inferred, its outputs in topological order."""
    tensors = [numpy_helper.from_array(np.asarray(x, order="C"), n) for n, x in initializers.items()]
    unknown = [helper.make_empty_tensor_value_info(node.output[0]) for node in nodes if node.output[0] in outputs]
    graph = helper.make_graph(nodes, "g", infos, unknown, tensors)
    ir = {18: 8, 21: 10, 23: 11}[opset]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    inferred = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    onnx.checker.check_model(inferred, full_check=True)
    return inferred


def session(model):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model, inputs):
    s = session(model)
    names = [o.name for o in s.get_outputs()]
    return dict(zip(names, s.run(names, inputs)))


def save(model, directory):
    """Model and data file, large tensors at multiples of a page."""
    data = bytearray()
    for tensor in model.graph.initializer:
        raw = tensor.raw_data
        if len(raw) < INLINE_LIMIT:
            continue
        data.extend(bytes(-len(data) % PAGE))
        external_data_helper.set_external_data(tensor, "model.data", offset=len(data), length=len(raw))
        tensor.ClearField("raw_data")
        data.extend(raw)
    (directory / "model.data").write_bytes(data)
    (directory / "model.onnx").write_bytes(model.SerializeToString())


# The graphs.


def pairs(net):
    a, b = net.input("a", (2, 1, 4, 33)), net.input("b", (1, 33), 3.0)
    c = net.input("c", (2, 3, 4, 1), 0.2)
    net.node("Add", [a, b])
    net.node("Sub", [c, a])
    net.node("Mul", [a, a])
    net.node("Mul", [c, b])
    net.output(net.node("Add", [net.node("Sub", [a, b]), c]))


def functions(net):
    x = net.input("x", (3, 700), 2.5)
    net.node("Sigmoid", [x])
    net.node("Gelu", [x])
    net.node("Neg", [x])
    net.output(net.node("Softmax", [x], axis=-1))


def softmax_masked(net):
    """Scores and a mask of the export's size: blocked positions end at the bottom of the range."""
    x = net.input("x", (2, 1, 4, 512), 3.0)
    mask = np.zeros((1, 1, 1, 512), np.float32)
    mask[..., 300:500] = -40
    net.output(net.node("Softmax", [net.node("Add", [x, net.constant(mask)])], axis=-1))


def norm(net):
    x = net.input("x", (1, 2048), 1.7)
    net.output(net.node("RMSNormalization", [x, net.constant(1 + 0.3 * net.rng.standard_normal(2048))], axis=-1, epsilon=1e-6))


def decomposed_norm(net, x, weight, axis_count=1):
    squares = net.node("Pow", [x, net.constant(2.0)])
    mean = net.node("ReduceMean", [squares, net.constant([-1], np.int64)], keepdims=1)
    root = net.node("Sqrt", [net.node("Add", [mean, net.constant(1e-6)])])
    normal = net.node("Div", [x, root])
    net.islands |= {squares, mean, net.nodes[-3][2], root, normal}
    return net.node("Mul", [normal, net.constant(weight)])


def erf_gelu(net, x):
    scaled = net.node("Div", [x, net.constant(np.sqrt(2))])
    erf = net.node("Erf", [scaled])
    more = net.node("Add", [erf, net.constant(1.0)])
    product = net.node("Mul", [x, more])
    net.islands |= {scaled, erf, more, product}
    return net.node("Mul", [product, net.constant(0.5)])


def decomposed(net):
    x = net.input("x", (1, 512), 2.0)
    n = decomposed_norm(net, x, 1 + 0.3 * net.rng.standard_normal(512))
    net.output(erf_gelu(net, n))


def movement(net):
    x = net.input("x", (1, 96))
    y = net.reshape(x, (2, 1, 3, 16))
    a, b = net.slice(y, 0, 5, 3), net.slice(y, 5, 2**62, -1)
    z = net.node("Concat", [b, a, y], axis=3)
    net.node("Identity", [z])
    net.output(net.node("Transpose", [z], perm=[0, 2, 3, 1]))


def gemms(net):
    x = net.input("x", (1, 640))
    net.linear(x, 1500, 640)
    net.linear(x, 8, 640, bits=16)
    y = net.input("y", (1, 6656))
    net.output(net.linear(y, 300, 6656))


def wide_weights(net):
    x = net.input("x", (1, 900))
    net.output(net.linear(net.linear(x, 700, 900, bits=16), 900, 700, bits=16))


def matmuls(net):
    a, b = net.input("a", (2, 1, 4, 256)), net.input("b", (2, 1, 256, 511), 2.0, signed=True)
    scores = net.node("MatMul", [a, b])
    v = net.input("v", (2, 1, 511, 256), 0.5, signed=True)
    net.output(net.node("MatMul", [net.node("Softmax", [scores], axis=-1), v]))


def layer(net, fused, norm_and_gelu):
    """A whole layer and a head with caches, as in the contract: sliding rotation, ring cache."""
    hidden, kv, group, dim, window, inner, vocab = 192, 2, 2, 32, 24, 384, 900
    heads = kv * group
    x = net.input("hidden_in", (1, 1, hidden))
    cos, sin = net.input("cos", (1, 1, 1, dim // 2), 0.7), net.input("sin", (1, 1, 1, dim // 2), 0.7)
    past_key = net.input("past_key", (kv, 1, dim, window - 1), signed=True)
    past_value = net.input("past_value", (kv, 1, window - 1, dim), signed=True)
    mask = np.zeros((1, 1, 1, window), np.float32)
    mask[..., 9:15] = -30
    weight = lambda: 1 + 0.2 * net.rng.standard_normal(hidden)
    norm_of = (
        (lambda t: net.node("RMSNormalization", [t, net.constant(weight())], axis=-1, epsilon=1e-6))
        if fused
        else (lambda t: decomposed_norm(net, t, weight()))
    )
    gelu_of = (lambda t: net.node("Gelu", [t])) if fused else (lambda t: erf_gelu(net, t))

    def rotate(t):
        a, b = net.slice(t, 0, dim // 2, 3), net.slice(t, dim // 2, dim, 3)
        first = net.node("Sub", [net.node("Mul", [a, cos]), net.node("Mul", [b, sin])])
        second = net.node("Add", [net.node("Mul", [a, sin]), net.node("Mul", [b, cos])])
        return net.node("Concat", [first, second], axis=3)

    x = net.reshape(x, (1, hidden))
    n = norm_of(x)
    q = rotate(net.reshape(net.linear(n, heads * dim, hidden), (kv, 1, group, dim)))
    k = rotate(net.reshape(net.linear(n, kv * dim, hidden), (kv, 1, 1, dim)))
    v = net.reshape(net.linear(n, kv * dim, hidden), (kv, 1, 1, dim))
    gate = net.node("Sigmoid", [net.linear(n, heads, hidden, bits=16)])
    key = net.node("Concat", [past_key, net.recode(net.reshape(k, (kv, 1, dim, 1)))], axis=3)
    value = net.node("Concat", [past_value, net.recode(v)], axis=2)
    scores = net.node("Add", [net.node("MatMul", [q, key]), net.constant(mask)])
    mixed = net.node("MatMul", [net.node("Softmax", [scores], axis=-1), value])
    gated = net.node("Mul", [mixed, net.reshape(gate, (kv, 1, group, 1))])
    x = net.node("Add", [x, net.linear(net.reshape(gated, (1, heads * dim)), hidden, heads * dim)])
    n = norm_of(x)
    product = net.node("Mul", [gelu_of(net.linear(n, inner, hidden)), net.linear(n, inner, hidden)])
    x = net.node("Add", [x, net.linear(product, hidden, inner)])
    net.output(net.reshape(net.linear(norm_of(x), vocab, hidden), (1, 1, vocab)))


def fused_layer(net):
    layer(net, True, None)


def plain_layer(net):
    layer(net, False, None)


def graphs():
    """Name, model and inputs of every graph."""
    forms = [
        (pairs, "float 16 8", (23,)),
        (functions, "float 16 8", (23,)),
        (softmax_masked, "float 16 8", (23,)),
        (norm, "float 16 8", (23,)),
        (decomposed, "float 16", (18, 21)),
        (movement, "float 16 8", (23,)),
        (gemms, "float 16 8", (23,)),
        (wide_weights, "float 16", (23,)),
        (matmuls, "float 16 8", (23,)),
        (fused_layer, "float 16 8", (23,)),
        (plain_layer, "float 16", (18, 21)),
    ]
    for i, (build, precisions, opsets) in enumerate(forms):
        for precision in precisions.split():
            net = Net(1000 + i)
            build(net)
            if precision == "float":
                model, inputs = net.float_model(opsets[0]), net.inputs
            else:
                model, inputs = net.quantized_model(opsets[-1], int(precision))
            yield f"{i:02}-{build.__name__}-{precision}", model, inputs


def make(out):
    for name, model, inputs in graphs():
        directory = out / name
        directory.mkdir(parents=True)
        made = run(model, inputs)
        tensors = {f"in.{n}": np.asarray(x, order="C") for n, x in inputs.items()}
        tensors |= {f"node.{n}": np.asarray(x, order="C") for n, x in made.items()}
        save_file(tensors, directory / "tensors.safetensors")
        save(model, directory)


def check(out):
    """The models written again are valid, and ONNX Runtime computes the same from them, bit for bit."""
    count = 0
    for again in sorted(out.glob("*/again.onnx")):
        onnx.checker.check_model(str(again), full_check=True)
        first, second = session(str(again.with_name("model.onnx"))), session(str(again))
        rng = np.random.default_rng(5)
        feed = {}
        for i in first.get_inputs():
            kind = {"tensor(float)": np.float32, "tensor(uint16)": np.uint16, "tensor(int16)": np.int16, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8}[i.type]
            if kind == np.float32:
                feed[i.name] = rng.standard_normal(i.shape).astype(kind)
            else:
                limits = np.iinfo(kind)
                feed[i.name] = rng.integers(limits.min, limits.max + 1, i.shape).astype(kind)
        names = [o.name for o in first.get_outputs()]
        if names != [o.name for o in second.get_outputs()]:
            sys.exit(f"{again}: other outputs")
        for name, a, b in zip(names, first.run(names, feed), second.run(names, feed)):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                sys.exit(f"{again}: {name} differs")
        count += 1
    if not count:
        sys.exit(f"{out}: nothing was written again")
    print(f"{count} models written again are valid and compute the same")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "check"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    {"make": make, "check": check}[arguments.verb](arguments.out)


if __name__ == "__main__":
    main()
