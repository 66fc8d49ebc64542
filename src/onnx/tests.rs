use onnx_protobuf::{GraphProto, Message, ModelProto, StringStringEntryProto, TensorProto};
use proptest::prelude::*;
use protobuf::MessageField;

use super::*;

/// A model with one of everything.
fn model() -> Model {
    let attribute = |name: &str, value| Attribute { name: name.into(), value };
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    Model {
        ir_version: 11,
        opset: 23,
        producer_name: "spark-convert".into(),
        producer_version: "0.1.0".into(),
        graph: Graph {
            name: "step".into(),
            inputs: vec![ValueInfo::new("x", ElementType::U16, [1, 300])],
            outputs: vec![ValueInfo::new("y", ElementType::F32, [1, 20])],
            value_infos: vec![ValueInfo::new("t", ElementType::F32, [])],
            initializers: vec![
                Initializer::f32("scale", [], &[0.5]),
                Initializer::i64("shape", &[1, -1]),
                Initializer::inline("zero", ElementType::U16, [], vec![0x34, 0x12]),
                Initializer {
                    name: "w".into(),
                    element: ElementType::I8,
                    shape: vec![20, 300],
                    data: TensorData::External { offset: 8192, length: 6000 },
                },
            ],
            nodes: vec![Node {
                name: "dq".into(),
                op_type: "DequantizeLinear".into(),
                inputs: text(&["x", "scale", "zero"]),
                outputs: text(&["t"]),
                attributes: vec![
                    attribute("axis", AttributeValue::Int(0)),
                    attribute("epsilon", AttributeValue::Float(1e-6)),
                    attribute("perm", AttributeValue::Ints(vec![0, -2, 1])),
                    attribute("approximate", AttributeValue::String("none".into())),
                ],
            }],
        },
    }
}

fn bytes() -> Vec<u8> {
    model().encode("model.data").unwrap()
}

fn refusal(bytes: &[u8]) -> String {
    Model::decode(bytes, "model.data").unwrap_err().to_string()
}

/// The refusal of the model with something changed in the generated types.
fn spoilt(spoil: impl FnOnce(&mut ModelProto)) -> String {
    let mut proto = ModelProto::parse_from_bytes(&bytes()).unwrap();
    spoil(&mut proto);
    refusal(&proto.write_to_bytes().unwrap())
}

fn graph(proto: &mut ModelProto) -> &mut GraphProto {
    proto.graph.mut_or_insert_default()
}

#[test]
fn a_model_survives_the_way_to_bytes_and_back() {
    assert_eq!(Model::decode(&bytes(), "model.data").unwrap(), model());
    assert_eq!(bytes(), bytes());
}

/// Field numbers, wire types and order of fields from the published `onnx.proto`.
#[test]
fn a_small_model_has_the_bytes_of_the_specification() {
    let model = Model {
        ir_version: 11,
        opset: 23,
        producer_name: "p".into(),
        producer_version: "1".into(),
        graph: Graph {
            name: "g".into(),
            outputs: vec![ValueInfo::new("y", ElementType::U16, [2])],
            ..Graph::default()
        },
    };
    #[rustfmt::skip]
    let expected = [
        0x08, 11,                       // ir_version = 1
        0x42, 2,                        // opset_import = 8
            0x10, 23,                   //   version = 2
        0x12, 1, b'p',                  // producer_name = 2
        0x1a, 1, b'1',                  // producer_version = 3
        0x3a, 20,                       // graph = 7
            0x12, 1, b'g',              //   name = 2
            0x62, 15,                   //   output = 12
                0x0a, 1, b'y',          //     name = 1
                0x12, 10,               //     type = 2
                    0x0a, 8,            //       tensor_type = 1
                        0x08, 4,        //         elem_type = 1: UINT16
                        0x12, 4,        //         shape = 2
                            0x0a, 2,    //           dim = 1
                                8, 2,   //             dim_value = 1
    ];
    assert_eq!(model.encode("d").unwrap(), expected);
}

