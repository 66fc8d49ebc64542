//! `gates.toml`: bars for every artifact, for a scheme, for a scenario.
//!
//! ```toml
//! max_kld = 0.05            # every artifact
//!
//! [scenario.long]           # one scenario of every artifact
//! min_greedy = 0.5
//!
//! [scheme.w8a8]             # artifacts of one scheme
//! min_snr_db = 30
//!
//! [scheme.w8a8.scenario.agent-last-step]
//! min_actions = 1.0
//! ```

use toml::{Table, Value};

use super::{Bar, Metric, overlay};
use crate::error::InputError;

/// Schemes that artifacts have: a table of another name would never be looked at.
const SCHEMES: [&str; 4] = [
    crate::formats::W8a8::SCHEME,
    crate::formats::W4a8::SCHEME,
    crate::formats::W4a16::SCHEME,
    crate::npu::options::Options::SCHEME,
];

/// Bars of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GateFile {
    everywhere: Vec<Bar>,
    schemes: Vec<(String, Vec<Bar>)>,
}

impl GateFile {
    /// Reads the text of the file `name`.
    ///
    /// # Errors
    /// What is not TOML, or not a bar: unknown keys, schemes and values are mistakes, never ignored.
    pub fn parse(name: &str, text: &str) -> Result<Self, InputError> {
        let file = || InputError::file(name);
        let mut table: Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
            file().subject(format!("line {line}")).expected("TOML").found(e.message())
        })?;
        let mut schemes = Vec::new();
        for (scheme, bars) in tables(table.remove("scheme"), "scheme").map_err(|e| e.of(name))? {
            if !SCHEMES.contains(&scheme.as_str()) {
                return Err(file()
                    .subject(format!("scheme.{scheme}"))
                    .expected(format!("one of {}", SCHEMES.join(", ")))
                    .found("another"));
            }
            let path = format!("scheme.{scheme}.");
            schemes.push((scheme, bars_of(bars, &path).map_err(|e| e.of(name))?));
        }
        let everywhere = bars_of(table, "").map_err(|e| e.of(name))?;
        if everywhere.is_empty() && schemes.iter().all(|(_, bars)| bars.is_empty()) {
            return Err(file().found("no gate").hint("a file that holds nothing to anything is a mistake"));
        }
        Ok(Self { everywhere, schemes })
    }

    /// The bars for an artifact of a scheme: those of the scheme over those for all.
    pub fn bars(&self, scheme: &str) -> Vec<Bar> {
        let mut bars = self.everywhere.clone();
        for (_, over) in self.schemes.iter().filter(|(name, _)| name == scheme) {
            overlay(&mut bars, over);
        }
        bars
    }

    /// All bars of the file.
    pub fn all(&self) -> impl Iterator<Item = &Bar> {
        self.everywhere.iter().chain(self.schemes.iter().flat_map(|(_, bars)| bars))
    }
}

/// A mistake at a key.
struct Mistake {
    key: String,
    expected: String,
    found: String,
}

impl Mistake {
    fn of(self, file: &str) -> InputError {
        InputError::file(file).subject(self.key).expected(self.expected).found(self.found)
    }
}

/// The tables inside a table.
fn tables(value: Option<Value>, path: &str) -> Result<Vec<(String, Table)>, Mistake> {
    let table = match value {
        None => return Ok(Vec::new()),
        Some(Value::Table(table)) => table,
        Some(other) => {
            return Err(Mistake {
                key: path.to_owned(),
                expected: format!("tables [{path}.NAME]"),
                found: other.type_str().to_owned(),
            });
        }
    };
    table
        .into_iter()
        .map(|(name, value)| match value {
            Value::Table(table) => Ok((name, table)),
            other => Err(Mistake {
                key: format!("{path}.{name}"),
                expected: "a table".to_owned(),
                found: other.type_str().to_owned(),
            }),
        })
        .collect()
}

/// The bars of a table, and those of the scenarios in it.
fn bars_of(mut table: Table, path: &str) -> Result<Vec<Bar>, Mistake> {
    let mut bars = Vec::new();
    let scenarios = tables(table.remove("scenario"), &format!("{path}scenario"))?;
    for (key, value) in table {
        bars.push(bar(path, &key, &value, None)?);
    }
    for (scenario, table) in scenarios {
        for (key, value) in table {
            bars.push(bar(&format!("{path}scenario.{scenario}."), &key, &value, Some(&scenario))?);
        }
    }
    Ok(bars)
}

fn bar(path: &str, key: &str, value: &Value, scenario: Option<&str>) -> Result<Bar, Mistake> {
    let known: Vec<Metric> =
        Metric::ALL.into_iter().filter(|m| scenario.is_none() || m.is_per_scenario()).collect();
    let mistake = |expected: String, found: String| Mistake { key: format!("{path}{key}"), expected, found };
    let Some(metric) = known.iter().find(|m| m.key() == key) else {
        let keys: Vec<_> = known.iter().map(|m| m.key()).collect();
        return Err(mistake(format!("one of {}", keys.join(", ")), "another key".to_owned()));
    };
    #[expect(clippy::cast_precision_loss, reason = "a bar, not an id")]
    let number = match value {
        Value::Float(x) => Some(*x),
        Value::Integer(x) => Some(*x as f64),
        _ => None,
    };
    let shown = || number.map_or_else(|| value.type_str().to_owned(), |x| x.to_string());
    match number.map(|x| (x, metric.check(x))) {
        Some((bar, Ok(()))) => {
            Ok(Bar { metric: *metric, scenario: scenario.map(str::to_owned), bar, asked: true })
        }
        Some((_, Err(expected))) => Err(mistake(expected.to_owned(), shown())),
        None => Err(mistake("a number".to_owned(), shown())),
    }
}
