//! One body, several instruction sets: how the leaf kernels are compiled.
//!
//! A kernel is written once, as plain Rust over fixed arrays of [`LANES`] lanes, and compiled for the
//! baseline and for AVX2 + FMA + F16C. The operations and their order are fixed by the source
//! (floating point is never reassociated, fused multiply-adds are written as `mul_add`), so the
//! variants are equal bit for bit and artifacts do not depend on the processor. The tests compare
//! them all the same.

/// Width of the accumulators of every reduction; part of the definition of the results.
pub(crate) const LANES: usize = 16;

/// Defines `fn $name` that runs the AVX2 build of the body where the processor has it, and a module
/// of the same name whose `scalar` is the baseline build, for the tests.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            /// The baseline build of the kernel: the reference for the other builds.
            #[allow(dead_code, reason = "called by the tests where a faster build exists")]
            pub(crate) fn scalar($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[inline]
            pub(super) fn dispatch($($arg: $ty),*) $(-> $ret)? {
                #[cfg(target_arch = "x86_64")]
                if $crate::simd::has_avx2() {
                    // SAFETY: the processor has every feature the function is compiled for.
                    #[allow(unsafe_code)]
                    return unsafe { avx2($($arg),*) };
                }
                scalar($($arg),*)
            }
        }

        $(#[$meta])*
        #[inline]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            $name::dispatch($($arg),*)
        }
    };
}
pub(crate) use multiversion;

/// Whether the AVX2 builds may run; the standard library caches the answer.
#[inline]
pub(crate) fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Asks for bytes to be brought into the second-level cache. They need not exist.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn prefetch(from: *const u8, bytes: usize) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    const LINE_BYTES: usize = 64;
    for at in (0..bytes).step_by(LINE_BYTES) {
        // SAFETY: a prefetch of any address has no effect but on the caches, and every x86-64 has it.
        #[allow(unsafe_code)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast());
        }
    }
}

/// Adds the lanes up in a fixed order: halves onto halves.
///
/// Not inlined on purpose: the compiler then sees the lanes of a kernel's loop stored side by side and
/// makes full vectors of them, instead of shaping the loop after this tree of pairs.
#[inline(never)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