#[test]
fn external_data_is_bounded_by_the_file() {
    let mut weights = model().graph.initializers.remove(3);
    let file = vec![7; 8192 + 6000];
    assert_eq!(weights.bytes(&file).unwrap().len(), 6000);
    let message = weights.bytes(&file[1..]).unwrap_err().to_string();
    assert!(message.contains("w: expected 6000 bytes of external data from byte 8192"), "{message}");
    for (offset, length) in [(u64::MAX, 1), (u64::MAX, u64::MAX), (0, u64::MAX), (1 << 40, 0)] {
        weights.data = TensorData::External { offset, length };
        assert!(weights.bytes(&file).is_err());
    }
    assert_eq!(model().graph.initializers[2].bytes(&[]).unwrap(), [0x34, 0x12]);
}

#[test]
fn layouts_are_aligned_and_end_with_the_last_tensor() {
    let mut layout = DataLayout::default();
    let external = |offset, length| Some(TensorData::External { offset, length });
    assert_eq!(layout.place(1), external(0, 1));
    assert_eq!(layout.place(4096), external(4096, 4096));
    assert_eq!(layout.place(5000), external(8192, 5000));
    assert_eq!(layout.file_bytes(), 13_192);
    assert_eq!(layout.place(u64::MAX), None);
}

#[test]
fn a_data_file_is_a_bare_name() {
    for name in ["", ".", "..", "a/b", "../model.data", "/etc/passwd", "a\\b", "c:x", "a\0b"] {
        assert!(model().encode(name).is_err(), "{name:?}");
        let message = spoilt(|m| graph(m).initializer[3].external_data[0].value = name.into());
        assert!(message.contains("w: expected external data in model.data"), "{message}");
        assert!(Model::decode(&bytes(), name).is_err(), "{name:?}");
    }
    assert!(is_bare_name("model..data"));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    type Spoil = fn(&mut ModelProto);
    let cases: [(&str, Spoil); 31] = [
        ("expected one, found 0 operator sets", |m| m.opset_import.clear()),
        ("found 2 operator sets", |m| m.opset_import.push(m.opset_import[0].clone())),
        ("expected the default domain, found com.microsoft", |m| {
            m.opset_import[0].domain = "com.microsoft".into();
        }),
        ("dq: expected the default domain, found x", |m| graph(m).node[0].domain = "x".into()),
        ("expected a graph, found none", |m| m.graph = MessageField::none()),
        ("x: expected a tensor, found no type", |m| graph(m).input[0].type_ = MessageField::none()),
        ("x: expected static dimensions, found the dynamic dimension \"n\"", |m| {
            dim(m).value = Some(onnx_protobuf::tensor_shape_proto::dimension::Value::DimParam("n".into()));
        }),
        ("x: expected static dimensions, found a dimension without a value", |m| dim(m).value = None),
        ("x: expected a static dimension, found -1", |m| set_dim(m, -1)),
        ("x: expected a static dimension, found 0", |m| set_dim(m, 0)),
        ("x: expected dimensions of at least 1 that fit", |m| set_dim(m, i64::MAX)),
        ("x: expected FLOAT, UINT8, INT8, UINT16, INT16 or INT64, found BFLOAT16", |m| {
            tensor_type(m).elem_type = 16;
        }),
        ("found element type 99", |m| graph(m).initializer[0].data_type = 99),
        ("x: expected a static shape, found none", |m| tensor_type(m).shape = MessageField::none()),
        ("scale: a tensor of that name twice", |m| graph(m).initializer[1].name = "scale".into()),
        ("x: a tensor of that name twice", |m| graph(m).node[0].output[0] = "x".into()),
        ("x: a value info of that name twice", |m| graph(m).value_info[0].name = "x".into()),
        ("y: a graph output of that name twice", |m| {
            let output = graph(m).output[0].clone();
            graph(m).output.push(output);
        }),
        ("a node of that name twice", |m| {
            let mut node = graph(m).node[0].clone();
            node.output[0] = "u".into();
            graph(m).node.push(node);
        }),
        ("a node without a name", |m| graph(m).node[0].name.clear()),
        ("a tensor without a name", |m| graph(m).node[0].output[0].clear()),
        ("dq: expected names of tensors, found an input that is left out", |m| {
            graph(m).node[0].input[2].clear();
        }),
        ("dq: attribute of that name twice", |m| graph(m).node[0].attribute[1].name = "axis".into()),
        ("dq.axis: expected INT, FLOAT, INTS or STRING, found TENSOR", |m| {
            graph(m).node[0].attribute[0].type_ =
                onnx_protobuf::attribute_proto::AttributeType::TENSOR.into();
        }),
        ("dq.approximate: expected UTF-8", |m| graph(m).node[0].attribute[3].s = vec![0xff]),
        ("scale: expected the bytes of float32 [], found 3 bytes", |m| {
            graph(m).initializer[0].raw_data.truncate(3);
        }),
        ("w: expected the bytes of int8 [20, 300], found 5999 bytes", |m| entry(m, 2).value = "5999".into()),
        ("w: expected external data at a multiple of 4096", |m| entry(m, 1).value = "8193".into()),
        ("w: expected offset and length of external data", |m| entry(m, 1).value = "+8192".into()),
        ("w: expected location, offset and length of external data, found the key \"checksum\"", |m| {
            entry(m, 2).key = "checksum".into();
        }),
        ("w: expected elements in the model or a range of the data file", |m| {
            graph(m).initializer[3].raw_data = vec![0; 6000];
        }),
    ];
    for (message, spoil) in cases {
        let found = spoilt(spoil);
        assert!(found.contains(message), "{message:?} is not in {found:?}");
    }
}

