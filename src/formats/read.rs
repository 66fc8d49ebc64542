//! Reading the tensors of a module back, with everything that is wrong about them collected.

use super::{Codec, OutputTensor, Problem};
use crate::checkpoint::TensorFiles;
use crate::tensor::{Dtype, TensorView};

/// Looks up the tensors that a codec calls for.
pub(super) struct Reader<'a, 'c> {
    files: &'a TensorFiles,
    codec: &'c dyn Codec,
    outputs: Vec<OutputTensor>,
    /// What was found to be wrong so far.
    pub(super) problems: Vec<Problem>,
}

impl<'a, 'c> Reader<'a, 'c> {
    pub(super) fn new(files: &'a TensorFiles, codec: &'c dyn Codec, module: &str, shape: [usize; 2]) -> Self {
        Self { files, codec, outputs: codec.outputs(module, shape), problems: Vec::new() }
    }

    /// The `i`th of the codec's outputs, if it is there with the right shape and its own dtype or one of
    /// `also`.
    pub(super) fn tensor(&mut self, i: usize, also: &[Dtype]) -> Option<TensorView<'a>> {
        let OutputTensor { name, dtype, shape } = self.outputs[i].clone();
        let Some(tensor) = self.files.get(&name) else {
            self.problem(&name, "missing".to_owned(), self.codec.missing_consequence(&name));
            return None;
        };
        if tensor.dtype != dtype && !also.contains(&tensor.dtype) {
            let what = format!("expected {dtype}, found {}", tensor.dtype);
            self.problem(&name, what, "the loader copies it into a parameter of another type, or stops");
            return None;
        }
        if tensor.shape != shape {
            let what = format!("expected shape {shape:?}, found {:?}", tensor.shape);
            self.problem(&name, what, "the loader fails the shape check of its parameter");
            return None;
        }
        Some(tensor)
    }

    pub(super) fn problem(&mut self, tensor: &str, what: String, consequence: &'static str) {
        self.problems.push(Problem { tensor: tensor.to_owned(), what, consequence });
    }
}
