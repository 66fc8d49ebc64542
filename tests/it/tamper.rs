//! Changing what an artifact holds and hiding it: every hash is made to fit.

use std::fs;
use std::path::Path;

use serde_json::json;
use sha2::{Digest, Sha256};
use spark_convert::onnx::Model as Onnx;

use crate::runs::{Model, Run, Tensors, edit_json, read_json, shards, write_json};

const MANIFEST: &str = "spark-convert.json";

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Makes every hash of the manifest fit what is there, as somebody would who wants to hide a change.
pub(crate) fn repair_hashes(out: &Path) {
    edit_json(&out.join(MANIFEST), |m| {
        let tensors: std::collections::BTreeMap<_, _> =
            shards(out).iter().flat_map(|p| Tensors::read(p).tensors).map(|t| (t.0, t.3)).collect();
        m["tensors"].as_array_mut().unwrap().retain(|t| tensors.contains_key(t["name"].as_str().unwrap()));
        for tensor in m["tensors"].as_array_mut().unwrap() {
            let bytes = &tensors[tensor["name"].as_str().unwrap()];
            tensor["sha256"] = sha256(bytes).into();
            tensor["bytes"] = bytes.len().into();
        }
        repair_files(out, m);
    });
    seal(out);
}

/// The same for an NPU export, whose tensors are constants of graphs.
pub(crate) fn repair_export_hashes(out: &Path) {
    edit_json(&out.join(MANIFEST), |m| {
        let mut opened: std::collections::BTreeMap<String, (Onnx, Vec<u8>)> =
            std::collections::BTreeMap::new();
        for tensor in m["tensors"].as_array_mut().unwrap() {
            let graph = tensor["file"].as_str().unwrap().split('/').next().unwrap().to_owned();
            let (model, data) = opened.entry(graph).or_insert_with_key(|graph| {
                let data = fs::read(out.join(graph).join("model.data")).unwrap();
                (read_onnx(out, graph), data)
            });
            let constant =
                model.graph.initializers.iter().find(|i| i.name == tensor["name"].as_str().unwrap());
            // What was cut off has no hash.
            if let Ok(bytes) = constant.unwrap().bytes(data) {
                tensor["sha256"] = sha256(bytes).into();
            }
        }
        repair_files(out, m);
    });
    seal(out);
}

/// A graph of an export.
pub(crate) fn read_onnx(out: &Path, graph: &str) -> Onnx {
    Onnx::decode(&fs::read(out.join(graph).join("model.onnx")).unwrap(), "model.data").unwrap()
}

/// Changes a graph of an export; the hashes are not repaired.
pub(crate) fn edit_onnx(out: &Path, graph: &str, edit: impl FnOnce(&mut spark_convert::onnx::Graph)) {
    let mut model = read_onnx(out, graph);
    edit(&mut model.graph);
    fs::write(out.join(graph).join("model.onnx"), model.encode("model.data").unwrap()).unwrap();
}

fn repair_files(out: &Path, manifest: &mut serde_json::Value) {
    let names: Vec<String> = manifest["files"].as_object().unwrap().keys().cloned().collect();
    for name in names {
        let bytes = fs::read(out.join(&name)).unwrap();
        manifest["files"][&name] = json!({"bytes": bytes.len(), "sha256": sha256(&bytes)});
    }
}

fn seal(out: &Path) {
    let path = out.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    let old = read_json(&path)["self_sha256"].as_str().unwrap().to_owned();
    let blank = text.replacen(&old, &"0".repeat(64), 1);
    fs::write(&path, text.replacen(&old, &sha256(blank.as_bytes()), 1)).unwrap();
}

/// Changes the shards, the index and the hashes.
pub(crate) fn tamper(model: &Model, mut edit: impl FnMut(&mut Tensors)) {
    let mut map = serde_json::Map::new();
    let mut total = 0;
    for path in shards(&model.out()) {
        let mut file = Tensors::read(&path);
        edit(&mut file);
        file.write(&path);
        for (name, _, _, bytes) in &file.tensors {
            map.insert(name.clone(), path.file_name().unwrap().to_str().unwrap().into());
            total += bytes.len();
        }
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    write_json(&model.out().join("model.safetensors.index.json"), &index);
    repair_hashes(&model.out());
}

#[track_caller]
pub(crate) fn fails_with(model: &Model, words: &[&str]) -> Run {
    let run = model.verify(&[]).expect(1);
    for word in words {
        assert!(run.stdout.contains(word), "{word:?} in {}", run.stdout);
    }
    run
}
