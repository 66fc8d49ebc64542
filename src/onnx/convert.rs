//! Between our types and the generated ones, and the rules that a model has to keep.

use std::collections::HashSet;

use onnx_protobuf::attribute_proto::AttributeType;
use onnx_protobuf::tensor_proto::{DataLocation, DataType};
use onnx_protobuf::tensor_shape_proto::{Dimension, dimension};
use onnx_protobuf::{
    AttributeProto, GraphProto, Message, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use protobuf::{Enum, MessageField};

use super::{
    Attribute, AttributeValue, ElementType, Graph, Initializer, Model, Node, PAGE, TensorData, ValueInfo,
    element_count, is_bare_name, wire,
};
use crate::error::InputError;

type Result<T> = std::result::Result<T, InputError>;

impl Model {
    /// The model as bytes; `data_file` is the bare name of the file beside it that holds the external
    /// data.
    ///
    /// # Errors
    /// When the model breaks a rule that [`Model::decode`] holds it to, or is too large.
    pub fn encode(&self, data_file: &str) -> Result<Vec<u8>> {
        check_data_file(data_file)?;
        self.check()?;
        let model = ModelProto {
            ir_version: self.ir_version,
            opset_import: vec![OperatorSetIdProto { version: self.opset, ..Default::default() }],
            producer_name: self.producer_name.clone(),
            producer_version: self.producer_version.clone(),
            graph: MessageField::some(encode_graph(&self.graph, data_file)),
            ..Default::default()
        };
        let bytes = model.write_to_bytes();
        let bytes = bytes.map_err(|e| InputError::default().subject(&self.graph.name).found(e))?;
        // Whatever is written can be read.
        wire::check(&bytes)?;
        Ok(bytes)
    }

    /// Reads a model whose external data, if any, is in the file of the bare name `data_file`.
    ///
    /// # Errors
    /// When the bytes are not a model, or one that uses what is not supported here: the message names
    /// the first such thing.
    pub fn decode(bytes: &[u8], data_file: &str) -> Result<Self> {
        check_data_file(data_file)?;
        wire::check(bytes)?;
        let proto = ModelProto::parse_from_bytes(bytes);
        let proto = proto.map_err(|e| InputError::default().expected("an ONNX model").found(e))?;
        let [opset] = &*proto.opset_import else {
            let found = format!("{} operator sets", proto.opset_import.len());
            return Err(InputError::default().subject("opset_import").expected("one").found(found));
        };
        check_domain("opset_import", &opset.domain)?;
        let graph = proto.graph.into_option();
        let graph = graph.ok_or_else(|| InputError::default().expected("a graph").found("none"))?;
        let model = Self {
            ir_version: proto.ir_version,
            opset: opset.version,
            producer_name: proto.producer_name,
            producer_version: proto.producer_version,
            graph: decode_graph(graph, data_file)?,
        };
        model.check()?;
        Ok(model)
    }

    /// Checks what can be said without knowing operators: names are unique and not empty, sizes fit,
    /// external data is aligned.
    ///
    /// # Errors
    /// At the first thing that is wrong.
    pub fn check(&self) -> Result<()> {
        let graph = &self.graph;
        for (name, shape) in infos(graph).map(|v| (&v.name, &v.shape)) {
            check_shape(name, shape)?;
        }
        for initializer in &graph.initializers {
            check_initializer(initializer)?;
        }
        let produced = graph.nodes.iter().flat_map(|n| &n.outputs);
        let sources = graph.inputs.iter().map(|v| &v.name);
        unique("tensor", sources.chain(graph.initializers.iter().map(|i| &i.name)).chain(produced))?;
        unique("graph output", graph.outputs.iter().map(|v| &v.name))?;
        unique("value info", graph.inputs.iter().chain(&graph.value_infos).map(|v| &v.name))?;
        unique("node", graph.nodes.iter().map(|n| &n.name))?;
        for node in &graph.nodes {
            unique(&format!("{}: attribute", node.name), node.attributes.iter().map(|a| &a.name))?;
            if node.inputs.iter().any(String::is_empty) {
                let error = InputError::default().subject(&node.name);
                return Err(error.expected("names of tensors").found("an input that is left out"));
            }
        }
        Ok(())
    }
}

fn infos(graph: &Graph) -> impl Iterator<Item = &ValueInfo> {
    graph.inputs.iter().chain(&graph.outputs).chain(&graph.value_infos)
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
    let mut seen = HashSet::new();
    for name in names {
        if name.is_empty() {
            return Err(InputError::default().found(format!("a {what} without a name")));
        }
        if !seen.insert(name) {
            return Err(InputError::default().subject(name).found(format!("a {what} of that name twice")));
        }
    }
    Ok(())
}

fn check_data_file(name: &str) -> Result<()> {
    if is_bare_name(name) {
        return Ok(());
    }
    Err(InputError::default().subject("external data").expected("a bare file name").found(name))
}

fn check_domain(subject: &str, domain: &str) -> Result<()> {
    if domain.is_empty() || domain == "ai.onnx" {
        return Ok(());
    }
    Err(InputError::default().subject(subject).expected("the default domain").found(domain))
}

fn check_shape(name: &str, shape: &[usize]) -> Result<()> {
    // With room for the widest type.
    if !shape.contains(&0) && element_count(shape).is_some_and(|n| n <= isize::MAX as usize / 8) {
        return Ok(());
    }
    let error = InputError::default().subject(name);
    Err(error.expected("dimensions of at least 1 that fit into memory").found(format!("{shape:?}")))
}

fn check_initializer(initializer: &Initializer) -> Result<()> {
    check_shape(&initializer.name, &initializer.shape)?;
    let error = InputError::default().subject(&initializer.name);
    let expected = element_count(&initializer.shape)
        .and_then(|n| n.checked_mul(initializer.element.bytes()))
        .and_then(|n| u64::try_from(n).ok());
    let length = match &initializer.data {
        TensorData::Inline(bytes) => bytes.len() as u64,
        TensorData::External { offset, length } => {
            if !offset.is_multiple_of(PAGE) || offset.checked_add(*length).is_none() {
                let expected = format!("external data at a multiple of {PAGE}");
                return Err(error.expected(expected).found(format!("{length} bytes at {offset}")));
            }
            *length
        }
    };
    if expected == Some(length) {
        return Ok(());
    }
    let what = format!("the bytes of {} {:?}", initializer.element, initializer.shape);
    Err(error.expected(what).found(format!("{length} bytes")))
}

// To bytes.

fn data_type(element: ElementType) -> i32 {
    let data_type = match element {
        ElementType::F32 => DataType::FLOAT,
        ElementType::U8 => DataType::UINT8,
        ElementType::I8 => DataType::INT8,
        ElementType::U16 => DataType::UINT16,
        ElementType::I16 => DataType::INT16,
        ElementType::I64 => DataType::INT64,
    };
    data_type.value()
}

fn dims(shape: &[usize]) -> Vec<i64> {
    // The check before has bounded their product.
    shape.iter().map(|d| i64::try_from(*d).unwrap_or(i64::MAX)).collect()
}

fn encode_graph(graph: &Graph, data_file: &str) -> GraphProto {
    GraphProto {
        node: graph.nodes.iter().map(encode_node).collect(),
        name: graph.name.clone(),
        initializer: graph.initializers.iter().map(|i| encode_initializer(i, data_file)).collect(),
        input: graph.inputs.iter().map(encode_info).collect(),
        output: graph.outputs.iter().map(encode_info).collect(),
        value_info: graph.value_infos.iter().map(encode_info).collect(),
        ..Default::default()
    }
}

fn encode_info(info: &ValueInfo) -> ValueInfoProto {
    let dim = dims(&info.shape)
        .into_iter()
        .map(|d| Dimension { value: Some(dimension::Value::DimValue(d)), ..Default::default() });
    let tensor = type_proto::Tensor {
        elem_type: data_type(info.element),
        shape: MessageField::some(TensorShapeProto { dim: dim.collect(), ..Default::default() }),
        ..Default::default()
    };
    let type_ = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() };
    ValueInfoProto { name: info.name.clone(), type_: MessageField::some(type_), ..Default::default() }
}

