//! What a manifest says of its graphs must be what the graphs say: a runner makes room by these numbers and
//! computes with them, and a manifest is a file that somebody else wrote.

use super::refuse;
use crate::error::Result;
use crate::interpreter::Session;
use crate::npu::manifest::{DecodeManifest, GraphInfo, TensorInfo, codes_of};

/// Elements of the largest input; no computed tensor of the interpreter is larger.
const MAX_ELEMENTS: usize = 1 << 30;

/// Compares every input of every graph, and looks at all encodings.
///
/// # Errors
/// At the first that differs, or that codes cannot be computed with.
pub(super) fn check(
    manifest: &DecodeManifest,
    decode: &[Session<'_>],
    prefill: &[Session<'_>],
) -> Result<()> {
    let length = |kind: &str| manifest.masks.get(kind).map(|mask| mask.length);
    check_graphs(manifest, &manifest.graphs, decode, length, 1)?;
    let Some(info) = &manifest.prefill else { return Ok(()) };
    let length = |kind: &str| info.masks.get(kind).map(|mask| mask.length);
    check_graphs(manifest, &info.graphs, prefill, length, info.rows)
}

fn check_graphs(
    manifest: &DecodeManifest,
    graphs: &[GraphInfo],
    sessions: &[Session<'_>],
    mask_length: impl Fn(&str) -> Option<usize>,
    rows: usize,
) -> Result<()> {
    for (graph, session) in graphs.iter().zip(sessions) {
        for info in graph.inputs.iter().chain(&graph.outputs) {
            check_encoding(info)?;
        }
        for info in &graph.inputs {
            let input = session.inputs().find(|input| input.name == info.name);
            let input = input.ok_or_else(|| refuse(&graph.name, "an input of that name", &info.name))?;
            if input.shape != info.shape || input.element.name() != info.dtype {
                let found = format!("{} {:?}", info.dtype, info.shape);
                return Err(refuse(&info.name, &format!("{} {:?}", input.element, input.shape), found));
            }
            let elements = info.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            let elements = elements.filter(|n| *n <= MAX_ELEMENTS);
            let elements = elements.ok_or_else(|| {
                refuse(&info.name, "a shape that fits into memory", format!("{:?}", info.shape))
            })?;
            let kind = info.layer_type.as_deref().unwrap_or_default();
            let (what, of_a_row) = match info.role.as_str() {
                "hidden" => ("model.hidden", Some(manifest.model.hidden)),
                "rope_cos" | "rope_sin" => ("rope", manifest.rope.get(kind).map(|rope| rope.rotary_dim / 2)),
                "mask" => ("masks", mask_length(kind)),
                _ => continue,
            };
            let of_a_row = of_a_row.ok_or_else(|| refuse(what, "a layer type", kind))?;
            if of_a_row.checked_mul(rows) != Some(elements) {
                let expected = format!("{elements} elements, like {}", info.name);
                return Err(refuse(what, &expected, format!("{of_a_row} in each of {rows} rows")));
            }
        }
    }
    Ok(())
}

/// A scale that can be divided by, and a code of zero that is a code.
fn check_encoding(info: &TensorInfo) -> Result<()> {
    let Some(encoding) = &info.encoding else { return Ok(()) };
    let codes = codes_of(&encoding.dtype);
    let (lowest, highest) =
        codes.ok_or_else(|| refuse(&info.name, "codes of 8 or 16 bits", &encoding.dtype))?;
    if !(encoding.scale.is_finite() && encoding.scale > 0.0) {
        return Err(refuse(&info.name, "a positive scale", encoding.scale));
    }
    if !(lowest..=highest).contains(&encoding.zero_point) {
        let expected = format!("a zero point from {lowest} to {highest}");
        return Err(refuse(&info.name, &expected, encoding.zero_point));
    }
    Ok(())
}
