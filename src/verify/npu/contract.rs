//! `manifest.json` against the architecture and the rules of the contract: what a runtime reads of it must
//! be what the checkpoint was trained with, and must fit together.

use serde_json::{Value, json};

use super::ExportFiles;
use crate::artifact::Manifest;
use crate::npu::manifest::{
    CacheInfo, DECODE_MANIFEST_FILE, DecodeManifest, EncodingInfo, GraphInfo, TensorInfo, codes_of,
};
use crate::spark::{LayerType, SparkConfig};
use crate::verify::json_diff::diff;
use crate::verify::{Check, Finding};

/// The kinds of caches that there are: layer type, layout, what the graph returns.
const CACHES: [(&str, &str, &str); 5] = [
    ("sliding", "ring", "entry"),
    ("sliding", "roll", "cache"),
    ("full", "roll", "entry"),
    ("full", "roll", "cache"),
    ("full", "ring", "entry"),
];

/// Blocked positions of a mask of codes, as far as the 16-bit range of the scores allows: far enough below
/// them that a probability comes out as zero, and no further.
const BLOCKED: std::ops::RangeInclusive<f64> = -1000.0..=-16.0;

fn finding(subject: impl Into<String>, what: impl Into<String>, consequence: &str) -> Finding {
    Finding::new(Check::Contract, DECODE_MANIFEST_FILE, what).subject(subject).consequence(consequence)
}

/// The word of the contract for a layer type.
fn word(kind: LayerType) -> &'static str {
    match kind {
        LayerType::Sliding => "sliding",
        LayerType::Full => "full",
    }
}

/// Everything that the manifest says.
pub(super) fn check_manifest(files: &ExportFiles, tied: &Manifest, config: &SparkConfig) -> Vec<Finding> {
    let manifest = files.manifest();
    let mut findings = check_model(files, config);
    findings.extend(check_options(manifest, tied, config));
    findings.extend(check_rotations_and_masks(files, config));
    findings.extend(check_caches(files, config));
    findings.extend(check_layers(manifest, config));
    for graph in &manifest.graphs {
        findings.extend(check_ports(graph, manifest, config));
        findings.extend(check_encodings(graph, manifest));
    }
    findings
}

/// Differences of the keys that `expected` has; readers pass over keys they don't know.
fn compare(path: &str, expected: &Value, found: &Value, consequence: &str) -> Vec<Finding> {
    // A key that is missing has none of its parts.
    let empty = json!({});
    diff(expected, if found.is_null() { &empty } else { found })
        .into_iter()
        .filter(|d| d.expected != "nothing")
        .map(|d| {
            let what = format!("expected {}, found {}", d.expected, d.found);
            finding(format!("{path}.{}", d.path), what, consequence)
        })
        .collect()
}

fn check_model(files: &ExportFiles, config: &SparkConfig) -> Vec<Finding> {
    let expected = json!({
        "architecture": "Spark2_5ForCausalLM",
        "layers": config.num_hidden_layers(),
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
        "sliding_window": config.sliding_window,
        "rms_eps": config.rms_norm_eps,
        "layer_types": config.layer_types.iter().map(|kind| word(*kind)).collect::<Vec<_>>(),
        "tied_embeddings": config.tie_word_embeddings,
    });
    let json = &files.json;
    let mut findings =
        compare("model", &expected, &json["model"], "a runtime makes buffers and tables of the wrong form");
    let manifest = files.manifest();
    if (manifest.format.as_str(), manifest.version) != ("spark-npu-decode", 1) {
        let found = format!("expected spark-npu-decode 1, found {} {}", manifest.format, manifest.version);
        findings.push(finding("format", found, "a runtime that knows version 1 refuses it"));
    }
    let embedding = &manifest.embedding;
    let element: u64 = if embedding.dtype == "float16" { 2 } else { 4 };
    let shape = [config.vocab_size, config.hidden_size];
    let bytes = config.vocab_size as u64 * config.hidden_size as u64 * element;
    let consequence = "tokens get rows of other tokens";
    if !["float16", "float32"].contains(&embedding.dtype.as_str()) {
        let what = format!("expected float16 or float32, found {:?}", embedding.dtype);
        findings.push(finding("embedding.dtype", what, consequence));
    } else if embedding.shape != shape {
        let what = format!("expected {shape:?}, found {:?}", embedding.shape);
        findings.push(finding("embedding.shape", what, consequence));
    } else if let Some(found) = files.embedding.as_ref().map(|e| e.len() as u64).filter(|n| *n != bytes) {
        findings.push(
            Finding::new(Check::Contract, &embedding.file, format!("expected {bytes} bytes, found {found}"))
                .consequence(consequence),
        );
    }
    findings
}