fn encode_initializer(initializer: &Initializer, data_file: &str) -> TensorProto {
    let mut proto = TensorProto {
        dims: dims(&initializer.shape),
        data_type: data_type(initializer.element),
        name: initializer.name.clone(),
        ..Default::default()
    };
    match &initializer.data {
        TensorData::Inline(bytes) => proto.raw_data.clone_from(bytes),
        TensorData::External { offset, length } => {
            proto.data_location = DataLocation::EXTERNAL.into();
            let pair = |key: &str, value: String| StringStringEntryProto {
                key: key.to_owned(),
                value,
                ..Default::default()
            };
            proto.external_data = vec![
                pair("location", data_file.to_owned()),
                pair("offset", offset.to_string()),
                pair("length", length.to_string()),
            ];
        }
    }
    proto
}

fn encode_node(node: &Node) -> NodeProto {
    NodeProto {
        input: node.inputs.clone(),
        output: node.outputs.clone(),
        name: node.name.clone(),
        op_type: node.op_type.clone(),
        attribute: node.attributes.iter().map(encode_attribute).collect(),
        ..Default::default()
    }
}

fn encode_attribute(attribute: &Attribute) -> AttributeProto {
    let mut proto = AttributeProto { name: attribute.name.clone(), ..Default::default() };
    let type_ = match &attribute.value {
        AttributeValue::Int(i) => {
            proto.i = *i;
            AttributeType::INT
        }
        AttributeValue::Float(f) => {
            proto.f = *f;
            AttributeType::FLOAT
        }
        AttributeValue::Ints(ints) => {
            proto.ints.clone_from(ints);
            AttributeType::INTS
        }
        AttributeValue::String(s) => {
            proto.s = s.clone().into_bytes();
            AttributeType::STRING
        }
    };
    proto.type_ = type_.into();
    proto
}

