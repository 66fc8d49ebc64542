//! Integer products with 4-bit codes as they are packed: words of eight neighbours along K, the words of
//! neighbouring rows beside each other, with int8 activation codes. Sums are exact in i32.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::simd::multiversion;

/// Codes of a word.
pub(crate) const WORD: usize = 8;
/// Words whose products are summed in 16 bits: four times two bytes times two products of at most
/// 15 * 127.
#[cfg(target_arch = "x86_64")]
const WORDS: usize = 4;
/// Rows of a tile.
#[cfg(target_arch = "x86_64")]
const TILE: usize = 8;

/// Arranges the codes of a block as the low and the high nibbles of its bytes meet them: those at even
/// places before those at odd ones.
///
/// # Panics
/// When the lengths differ or are odd.
pub(crate) fn arrange(codes: &[i16], out: &mut [i8]) {
    let (pairs, rest) = codes.as_chunks::<2>();
    assert!(rest.is_empty() && codes.len() == out.len(), "codes and their arrangement differ in length");
    let (even, odd) = out.split_at_mut(pairs.len());
    for ((pair, even), odd) in pairs.iter().zip(even).zip(odd) {
        #[expect(clippy::cast_possible_truncation, reason = "codes of eight bits")]
        let codes = pair.map(|code| code as i8);
        [*even, *odd] = codes;
    }
}

/// Packed codes of some rows: word w of row r at `w * stride + r`.
#[derive(Clone, Copy)]
pub(crate) struct Words<'a> {
    pub(crate) words: &'a [[u8; 4]],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
}

impl Words<'_> {
    /// Those from block `b` on, blocks being of `block` columns.
    pub(crate) fn skip_to_block(self, b: usize, block: usize) -> Self {
        Self { words: &self.words[b * block / WORD * self.stride..], ..self }
    }
}

/// The products of blocks of `block` columns: `sums[(b * tokens + t) * rows + r]` is the sum over block b
/// of `x[(b * tokens + t) * block + ..]`, each block arranged, times the codes (0..=15) of row r.
///
/// # Panics
/// When the lengths do not fit or a block is not of whole words.
pub(crate) fn block_sums(w: Words<'_>, x: &[i8], tokens: usize, block: usize, sums: &mut [i32]) {
    let blocks = x.len() / (tokens * block);
    assert!(
        block.is_multiple_of(WORD)
            && x.len() == blocks * tokens * block
            && sums.len() == blocks * tokens * w.rows
            && w.rows <= w.stride
            && (w.rows == 0 || (blocks * block / WORD - 1) * w.stride + w.rows <= w.words.len()),
        "{} activations, {} words and {} sums of {} rows do not fit",
        x.len(),
        w.words.len(),
        sums.len(),
        w.rows
    );
    sums.fill(0);
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the function is compiled for.
        #[allow(unsafe_code)]
        unsafe {
            block_sums_avx2(w, x, tokens, block, sums);
        }
        let whole = w.rows / TILE * TILE;
        if whole < w.rows {
            block_sums_portable(w, whole, x, tokens, block, sums);
        }
        return;
    }
    block_sums_portable(w, 0, x, tokens, block, sums);
}

/// The definition of [`block_sums`], from row `first` on; sums are exact, so their order does not matter.
fn block_sums_portable(w: Words<'_>, first: usize, x: &[i8], tokens: usize, block: usize, sums: &mut [i32]) {
    let words = block / WORD;
    for (i, (x, sums)) in x.chunks_exact(block).zip(sums.chunks_exact_mut(w.rows.max(1))).enumerate() {
        let (even, odd) = x.split_at(block / 2);
        for (j, (even, odd)) in even.chunks_exact(4).zip(odd.chunks_exact(4)).enumerate() {
            let word = i / tokens * words + j;
            for (r, sum) in sums.iter_mut().enumerate().skip(first) {
                *sum += nibbles(&w.words[word * w.stride + r], even, odd);
            }
        }
    }
}

/// The products of bytes: low nibbles with the codes at even places, high ones with those at odd places.
pub(super) fn nibbles(bytes: &[u8], even: &[i8], odd: &[i8]) -> i32 {
    let product = |(byte, (even, odd)): (&u8, (&i8, &i8))| {
        i32::from(byte & 15) * i32::from(*even) + i32::from(byte >> 4) * i32::from(*odd)
    };
    bytes.iter().zip(even.iter().zip(odd)).map(product).sum()
}

