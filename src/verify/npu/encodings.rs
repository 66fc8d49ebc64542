//! The encodings of a written graph: that what should be integer is, on the grids that HTP wants, and that
//! moving elements moves codes.

use std::collections::HashSet;

use super::ExportFiles;
use super::contract::is_quantized;
use super::view::{Grid, Origin, View, code_range};
use crate::npu::encoding::Bits;
use crate::npu::manifest::TensorInfo;
use crate::npu::options::Precision;
use crate::onnx::{ElementType, Initializer, Node};
use crate::verify::Finding;

/// Operators that move elements and compute nothing.
const MOVES: [&str; 8] =
    ["Reshape", "Slice", "Transpose", "Concat", "Identity", "Squeeze", "Unsqueeze", "Split"];

struct Rules<'a> {
    view: &'a View<'a>,
    precision: Precision,
    /// Width of activations; `None` where they are floats.
    bits: Option<Bits>,
    /// Nodes that the manifest lets compute in float.
    float_nodes: HashSet<&'a str>,
    /// Weights that the manifest lets be more precise than the precision says.
    precise: HashSet<&'a str>,
    findings: Vec<Finding>,
}

/// Everything about the encodings of a graph.
pub(super) fn check_encodings(view: &View<'_>, files: &ExportFiles, index: usize) -> Vec<Finding> {
    let manifest = files.manifest();
    let info = &manifest.graphs[index];
    let float_nodes = files.json["graphs"][index]["float_nodes"].as_array();
    let mut rules = Rules {
        view,
        precision: files.precision(),
        bits: files.precision().activation_bits(),
        float_nodes: float_nodes.into_iter().flatten().filter_map(|n| n.as_str()).collect(),
        precise: info.high_precision_weights.iter().map(String::as_str).collect(),
        findings: Vec::new(),
    };
    for node in &view.graph.nodes {
        match node.op_type.as_str() {
            "QuantizeLinear" | "DequantizeLinear" => rules.check_grid(node),
            _ => rules.check_operator(node),
        }
        if node.op_type == "Gemm" {
            rules.check_weight(node);
        }
    }
    if is_quantized(manifest) {
        for input in &info.inputs {
            rules.check_input(input);
        }
        for output in &info.outputs {
            rules.check_output(output);
        }
    }
    rules.findings
}

impl<'a> Rules<'a> {
    fn fail(&mut self, subject: &str, what: impl Into<String>, consequence: &str) {
        self.findings.push(self.view.finding(subject, what, consequence));
    }

    fn is_float(&self, node: &Node) -> bool {
        self.float_nodes.contains(node.name.as_str())
    }

    /// A node that states an encoding.
    fn check_grid(&mut self, node: &Node) {
        let Some(grid) = self.view.grid(node) else {
            let what = "scale and zero point are not constants of one form";
            return self.fail(&node.name, what, "QNN takes constant encodings only");
        };
        if let Some(scale) = grid.scales.iter().find(|s| !s.is_normal() || **s < 0.0) {
            self.fail(&node.name, format!("scale {scale}"), "a scale must be positive, finite and normal");
        }
        if node.op_type == "DequantizeLinear" && self.view.weight_of(node).is_some() {
            return;
        }
        let Some(bits) = self.bits else {
            let what = format!("{} of an activation in an export of float activations", node.op_type);
            return self.fail(&node.name, what, "the graph rounds where it should not");
        };
        if ![bits.unsigned(), bits.signed()].contains(&grid.element) {
            let what = format!("{}, expected {} or {}", grid.element, bits.unsigned(), bits.signed());
            self.fail(&node.name, what, "activations have another width than the precision says");
        }
        if !grid.per_tensor {
            self.fail(&node.name, "one scale per channel", "HTP takes activations per tensor only");
        } else if grid.element == bits.signed() && grid.zeros[0] != 0 {
            let what = format!("zero point {} of {}", grid.zeros[0], grid.element);
            self.fail(&node.name, what, "HTP takes signed activations symmetric only");
        }
        if node.op_type == "QuantizeLinear" {
            self.check_recoding(node, &grid, bits);
        }
    }