// From bytes.

fn decode_graph(proto: GraphProto, data_file: &str) -> Result<Graph> {
    let infos = |protos: Vec<ValueInfoProto>| protos.into_iter().map(decode_info).collect::<Result<_>>();
    let initializers = proto.initializer.into_iter().map(|t| decode_initializer(t, data_file));
    Ok(Graph {
        name: proto.name,
        inputs: infos(proto.input)?,
        outputs: infos(proto.output)?,
        value_infos: infos(proto.value_info)?,
        initializers: initializers.collect::<Result<_>>()?,
        nodes: proto.node.into_iter().map(decode_node).collect::<Result<_>>()?,
    })
}

fn element_type(subject: &str, data_type: i32) -> Result<ElementType> {
    Ok(match DataType::from_i32(data_type) {
        Some(DataType::FLOAT) => ElementType::F32,
        Some(DataType::UINT8) => ElementType::U8,
        Some(DataType::INT8) => ElementType::I8,
        Some(DataType::UINT16) => ElementType::U16,
        Some(DataType::INT16) => ElementType::I16,
        Some(DataType::INT64) => ElementType::I64,
        other => {
            let found = other.map_or_else(|| format!("element type {data_type}"), |o| format!("{o:?}"));
            let error = InputError::default().subject(subject);
            return Err(error.expected("FLOAT, UINT8, INT8, UINT16, INT16 or INT64").found(found));
        }
    })
}

fn size(subject: &str, dim: i64) -> Result<usize> {
    let error = || InputError::default().subject(subject).expected("a static dimension").found(dim);
    usize::try_from(dim).ok().filter(|d| *d > 0).ok_or_else(error)
}