/// What `spark-convert.json` says of the export must be what its manifest says.
fn check_options(manifest: &DecodeManifest, tied: &Manifest, config: &SparkConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (key, found) in [("precision", json!(manifest.precision)), ("context", json!(manifest.context))] {
        let expected = tied.options.get(key).unwrap_or(&Value::Null);
        if *expected != found {
            let what = format!("expected {expected}, as the export was asked for, found {found}");
            findings.push(finding(key, what, "the export is another than its record says"));
        }
    }
    if manifest.context < 2 || manifest.context > config.max_position_embeddings {
        let what = format!(
            "expected 2 to {}, the positions the model was made for, found {}",
            config.max_position_embeddings, manifest.context
        );
        findings.push(finding("context", what, "positions that the model was never trained on"));
    }
    let io = if is_quantized(manifest) { "quantized" } else { "float" };
    if manifest.io != io {
        let what = format!("expected {io} with {}, found {}", manifest.precision, manifest.io);
        findings.push(finding("io", what, "a runtime feeds floats as codes, or codes as floats"));
    }
    findings
}

/// Whether activations are codes.
pub(super) fn is_quantized(manifest: &DecodeManifest) -> bool {
    !["fp32", "w8"].contains(&manifest.precision.as_str())
}

/// Entries that a cache of a layer type holds: all that is visible but the current token.
fn capacity(manifest: &DecodeManifest, config: &SparkConfig, kind: LayerType) -> usize {
    match kind {
        LayerType::Sliding => config.sliding_window.saturating_sub(1),
        LayerType::Full => manifest.context.saturating_sub(1),
    }
}

fn kinds(config: &SparkConfig) -> impl Iterator<Item = LayerType> {
    [LayerType::Sliding, LayerType::Full].into_iter().filter(|kind| config.layer_types.contains(kind))
}

fn check_rotations_and_masks(files: &ExportFiles, config: &SparkConfig) -> Vec<Finding> {
    let (json, manifest) = (&files.json, files.manifest());
    let mut findings = Vec::new();
    for kind in kinds(config) {
        let (word, rope) = (word(kind), config.rope(kind));
        let expected = json!({
            "theta": rope.theta, "rotary_dim": rope.rotary_dims, "pairing": "half",
            "cos": format!("rope_cos_{word}"), "sin": format!("rope_sin_{word}"),
        });
        let consequence = "queries and keys are turned by other angles than the model was trained with";
        findings.extend(compare(&format!("rope.{word}"), &expected, &json["rope"][word], consequence));
        let capacity = capacity(manifest, config, kind);
        let expected = json!({
            "input": format!("mask_{word}"), "length": capacity + 1, "attend": 0.0, "current_index": capacity,
        });
        let consequence = "the wrong positions are seen";
        findings.extend(compare(&format!("masks.{word}"), &expected, &json["masks"][word], consequence));
        let Some(mask) = manifest.masks.get(word).filter(|_| is_quantized(manifest)) else { continue };
        if !BLOCKED.contains(&mask.blocked) {
            let what = format!(
                "expected {} to {}, about 24 below the lowest score, found {}",
                BLOCKED.start(),
                BLOCKED.end(),
                mask.blocked
            );
            let consequence = "the mask shares its range with the scores, which lose their resolution, or \
                               blocked positions are seen";
            findings.push(finding(format!("masks.{word}.blocked"), what, consequence));
        }
    }
    findings
}

