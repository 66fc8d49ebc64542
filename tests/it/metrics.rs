//! Figures of `verify` against numpy's, from the same logits.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use spark_convert::metrics::{Comparison, Greedy, Position};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/goldens/metrics")
}

/// Equal, numbers to 1e-9 of themselves or of one.
#[track_caller]
fn close(place: &str, found: &Value, expected: &Value) {
    match (found, expected) {
        (Value::Object(f), Value::Object(e)) => {
            assert_eq!(f.keys().collect::<Vec<_>>(), e.keys().collect::<Vec<_>>(), "{place}");
            e.iter().for_each(|(key, value)| close(&format!("{place}.{key}"), &f[key], value));
        }
        (Value::Number(f), Value::Number(e)) => {
            let (f, e) = (f.as_f64().unwrap(), e.as_f64().unwrap());
            assert!((f - e).abs() <= 1e-9 * e.abs().max(1.0), "{place}: {f}, and numpy has {e}");
        }
        _ => assert_eq!(found, expected, "{place}"),
    }
}

#[test]
fn every_figure_is_numpys() {
    let mut compared = 0;
    for entry in fs::read_dir(goldens()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "json") {
            continue;
        }
        let golden: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let bytes = fs::read(path.with_extension("bin")).unwrap();
        let logits: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let vocab = usize::try_from(golden["vocab"].as_u64().unwrap()).unwrap();
        let prompt_tokens = usize::try_from(golden["prompt_tokens"].as_u64().unwrap()).unwrap();
        let (reference, other) = logits.split_at(logits.len() / 2);
        let (mut first, mut second, mut greedy) =
            (Comparison::default(), Comparison::default(), Greedy::start());
        for (i, (r, y)) in reference.chunks(vocab).zip(other.chunks(vocab)).enumerate() {
            let next = golden["next"].get(i).map(|t| u32::try_from(t.as_u64().unwrap()).unwrap());
            // In two parts, as scenarios are.
            let part = if i < 7 { &mut first } else { &mut second };
            part.add(Position::before(r, y, next));
            if i + 1 >= prompt_tokens {
                greedy.add(r, y);
            }
        }
        first.merge(&second);
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        close(&name, &json!(first.summary(vocab)), &golden["summary"]);
        close(&name, &json!(greedy), &golden["greedy"]);
        compared += 1;
    }
    assert!(compared > 0);
}