    /// From one encoding to another there may be a shift by a constant, and no more.
    fn check_recoding(&mut self, quantize: &Node, to: &Grid, bits: Bits) {
        let Some(Origin::Dequantized(dequantize)) = quantize.inputs.first().map(|i| self.view.origin(i))
        else {
            return;
        };
        let Some(from) = self.view.grid(dequantize) else { return };
        let shift = from.zeros[0] - to.zeros[0];
        if from.scales != to.scales || ![0, i64::from(bits.middle())].contains(&shift) {
            let what = format!("from {} to {}", shown(&from), shown(to));
            self.fail(&quantize.name, what, "re-coding entries of a cache must be a shift of their codes");
        }
    }

    /// A node that computes or moves.
    fn check_operator(&mut self, node: &'a Node) {
        let Some(bits) = self.bits else { return };
        let island = self.is_float(node);
        for output in &node.outputs {
            if self.view.outputs.contains(output.as_str()) && !island {
                self.fail(
                    &node.name,
                    format!("output {output} has no encoding"),
                    "a part of the graph is float",
                );
            }
            for reader in self.view.readers(output) {
                if reader.op_type != "QuantizeLinear" && !island && !self.is_float(reader) {
                    let what = format!("{} reads its result as floats", reader.name);
                    self.fail(
                        &node.name,
                        what,
                        "a part of the graph is float: it does not compile to integers",
                    );
                }
            }
        }
        let mut operands = Vec::new();
        for (i, input) in node.inputs.iter().enumerate() {
            match self.view.origin(input) {
                Origin::Dequantized(dequantize) => operands.extend(self.view.grid(dequantize)),
                // Shapes, bounds and axes.
                Origin::Constant(constant) if constant.element == ElementType::I64 && i > 0 => {}
                Origin::Computed(maker) if island || self.is_float(maker) => {}
                Origin::Constant(_) if island => {}
                Origin::Missing => {}
                Origin::Constant(_) | Origin::Input | Origin::Computed(_) => {
                    let what = format!("reads {input}, which has no encoding");
                    self.fail(
                        &node.name,
                        what,
                        "a part of the graph is float: it does not compile to integers",
                    );
                }
            }
        }
        let result = self.view.output_grid(node);
        if MOVES.contains(&node.op_type.as_str()) {
            self.check_move(node, &operands, result.as_ref());
        }
        let Some(result) = result else { return };
        let top = f64::from(bits.levels());
        let scale = f64::from(result.scales[0]);
        match node.op_type.as_str() {
            "Softmax" if result.zeros[0] != 0 || !(0.999 / (top + 1.0)..=1.001 / top).contains(&scale) => {
                let what = format!("its result is {}, expected 0 to 1 from code 0", shown(&result));
                self.fail(&node.name, what, "probabilities are clipped, or lose their resolution");
            }
            "Sigmoid" if result.zeros[0] != 0 || (scale * (top + 1.0) - 1.0).abs() > 1e-4 => {
                let what = format!(
                    "its result is {}, expected steps of 1/{} from code 0",
                    shown(&result),
                    top + 1.0
                );
                self.fail(&node.name, what, "HTP fixes the grid of Sigmoid: it would read other values");
            }
            _ => {}
        }
        if node.op_type == "MatMul" {
            self.check_second_operand(node, operands.get(1));
        }
    }

    fn check_move(&mut self, node: &Node, operands: &[Grid], result: Option<&Grid>) {
        let Some(result) = result else { return };
        if let Some(other) = operands.iter().find(|grid| *grid != result) {
            let what = format!("{} in, {} out", shown(other), shown(result));
            self.fail(
                &node.name,
                what,
                "moving elements must keep their encoding: codes are moved, not reals",
            );
        }
    }

    /// Keys or values: symmetric, or QNN takes 8 bits of them.
    fn check_second_operand(&mut self, node: &Node, grid: Option<&Grid>) {
        let Some(grid) = grid else { return };
        let (low, high) = code_range(grid.element);
        if grid.zeros[0] != i64::midpoint(low, high + 1) {
            let what = format!("its second operand is {}, expected a symmetric grid", shown(grid));
            self.fail(&node.name, what, "QNN re-codes it to 8 bits, or refuses it");
        }
    }

