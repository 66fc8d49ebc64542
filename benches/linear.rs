//! `cargo bench`: every kind of linear on a layer of the real model, one token and many, beside a plain
//! read of as many bytes. Best of several runs each; only ratios within one run mean anything.

use std::hint::black_box;
use std::time::{Duration, Instant};

use spark_convert::ggml::{BlockMatrix, BlockType};
use spark_convert::pack::{CodeLayout, GroupGrids, Int4Matrix, PackedCodes};
use spark_convert::runtime::{
    BlockLinear, FloatLinear, Int4FloatLinear, Int4Linear, Int8FloatLinear, Int8Linear, Linear, Rounding,
};
use spark_convert::tensor::{Dtype, TensorView};

/// The up projections of four layers, too large for any cache.
const SHAPE: [usize; 2] = [4 * 6656, 2048];
const GROUP_SIZE: usize = 32;
const RUNS: usize = 7;

fn main() {
    let [out, k] = SHAPE;
    // Codes, nibbles and bf16 numbers between 0.5 and 2 alike.
    let bytes: Vec<u8> =
        (0..out * k * 2).map(|i| if i % 2 == 1 { 0x3f } else { (i * 37 % 251) as u8 }).collect();
    let codes: &[i8] = bytemuck::cast_slice(&bytes[..out * k]);
    let nibbles = &bytes[..out * k / 2];
    let grids = |each: usize| &bytes[..out * (k / GROUP_SIZE) * each];
    let scales = vec![0.01f32; out];
    let int4 = |layout, grids| {
        let codes = PackedCodes::new(nibbles, layout, SHAPE).expect("the layout holds the shape");
        Int4Matrix::new(codes, GROUP_SIZE, grids).expect("whole groups")
    };
    let row_major = GroupGrids::RowMajor { scales: grids(2), zero_points: None };
    let group_major = GroupGrids::GroupMajor { scales: grids(2) };
    let affine = GroupGrids::ScalesAndZeros(grids(4));
    let view = TensorView { name: "w", dtype: Dtype::BF16, shape: &SHAPE, bytes: &bytes };
    let q4_k = &bytes[..out * k / 256 * 144];
    let kinds: Vec<(&str, usize, Box<dyn Linear + '_>)> = vec![
        ("bf16", 2 * out * k, Box::new(FloatLinear::new(view, Rounding::None).expect("a matrix"))),
        ("int8 x int8", out * k, Box::new(Int8Linear::new(codes, &scales[..], k).expect("fits"))),
        ("int8 x float", out * k, Box::new(Int8FloatLinear::new(codes, &scales[..], k).expect("fits"))),
        (
            "int4 rows x int8",
            out * k / 2,
            Box::new(Int4Linear::new(int4(CodeLayout::Rows, row_major)).expect("zero points")),
        ),
        (
            "int4 columns x int8",
            out * k / 2,
            Box::new(Int4Linear::new(int4(CodeLayout::Columns, group_major)).expect("zero points")),
        ),
        (
            "int4 blocks of 32 x float",
            out * k / 2,
            Box::new(
                Int4FloatLinear::new(int4(CodeLayout::Blocks { rows: 32 }, affine)).expect("whole blocks"),
            ),
        ),
        (
            "int4 blocks of 64 x float",
            out * k / 2,
            Box::new(
                Int4FloatLinear::new(int4(CodeLayout::Blocks { rows: 64 }, affine)).expect("whole blocks"),
            ),
        ),
        (
            "int4 rows x float",
            out * k / 2,
            Box::new(Int4FloatLinear::new(int4(CodeLayout::Rows, row_major)).expect("whole blocks")),
        ),
        (
            "Q4_K x float",
            q4_k.len(),
            Box::new(BlockLinear::new(BlockMatrix::new(BlockType::Q4K, SHAPE, q4_k).expect("fits"))),
        ),
    ];
    let only: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    println!(
        "{:28} {:>8} {:>10} {:>10} {:>12}",
        "[26624, 2048], 2 threads", "MB", "1 token ms", "GB/s", "64 tokens ms"
    );
    rayon::ThreadPoolBuilder::new().num_threads(2).build_global().expect("the only pool");
    let read = best(|| {
        use rayon::prelude::*;
        let sum = |words: &[u64]| words.iter().fold(0u64, |a, b| a ^ b);
        black_box(
            bytemuck::cast_slice::<u8, u64>(&bytes).par_chunks(1 << 16).map(sum).reduce(|| 0, |a, b| a ^ b),
        );
    });
    row("a plain read", bytes.len(), read, None);
    for (name, size, linear) in &kinds {
        if !only.is_empty() && !only.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let x: Vec<f32> = (0..64 * k).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut y = vec![0.0; 64 * out];
        let one = best(|| linear.forward(black_box(&x[..k]), black_box(&mut y[..out])));
        let many = best(|| linear.forward(black_box(&x), black_box(&mut y)));
        row(name, *size, one, Some(many));
    }
}

fn best(mut run: impl FnMut()) -> Duration {
    let timed = |run: &mut dyn FnMut()| {
        let start = Instant::now();
        run();
        start.elapsed()
    };
    (0..RUNS).map(|_| timed(&mut run)).min().expect("at least one run")
}

fn row(name: &str, bytes: usize, one: Duration, many: Option<Duration>) {
    let ms = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
    println!(
        "{name:28} {:>8.1} {:>10} {:>10.1} {:>12}",
        bytes as f64 / 1e6,
        ms(one),
        bytes as f64 / 1e9 / one.as_secs_f64(),
        many.map_or("-".to_owned(), ms)
    );
}