fn check_caches(files: &ExportFiles, config: &SparkConfig) -> Vec<Finding> {
    let manifest = files.manifest();
    let mut findings = Vec::new();
    if manifest.caches.len() != config.num_hidden_layers() {
        let what = format!("expected {}, found {}", config.num_hidden_layers(), manifest.caches.len());
        findings.push(finding("caches", what, "layers without a cache see the current token only"));
    }
    for (i, (cache, kind)) in manifest.caches.iter().zip(&config.layer_types).enumerate() {
        let tensors = |what: &str, axis: usize| json!({"input": format!("past_{what}_{i}_in"), "output": format!("past_{what}_{i}_out"), "seq_axis": axis});
        let expected = json!({
            "layer": i, "type": word(*kind), "capacity": capacity(manifest, config, *kind),
            "key": tensors("key", 3), "value": tensors("value", 2),
        });
        let consequence = "entries go into other slots than the mask shows, or into another layer";
        findings.extend(compare(&format!("caches.{i}"), &expected, &files.json["caches"][i], consequence));
        let found = kind_of(cache);
        if !CACHES.contains(&found) {
            let what = format!("a {} layer cannot be {}/{}", found.0, found.1, found.2);
            let consequence = "sliding roll/entry ends at the window, and a ring that the graph returns would \
                               have to write slots";
            findings.push(finding(format!("caches.{i}"), what, consequence));
        }
        let first = manifest.caches.iter().find(|c| c.kind == cache.kind).map(kind_of);
        if first.is_some_and(|first| first != found) {
            let what = format!("{}/{}, and the first {} layer is another kind", found.1, found.2, found.0);
            findings.push(finding(format!("caches.{i}"), what, "all layers of a type share one mask"));
        }
    }
    findings
}

fn kind_of(cache: &CacheInfo) -> (&str, &str, &str) {
    (&cache.kind, &cache.layout, &cache.returns)
}

/// Graphs hold all layers in order, the last one the head, and pass the residual stream on as it is.
fn check_layers(manifest: &DecodeManifest, config: &SparkConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    let layers: Vec<usize> = manifest.graphs.iter().flat_map(|g| g.layers.iter().copied()).collect();
    if !layers.iter().copied().eq(0..config.num_hidden_layers()) {
        let what =
            format!("expected layers 0 to {} in order, found {layers:?}", config.num_hidden_layers() - 1);
        findings.push(finding("graphs", what, "the step is not the model's"));
    }
    for (i, graph) in manifest.graphs.iter().enumerate() {
        if graph.head != (i + 1 == manifest.graphs.len()) {
            let what = format!("expected the head in the last graph only, found head {}", graph.head);
            findings.push(finding(&graph.name, what, "no logits come out"));
        }
    }
    for pair in manifest.graphs.windows(2) {
        let hidden = |infos: &[TensorInfo]| infos.iter().find(|i| i.role == "hidden").cloned();
        let (Some(out), Some(into)) = (hidden(&pair[0].outputs), hidden(&pair[1].inputs)) else { continue };
        if (&out.shape, &out.dtype, &out.encoding) != (&into.shape, &into.dtype, &into.encoding) {
            let what =
                format!("{} returns {}, {} takes {}", pair[0].name, shown(&out), pair[1].name, shown(&into));
            let consequence = "the residual stream changes its meaning at the seam";
            findings.push(finding(format!("{}.{}", pair[1].name, into.name), what, consequence));
        }
    }
    findings
}

fn shown(info: &TensorInfo) -> String {
    match &info.encoding {
        Some(e) => format!("{} in steps of {} around {}", e.dtype, e.scale, e.zero_point),
        None => info.dtype.clone(),
    }
}

