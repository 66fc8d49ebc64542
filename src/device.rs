//! Machines that artifacts are made for: what they are, which build suits which, and what it costs to
//! hold a model there.
//!
//! [`probe`] reads what this machine is, [`choice`] is the table of what to make for whom, and
//! [`budget`] the arithmetic of caches and rotary tables. None of them reads a checkpoint.

pub mod budget;
pub mod choice;
pub mod probe;

/// A kind of machine. Processors differ by the instructions that the consumers' kernels choose by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// x86-64 with AMX tiles.
    X86Amx,
    /// x86-64 with AVX-512 and its VNNI, without AMX.
    X86Vnni,
    /// x86-64 with AVX-512, without VNNI.
    X86Avx512,
    /// x86-64 with AVX2 and no more.
    X86Avx2,
    /// 64-bit ARM.
    Arm64,
    /// A phone's Hexagon NPU.
    Hexagon,
    /// A graphics card.
    Gpu,
}

impl Target {
    /// Every target.
    pub const ALL: [Self; 7] =
        [Self::X86Amx, Self::X86Vnni, Self::X86Avx512, Self::X86Avx2, Self::Arm64, Self::Hexagon, Self::Gpu];

    /// As `--target` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86Amx => "x86-amx",
            Self::X86Vnni => "x86-vnni",
            Self::X86Avx512 => "x86-avx512",
            Self::X86Avx2 => "x86-avx2",
            Self::Arm64 => "arm64",
            Self::Hexagon => "hexagon",
            Self::Gpu => "gpu",
        }
    }

    /// Whether more than one program runs models there, so that it matters which.
    pub fn has_consumers(self) -> bool {
        matches!(self, Self::X86Amx | Self::X86Vnni | Self::X86Avx512 | Self::X86Avx2)
    }
}

/// The program that runs the artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumer {
    /// vLLM's CPU backend.
    Vllm,
    /// PyTorch's 4-bit kernel, called by a loader of one's own.
    Pytorch,
}

impl Consumer {
    /// As `--consumer` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Pytorch => "pytorch",
        }
    }
}

/// What counts more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// That the model does what it did before.
    Fidelity,
    /// Tokens per second.
    Speed,
}

impl Priority {
    /// As `--priority` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fidelity => "fidelity",
            Self::Speed => "speed",
        }
    }
}
