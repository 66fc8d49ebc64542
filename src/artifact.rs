//! Writing artifacts: staged beside the target, hashed on the way out, published in one step.
//! The only place that creates outputs.

mod hash;
mod manifest;
mod scratch;
mod shard_writer;
mod single;
mod staging;
mod store;

pub(crate) use hash::hex as finish_hash;
pub use hash::{Sha256Hex, hash_bytes, hash_file};
pub use manifest::{
    FileRecord, Manifest, ManifestError, ManifestSizes, Source, TensorAction, TensorRecord, Tool,
};
pub(crate) use manifest::{MANIFEST_VERSION, rounded};
pub use scratch::Scratch;
pub use shard_writer::{ShardWriter, WrittenShard};
pub use single::write_file;
pub use staging::{Staging, check_space, free_bytes, refuse_overlap};
pub use store::Store;
