//! Weight SNR of every grid on the referee's fixed matrices, against the levels that it expects.
//!
//! A level may be above the expected one, where a search is better than the referee's.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use safetensors::SafeTensors;
use serde_json::Value;
use spark_convert::quant::int4::symmetric::{self, Signs};
use spark_convert::quant::int4::{affine, zero_point};
use spark_convert::quant::{ErrorSums, Method, int8};
use spark_convert::tensor::{TensorView, amax_bits};

use crate::command::process::{program, run};

/// How far below the expected level a grid may be; for plain rounding, which is a rule, above too.
const TOLERANCE_DB: f64 = 0.1;
const GROUPS: [usize; 3] = [128, 64, 32];

/// Makes the matrices and compares.
pub(super) fn check(dir: &Path, python: &str) -> Result<()> {
    let temp = tempfile::tempdir()?;
    run(program(python).arg(dir.join("grid_reference.py")).args(["make", "--out"]).arg(temp.path()))?;
    let bytes = fs::read(temp.path().join("matrices.safetensors"))?;
    let matrices = SafeTensors::deserialize(&bytes)?;
    let golden: Value = serde_json::from_slice(&fs::read(dir.join("golden/snr_levels.json"))?)?;
    let levels = golden["levels_db"].as_object().context("levels_db")?;
    ensure!(levels.len() == matrices.len(), "matrices and levels differ");
    for (name, expected) in levels {
        let matrix = matrices.tensor(name)?;
        let view = TensorView { name, dtype: matrix.dtype(), shape: matrix.shape(), bytes: matrix.data() };
        one_matrix(view, expected)?;
    }
    Ok(())
}

fn one_matrix(matrix: TensorView<'_>, expected: &Value) -> Result<()> {
    let name = matrix.name;
    // Of a grid whose rounding and search have levels of their own, if the referee has them.
    let judge = |grid: &str, rtn: f64, search: f64, levels: [Option<String>; 2]| -> Result<()> {
        let [rtn_level, search_level] = levels.map(|key| key.map(|key| expected[&key].as_f64().context(key)));
        let (rtn_level, search_level) = (rtn_level.transpose()?, search_level.transpose()?);
        let told = |level: Option<f64>| level.map(|l| format!(" (expected {l:.2})")).unwrap_or_default();
        println!(
            "{name}: {grid} {rtn:.2} dB{}, search {search:.2} dB{}",
            told(rtn_level),
            told(search_level)
        );
        if let Some(level) = rtn_level {
            ensure!(
                (rtn - level).abs() <= TOLERANCE_DB,
                "{name}, {grid}: off by more than {TOLERANCE_DB} dB"
            );
        }
        if let Some(level) = search_level {
            ensure!(search >= level - TOLERANCE_DB, "{name}, {grid}: the search is below {level} dB");
        }
        ensure!(search >= rtn, "{name}, {grid}: the search is below rounding");
        Ok(())
    };
    let rows = |method| {
        snr_db(matrix, matrix.row_len(), |weights, codes| {
            let scale = int8::row_scale(weights, f32::from_bits(amax_bits(weights)), method);
            int8::encode_row(weights, scale, codes);
            int8::row_error(weights, codes, scale)
        })
    };
    let (rtn, search) = (rows(Method::RoundToNearest), rows(Method::Search));
    judge("int8", rtn, search, [Some("int8 channel amax/127".into()), None])?;
    for g in GROUPS {
        let symmetric = |method| {
            snr_db(matrix, g, |weights, codes| {
                let scale = symmetric::quantize_group(weights, None, method, Signs::Both, codes);
                symmetric::group_error(weights, codes, scale)
            })
        };
        let zero_point = |method| {
            snr_db(matrix, g, |weights, codes| {
                let (scale, zero) = zero_point::quantize_group(weights, None, method, codes);
                zero_point::group_error(weights, codes, scale, zero)
            })
        };
        let affine = |method| {
            snr_db(matrix, g, |weights, codes| {
                let (scale, zero) = affine::quantize_group(weights, None, method, codes);
                affine::group_error(weights, codes, scale, zero)
            })
        };
        let (rtn, signed) = (symmetric(Method::RoundToNearest), symmetric(Method::Search));
        let levels = [format!("sym g{g} amax/7"), format!("sym g{g} signed search")].map(Some);
        judge(&format!("symmetric g{g}"), rtn, signed, levels)?;
        let (rtn, search) = (zero_point(Method::RoundToNearest), zero_point(Method::Search));
        judge(&format!("zero point g{g}"), rtn, search, [None, None])?;
        // The symmetric grid of either sign is among its cases.
        ensure!(search >= signed, "{name}, zero point g{g}: below the symmetric grid");
        let (rtn, search) = (affine(Method::RoundToNearest), affine(Method::Search));
        let levels = [format!("asym g{g} min/max"), format!("asym g{g} two-ended + 2 refits")].map(Some);
        judge(&format!("affine g{g}"), rtn, search, levels)?;
    }
    Ok(())
}

/// Signal to noise of a matrix that is quantized in groups of a length: `quantize` gets the weights of
/// one and room for its codes.
fn snr_db<Code: Clone + Default>(
    matrix: TensorView<'_>,
    group: usize,
    mut quantize: impl FnMut(&[f32], &mut [Code]) -> ErrorSums,
) -> f64 {
    let mut weights = vec![0.0; matrix.row_len()];
    let mut codes = vec![Code::default(); group];
    let mut sums = ErrorSums::default();
    for row in 0..matrix.rows() {
        matrix.decode_row(row, &mut weights);
        for weights in weights.chunks_exact(group) {
            sums += quantize(weights, &mut codes);
        }
    }
    sums.snr_db().unwrap_or(f64::INFINITY)
}
