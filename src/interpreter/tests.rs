//! Every graph here goes through bytes: written, read back, planned, run.

mod malformed;
mod movement;
mod numbers;
mod products;
mod quantization;
mod sessions;

use super::{Data, Session, SliceMut, Tensor, Tensors};
use crate::onnx::{
    Attribute, AttributeValue, DataLayout, ElementType, Graph, Initializer, Model, Node, TensorData,
    ValueInfo,
};

/// A model and its data file in the making.
#[derive(Clone)]
struct Build {
    model: Model,
    layout: DataLayout,
    data: Vec<u8>,
}

impl Build {
    fn new() -> Self {
        let graph = Graph { name: "g".into(), ..Graph::default() };
        let model = Model { ir_version: 11, opset: 23, graph, ..Model::default() };
        Self { model, layout: DataLayout::default(), data: Vec::new() }
    }

    fn input(mut self, name: &str, element: ElementType, shape: &[usize]) -> Self {
        self.model.graph.inputs.push(ValueInfo::new(name, element, shape));
        self
    }

    fn output(mut self, name: &str, element: ElementType, shape: &[usize]) -> Self {
        self.model.graph.outputs.push(ValueInfo::new(name, element, shape));
        self
    }

    /// Says what an intermediate is.
    fn declare(mut self, name: &str, element: ElementType, shape: &[usize]) -> Self {
        self.model.graph.value_infos.push(ValueInfo::new(name, element, shape));
        self
    }

    /// A constant in the model.
    fn constant(mut self, name: &str, tensor: &Tensor) -> Self {
        let initializer = Initializer::inline(name, tensor.element(), tensor.shape(), tensor.to_le_bytes());
        self.model.graph.initializers.push(initializer);
        self
    }

    /// A constant in the data file.
    fn external(mut self, name: &str, tensor: &Tensor) -> Self {
        let bytes = tensor.to_le_bytes();
        let data = self.layout.place(bytes.len() as u64).unwrap();
        let TensorData::External { offset, .. } = data else { panic!("not external") };
        self.data.resize(offset as usize, 0);
        self.data.extend(bytes);
        let (element, shape) = (tensor.element(), tensor.shape().to_vec());
        self.model.graph.initializers.push(Initializer { name: name.into(), element, shape, data });
        self
    }

    fn node(self, op_type: &str, inputs: &[&str], output: &str) -> Self {
        self.node_with(op_type, inputs, output, &[])
    }

    fn node_with(
        mut self,
        op_type: &str,
        inputs: &[&str],
        output: &str,
        attributes: &[(&str, AttributeValue)],
    ) -> Self {
        let attribute =
            |(name, value): &(&str, AttributeValue)| Attribute { name: (*name).into(), value: value.clone() };
        self.model.graph.nodes.push(Node {
            name: format!("make_{output}"),
            op_type: op_type.into(),
            inputs: inputs.iter().map(|i| (*i).to_owned()).collect(),
            outputs: vec![output.into()],
            attributes: attributes.iter().map(attribute).collect(),
        });
        self
    }

    /// A node that makes `output` of codes.
    fn dequantize(self, codes: &str, scale: f32, zero: Data, output: &str) -> Self {
        let (scale_name, zero_name) = (format!("{output}_scale"), format!("{output}_zero"));
        self.constant(&scale_name, &floats(&[], &[scale])).constant(&zero_name, &tensor(&[], zero)).node(
            "DequantizeLinear",
            &[codes, &scale_name, &zero_name],
            output,
        )
    }

    /// A node that makes codes of `input`.
    fn quantize(self, input: &str, scale: f32, zero: Data, output: &str) -> Self {
        let (scale_name, zero_name) = (format!("{output}_scale"), format!("{output}_zero"));
        self.constant(&scale_name, &floats(&[], &[scale])).constant(&zero_name, &tensor(&[], zero)).node(
            "QuantizeLinear",
            &[input, &scale_name, &zero_name],
            output,
        )
    }

    fn read(&self) -> Model {
        Model::decode(&self.model.encode("d").unwrap(), "d").unwrap()
    }

    fn run(&self, inputs: &[(&str, &Tensor)]) -> Tensors {
        let model = self.read();
        let session = Session::new(&model, &self.data).unwrap_or_else(|e| panic!("{e}"));
        session.run(&given(inputs)).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The refusal of the graph.
    fn refusal(&self) -> String {
        Session::new(&self.read(), &self.data).unwrap_err().to_string()
    }
}

fn given(inputs: &[(&str, &Tensor)]) -> Tensors {
    inputs.iter().map(|(name, tensor)| ((*name).to_owned(), (*tensor).clone())).collect()
}

fn tensor(shape: &[usize], data: Data) -> Tensor {
    Tensor::new(shape, data).unwrap()
}

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    tensor(shape, Data::F32(values.to_vec()))
}

fn ints(values: &[i64]) -> Tensor {
    tensor(&[values.len()], Data::I64(values.to_vec()))
}

/// Applies one operator; integers of 64 bits are constants, the rest inputs.
fn apply(
    op_type: &str,
    attributes: &[(&str, AttributeValue)],
    inputs: &[&Tensor],
    shape: &[usize],
) -> Tensor {
    let names: Vec<String> = (0..inputs.len()).map(|i| format!("x{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut build = Build::new();
    let mut supplied = Vec::new();
    for (name, input) in names.iter().zip(inputs) {
        build = match input.element() {
            ElementType::I64 => build.constant(name, input),
            element => {
                supplied.push((*name, *input));
                build.input(name, element, input.shape())
            }
        };
    }
    build = build.node_with(op_type, &names, "y", attributes).output("y", inputs[0].element(), shape);
    build.run(&supplied).remove("y").unwrap()
}

/// Numbers without a pattern, by a linear congruential generator.
fn numbers(seed: u64) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(seed), |s| {
        Some(s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    })
    .skip(1)
    .map(|s| (s >> 33) as u32)
}

/// Floats within -1..1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    numbers(seed).take(count).map(|n| n as f32 / (1u32 << 30) as f32 - 1.0).collect()
}

fn codes_u16(seed: u64, count: usize) -> Vec<u16> {
    numbers(seed).take(count).map(|n| n as u16).collect()
}

fn codes_i16(seed: u64, count: usize) -> Vec<i16> {
    numbers(seed).take(count).map(|n| n as i16).collect()
}

fn codes_u8(seed: u64, count: usize) -> Vec<u8> {
    numbers(seed).take(count).map(|n| n as u8).collect()
}

fn codes_i8(seed: u64, count: usize) -> Vec<i8> {
    numbers(seed).take(count).map(|n| n as i8).collect()
}
