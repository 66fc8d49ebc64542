//! Sizes as people type them.

/// Units by their names, in bytes.
const UNITS: [(&str, u64); 8] = [
    ("", 1),
    ("b", 1),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
];

/// Decimals at most: a byte of a GiB is at the ninth.
const DECIMALS: usize = 9;

/// Bytes of `12000000`, `12MB`, `11.5 MiB`: a number, decimals included, and a unit in any case, of 1000 (kB, MB, GB)
/// or of 1024 (KiB, MiB, GiB). Parts of a byte are dropped.
///
/// # Errors
/// What is not of this form, or beyond 64 bits.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let form = || "expected bytes, as 12000000, 12MB or 11.5MiB (kB, MB, GB, KiB, MiB, GiB)".to_owned();
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[number.len()..].to_ascii_lowercase();
    let (_, unit) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(form)?;
    let (whole, decimals) = number.trim_end().split_once('.').map_or((number.trim_end(), "0"), |parts| parts);
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(decimals) || decimals.len() > DECIMALS {
        return Err(form());
    }
    let too_large = || format!("{text} is more than 64 bits hold");
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let decimals = format!("{decimals:0<DECIMALS$}").parse::<u64>().map_err(|_| form())?;
    // Below 2^30 times 10^9, which is below 2^60.
    let part = decimals * unit / 10u64.pow(DECIMALS as u32);
    whole.checked_mul(*unit).and_then(|bytes| bytes.checked_add(part)).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_said() {
        for (text, bytes) in [
            ("0", 0),
            ("12345", 12345),
            ("7B", 7),
            ("12MB", 12_000_000),
            ("12mb", 12_000_000),
            ("1.5 kB", 1500),
            ("2GB", 2_000_000_000),
            ("1KiB", 1024),
            ("11.5MiB", 11 * (1 << 20) + (1 << 19)),
            ("0.25GiB", 1 << 28),
            ("0.000000001GiB", 1),
            ("1.9B", 1),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_none_is_refused() {
        for text in [
            "",
            "MB",
            "-1",
            "+1",
            "1e6",
            "1.",
            ".5MB",
            "1.2.3",
            "12MBit",
            "12 M B",
            "0.0000000001GiB",
            "１２",
        ] {
            assert!(parse(text).is_err_and(|why| why.contains("12MB")), "{text}");
        }
        for text in ["18446744073709551616", "18446744073709551615kB", "17179869184.1GiB"] {
            assert!(parse(text).is_err_and(|why| why.contains("64 bits")), "{text}");
        }
    }
}
