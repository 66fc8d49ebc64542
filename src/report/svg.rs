//! Drawings as inline SVG. Coordinates are in a box of fixed width, so that letters keep their size
//! relative to it; colours come from the page's variables, which know light and dark.

use std::fmt::Write;

use super::document::{Chart, Levels, Plane, Prefix, Spread};
use super::junit::escaped;

/// Width of the box; a narrow phone shows it at nine tenths.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 36.0;

/// Height of a line of names.
const LINE: f64 = 18.0;

/// Draws a chart; `label` tells what it shows to those who cannot see it.
pub(super) fn svg(chart: &Chart, label: &str) -> String {
    let (height, inner) = match chart {
        Chart::Levels(levels) => (HEIGHT, draw_levels(levels)),
        Chart::Spread(spread) => (HEIGHT, draw_spread(spread)),
        Chart::Prefixes(prefixes) => draw_prefixes(prefixes),
        Chart::Plane(plane) => draw_plane(plane),
    };
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{}\">\n{inner}</svg>\n",
        escaped(label)
    )
}

/// A linear axis over `[from, to]`, mapped to `[low, high]` of the box.
struct Scale {
    from: f64,
    to: f64,
    low: f64,
    high: f64,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let share = if self.to > self.from { (value - self.from) / (self.to - self.from) } else { 0.5 };
        self.low + share.clamp(0.0, 1.0) * (self.high - self.low)
    }

    /// Round values inside, at most about `count` of them.
    fn ticks(&self, count: f64) -> Vec<f64> {
        let raw = ((self.to - self.from) / count).max(f64::MIN_POSITIVE);
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw).unwrap_or(raw);
        let first = (self.from / step).ceil();
        let mut ticks = Vec::new();
        let mut i = 0.0;
        while (first + i) * step <= self.to + step * 1e-9 && ticks.len() < 50 {
            ticks.push((first + i) * step);
            i += 1.0;
        }
        ticks
    }
}

fn text(out: &mut String, x: f64, y: f64, class: &str, words: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escaped(words));
}

fn line(out: &mut String, [x1, y1, x2, y2]: [f64; 4], class: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
    );
}

fn rect(out: &mut String, [x, y, width, height]: [f64; 4], class: &str) {
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" class=\"{class}\"/>",
        width.max(0.0),
        height.max(0.0)
    );
}

/// A point; the second series is a square, so that colour is not all that tells them apart.
fn mark(out: &mut String, x: f64, y: f64, series: usize, class: &str) {
    if series.is_multiple_of(2) {
        let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"{class}\"/>");
    } else {
        rect(out, [x - 3.5, y - 3.5, 7.0, 7.0], class);
    }
}

/// Names of the series above the drawing.
fn legend(out: &mut String, series: &[String]) {
    let mut x = LEFT;
    for (i, name) in series.iter().enumerate() {
        mark(out, x + 4.0, 10.0, i, &format!("s{}", i % 2));
        text(out, x + 13.0, 14.0, "t", name);
        x += 26.0 + 7.0 * width_of(name);
    }
}

/// Characters of a name, as a number.
fn width_of(name: &str) -> f64 {
    f64::from(u32::try_from(name.chars().count()).unwrap_or(u32::MAX))
}