    /// The weight of a Gemm: codes per output channel, or what the precision says.
    fn check_weight(&mut self, node: &'a Node) {
        let Some(input) = node.inputs.get(1) else { return };
        let (weight, dequantize) = match self.view.origin(input) {
            Origin::Dequantized(dequantize) => match self.view.weight_of(dequantize) {
                Some(weight) => (weight, dequantize),
                None => return self.fail(&node.name, "its weight is an activation", "it is no linear"),
            },
            Origin::Constant(weight) => {
                if self.precision != Precision::Fp32 {
                    let what = format!("{}, expected codes", weight.element);
                    self.fail(&weight.name, what, "the weight has not the size that the precision says");
                }
                return;
            }
            _ => return self.fail(&node.name, "its weight is no constant", "it is no linear"),
        };
        if self.precision == Precision::Fp32 {
            let what = format!("{} in a float export", weight.element);
            return self.fail(&weight.name, what, "the reference twin has codes");
        }
        let Some(grid) = self.view.grid(dequantize) else { return };
        if grid.zeros.iter().any(|z| *z != 0) {
            self.fail(&weight.name, "a zero point other than 0", "HTP takes weights symmetric only");
        }
        self.check_weight_form(weight, &grid);
    }

    fn check_weight_form(&mut self, weight: &Initializer, grid: &Grid) {
        let by_rows = grid.scales.len() == weight.shape[0] && !grid.per_tensor && matches!(grid.axis, 0 | -2);
        let precise = self.precise.contains(weight.name.as_str());
        let right = match (weight.element, self.precision.has_int8_weights()) {
            (ElementType::I8, true) => by_rows && !precise,
            (ElementType::I16, true) => precise && (by_rows || grid.per_tensor),
            (ElementType::I16, false) => by_rows || grid.per_tensor,
            _ => false,
        };
        if !right {
            let form = if grid.per_tensor { "one scale" } else { "a scale per channel of axis" };
            let axis = if grid.per_tensor { String::new() } else { format!(" {}", grid.axis) };
            let listed = if precise { ", listed as more precise" } else { "" };
            let what = format!(
                "{} with {form}{axis}{listed}, expected {}",
                weight.element,
                match self.precision.has_int8_weights() {
                    true => "int8 with a scale per output channel, or int16 that is listed as more precise",
                    false => "int16",
                }
            );
            self.fail(
                &weight.name,
                what,
                "HTP takes weights per output channel; a shared scale costs precision",
            );
        }
    }

    /// An input feeds nothing but DequantizeLinear, in the manifest's encoding.
    fn check_input(&mut self, info: &TensorInfo) {
        let view = self.view;
        for reader in view.readers(&info.name) {
            if reader.op_type != "DequantizeLinear" {
                let what = format!("{} reads codes of {} as they are", reader.name, info.name);
                self.fail(&reader.name, what, "codes are computed with as if they were reals");
            } else if let Some(grid) = view.grid(reader) {
                self.compare(info, &grid);
            }
        }
    }

    fn check_output(&mut self, info: &TensorInfo) {
        match self.view.producers.get(info.name.as_str()) {
            Some(node) if node.op_type == "QuantizeLinear" => {
                if let Some(grid) = self.view.grid(node) {
                    self.compare(info, &grid);
                }
            }
            Some(node) => {
                let what = format!("{} makes it without QuantizeLinear", node.name);
                self.fail(&info.name, what, "the runtime reads something else than the manifest says");
            }
            None => {}
        }
    }

    /// The encoding in the graph is the manifest's, bit for bit.
    fn compare(&mut self, info: &TensorInfo, grid: &Grid) {
        let Some(encoding) = &info.encoding else { return };
        let same = grid.per_tensor
            && grid.element.name() == encoding.dtype
            && f64::from(grid.scales[0]).to_bits() == encoding.scale.to_bits()
            && grid.zeros[0] == encoding.zero_point;
        if !same {
            let what = format!(
                "the graph has {}, the manifest {} in steps of {} around {}",
                shown(grid),
                encoding.dtype,
                encoding.scale,
                encoding.zero_point
            );
            self.fail(&info.name, what, "the runtime reads and writes other values than the graph means");
        }
    }
}

fn shown(grid: &Grid) -> String {
    match grid.per_tensor {
        true => {
            let (low, high) = grid.extent();
            format!(
                "{} in steps of {} around {} ({low:.6} to {high:.6})",
                grid.element, grid.scales[0], grid.zeros[0]
            )
        }
        false => format!("{} with {} scales", grid.element, grid.scales.len()),
    }
}
