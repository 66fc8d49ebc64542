//! How much of a matrix's columns to move into its inputs.
//!
//! Where `y = W x`, a column of `W` may be multiplied by `s` if the input of that column is divided by it.
//! With inputs in int8 that takes a wide channel from the inputs, where it costs every other one its steps,
//! to the weights; with weights in groups it moves error to columns that count less.
//!
//! Factors are powers of two: moving one is exact in every binary format, so the function stays what it was
//! to the bit, and tensors that are not quantized lose nothing.
//!
//! Sources: Xiao et al., "SmoothQuant" (`s = max|x|^a / max|w|^(1 - a)`); Lin et al., "AWQ"
//! (`s = mean|x|^a`). The candidates here are points of both rules.

/// Largest exponent that is moved, in either direction.
pub const MAX_EXPONENT: i8 = 15;

/// What is known of a matrix's input columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Columns {
    /// Largest absolute input, `[in]`.
    pub input_max: Vec<f32>,
    /// Mean absolute input, `[in]`.
    pub input_mean: Vec<f32>,
    /// Largest absolute weight of the column over all matrices that read it, `[in]`.
    pub weight_max: Vec<f32>,
}

/// `s = input^a / weight^b`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rule {
    mean: bool,
    input: f32,
    weight: f32,
}

const RULES: [Rule; 8] = [
    Rule { mean: false, input: 0.25, weight: 0.75 },
    Rule { mean: false, input: 0.5, weight: 0.5 },
    Rule { mean: false, input: 0.75, weight: 0.25 },
    Rule { mean: false, input: 1.0, weight: 0.0 },
    Rule { mean: true, input: 0.25, weight: 0.0 },
    Rule { mean: true, input: 0.5, weight: 0.0 },
    Rule { mean: true, input: 0.75, weight: 0.25 },
    Rule { mean: false, input: 0.0, weight: 1.0 },
];

/// Exponents to try, `[in]` each: columns are multiplied by `2^e`, inputs divided by it. Equal ones and those
/// that move nothing are left out.
pub fn candidates(columns: &Columns) -> Vec<Vec<i8>> {
    let mut all: Vec<Vec<i8>> = Vec::new();
    for rule in RULES {
        let exponents = exponents(columns, rule);
        if exponents.iter().any(|e| *e != 0) && !all.contains(&exponents) {
            all.push(exponents);
        }
    }
    all
}

fn exponents(columns: &Columns, rule: Rule) -> Vec<i8> {
    let inputs = if rule.mean { &columns.input_mean } else { &columns.input_max };
    let log = |(x, w): (&f32, &f32)| {
        // A column without inputs, or without weights, has nothing to move.
        (*x > 0.0 && *w > 0.0).then(|| rule.input * x.log2() - rule.weight * w.log2())
    };
    let logs: Vec<Option<f32>> = inputs.iter().zip(&columns.weight_max).map(log).collect();
    let mut sorted: Vec<f32> = logs.iter().flatten().copied().collect();
    sorted.sort_by(f32::total_cmp);
    let Some(&middle) = sorted.get(sorted.len() / 2) else { return vec![0; logs.len()] };
    let bound = f32::from(MAX_EXPONENT);
    #[expect(clippy::cast_possible_truncation, reason = "clamped")]
    let exponent = |log: &Option<f32>| log.map_or(0, |log| (log - middle).round().clamp(-bound, bound) as i8);
    logs.iter().map(exponent).collect()
}

/// `2^e`.
pub fn power(exponent: i8) -> f32 {
    // From 2^-128, which is subnormal, to 2^127.
    let biased = i32::from(exponent) + 127;
    if biased > 0 {
        f32::from_bits(biased.cast_unsigned() << 23)
    } else {
        f32::MIN_POSITIVE * power(exponent + 126)
    }
}

/// Rounds rows of inputs `[n, in]` to int8 with a scale per row, as the int8 kernels do.
pub fn int8_inputs(rows: &mut [f32], in_features: usize) {
    const MAX_CODE: f32 = 127.0;
    for row in rows.chunks_exact_mut(in_features) {
        let amax = row.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        if amax == 0.0 {
            continue;
        }
        let scale = amax / MAX_CODE;
        for x in row {
            *x = (*x / scale).round_ties_even().clamp(-MAX_CODE, MAX_CODE) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_exact() {
        for e in i8::MIN..=i8::MAX {
            assert_eq!(f64::from(power(e)), 2f64.powi(i32::from(e)), "{e}");
        }
    }

    /// A channel whose inputs are 16 times as wide and whose weights 16 times as small is put back by every
    /// rule that shares between the two; one without inputs stays.
    #[test]
    fn a_spiked_channel_is_put_back() {
        let mut columns =
            Columns { input_max: vec![1.0; 9], input_mean: vec![0.5; 9], weight_max: vec![0.25; 9] };
        assert_eq!(candidates(&columns), Vec::<Vec<i8>>::new(), "even columns have nothing to move");
        columns.input_max[3] = 16.0;
        columns.input_mean[3] = 8.0;
        columns.weight_max[3] = 0.25 / 16.0;
        columns.input_max[5] = 0.0;
        columns.input_mean[5] = 0.0;
        let found = candidates(&columns);
        assert!(found.contains(&vec![0, 0, 0, 4, 0, 0, 0, 0, 0]), "{found:?}");
        assert!(found.iter().all(|e| e[5] == 0 && e[3] > 0 && e[0] == 0), "{found:?}");
    }

    #[test]
    fn int8_inputs_lose_half_a_step_at_most() {
        let exact: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut rounded = exact.clone();
        int8_inputs(&mut rounded, 32);
        for (exact, rounded) in exact.chunks(32).zip(rounded.chunks(32)) {
            let step = exact.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
            assert!(exact.iter().zip(rounded).all(|(a, b)| (a - b).abs() <= step * 0.5001));
            assert!(exact != rounded);
        }
    }
}