/// The whole tiles of rows.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn block_sums_avx2(w: Words<'_>, x: &[i8], tokens: usize, block: usize, sums: &mut [i32]) {
    let words = block / WORD;
    let rows = w.rows / TILE * TILE;
    for (b, (x, sums)) in
        x.chunks_exact(tokens * block).zip(sums.chunks_exact_mut(tokens * w.rows.max(1))).enumerate()
    {
        let mut first = 0;
        while first < words {
            let at = (b * words + first) * w.stride;
            let here = Words { words: &w.words[at..], ..w };
            let n = WORDS.min(words - first);
            match n {
                WORDS => words_avx2::<WORDS>(here, rows, x, first, tokens, block, sums),
                3 => words_avx2::<3>(here, rows, x, first, tokens, block, sums),
                2 => words_avx2::<2>(here, rows, x, first, tokens, block, sums),
                _ => words_avx2::<1>(here, rows, x, first, tokens, block, sums),
            }
            first += n;
        }
    }
}

/// Adds the products of `N` words of every row, `first` and the following of a block, for all tokens.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn words_avx2<const N: usize>(
    w: Words<'_>,
    rows: usize,
    x: &[i8],
    first: usize,
    tokens: usize,
    block: usize,
    sums: &mut [i32],
) {
    const { assert!(N <= WORDS) };
    assert!(rows <= w.rows && (N - 1) * w.stride + rows <= w.words.len());
    assert!(
        first + N <= block / WORD && tokens * block <= x.len() && (tokens - 1) * w.rows + rows <= sums.len()
    );
    let low = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    for r in (0..rows).step_by(TILE) {
        let mut codes = [[_mm256_setzero_si256(); 2]; N];
        for i in 0..N {
            // SAFETY: eight words from i * stride + r on lie within the words.
            let word = unsafe { _mm256_loadu_si256(w.words.as_ptr().add(i * w.stride + r).cast()) };
            codes[i] = [_mm256_and_si256(word, low), _mm256_and_si256(_mm256_srli_epi16::<4>(word), low)];
        }
        for t in 0..tokens {
            let mut sum = _mm256_setzero_si256();
            for i in 0..N {
                for part in 0..2 {
                    // SAFETY: the codes of the token's words before first + N lie within x.
                    let x = unsafe {
                        let at = x.as_ptr().add(t * block + part * (block / 2) + (first + i) * (WORD / 2));
                        _mm256_set1_epi32(at.cast::<i32>().read_unaligned())
                    };
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[i][part], x));
                }
            }
            // SAFETY: eight sums from t * rows + r on lie within the sums.
            unsafe {
                let at = sums.as_mut_ptr().add(t * w.rows + r).cast();
                let sum = _mm256_madd_epi16(sum, ones);
                _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), sum));
            }
        }
    }
}

/// Bytes of a step along a row: 64 codes.
#[cfg(target_arch = "x86_64")]
const STEP: usize = 32;
/// Steps whose products are summed in 16 bits, as with [`WORDS`].
#[cfg(target_arch = "x86_64")]
const STEPS: usize = 4;

/// The same for one token and one row whose words follow each other: `sums[b]` is that of block b.
///
/// # Panics
/// When the lengths do not fit or a block is odd.
pub(crate) fn row_sums(bytes: &[u8], x: &[i8], block: usize, sums: &mut [i32]) {
    assert!(
        block.is_multiple_of(2) && x.len() == sums.len() * block && bytes.len() * 2 == x.len(),
        "{} activations, {} bytes and {} sums of blocks of {block} do not fit",
        x.len(),
        bytes.len(),
        sums.len()
    );
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        // SAFETY: the processor has every feature the functions are compiled for.
        #[allow(unsafe_code)]
        unsafe {
            if block.is_multiple_of(2 * STEP) && block <= 2 * STEP * STEPS {
                return row_sums_avx2(bytes, x, block, sums);
            }
            if block == STEP {
                return row_sums_of_32_avx2(bytes, x, sums);
            }
        }
    }
    row_sums_portable(bytes, x, block, sums);
}