/// The names, shapes and roles that a graph of these layers has: inputs, outputs.
fn ports(graph: &GraphInfo, manifest: &DecodeManifest, config: &SparkConfig) -> [Vec<TensorInfo>; 2] {
    let info = |name: String, shape: Vec<usize>, role: &str| TensorInfo {
        name,
        shape,
        dtype: String::new(),
        role: role.to_owned(),
        layer: None,
        layer_type: None,
        encoding: None,
    };
    let layers = || graph.layers.iter().filter(|i| **i < config.num_hidden_layers());
    let stream = vec![1, 1, config.hidden_size];
    let mut inputs = vec![info("hidden_in".to_owned(), stream.clone(), "hidden")];
    let mut outputs = vec![match graph.head {
        true => info("logits".to_owned(), vec![1, 1, config.vocab_size], "logits"),
        false => info("hidden_out".to_owned(), stream, "hidden"),
    }];
    for kind in kinds(config).filter(|kind| layers().any(|i| config.layer_types[*i] == *kind)) {
        let (word, pairs) = (word(kind), config.rope(kind).rotary_dims / 2);
        let length = capacity(manifest, config, kind) + 1;
        for (role, name, size) in
            [("rope_cos", "rope_cos", pairs), ("rope_sin", "rope_sin", pairs), ("mask", "mask", length)]
        {
            let port = info(format!("{name}_{word}"), vec![1, 1, 1, size], role);
            inputs.push(TensorInfo { layer_type: Some(word.to_owned()), ..port });
        }
    }
    let (heads, dim) = (config.num_key_value_heads, config.head_dim);
    for i in layers() {
        let capacity = capacity(manifest, config, config.layer_types[*i]);
        let returned = match manifest.caches.iter().find(|c| c.layer == *i) {
            Some(cache) if cache.returns == "cache" => capacity,
            _ => 1,
        };
        for (what, role, by_slot) in
            [("key", "key_cache", [heads, 1, dim, 0]), ("value", "value_cache", [heads, 1, 0, dim])]
        {
            let sized = |slots: usize| by_slot.map(|d| if d == 0 { slots } else { d }).to_vec();
            for (ports, suffix, slots) in [(&mut inputs, "in", capacity), (&mut outputs, "out", returned)] {
                let port = info(format!("past_{what}_{i}_{suffix}"), sized(slots), role);
                ports.push(TensorInfo { layer: Some(*i), ..port });
            }
        }
    }
    [inputs, outputs]
}

fn check_ports(graph: &GraphInfo, manifest: &DecodeManifest, config: &SparkConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (expected, found) in ports(graph, manifest, config).iter().zip([&graph.inputs, &graph.outputs]) {
        let subject = |name: &str| format!("{}.{name}", graph.name);
        for port in expected {
            let Some(info) = found.iter().find(|i| i.name == port.name) else {
                let what = format!("missing; a graph of layers {:?} has it", graph.layers);
                findings.push(finding(subject(&port.name), what, "a runtime does not feed or read it"));
                continue;
            };
            let form = |i: &TensorInfo| (i.shape.clone(), i.role.clone(), i.layer, i.layer_type.clone());
            if form(info) != form(port) {
                let told = |i: &TensorInfo| {
                    let layer = i.layer.map(|l| format!(" of layer {l}"));
                    let kind = i.layer_type.as_ref().map(|k| format!(" of {k} layers"));
                    format!("{} {:?}{}", i.role, i.shape, layer.or(kind).unwrap_or_default())
                };
                let what = format!("expected {}, found {}", told(port), told(info));
                findings.push(finding(
                    subject(&port.name),
                    what,
                    "a runtime feeds or reads it as something else",
                ));
            }
        }
        for info in found.iter().filter(|i| expected.iter().all(|port| port.name != i.name)) {
            let what = format!("a {} that the contract does not have", info.role);
            findings.push(finding(subject(&info.name), what, "a runtime does not know what it is"));
        }
    }
    findings
}

