//! What the fuzz targets share: each is one of the targets of `cargo xtask fuzz`, with bytes that libFuzzer
//! chooses by what they reach.

use std::path::PathBuf;
use std::sync::OnceLock;

pub use libfuzzer_sys;
use xtask::fuzz::{Counting, Damage, Target};

/// So that memory is measured.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The target of this process, made at first use.
///
/// # Panics
/// When its files cannot be made.
pub fn target(name: &str) -> &'static Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let binary = std::env::var_os("SPARK_CONVERT").map(PathBuf::from);
        let binary = binary.expect("SPARK_CONVERT: the built binary, which makes the undamaged files");
        Target::new(&binary, name).expect("the undamaged files")
    })
}

/// Reads a file of a target.
///
/// # Panics
/// When it is read in a way that must not be.
pub fn read(name: &str, bytes: &[u8]) {
    if let Err(bad) = target(name).try_on(bytes) {
        panic!("{name}: {bad}");
    }
}

/// Changes the first `size` bytes of `data`, which has room for `max_size`. Half of the changes are those of
/// `cargo xtask fuzz`, which know what numbers and lengths look like; the others are libFuzzer's, which knows
/// what it was compared with. Returns the new size.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    if seed & 1 == 0 {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    let damaged = Damage::new(u64::from(seed)).damaged(&data[..size]);
    let size = damaged.len().min(max_size).min(data.len());
    data[..size].copy_from_slice(&damaged[..size]);
    size
}

/// The entry points of one target.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        use $crate::libfuzzer_sys::{fuzz_mutator, fuzz_target};

        fuzz_target!(|bytes: &[u8]| $crate::read($name, bytes));
        fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
            $crate::mutate(data, size, max_size, seed)
        });
    };
}
