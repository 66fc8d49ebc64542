//! Plain text tables and sizes for people.

use crate::estimate::{self, Phase};

/// Columns padded to their widest cell; the first is left-aligned, the others right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            line += &if c == 0 { format!("{cell}{pad}") } else { format!("  {pad}{cell}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// A byte count with a binary unit.
pub(crate) fn bytes(n: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let mut value = n as f64;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.2} GiB")
}

/// What a run will take, with its phases where there are several.
pub(crate) fn estimate(phases: &[Phase]) -> String {
    let total = duration(estimate::total(phases));
    if phases.len() < 2 {
        return format!("about {total}");
    }
    let each: Vec<String> = phases.iter().map(|p| format!("{} {}", p.phase, duration(p.seconds))).collect();
    format!("about {total} ({})", each.join(", "))
}

/// Seconds, minutes or hours, as far as an estimate can tell.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Bytes that a run takes on disk, and what there is.
pub(crate) fn disk(needed: u64, free: Option<u64>) -> String {
    let free = free.map_or_else(String::new, |free| format!(" ({} free)", bytes(free)));
    format!("{} on disk{free}", bytes(needed))
}

/// Decibels, or "exact".
pub(crate) fn decibels(db: Option<f64>) -> String {
    db.map_or_else(|| "exact".to_owned(), |db| format!("{db:.2} dB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_right_unit() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3_415_314_432), "3.18 GiB");
    }

    #[test]
    fn durations_are_told_as_well_as_they_are_known() {
        let phase = |phase, seconds| Phase { phase, seconds };
        assert_eq!(estimate(&[phase("write", 0.25)]), "about 0.2 s");
        assert_eq!(estimate(&[phase("a", 60.0), phase("b", 90.0)]), "about 2 min (a 60 s, b 90 s)");
        assert_eq!(duration(7200.0), "2.0 h");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["long".to_owned(), "100".to_owned()]];
        assert_eq!(table(&rows), "a       1\nlong  100\n");
    }
}
