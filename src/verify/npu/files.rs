//! The files of an export, opened for judging: what cannot be opened is a finding, not an error.

use memmap2::Mmap;
use rayon::prelude::*;
use serde_json::Value;

use crate::artifact::{Manifest, TensorRecord, hash_bytes};
use crate::checkpoint::ModelDir;
use crate::error::Result;
use crate::npu::manifest::{DATA_FILE, DECODE_MANIFEST_FILE, DecodeManifest, MODEL_FILE};
use crate::npu::options::Precision;
use crate::onnx::Model;
use crate::verify::integrity::{check_files, differs};
use crate::verify::{Check, Finding};

/// A graph that could be opened.
pub(super) struct OpenedGraph {
    pub(super) model: Model,
    pub(super) data: Mmap,
}

/// The manifest of an export and its graphs.
pub struct ExportFiles {
    manifest: DecodeManifest,
    /// As it stands, with the keys that are not read.
    pub(super) json: Value,
    precision: Precision,
    /// As the manifest lists them; `None` where one could not be opened.
    pub(super) graphs: Vec<Option<OpenedGraph>>,
    pub(super) embedding: Option<Mmap>,
}

impl ExportFiles {
    /// Opens what can be opened, and says what cannot.
    ///
    /// # Errors
    /// When there is no manifest to go by.
    pub fn open(dir: &ModelDir) -> Result<(Self, Vec<Finding>), Finding> {
        let unreadable = |what: String| {
            Finding::new(Check::Contract, DECODE_MANIFEST_FILE, what).consequence("no runtime starts")
        };
        let json = dir.read_json(DECODE_MANIFEST_FILE).map_err(|e| unreadable(e.to_string()))?;
        let manifest: DecodeManifest =
            serde_json::from_value(json.clone()).map_err(|e| unreadable(e.to_string()))?;
        let precision = Precision::from_name(&manifest.precision).ok_or_else(|| {
            unreadable(format!("{:?} is not known to this version", manifest.precision)).subject("precision")
        })?;
        let (mut graphs, mut findings) = (Vec::new(), Vec::new());
        for graph in &manifest.graphs {
            match open_graph(dir, &graph.file, &graph.data) {
                Ok(opened) => graphs.push(Some(opened)),
                Err(finding) => {
                    findings.push(finding);
                    graphs.push(None);
                }
            }
        }
        let embedding = dir.map(&manifest.embedding.file);
        if let Err(e) = &embedding {
            findings.push(
                Finding::new(Check::Contract, DECODE_MANIFEST_FILE, e.to_string())
                    .subject("embedding.file")
                    .consequence("a runtime has no rows for hidden_in"),
            );
        }
        Ok((Self { manifest, json, precision, graphs, embedding: embedding.ok() }, findings))
    }

    /// The runtime's contract.
    pub fn manifest(&self) -> &DecodeManifest {
        &self.manifest
    }

    /// Types of weights and activations.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Compares every file and every constant of a weight with the artifact's manifest.
    pub fn check_integrity(&self, dir: &ModelDir, manifest: &Manifest) -> Vec<Finding> {
        let mut findings = check_files(dir, manifest);
        findings.extend(self.strangers(dir));
        findings.par_extend(manifest.tensors.par_iter().filter_map(|record| self.check_tensor(record)));
        findings
    }

    /// Files beside a graph that are not its own.
    fn strangers(&self, dir: &ModelDir) -> Vec<Finding> {
        let mut findings = Vec::new();
        for graph in &self.manifest.graphs {
            let names = dir.sub_dir(&graph.name).and_then(|sub| sub.file_names());
            for name in
                names.unwrap_or_default().iter().filter(|n| ![MODEL_FILE, DATA_FILE].contains(&n.as_str()))
            {
                findings.push(
                    Finding::new(
                        Check::Integrity,
                        format!("{}/{name}", graph.name),
                        "not a file of this export",
                    )
                    .consequence("AI Hub refuses a model directory with anything else in it"),
                );
            }
        }
        findings
    }

    fn check_tensor(&self, record: &TensorRecord) -> Option<Finding> {
        let finding =
            |what: String| Some(Finding::new(Check::Integrity, &record.file, what).subject(&record.name));
        let index = self.manifest.graphs.iter().position(|g| g.data == record.file)?;
        let graph = self.graphs[index].as_ref()?;
        let Some(initializer) = graph.model.graph.initializers.iter().find(|i| i.name == record.name) else {
            return finding("missing, and the manifest lists it".to_owned());
        };
        // What reaches past the end is a finding of the contract.
        let bytes = initializer.bytes(&graph.data).ok()?;
        if bytes.len() as u64 != record.bytes {
            return finding(format!("expected {} bytes, found {}", record.bytes, bytes.len()));
        }
        let found = hash_bytes(bytes);
        if found == record.sha256 { None } else { finding(differs(&record.sha256, &found)) }
    }
}

fn open_graph(dir: &ModelDir, file: &str, data: &str) -> Result<OpenedGraph, Finding> {
    let finding = |file: &str, what: String| {
        Finding::new(Check::Contract, file, what).consequence("no consumer loads the graph")
    };
    let beside = |path: &str| match path.split_once('/') {
        Some((sub, name)) => dir.sub_dir(sub).map(|sub| (sub, name.to_owned())),
        None => Ok((dir.clone(), path.to_owned())),
    };
    let (sub, model) = beside(file).map_err(|e| finding(file, e.to_string()))?;
    let (data_dir, data_name) = beside(data).map_err(|e| finding(data, e.to_string()))?;
    let bytes = sub.read(&model).map_err(|e| finding(file, e.to_string()))?;
    let model = Model::decode(&bytes, &data_name).map_err(|e| finding(file, e.to_string()))?;
    let data = data_dir.map(&data_name).map_err(|e| finding(data, e.to_string()))?;
    Ok(OpenedGraph { model, data })
}
