//! Quantization maths: slices in, slices out. Knows no file, no tensor name and no configuration.

pub mod allocate;
pub mod gptq;
pub mod int4;
pub mod int8;
pub mod smooth;
mod snr;

pub use snr::ErrorSums;

/// How the scale (and zero) of a row or group is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The range of the weights is the range of the codes.
    RoundToNearest,
    /// The best of several grids by squared error, that of [`Method::RoundToNearest`] among them.
    Search,
    /// The same search, each weight counted by how large its inputs are, and codes that make up for each
    /// other's errors on calibrated inputs ([`gptq`]).
    Gptq,
}

impl Method {
    const ALL: [Self; 3] = [Self::RoundToNearest, Self::Search, Self::Gptq];

    /// As options spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundToNearest => "rtn",
            Self::Search => "search",
            Self::Gptq => "gptq",
        }
    }

    /// What the name of an artifact says of it: nothing of the default.
    pub fn name_suffix(self) -> &'static str {
        match self {
            Self::RoundToNearest => "-rtn",
            Self::Search => "",
            Self::Gptq => "-gptq",
        }
    }

    /// The inverse of [`Method::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }
}