fn tensor_type(m: &mut ModelProto) -> &mut onnx_protobuf::type_proto::Tensor {
    graph(m).input[0].type_.mut_or_insert_default().mut_tensor_type()
}

fn dim(m: &mut ModelProto) -> &mut onnx_protobuf::tensor_shape_proto::Dimension {
    &mut tensor_type(m).shape.mut_or_insert_default().dim[1]
}

fn set_dim(m: &mut ModelProto, value: i64) {
    dim(m).set_dim_value(value);
}

fn entry(m: &mut ModelProto, i: usize) -> &mut StringStringEntryProto {
    &mut graph(m).initializer[3].external_data[i]
}

#[test]
fn typed_data_in_place_of_raw_bytes_is_refused() {
    let typed = TensorProto { float_data: vec![0.5], ..Default::default() };
    let message = spoilt(|m| graph(m).initializer.push(typed));
    assert!(message.contains("Tensor: field 4, which is not supported here"), "{message}");
}

#[test]
fn nothing_is_not_a_model() {
    assert!(refusal(&[]).contains("expected one, found 0 operator sets"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_reading_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Model::decode(&bytes, "model.data");
    }

    /// Bytes that are nearly a model get further.
    #[test]
    fn no_damage_makes_reading_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..6),
    ) {
        let mut bytes = bytes();
        for (at, byte, kind) in damage {
            if bytes.is_empty() {
                break;
            }
            let i = at.index(bytes.len());
            match kind {
                0 => bytes[i] = byte,
                1 => bytes.insert(i, byte),
                2 => drop(bytes.remove(i)),
                _ => bytes.truncate(i),
            }
        }
        if let Ok(model) = Model::decode(&bytes, "model.data") {
            // Whatever is accepted is a model that can be written and read again.
            let again = model.encode("model.data").unwrap();
            let decoded = Model::decode(&again, "model.data").unwrap();
            prop_assert_eq!(decoded.encode("model.data").unwrap(), again);
        }
    }
}