/// The definition of [`row_sums`].
fn row_sums_portable(bytes: &[u8], x: &[i8], block: usize, sums: &mut [i32]) {
    let blocks = bytes.chunks_exact(block / 2).zip(x.chunks_exact(block));
    for ((bytes, x), sum) in blocks.zip(sums) {
        let (even, odd) = x.split_at(block / 2);
        *sum = nibbles(bytes, even, odd);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn row_sums_avx2(bytes: &[u8], x: &[i8], block: usize, sums: &mut [i32]) {
    let half = block / 2;
    assert!(half.is_multiple_of(STEP) && half <= STEP * STEPS);
    assert!(x.len() == sums.len() * block && bytes.len() == sums.len() * half);
    let low = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let mut b = 0;
    while b < sums.len() {
        // Four blocks have their lanes added up together; what is past the end stays zero.
        let mut four = [_mm256_setzero_si256(); 4];
        let n = (sums.len() - b).min(4);
        for i in 0..n {
            let mut sum = _mm256_setzero_si256();
            let mut at = 0;
            while at < half {
                // SAFETY: at + 32 <= half, and block b + i has `half` bytes, codes at even places and
                // codes at odd ones.
                let (bytes, even, odd) = unsafe {
                    let x = x.as_ptr().add((b + i) * block + at);
                    (
                        _mm256_loadu_si256(bytes.as_ptr().add((b + i) * half + at).cast()),
                        _mm256_loadu_si256(x.cast()),
                        _mm256_loadu_si256(x.add(half).cast()),
                    )
                };
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
                let products = _mm256_maddubs_epi16(_mm256_and_si256(bytes, low), even);
                sum = _mm256_add_epi16(sum, _mm256_add_epi16(products, _mm256_maddubs_epi16(high, odd)));
                at += STEP;
            }
            four[i] = _mm256_madd_epi16(sum, ones);
        }
        let [a, b_, c, d] = four;
        let eight = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b_), _mm256_hadd_epi32(c, d));
        let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
        let mut out = [0; 4];
        // SAFETY: the array has four elements.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), four) };
        sums[b..b + n].copy_from_slice(&out[..n]);
        b += n;
    }
}

/// [`row_sums`] for blocks of 32 codes, two to a register.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unsafe_code)]
fn row_sums_of_32_avx2(bytes: &[u8], x: &[i8], sums: &mut [i32]) {
    assert!(x.len() == sums.len() * STEP && bytes.len() == sums.len() * STEP / 2);
    let low = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let whole = sums.len() / 8 * 8;
    for b in (0..whole).step_by(8) {
        let mut pairs = [_mm256_setzero_si256(); 4];
        for i in 0..4 {
            // SAFETY: blocks b + 2 i and the next have 16 bytes, 16 codes at even places and 16 at odd
            // ones each.
            let (bytes, first, second) = unsafe {
                let x = x.as_ptr().add((b + 2 * i) * STEP);
                (
                    _mm256_loadu_si256(bytes.as_ptr().add((b + 2 * i) * STEP / 2).cast()),
                    _mm256_loadu_si256(x.cast()),
                    _mm256_loadu_si256(x.add(STEP).cast()),
                )
            };
            let even = _mm256_permute2x128_si256::<0x20>(first, second);
            let odd = _mm256_permute2x128_si256::<0x31>(first, second);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
            let products = _mm256_maddubs_epi16(_mm256_and_si256(bytes, low), even);
            let sum = _mm256_add_epi16(products, _mm256_maddubs_epi16(high, odd));
            pairs[i] = _mm256_madd_epi16(sum, ones);
        }
        // The even blocks' sums in the lower half, the odd ones' in the upper.
        let [p, q, r, s] = pairs;
        let eight = _mm256_hadd_epi32(_mm256_hadd_epi32(p, q), _mm256_hadd_epi32(r, s));
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        // SAFETY: b + 8 <= the number of sums.
        unsafe {
            let sums = sums.as_mut_ptr().add(b).cast();
            _mm256_storeu_si256(sums, _mm256_permutevar8x32_epi32(eight, order));
        }
    }
    let at = whole * STEP;
    row_sums_portable(&bytes[at / 2..], &x[at..], STEP, &mut sums[whole..]);
}

multiversion! {
    /// The terms of a row's blocks, as [`add_block`] adds them: `(sum - zero_point * x_sum) * scale`.
    pub(crate) fn block_terms(
        sums: &[i32],
        zero_points: &[i32],
        x_sums: &[i32],
        scales: &[f32],
        terms: &mut [f32],
    ) {
        let blocks = sums.iter().zip(zero_points).zip(x_sums).zip(scales);
        for ((((sum, zero_point), x_sum), scale), term) in blocks.zip(terms) {
            #[expect(clippy::cast_precision_loss, reason = "exact")]
            let sum = (sum - zero_point * x_sum) as f32;
            *term = sum * scale;
        }
    }
}

