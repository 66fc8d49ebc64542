//! Quantization maths: slices in, slices out. Knows no file, no tensor name and no configuration.

pub mod int4;
pub mod int8;
mod snr;

pub use snr::ErrorSums;

/// How the scale (and zero) of a row or group is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The range of the weights is the range of the codes.
    RoundToNearest,
    /// The best of several grids by squared error, that of [`Method::RoundToNearest`] among them.
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
