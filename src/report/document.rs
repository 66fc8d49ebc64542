//! A report as headings, tables and lines, before it is set in type.

/// A whole document.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// Whether everything passed.
    pub passed: bool,
    /// What it is about, in a few words.
    pub title: String,
    /// From top to bottom.
    pub blocks: Vec<Block>,
}

/// A piece of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Whether a terminal is spared it.
    pub detail: bool,
    /// What it is.
    pub content: Content,
}

/// What a block holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// The beginning of a part: an artifact, or a theme inside of it.
    Heading {
        /// 2 for an artifact, 3 for a theme.
        level: u8,
        /// The words.
        text: String,
    },
    /// A sentence or two.
    Paragraph(String),
    /// Rows and columns.
    Table(Table),
    /// Verdicts, one a line.
    Lines(Vec<Line>),
    /// A drawing, for forms that can draw. Its numbers stand in a table as well.
    Figure(Figure),
}

/// Rows and columns; the first column holds names, the others figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// What it shows.
    pub caption: String,
    /// Names of the columns; empty where they need none.
    pub header: Vec<String>,
    /// The rows, each of at most as many cells as there are columns.
    pub rows: Vec<Row>,
}

/// A row of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The cells.
    pub cells: Vec<String>,
    /// Whether it only gives the measure for another row.
    pub muted: bool,
    /// Whether it is one of the best.
    pub marked: bool,
}

/// A verdict in a line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Good or bad.
    pub passed: bool,
    /// The words, without the verdict.
    pub text: String,
}

/// A drawing.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What it shows, in a sentence.
    pub caption: String,
    /// What is drawn.
    pub chart: Chart,
}

/// Kinds of drawings.
#[derive(Clone, Debug, PartialEq)]
pub enum Chart {
    /// A point for each of a row of places, in one of several series.
    Levels(Levels),
    /// Counts in bins, two series over each other.
    Spread(Spread),
    /// A bar for each name, filled up to where two texts part.
    Prefixes(Vec<Prefix>),
    /// Points of two quantities.
    Plane(Plane),
}

/// Decibels by place.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    /// What the horizontal axis counts.
    pub axis: String,
    /// What the vertical axis counts.
    pub unit: String,
    /// Names of the series.
    pub series: Vec<String>,
    /// Series and value of each place; `None` where nothing is lost.
    pub values: Vec<(usize, Option<f64>)>,
}

/// Counts over a logarithmic axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// What is counted.
    pub axis: String,
    /// Names of both series.
    pub series: [String; 2],
    /// Lower edges of all bins but the first.
    pub edges: Vec<f64>,
    /// Shares by bin, one more than edges, of both series.
    pub shares: [Vec<f64>; 2],
    /// A value to be marked on the axis, with its name.
    pub mark: Option<(String, f64)>,
}

/// How far a continuation goes along.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefix {
    /// Which.
    pub name: String,
    /// Tokens that match.
    pub matched: usize,
    /// Tokens compared.
    pub of: usize,
    /// Where it parts, whether that is a tie, and what is said of it.
    pub parting: Option<(bool, String)>,
}

/// Points of two quantities.
#[derive(Clone, Debug, PartialEq)]
pub struct Plane {
    /// What the horizontal axis measures.
    pub x: String,
    /// What the vertical axis measures; it is logarithmic.
    pub y: String,
    /// The points.
    pub points: Vec<Point>,
}

/// A point of a plane.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub x: f64,
    /// Where it is.
    pub y: f64,
    /// Whether it is one of the best.
    pub marked: bool,
    /// Whether it only gives the measure.
    pub muted: bool,
}

impl Document {
    /// Appends a block that every form shows.
    pub fn push(&mut self, content: Content) {
        self.blocks.push(Block { detail: false, content });
    }

    /// Appends a block that a terminal is spared.
    pub fn detail(&mut self, content: Content) {
        self.blocks.push(Block { detail: true, content });
    }
}

impl Row {
    /// A row of these cells.
    pub fn new(cells: Vec<String>) -> Self {
        Self { cells, muted: false, marked: false }
    }

    /// Sets it apart as a measure.
    pub fn muted(mut self) -> Self {
        self.muted = true;
        self
    }

    /// Sets it apart as one of the best, or not.
    pub fn marked(mut self, marked: bool) -> Self {
        self.marked = marked;
        self
    }
}
