use serde_json::Value;

use super::*;
use crate::quant::int4::{Grid, symmetric};

/// The generator of `tests/oracle/gptq_goldens.py`.
fn values(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    };
    (0..n).map(next).collect()
}

struct Golden {
    json: Value,
    columns: usize,
    group_size: usize,
    x: Vec<f32>,
    w: Vec<f32>,
}

fn golden() -> Golden {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/goldens/gptq.json");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let size = |key: &str| json[key].as_u64().unwrap() as usize;
    let (rows, columns, inputs) = (size("rows"), size("columns"), size("inputs"));
    let mut x = values(inputs * columns, 1);
    for row in x.chunks_exact_mut(columns) {
        for j in 1..columns {
            row[j] = f64::midpoint(row[j], row[j - 1]);
        }
        row.iter_mut().step_by(17).for_each(|x| *x *= 8.0);
        row[40] = 0.0;
    }
    let narrow = |v: Vec<f64>| v.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    let w = narrow(values(rows * columns, 2));
    Golden { columns, group_size: size("group_size"), x: narrow(x), w, json }
}

impl Golden {
    fn scale(&self, row: usize, column: usize) -> f32 {
        self.json["scales"][row][column / self.group_size].as_f64().unwrap() as f32
    }

    fn expected(&self) -> Vec<u8> {
        let digits = |row: &Value| {
            row.as_str().unwrap().chars().map(|c| c.to_digit(16).unwrap() as u8).collect::<Vec<_>>()
        };
        self.json["codes"].as_array().unwrap().iter().flat_map(digits).collect()
    }

    fn hessian(&self) -> Hessian {
        let mut hessian = Hessian::new(self.columns);
        // In pieces that are no multiple of anything.
        self.x.chunks(self.columns * 77).for_each(|piece| hessian.add(piece));
        hessian
    }
}

#[test]
fn codes_are_those_of_the_plain_algorithm() {
    let golden = golden();
    // No sum is closer to a tie than rounding errors could decide.
    assert!(golden.json["closest_tie_in_steps"].as_f64().unwrap() > 1e-6);
    let solver = golden.hessian().solver().unwrap();
    assert_eq!((solver.damping(), solver.dead()), (DAMPING, 1));
    let mut codes = vec![0; golden.w.len()];
    let nearest = |row, column, w| symmetric::grid(golden.scale(row, column)).nearest(w);
    let noise = solver.solve(&golden.w, nearest, &mut codes);
    assert_eq!(codes, golden.expected());
    let expected = golden.json["output_noise_with_damping"].as_f64().unwrap();
    assert!((noise / expected - 1.0).abs() < 1e-5, "{noise} {expected}");
}

#[test]
fn rows_alone_and_any_number_of_threads_give_the_same_codes() {
    let golden = golden();
    let expected = golden.expected();
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let solver = pool.install(|| golden.hessian().solver().unwrap());
        for (row, (w, expected)) in
            golden.w.chunks(golden.columns).zip(expected.chunks(golden.columns)).enumerate()
        {
            let mut codes = vec![0; golden.columns];
            solver.solve(w, |_, column, w| symmetric::grid(golden.scale(row, column)).nearest(w), &mut codes);
            assert_eq!(codes, expected);
        }
    }
}

/// The layer of `facts` in small: a power-law spectrum in a random basis and a few large inputs.
/// Compensation on the weighted grid must gain at least 1.5 dB of output SNR over the searched grid.
#[test]
fn outputs_gain_on_inputs_that_were_not_calibrated() {
    const K: usize = 256;
    const N: usize = 32;
    const G: usize = 128;
    let normal = |n: usize, seed: u64| -> Vec<f64> {
        values(12 * n, seed).chunks(12).map(|u| u.iter().sum::<f64>() / 2.0).collect()
    };
    let w: Vec<f32> = normal(N * K, 3).into_iter().map(|x| x as f32).collect();
    let basis = normal(K * K, 4);
    let inputs = |count: usize, seed: u64| -> Vec<f32> {
        let mut x = vec![0.0; count * K];
        for (row, z) in x.chunks_exact_mut(K).zip(normal(count * K, seed).chunks(K)) {
            for (i, z) in z.iter().enumerate() {
                let size = z / (1.0 + i as f64);
                row.iter_mut().zip(&basis[i * K..][..K]).for_each(|(x, b)| *x += (size * b) as f32);
            }
            row.iter_mut().step_by(K / 8).for_each(|x| *x *= 8.0);
        }
        x
    };
    let mut hessian = Hessian::new(K);
    hessian.add(&inputs(1024, 5));
    let (solver, importance, held_out) = (hessian.solver().unwrap(), hessian.importance(), inputs(256, 6));
    let noise = |decoded: &[f32]| -> f64 {
        let mut sum = 0.0;
        for x in held_out.chunks(K) {
            for (w, q) in w.chunks(K).zip(decoded.chunks(K)) {
                let dot =
                    |a: &[f32]| x.iter().zip(a).map(|(x, a)| f64::from(*x) * f64::from(*a)).sum::<f64>();
                sum += (dot(w) - dot(q)).powi(2);
            }
        }
        sum
    };
    let grids = |importance: Option<&[f32]>| -> Vec<Grid> {
        let mut codes = vec![0; G];
        let group = |(i, group): (usize, &[f32])| {
            let importance = importance.map(|h| &h[i % (K / G) * G..][..G]);
            let signs = symmetric::Signs::Both;
            symmetric::grid(symmetric::quantize_group(
                group,
                importance,
                crate::quant::Method::Search,
                signs,
                &mut codes,
            ))
        };
        w.chunks(G).enumerate().map(group).collect()
    };
    let searched_grids = grids(None);
    let searched: Vec<f32> = w.iter().enumerate().map(|(i, w)| searched_grids[i / G].nearest(*w).1).collect();
    let weighted = grids(Some(&importance));
    let (mut codes, mut solved) = (vec![0; N * K], vec![0.0; N * K]);
    solver.solve(&w, |row, column, w| weighted[(row * K + column) / G].nearest(w), &mut codes);
    for (i, (q, code)) in solved.iter_mut().zip(&codes).enumerate() {
        *q = weighted[i / G].decode(*code);
    }
    let gain_db = 10.0 * (noise(&searched) / noise(&solved)).log10();
    assert!(gain_db >= 1.5, "{gain_db:.2} dB");
}
