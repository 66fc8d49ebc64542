//! From a report to what is drawn of it.

use super::Report;
use super::document::{Chart, Figure, Levels, Plane, Point, Spread};
use crate::metrics::Histogram;
use crate::verify::{Behaviour, Layers, layer_kind};

/// Output SNR by layer, a series per layer type.
pub(super) fn layer_levels(layers: &Layers) -> Figure {
    let mut series: Vec<String> = Vec::new();
    let mut values = Vec::new();
    for layer in &layers.layers {
        let kind = layer_kind(&layer.kind).to_owned();
        let at = series.iter().position(|s| *s == kind).unwrap_or_else(|| {
            series.push(kind);
            series.len() - 1
        });
        values.push((at, layer.output_snr_db));
    }
    Figure {
        caption: "SNR of every layer's output, fed the input that f32 feeds it".to_owned(),
        chart: Chart::Levels(Levels { axis: "layer".to_owned(), unit: "dB".to_owned(), series, values }),
    }
}

/// Divergences of all positions, beside those of the floor.
pub(super) fn divergence_spread(behaviour: &Behaviour) -> Figure {
    let shares = |histogram: &Histogram| {
        let total: usize = histogram.counts.iter().sum();
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let share = |n: &usize| *n as f64 / total.max(1) as f64;
        histogram.counts.iter().map(share).collect()
    };
    Figure {
        caption: "How the KL divergence of single positions spreads: the tail is what a reader notices"
            .to_owned(),
        chart: Chart::Spread(Spread {
            axis: "KL, nats".to_owned(),
            series: ["artifact".to_owned(), "bf16 floor".to_owned()],
            edges: Histogram::edges().collect(),
            shares: [shares(&behaviour.kl_histogram), shares(&behaviour.floor_kl_histogram)],
            mark: Some(("99.9 %".to_owned(), behaviour.total.kl.p999)),
        }),
    }
}

/// Bytes per token against divergence, with bf16 arithmetic on the source as the measure.
pub(super) fn sizes_and_fidelity(report: &Report) -> Option<Figure> {
    #[expect(clippy::cast_precision_loss, reason = "for a picture")]
    let mebibytes = |bytes: u64| bytes as f64 / (1u64 << 20) as f64;
    let floor = report.artifacts.iter().find_map(|v| v.behaviour.as_ref())?.floor_total.kl.mean;
    let mut points: Vec<Point> = report
        .comparison
        .iter()
        .map(|c| {
            let name =
                std::path::Path::new(&c.artifact).file_name().map(|n| n.to_string_lossy().into_owned());
            Point {
                name: name.unwrap_or_else(|| c.artifact.clone()),
                x: mebibytes(c.bytes_per_token),
                y: c.kl_mean,
                marked: c.pareto,
                muted: false,
            }
        })
        .collect();
    points.push(Point {
        name: "source, bf16 arithmetic".to_owned(),
        x: mebibytes(report.reference.sizes.bytes_per_token),
        y: floor,
        marked: false,
        muted: true,
    });
    Some(Figure {
        caption: "Size against fidelity: left and low is better; filled is what no other one beats"
            .to_owned(),
        chart: Chart::Plane(Plane {
            x: "MiB read per token".to_owned(),
            y: "mean KL, nats".to_owned(),
            points,
        }),
    })
}
