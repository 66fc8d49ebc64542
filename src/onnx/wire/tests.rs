use super::*;

/// Field numbers of the path from a model to one of each message.
const GRAPH: u32 = 7;
const NODE: u32 = 1;
const INITIALIZER: u32 = 5;

fn number(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn tag(field: u32, wire: u32) -> Vec<u8> {
    number(u64::from(field << 3 | wire))
}

/// A field of bytes.
fn with(field: u32, content: &[u8]) -> Vec<u8> {
    [tag(field, 2), number(content.len() as u64), content.to_vec()].concat()
}

/// Messages within messages: the outermost field first.
fn within(path: &[u32], content: Vec<u8>) -> Vec<u8> {
    path.iter().rev().fold(content, |content, field| with(*field, &content))
}

fn refusal(bytes: &[u8]) -> String {
    check(bytes).unwrap_err().to_string()
}

/// Paths to every message of a model.
const PATHS: [&[u32]; 12] = [
    &[],
    &[8],
    &[14],
    &[GRAPH],
    &[GRAPH, NODE],
    &[GRAPH, NODE, 5],
    &[GRAPH, INITIALIZER],
    &[GRAPH, INITIALIZER, 13],
    &[GRAPH, 11],
    &[GRAPH, 12, 2],
    &[GRAPH, 13, 2, 1],
    &[GRAPH, 13, 2, 1, 2, 1],
];

#[test]
fn groups_are_refused_wherever_they_stand() {
    for path in PATHS {
        for field in [1, 3, 31, 1000] {
            let group = [tag(field, 3), tag(field, 4)].concat();
            assert!(refusal(&within(path, group)).contains("a group"), "{path:?}");
            assert!(refusal(&within(path, tag(field, 4))).contains("a group"), "{path:?}");
        }
    }
}

#[test]
fn nested_groups_end_at_the_first_and_not_on_the_stack() {
    let deep = tag(99, 3).repeat(1_000_000);
    assert!(refusal(&deep).contains("at byte 0: Model: a group"));
    assert!(refusal(&within(&[GRAPH, NODE], deep)).contains("Node: a group"));
}

#[test]
fn subgraphs_and_other_nesting_have_no_depth_to_reach() {
    // A graph in an attribute of a node of a graph, and so on: GraphProto is field 6 of an attribute.
    let mut path = vec![GRAPH];
    path.extend([NODE, 5, 6].repeat(50));
    assert!(refusal(&within(&path, Vec::new())).contains("Attribute: field 6"));
    // A sequence of sequences of tensors.
    let mut path = vec![GRAPH, 11, 2];
    path.extend([4, 1].repeat(50));
    assert!(refusal(&within(&path, Vec::new())).contains("Type: field 4"));
    for (path, message) in [(vec![20], "Model: field 20"), (vec![25], "Model: field 25")] {
        assert!(refusal(&within(&path, Vec::new())).contains(message));
    }
    assert!(refusal(&within(&[GRAPH, 15], Vec::new())).contains("Graph: field 15"));
}

#[test]
fn unknown_fields_are_refused_with_every_wire_type() {
    for path in PATHS {
        for (wire, content) in [(0, vec![1]), (1, vec![0; 8]), (2, vec![0]), (5, vec![0; 4])] {
            let message = refusal(&within(path, [tag(77, wire), content].concat()));
            assert!(message.contains("field 77, which is not supported here"), "{message}");
        }
        assert!(refusal(&within(path, vec![0])).contains("field 0"), "{path:?}");
        assert!(refusal(&within(path, tag(77, 6))).contains("field 77"), "{path:?}");
    }
}

#[test]
fn known_fields_need_their_wire_type() {
    for wire in [0, 1, 5, 6, 7] {
        let bytes = [tag(GRAPH, wire), vec![0; 8]].concat();
        assert!(refusal(&bytes).contains(&format!("graph with wire type {wire}")));
    }
    assert!(refusal(&[tag(1, 2), vec![0]].concat()).contains("ir_version with wire type 2"));
    // A float attribute: four bytes, whole.
    let attribute = |bytes: usize| within(&[GRAPH, NODE, 5], [tag(2, 5), vec![0; bytes]].concat());
    assert!(check(&attribute(4)).is_ok());
    assert!(refusal(&attribute(3)).contains("f with wire type 5 or cut short"));
}

#[test]
fn lengths_stay_inside_their_message() {
    // The name reaches past the node, though not past the file.
    let node = [tag(3, 2), number(4), b"abc".to_vec()].concat();
    let bytes = [within(&[GRAPH, NODE], node), with(2, b"producer")].concat();
    assert!(refusal(&bytes).contains("Node: name of 4 bytes where 3 are left"));
    for length in [1, u64::from(u32::MAX), u64::MAX >> 1, u64::MAX] {
        let bytes = [tag(GRAPH, 2), number(length)].concat();
        assert!(refusal(&bytes).contains(&format!("graph of {length} bytes where 0 are left")));
    }
}

#[test]
fn numbers_end_and_fit_64_bits() {
    let version = |bytes: &[u8]| [tag(1, 0), bytes.to_vec()].concat();
    assert!(check(&version(&number(u64::MAX))).is_ok());
    assert!(refusal(&version(&[0x80])).contains("cut short"));
    assert!(refusal(&version(&[0xff; 9])).contains("cut short"));
    let sixty_five_bits = [vec![0xff; 9], vec![2]].concat();
    assert!(refusal(&version(&sixty_five_bits)).contains("more than 64 bits"));
    assert!(refusal(&version(&[0x80; 11])).contains("more than 64 bits"));
    assert!(refusal(&[0xff]).contains("cut short"));
    // Packed dimensions: the last number must end inside its field.
    let dims = |bytes: &[u8]| within(&[GRAPH, INITIALIZER], with(1, bytes));
    assert!(check(&dims(&[1, 2, 0x80, 1])).is_ok());
    let cut = [within(&[GRAPH, INITIALIZER], with(1, &[1, 0x80])), with(2, b"p")].concat();
    assert!(refusal(&cut).contains("Tensor: a number that is cut short"));
}

#[test]
fn what_is_singular_comes_once() {
    let graph = with(GRAPH, &[]);
    assert!(refusal(&[graph.clone(), graph].concat()).contains("graph given twice"));
    let version = [tag(1, 0), number(8)].concat();
    assert!(refusal(&version.repeat(2)).contains("ir_version given twice"));
    // Repeated fields may come often, and every message counts its own.
    let node = with(3, b"n");
    let nodes = [with(NODE, &node), with(NODE, &node), with(NODE, &with(1, b"x").repeat(3))].concat();
    assert!(check(&with(GRAPH, &nodes)).is_ok());
}

#[test]
fn a_small_file_cannot_ask_for_much_memory() {
    let nodes = with(NODE, &[]).repeat(MAX_MESSAGES);
    assert!(refusal(&with(GRAPH, &nodes)).contains("at most 1048576 parts"));
    let long = vec![0; MAX_MODEL_BYTES + 1];
    assert!(refusal(&long).contains("268435457"));
}

#[test]
fn nothing_at_all_is_an_empty_model() {
    assert!(check(&[]).is_ok());
}
