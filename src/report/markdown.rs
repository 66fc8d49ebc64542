//! A document as Markdown, for pull requests and release notes.

use super::document::{Content, Document, Table};

/// Sets a document as Markdown; drawings are left out.
pub fn markdown(document: &Document) -> String {
    let mut out = format!("# {}\n", escaped(&document.title));
    for block in &document.blocks {
        match &block.content {
            Content::Heading { level, text } => {
                out += &format!("\n{} {}\n", "#".repeat(usize::from(*level)), escaped(text));
            }
            Content::Paragraph(text) => out += &format!("\n{}\n", escaped(text)),
            Content::Table(table) => out += &rows(table),
            Content::Lines(lines) => {
                out.push('\n');
                for line in lines {
                    let word = if line.passed { "ok" } else { "**FAIL**" };
                    out += &format!("* {word} {}\n", escaped(&line.text));
                }
            }
            Content::Figure(_) => {}
        }
    }
    out
}

fn rows(table: &Table) -> String {
    let columns = table.rows.iter().map(|r| r.cells.len()).chain([table.header.len()]).max().unwrap_or(0);
    if columns == 0 {
        return String::new();
    }
    let line = |cells: &[String], mark: &str| {
        let cell = |i: usize| {
            let text = cells.get(i).map(|c| escaped(c)).unwrap_or_default();
            if text.is_empty() { text } else { format!("{mark}{text}{mark}") }
        };
        format!("| {} |\n", (0..columns).map(cell).collect::<Vec<_>>().join(" | "))
    };
    let caption =
        if table.caption.is_empty() { String::new() } else { format!("{}:\n\n", escaped(&table.caption)) };
    let mut out = format!("\n{caption}{}", line(&table.header, ""));
    let rule: Vec<_> = (0..columns).map(|i| if i == 0 { "---" } else { "---:" }.to_owned()).collect();
    out += &format!("| {} |\n", rule.join(" | "));
    for row in &table.rows {
        out += &line(&row.cells, if row.marked { "**" } else { "" });
    }
    out
}

/// Text that Markdown takes as it is.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '|' | '*' | '_' | '`' | '<' | '>' | '\\' | '[' | ']' | '#' => out.extend(['\\', c]),
            // A line of a table is a line.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
