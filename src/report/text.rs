//! A document for a terminal: the short one.

use super::document::{Content, Document, Table};
use crate::error::one_line;
use crate::table::table;

/// Sets a document as plain text, without the blocks that are detail.
pub fn text(document: &Document) -> String {
    let mut out = String::new();
    for block in document.blocks.iter().filter(|b| !b.detail) {
        match &block.content {
            Content::Heading { level: 2, text } => {
                if !out.is_empty() {
                    out.push('\n');
                }
                out += &format!("{}\n", one_line(text));
            }
            Content::Heading { text, .. } => out += &format!("{}:\n", one_line(text)),
            Content::Paragraph(text) => out += &format!("{}\n", one_line(text)),
            Content::Table(table) => out += &rows(table),
            Content::Lines(lines) => {
                for line in lines {
                    let word = if line.passed { "ok" } else { "FAIL" };
                    out += &format!("{word:<4} {}\n", one_line(&line.text));
                }
            }
            Content::Figure(_) => {}
        }
    }
    out
}

fn rows(of: &Table) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    if !of.header.is_empty() {
        rows.push(of.header.clone());
    }
    for row in &of.rows {
        let mut cells: Vec<String> = row.cells.iter().map(|cell| one_line(cell)).collect();
        if let Some(name) = cells.first_mut() {
            let indent = if row.muted || of.header.is_empty() { "  " } else { "" };
            *name = format!("{indent}{name}{}", if row.marked { " *" } else { "" });
        }
        rows.push(cells);
    }
    table(&rows)
}
