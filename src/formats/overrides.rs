//! Modules that are stored in another width than the rest of an artifact.
//!
//! Every target of a compressed-tensors configuration has `weights` of its own, group size included, and vLLM makes
//! the scheme of a linear from the target that it matches (`target_scheme_map`; builds of two widths and of two group
//! sizes were loaded). It looks for the linear's name among the targets first, for its class next, and for the names of the
//! tensors that it is joined from last (`find_matched_target`); a module to be ignored goes by the names of
//! those tensors alone (`should_ignore_layer`). So the expressions match both.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::spark::{Module, SparkConfig, TensorSpec, tensor_specs};

/// What a module is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 4 bits as the other modules have them, in groups of 128.
    Groups128,
    /// In groups of 64.
    Groups64,
    /// In groups of 32.
    Groups32,
    /// int8 per output channel, as [`super::W8a8`] stores it.
    Int8,
    /// As the source has it.
    Source,
}

impl Width {
    /// All of them, the fewest bytes first.
    pub const ALL: [Self; 5] = [Self::Groups128, Self::Groups64, Self::Groups32, Self::Int8, Self::Source];

    /// As options spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Groups128 => "g128",
            Self::Groups64 => "g64",
            Self::Groups32 => "g32",
            Self::Int8 => "int8",
            Self::Source => "bf16",
        }
    }

    /// Weights of a group, of 4 bits.
    pub fn group_size(self) -> Option<usize> {
        match self {
            Self::Groups128 => Some(128),
            Self::Groups64 => Some(64),
            Self::Groups32 => Some(32),
            Self::Int8 | Self::Source => None,
        }
    }

    /// The inverse of [`Width::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|width| width.name() == name)
    }
}

/// Widths by module name (`model.layers.3.mlp.down_proj`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides(BTreeMap<String, Width>);

impl Overrides {
    /// Resolves `PATTERN=WIDTH` against the projections of a model; a `*` stands for any text, and of
    /// patterns that meet in a module the last one holds.
    ///
    /// # Errors
    /// The pattern that is none, meets nothing, or leaves two modules apart that a loader joins.
    pub fn resolve(patterns: &[String], config: &SparkConfig) -> Result<Self, String> {
        let specs = tensor_specs(config);
        let names: Vec<&str> = specs.iter().filter(|s| s.module.is_projection()).map(module).collect();
        let mut widths = BTreeMap::new();
        for text in patterns {
            let parsed = text.rsplit_once('=').and_then(|(p, width)| Some((p, Width::from_name(width)?)));
            let Some((pattern, width)) = parsed else {
                return Err(format!(
                    "{text}: expected PATTERN=int8, PATTERN=bf16 or a group size, as PATTERN=g64"
                ));
            };
            let met: Vec<&&str> = names.iter().filter(|name| matches(pattern, name)).collect();
            if met.is_empty() {
                let example = names.last().copied().unwrap_or_default();
                return Err(format!(
                    "{text}: no projection of a layer has such a name; names are like {example}, and the head has --head"
                ));
            }
            widths.extend(met.into_iter().map(|name| ((*name).to_owned(), width)));
        }
        let overrides = Self(widths);
        overrides.check()?;
        Ok(overrides)
    }

    /// vLLM joins gate and up into one module.
    fn check(&self) -> Result<(), String> {
        let torn = self.0.iter().find_map(|(name, width)| {
            let other = match name.strip_suffix("gate_proj") {
                Some(mlp) => format!("{mlp}up_proj"),
                None => format!("{}gate_proj", name.strip_suffix("up_proj")?),
            };
            (self.0.get(&other) != Some(width)).then_some((name, other))
        });
        match torn {
            Some((name, other)) => {
                Err(format!("{name} and {other} are one module to vLLM: give both the same width"))
            }
            None => Ok(()),
        }
    }

