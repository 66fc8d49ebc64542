//! The forms of ONNX that an export can take. What is computed, names, shapes and cache rules are the
//! same in all of them.

/// Which operators the graphs are written with, and where encodings are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Operator set 23: norms and GELU are one node each, encodings are nodes of the graph.
    Qdq23,
    /// Operator set 21, the first whose quantized types have 16 bits: norms and GELU are several nodes,
    /// float inside.
    Qdq21,
    /// Operator set 18 in float, for readers that know neither 16-bit codes nor the newer operators.
    Float18,
    /// The float graph, with encodings in a file beside it in the form of AIMET.
    Aimet,
}

impl Dialect {
    const ALL: [Self; 4] = [Self::Qdq23, Self::Qdq21, Self::Float18, Self::Aimet];

    /// As options and manifests spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qdq23 => "qdq23",
            Self::Qdq21 => "qdq21",
            Self::Float18 => "float18",
            Self::Aimet => "aimet",
        }
    }

    /// The inverse of [`Dialect::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Operator set of the graphs. `ReduceMean` takes its axes as an input from 18 on.
    pub fn opset(self) -> i64 {
        match self {
            Self::Qdq23 => 23,
            Self::Qdq21 => 21,
            Self::Float18 | Self::Aimet => 18,
        }
    }

    /// Version of the container: the first that goes with the operator set, for old readers.
    pub fn ir_version(self) -> i64 {
        match self {
            Self::Qdq23 => 11,
            Self::Qdq21 => 10,
            Self::Float18 | Self::Aimet => 8,
        }
    }

    /// Whether norms and GELU are written as several plain operators.
    pub fn decomposes(self) -> bool {
        self != Self::Qdq23
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_operators_are_in_their_set() {
        for dialect in Dialect::ALL {
            assert_eq!(Dialect::from_name(dialect.name()), Some(dialect));
            // RMSNormalization came with 23, Gelu with 20.
            assert_eq!(dialect.decomposes(), dialect.opset() < 23);
        }
        assert_eq!(Dialect::from_name("qdq22"), None);
    }
}
