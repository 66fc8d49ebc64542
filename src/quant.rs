//! Quantization maths: slices in, slices out. Knows no file, no tensor name and no configuration.

pub mod int8;
mod snr;

pub use snr::ErrorSums;

/// How the scales of a row or group are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The full range of the weights, rounded to nearest.
    RoundToNearest,
    /// The best of several ranges, by squared error.
    Search,
}

impl Method {
    /// As options spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundToNearest => "rtn",
            Self::Search => "search",
        }
    }

    /// The inverse of [`Method::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::RoundToNearest, Self::Search].into_iter().find(|method| method.name() == name)
    }
}