    /// The same, and these modules (without `.weight`) in a width.
    #[must_use]
    pub fn and<'a>(mut self, modules: impl IntoIterator<Item = &'a str>, width: Width) -> Self {
        self.0.extend(modules.into_iter().map(|name| (name.to_owned(), width)));
        self
    }

    /// The same without those that have a width anyhow.
    #[must_use]
    pub fn without(mut self, width: Width) -> Self {
        self.0.retain(|_, w| *w != width);
        self
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a module is stored in, if not what the others are.
    pub fn of(&self, module: Module, layer: Option<usize>) -> Option<Width> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&format!("model.layers.{}.{}", layer?, path(module)?)).copied()
    }

    /// For the manifest: widths by name.
    pub fn to_json(&self) -> Value {
        let widths: Map<String, Value> =
            self.0.iter().map(|(name, width)| (name.clone(), width.name().into())).collect();
        Value::Object(widths)
    }

    /// The inverse of [`Overrides::to_json`].
    pub fn from_json(json: &Value) -> Option<Self> {
        let width = |(name, width): (&String, &Value)| {
            let module = name.strip_prefix("model.layers.")?.split_once('.')?.1;
            PATHS.iter().find(|(_, path)| *path == module)?;
            Some((name.clone(), Width::from_name(width.as_str()?)?))
        };
        let overrides = Self(json.as_object()?.iter().map(width).collect::<Option<_>>()?);
        overrides.check().is_ok().then_some(overrides)
    }

    /// Expressions that match the modules of a width from the start of a dotted name, one per kind of module;
    /// what stands before `layers` depends on the loader.
    pub fn expressions(&self, width: Width) -> Vec<String> {
        let layers = |path: &str| -> Vec<usize> {
            let number = |(name, w): (&String, &Width)| {
                let (layer, module) = name.strip_prefix("model.layers.")?.split_once('.')?;
                if *w == width && module == path { layer.parse().ok() } else { None }
            };
            let mut numbers: Vec<usize> = self.0.iter().filter_map(number).collect();
            numbers.sort_unstable();
            numbers
        };
        PATHS
            .iter()
            .map(|(module, path)| (expression(*module, path), layers(path)))
            .filter(|(_, layers)| !layers.is_empty())
            .map(|(expression, layers)| {
                let layers: Vec<String> = layers.iter().map(ToString::to_string).collect();
                format!(r"re:.*layers\.({})\.{expression}$", layers.join("|"))
            })
            .collect()
    }
}

/// What matches a module and, where vLLM joins it with others or calls it joined, those names as well.
fn expression(module: Module, path: &str) -> String {
    match module {
        Module::QkvProj => r"self_attn\.(q_k_v|q|k|v)_proj".to_owned(),
        Module::MlpGate => r"mlp\.gate_(up_)?proj".to_owned(),
        _ => path.replace('.', r"\."),
    }
}

const PATHS: [(Module, &str); 5] = [
    (Module::QkvProj, "self_attn.q_k_v_proj"),
    (Module::OutProj, "self_attn.out_proj"),
    (Module::MlpGate, "mlp.gate_proj"),
    (Module::MlpUp, "mlp.up_proj"),
    (Module::MlpDown, "mlp.down_proj"),
];

fn path(module: Module) -> Option<&'static str> {
    PATHS.iter().find(|(m, _)| *m == module).map(|(_, path)| *path)
}

fn module(spec: &TensorSpec) -> &str {
    crate::plan::module_of(&spec.name)
}

/// Whether a name is what a pattern says, where `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        // The first place is as good as any for what is not the end.
        if let Some(part) = last.replace(part) {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
    }
    match last {
        Some(end) => rest.ends_with(end),
        None => rest.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        let name = "model.layers.12.mlp.down_proj";
        for pattern in [name, "*", "*down_proj", "model.*", "model.layers.1*.mlp.*", "*.12.*", "*12*d*n_proj"]
        {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in
            ["", "down_proj", "*.1.*", "model", "*up_proj", "model.layers.12.mlp.down_proj.", "*x*"]
        {
            assert!(!matches(pattern, name), "{pattern}");
        }
        // The end may not overlap with what is before it.
        assert!(!matches("*.12.mlp.down_proj*down_proj", name));
    }
}