fn decode_info(proto: ValueInfoProto) -> Result<ValueInfo> {
    let error = || InputError::default().subject(&proto.name);
    let Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), .. }) = proto.type_.as_ref()
    else {
        return Err(error().expected("a tensor").found("no type"));
    };
    let element = element_type(&proto.name, tensor.elem_type)?;
    let Some(shape) = tensor.shape.as_ref() else {
        return Err(error().expected("a static shape").found("none"));
    };
    let shape = shape.dim.iter().map(|dim| match &dim.value {
        Some(dimension::Value::DimValue(d)) => size(&proto.name, *d),
        Some(dimension::Value::DimParam(name)) => {
            Err(error().expected("static dimensions").found(format!("the dynamic dimension {name:?}")))
        }
        _ => Err(error().expected("static dimensions").found("a dimension without a value")),
    });
    let shape = shape.collect::<Result<_>>()?;
    Ok(ValueInfo { name: proto.name, element, shape })
}

fn decode_initializer(proto: TensorProto, data_file: &str) -> Result<Initializer> {
    let element = element_type(&proto.name, proto.data_type)?;
    let shape = proto.dims.iter().map(|d| size(&proto.name, *d)).collect::<Result<_>>()?;
    let error = InputError::default().subject(&proto.name);
    let data = match proto.data_location.enum_value() {
        Ok(DataLocation::DEFAULT) if proto.external_data.is_empty() => TensorData::Inline(proto.raw_data),
        Ok(DataLocation::EXTERNAL) if proto.raw_data.is_empty() => {
            external(&proto.name, &proto.external_data, data_file)?
        }
        _ => {
            let found = "neither or both";
            return Err(error.expected("elements in the model or a range of the data file").found(found));
        }
    };
    Ok(Initializer { name: proto.name, element, shape, data })
}

fn external(subject: &str, pairs: &[StringStringEntryProto], data_file: &str) -> Result<TensorData> {
    let error = || InputError::default().subject(subject);
    let (mut location, mut offset, mut length) = (None, None, None);
    for pair in pairs {
        let slot = match pair.key.as_str() {
            "location" => &mut location,
            "offset" => &mut offset,
            "length" => &mut length,
            other => {
                let expected = "location, offset and length of external data";
                return Err(error().expected(expected).found(format!("the key {other:?}")));
            }
        };
        if slot.replace(pair.value.as_str()).is_some() {
            return Err(error().found(format!("external data with {} given twice", pair.key)));
        }
    }
    if location != Some(data_file) {
        let found = location.unwrap_or("no location");
        return Err(error().expected(format!("external data in {data_file}")).found(found));
    }
    // Digits only: from_str would take a sign.
    let number = |text: Option<&str>| {
        text.filter(|t| t.bytes().all(|b| b.is_ascii_digit())).and_then(|t| t.parse::<u64>().ok())
    };
    match (number(offset), number(length)) {
        (Some(offset), Some(length)) => Ok(TensorData::External { offset, length }),
        _ => {
            let found = format!("offset {offset:?}, length {length:?}");
            Err(error().expected("offset and length of external data").found(found))
        }
    }
}

fn decode_node(proto: NodeProto) -> Result<Node> {
    check_domain(&proto.name, &proto.domain)?;
    let attributes = proto.attribute.into_iter().map(|a| decode_attribute(&proto.name, a));
    Ok(Node {
        attributes: attributes.collect::<Result<_>>()?,
        name: proto.name,
        op_type: proto.op_type,
        inputs: proto.input,
        outputs: proto.output,
    })
}

fn decode_attribute(node: &str, proto: AttributeProto) -> Result<Attribute> {
    let subject = format!("{node}.{}", proto.name);
    let error = InputError::default().subject(&subject);
    let value = match proto.type_.enum_value() {
        Ok(AttributeType::INT) => AttributeValue::Int(proto.i),
        Ok(AttributeType::FLOAT) => AttributeValue::Float(proto.f),
        Ok(AttributeType::INTS) => AttributeValue::Ints(proto.ints),
        Ok(AttributeType::STRING) => match String::from_utf8(proto.s) {
            Ok(text) => AttributeValue::String(text),
            Err(_) => return Err(error.expected("UTF-8").found("other bytes")),
        },
        other => {
            let found = other.map_or_else(|n| format!("type {n}"), |t| format!("{t:?}"));
            return Err(error.expected("INT, FLOAT, INTS or STRING").found(found));
        }
    };
    Ok(Attribute { name: proto.name, value })
}