multiversion! {
    /// Adds a block to the outputs of a token: `y[r] += (sum[r] - zero_point[r] * x_sum) * scale[r]`, the
    /// difference being exact and below 2^24.
    pub(crate) fn add_block(sums: &[i32], zero_points: &[i32], scales: &[f32], x_sum: i32, y: &mut [f32]) {
        for (((y, sum), zero_point), scale) in y.iter_mut().zip(sums).zip(zero_points).zip(scales) {
            #[expect(clippy::cast_precision_loss, reason = "exact")]
            let sum = (sum - zero_point * x_sum) as f32;
            *y += sum * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_at_every_shape_and_at_the_extremes() {
        for (rows, tokens, block, blocks, spare) in
            [(1, 1, 8, 1, 0), (8, 1, 128, 3, 5), (13, 3, 32, 2, 0), (40, 5, 40, 2, 1), (24, 2, 56, 1, 0)]
        {
            let (k, stride) = (blocks * block, rows + spare);
            for extreme in [false, true] {
                let code = |r: usize, k: usize| if extreme { 15 } else { (r * 31 + k * 7) % 16 };
                let value = |t: usize, k: usize| match extreme {
                    true => -127,
                    false => (t * 53 + k * 29) as i16 % 255 - 127,
                };
                let mut words = vec![[0xff; 4]; k / WORD * stride];
                for r in 0..rows {
                    for k in 0..k {
                        let byte = &mut words[k / WORD * stride + r][k % WORD / 2];
                        let shift = k % 2 * 4;
                        *byte = *byte & !(15 << shift) | (code(r, k) as u8) << shift;
                    }
                }
                let mut x = vec![0; tokens * k];
                for b in 0..blocks {
                    for t in 0..tokens {
                        let codes: Vec<i16> = (0..block).map(|k| value(t, b * block + k)).collect();
                        arrange(&codes, &mut x[(b * tokens + t) * block..][..block]);
                    }
                }
                let mut sums = vec![-1; blocks * tokens * rows];
                let w = Words { words: &words, stride, rows };
                block_sums(w, &x, tokens, block, &mut sums);
                for (i, sum) in sums.iter().enumerate() {
                    let (b, t, r) = (i / rows / tokens, i / rows % tokens, i % rows);
                    let product = |k| i64::from(value(t, k)) * code(r, k) as i64;
                    let expected: i64 = (b * block..(b + 1) * block).map(product).sum();
                    assert_eq!(i64::from(*sum), expected, "{rows} {tokens} {block} {b} {t} {r}");
                }
                for (r, b, t) in
                    (0..rows * blocks * tokens).map(|i| (i % rows, i / rows / tokens, i / rows % tokens))
                {
                    let row: Vec<u8> = (b * block / WORD..(b + 1) * block / WORD)
                        .flat_map(|word| words[word * stride + r])
                        .collect();
                    let mut sum = [-1];
                    row_sums(&row, &x[(b * tokens + t) * block..][..block], block, &mut sum);
                    assert_eq!(sum[0], sums[(b * tokens + t) * rows + r], "{block}");
                }
                let mut again = vec![0; sums.len()];
                block_sums_portable(w, 0, &x, tokens, block, &mut again);
                assert_eq!(sums, again);
            }
        }
    }

    #[test]
    fn both_builds_of_a_row_agree() {
        for block in [32, 64, 96, 128, 192, 256] {
            for blocks in 1..=19 {
                let bytes: Vec<u8> = (0..blocks * block / 2).map(|i| (i * 37 % 256) as u8).collect();
                let x: Vec<i8> = (0..blocks * block).map(|i| (i * 29 % 255) as u8 as i8).collect();
                let (mut a, mut b) = (vec![0; blocks], vec![1; blocks]);
                row_sums(&bytes, &x, block, &mut a);
                row_sums_portable(&bytes, &x, block, &mut b);
                assert_eq!(a, b);
                // The largest sums.
                row_sums(&vec![0xff; bytes.len()], &vec![-128; x.len()], block, &mut a);
                assert_eq!(a, vec![-15 * 128 * block as i32; blocks]);
            }
        }
    }

    #[test]
    fn both_builds_of_the_last_step_agree() {
        let sums: Vec<i32> = (0..21).map(|i| i * 977 - 9000).collect();
        let zero_points: Vec<i32> = (0..21).map(|i| i % 16).collect();
        let scales: Vec<f32> = (0..21).map(|i| 0.01 + i as f32 * 0.003).collect();
        let (mut a, mut b) = (vec![0.5; 21], vec![0.5; 21]);
        add_block(&sums, &zero_points, &scales, -331, &mut a);
        add_block::scalar(&sums, &zero_points, &scales, -331, &mut b);
        assert_eq!(a, b);
        let x_sums: Vec<i32> = (0..21).map(|i| i * 13 - 99).collect();
        let (mut c, mut d) = (vec![0.0; 21], vec![1.0; 21]);
        block_terms(&sums, &zero_points, &x_sums, &scales, &mut c);
        block_terms::scalar(&sums, &zero_points, &x_sums, &scales, &mut d);
        assert_eq!(c, d);
        assert_eq!(c[20], (20 * 977 - 9000 - 4 * (20 * 13 - 99)) as f32 * scales[20]);
        assert_eq!(a[20], 0.5 + (20 * 977 - 9000 + 4 * 331) as f32 * scales[20]);
    }
}