fn as_number(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

/// A horizontal grid with its numbers, and the name of the axis above it.
fn grid(out: &mut String, y: &Scale, shown: impl Fn(f64) -> String) {
    for tick in y.ticks(5.0) {
        let at = y.at(tick);
        line(out, [LEFT, at, WIDTH - RIGHT, at], "g");
        text(out, LEFT - 5.0, at + 4.0, "t e", &shown(tick));
    }
}

fn draw_levels(levels: &Levels) -> String {
    let mut out = String::new();
    legend(&mut out, &levels.series);
    let known: Vec<f64> = levels.values.iter().filter_map(|(_, v)| *v).collect();
    let lowest = known.iter().copied().fold(f64::INFINITY, f64::min).min(1e3);
    let highest = known.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(lowest + 1.0);
    let y = Scale { from: lowest.min(0.0), to: highest * 1.05, low: HEIGHT - BOTTOM, high: TOP };
    grid(&mut out, &y, |v| format!("{v:.0}"));
    text(&mut out, WIDTH - RIGHT, 14.0, "t e", &levels.unit);
    let n = as_number(levels.values.len().max(1));
    let step = (WIDTH - LEFT - RIGHT) / n;
    let every = (n / 10.0).ceil();
    for (i, (series, value)) in levels.values.iter().enumerate() {
        let place = as_number(i);
        let x = LEFT + (place + 0.5) * step;
        if place % every == 0.0 {
            text(&mut out, x, HEIGHT - BOTTOM + 16.0, "t m", &i.to_string());
        }
        // Where nothing is lost the mark is at the top, hollow.
        let at = value.map_or(TOP, |v| y.at(v));
        line(&mut out, [x, HEIGHT - BOTTOM, x, at], "stem");
        let class =
            if value.is_some() { format!("s{}", series % 2) } else { format!("s{} hollow", series % 2) };
        mark(&mut out, x, at, *series, &class);
    }
    text(&mut out, WIDTH / 2.0, HEIGHT - 4.0, "t m", &levels.axis);
    out
}

fn draw_spread(spread: &Spread) -> String {
    let mut out = String::new();
    legend(&mut out, &spread.series);
    let bins = spread.shares[0].len().max(1);
    let highest = spread.shares.iter().flatten().copied().fold(0.0, f64::max).max(1e-9);
    // The square root lets a tail of a thousandth be seen beside a half.
    let y = Scale { from: 0.0, to: highest.sqrt(), low: HEIGHT - BOTTOM, high: TOP };
    for share in [0.001, 0.01, 0.05, 0.2, 0.5, 1.0] {
        if share <= highest {
            let at = y.at(f64::sqrt(share));
            line(&mut out, [LEFT, at, WIDTH - RIGHT, at], "g");
            text(&mut out, LEFT - 5.0, at + 4.0, "t e", &format!("{} %", 100.0 * share));
        }
    }
    let step = (WIDTH - LEFT - RIGHT) / as_number(bins);
    for (series, shares) in spread.shares.iter().enumerate() {
        for (i, share) in shares.iter().enumerate().filter(|(_, share)| **share > 0.0) {
            let at = y.at(share.sqrt());
            // The floor is a narrow bar in front.
            let inset = if series == 0 { 0.5 } else { step * 0.3 };
            let x = LEFT + as_number(i) * step + inset;
            rect(&mut out, [x, at, step - 2.0 * inset, HEIGHT - BOTTOM - at], &format!("s{series} bar"));
        }
    }
    // Bin i begins at edge i - 1.
    for (i, edge) in spread.edges.iter().enumerate() {
        let power = edge.log10();
        if (power - power.round()).abs() < 1e-6 {
            let x = LEFT + (as_number(i) + 1.0) * step;
            text(&mut out, x, HEIGHT - BOTTOM + 16.0, "t m", &decade(power.round()).to_string());
        }
    }
    if let Some((name, value)) = &spread.mark {
        let bin = spread.edges.partition_point(|edge| edge <= value);
        let x = LEFT + (as_number(bin) + 0.5) * step;
        line(&mut out, [x, TOP, x, HEIGHT - BOTTOM], "dash");
        // On the side that has room for it.
        let (at, class) = if x > WIDTH / 2.0 { (x - 4.0, "t e") } else { (x + 4.0, "t") };
        text(&mut out, at, TOP + 10.0, class, name);
    }
    text(&mut out, WIDTH / 2.0, HEIGHT - 4.0, "t m", &spread.axis);
    out
}

/// A power of ten in few letters.
fn decade(power: f64) -> String {
    match power {
        p if (-2.0..=2.0).contains(&p) => format!("{}", 10f64.powf(p)),
        p => format!("1e{p}"),
    }
}

fn draw_prefixes(prefixes: &[Prefix]) -> (f64, String) {
    let mut out = String::new();
    let left = 128.0;
    let scale = Scale { from: 0.0, to: 1.0, low: left, high: WIDTH - 70.0 };
    for (i, prefix) in prefixes.iter().enumerate() {
        let y = as_number(i) * LINE + 2.0;
        let name: String = prefix.name.chars().take(18).collect();
        text(&mut out, left - 6.0, y + 11.0, "t e", &name);
        let share = as_number(prefix.matched) / as_number(prefix.of.max(1));
        rect(&mut out, [left, y, scale.at(1.0) - left, LINE - 5.0], "track");
        rect(&mut out, [left, y, scale.at(share) - left, LINE - 5.0], "s0");
        let words = match &prefix.parting {
            None => format!("{}/{}", prefix.matched, prefix.of),
            Some((tie, margin)) => {
                let class = if *tie { "s1 hollow" } else { "s1" };
                mark(&mut out, scale.at(share), y + (LINE - 5.0) / 2.0, 1, class);
                format!("{margin}{}", if *tie { " tie" } else { "" })
            }
        };
        text(&mut out, scale.at(1.0) + 8.0, y + 11.0, "t", &words);
    }
    (as_number(prefixes.len()) * LINE + 6.0, out)
}

fn draw_plane(plane: &Plane) -> (f64, String) {
    let mut out = String::new();
    let finite: Vec<(usize, &super::document::Point)> =
        plane.points.iter().enumerate().filter(|(_, p)| p.x.is_finite() && p.y.is_finite()).collect();
    if finite.is_empty() {
        return (0.0, out);
    }
    let logs = finite.iter().map(|(_, p)| p.y.max(1e-9).log10());
    let (low, high) =
        logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), l| (low.min(l), high.max(l)));
    let widest = finite.iter().map(|(_, p)| p.x).fold(0.0, f64::max);
    let y =
        Scale { from: low.floor(), to: high.ceil().max(low.floor() + 1.0), low: HEIGHT - BOTTOM, high: TOP };
    let x = Scale { from: 0.0, to: widest * 1.1, low: LEFT, high: WIDTH - RIGHT };
    let mut power = y.from;
    while power <= y.to + 1e-9 {
        line(&mut out, [LEFT, y.at(power), WIDTH - RIGHT, y.at(power)], "g");
        text(&mut out, LEFT - 5.0, y.at(power) + 4.0, "t e", &decade(power));
        power += 1.0;
    }
    for tick in x.ticks(6.0) {
        text(&mut out, x.at(tick), HEIGHT - BOTTOM + 16.0, "t m", &format!("{tick}"));
    }
    text(&mut out, LEFT, 12.0, "t", &plane.y);
    text(&mut out, WIDTH / 2.0, HEIGHT - 4.0, "t m", &plane.x);
    // Points carry numbers, which the list below spells out: names would lie over each other.
    for (n, (_, point)) in finite.iter().enumerate() {
        let (px, py) = (x.at(point.x), y.at(point.y.max(1e-9).log10()));
        let class = match (point.muted, point.marked) {
            (true, _) => "s1",
            (false, true) => "s0",
            (false, false) => "s0 hollow",
        };
        mark(&mut out, px, py, usize::from(point.muted), class);
        text(&mut out, px + 7.0, py - 5.0, "t", &(n + 1).to_string());
    }
    let mut at = HEIGHT + LINE - 4.0;
    for (n, (_, point)) in finite.iter().enumerate() {
        let name: String = point.name.chars().take(52).collect();
        text(&mut out, LEFT, at, "t", &format!("{}  {name}", n + 1));
        at += LINE - 2.0;
    }
    (at, out)
}