/// Encodings of inputs and outputs, as far as their role says something about them.
fn check_encodings(graph: &GraphInfo, manifest: &DecodeManifest) -> Vec<Finding> {
    let mut findings = Vec::new();
    for info in graph.inputs.iter().chain(&graph.outputs) {
        let subject = format!("{}.{}", graph.name, info.name);
        let mut fail = |what: String, consequence: &str| findings.push(finding(&*subject, what, consequence));
        if !is_quantized(manifest) {
            if info.dtype != "float32" || info.encoding.is_some() {
                fail(
                    format!("expected float32 without an encoding, found {}", shown(info)),
                    "floats are fed as codes",
                );
            }
            continue;
        }
        let Some(encoding) = &info.encoding else {
            fail("expected an encoding, found none".to_owned(), "a runtime cannot make codes of reals");
            continue;
        };
        let Some(codes) = codes_of(&info.dtype).filter(|_| encoding.dtype == info.dtype) else {
            let what = format!("expected codes of {}, found an encoding in {}", info.dtype, encoding.dtype);
            fail(what, "a runtime writes codes of another type");
            continue;
        };
        #[expect(clippy::cast_possible_truncation, reason = "that it is an f32 is what is checked")]
        let single = encoding.scale as f32;
        if !single.is_normal() || single < 0.0 || f64::from(single).to_bits() != encoding.scale.to_bits() {
            fail(format!("expected a positive f32 as scale, found {}", encoding.scale), "codes mean nothing");
        }
        if !(codes.0..=codes.1).contains(&encoding.zero_point) {
            fail(format!("zero point {} is no {}", encoding.zero_point, info.dtype), "zero has no code");
        }
        match info.role.as_str() {
            "rope_cos" | "rope_sin" if !holds(encoding, codes, -1.0, 1.0) => {
                fail(format!("{} does not reach from -1 to 1", shown(info)), "rotations are clipped");
            }
            "mask" => findings.extend(check_mask(&subject, info, encoding, codes, manifest)),
            "key_cache" | "value_cache" => {
                let middle = i64::midpoint(codes.0, codes.1 + 1);
                if encoding.zero_point != middle {
                    let what = format!("expected zero point {middle}, found {}", encoding.zero_point);
                    fail(what, "QNN takes the second operand of a product of activations symmetric only");
                }
            }
            _ => {}
        }
    }
    findings.extend(check_cache_encodings(graph, manifest));
    findings
}

/// Blocked is the lowest code and attending is zero.
fn check_mask(
    subject: &str,
    info: &TensorInfo,
    encoding: &EncodingInfo,
    codes: (i64, i64),
    manifest: &DecodeManifest,
) -> Vec<Finding> {
    let Some(mask) = info.layer_type.as_ref().and_then(|kind| manifest.masks.get(kind)) else {
        return Vec::new();
    };
    let code = |real: f64| (real / encoding.scale).round_ties_even() + encoding.zero_point as f64;
    let (blocked, attend) = (code(mask.blocked), code(mask.attend));
    let mut findings = Vec::new();
    if (blocked - codes.0 as f64).abs() > 1.0 {
        let what = format!("blocked, {}, has code {blocked}, expected {}", mask.blocked, codes.0);
        findings.push(finding(subject, what, "blocked positions are seen, or steps of the range are wasted"));
    }
    if attend != encoding.zero_point as f64 || attend > codes.1 as f64 {
        let what =
            format!("attend, {}, has code {attend}, and zero has {}", mask.attend, encoding.zero_point);
        findings.push(finding(subject, what, "scores of positions that are seen are shifted"));
    }
    findings
}

/// What a graph returns is written into the cache as it is.
fn check_cache_encodings(graph: &GraphInfo, manifest: &DecodeManifest) -> Vec<Finding> {
    let mut findings = Vec::new();
    for cache in manifest.caches.iter().filter(|c| graph.layers.contains(&c.layer)) {
        for tensors in [&cache.key, &cache.value] {
            let input = graph.inputs.iter().find(|i| i.name == tensors.input);
            let output = graph.outputs.iter().find(|o| o.name == tensors.output);
            let (Some(input), Some(output)) = (input, output) else { continue };
            if (&input.dtype, &input.encoding) != (&output.dtype, &output.encoding) {
                let what =
                    format!("{} is {}, {} is {}", input.name, shown(input), output.name, shown(output));
                let consequence =
                    "the runtime moves codes: entries would mean other values once they are cached";
                findings.push(finding(format!("{}.{}", graph.name, output.name), what, consequence));
            }
        }
    }
    findings
}

/// Whether `low` and `high` have codes, to a step.
fn holds(encoding: &EncodingInfo, codes: (i64, i64), low: f64, high: f64) -> bool {
    let real = |code: i64| (code as f64 - encoding.zero_point as f64) * encoding.scale;
    real(codes.0) <= low + encoding.scale && real(codes.1) >= high - encoding.scale
}
