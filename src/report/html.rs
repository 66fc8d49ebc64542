//! A document as one HTML file: no script, no network, light and dark.

use super::document::{Content, Document, Row, Table};
use super::junit::escaped;
use super::svg::svg;

/// Looks. Two series are told apart by lightness and shape as well as by colour.
const STYLE: &str = "\
:root{--bg:#fcfcfa;--fg:#1c1d1f;--dim:#5d6168;--line:#dcdcd6;--card:#fff;--a:#1f5fa8;--b:#b8560b;--ok:#1d6b3a;--bad:#a8201a}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e8e8e4;--dim:#a2a6ad;--line:#34383e;--card:#1c1f23;--a:#7fb4f0;--b:#f0a35e;--ok:#7dce9b;--bad:#ff8f85}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:76rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem;border-top:1px solid var(--line);padding-top:1rem;overflow-wrap:anywhere}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p{margin:.5rem 0;max-width:60rem}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
.cap{color:var(--dim);font-size:.9rem;margin:1rem 0 0}
th,td{padding:.15rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left;padding-left:0}
th{font-weight:600}tr.muted td{color:var(--dim)}tr.muted td:first-child{padding-left:1rem}tr.marked td{font-weight:700}
ul{list-style:none;padding:0;margin:.5rem 0}li{overflow-wrap:anywhere}
.ok,.fail{display:inline-block;min-width:3rem;font-weight:700}.ok{color:var(--ok)}.fail{color:var(--bad)}
figure{margin:1rem 0;padding:.75rem;background:var(--card);border:1px solid var(--line);border-radius:6px;max-width:42rem}
figcaption{color:var(--dim);font-size:.9rem;margin-bottom:.5rem}
svg{width:100%;height:auto;display:block}
svg .t{font:12px system-ui,sans-serif;fill:var(--fg)}svg .m{text-anchor:middle}svg .e{text-anchor:end}
svg .g{stroke:var(--line)}svg .stem{stroke:var(--dim);stroke-opacity:.4}svg .dash{stroke:var(--dim);stroke-dasharray:3 3}
svg .s0{fill:var(--a);stroke:var(--a)}svg .s1{fill:var(--b);stroke:var(--b)}svg .bar{stroke:none}svg .s0.bar{fill-opacity:.75}
svg .hollow{fill:var(--card)}svg .track{fill:var(--line);stroke:none}
";

/// Sets a document as a page of its own.
pub fn html(document: &Document) -> String {
    let word = if document.passed { "ok" } else { "fail" };
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n\
         </head>\n<body>\n<main>\n<h1 class=\"{word}\">{title}</h1>\n",
        title = escaped(&document.title)
    );
    for block in &document.blocks {
        match &block.content {
            Content::Heading { level, text } => {
                out += &format!("<h{level}>{}</h{level}>\n", escaped(text));
            }
            Content::Paragraph(text) => out += &format!("<p>{}</p>\n", escaped(text)),
            Content::Table(table) => out += &rows(table),
            Content::Lines(lines) => {
                out += "<ul>\n";
                for line in lines {
                    let (class, word) = if line.passed { ("ok", "ok") } else { ("fail", "FAIL") };
                    let text = escaped(&line.text);
                    out += &format!("<li><span class=\"{class}\">{word}</span> {text}</li>\n");
                }
                out += "</ul>\n";
            }
            Content::Figure(figure) => {
                out += &format!(
                    "<figure>\n<figcaption>{}</figcaption>\n{}</figure>\n",
                    escaped(&figure.caption),
                    svg(&figure.chart, &figure.caption)
                );
            }
        }
    }
    out + "</main>\n</body>\n</html>\n"
}

fn rows(table: &Table) -> String {
    // Above the table, not inside: it wraps with the page while a wide table scrolls.
    let mut out = match table.caption.as_str() {
        "" => String::new(),
        caption => format!("<p class=\"cap\">{}</p>\n", escaped(caption)),
    };
    out += "<div class=\"scroll\"><table>\n";
    if !table.header.is_empty() {
        let cells: String = table.header.iter().map(|c| format!("<th>{}</th>", escaped(c))).collect();
        out += &format!("<thead><tr>{cells}</tr></thead>\n");
    }
    out += "<tbody>\n";
    let columns = table.rows.iter().map(|r| r.cells.len()).chain([table.header.len()]).max().unwrap_or(0);
    for row in &table.rows {
        out += &cells(row, columns);
    }
    out + "</tbody></table></div>\n"
}

fn cells(row: &Row, columns: usize) -> String {
    let class = match (row.muted, row.marked) {
        (true, _) => " class=\"muted\"",
        (false, true) => " class=\"marked\"",
        (false, false) => "",
    };
    let cell = |i: usize| format!("<td>{}</td>", row.cells.get(i).map(|c| escaped(c)).unwrap_or_default());
    let cells: String = (0..columns).map(cell).collect();
    format!("<tr{class}>{cells}</tr>\n")
}
