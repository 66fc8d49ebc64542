use super::*;

const FILE: &str = "imatrix.dat";

fn entry(name: &[u8], values: i32) -> Vec<u8> {
    let length = i32::try_from(name.len()).unwrap();
    [&length.to_le_bytes(), name, &1i32.to_le_bytes(), &values.to_le_bytes()].concat()
}

/// Counts that lead out of the file, and names that are none, are told and not followed.
#[test]
fn a_damaged_list_is_refused() {
    let one = 1i32.to_le_bytes();
    let bad: [Vec<u8>; 7] = [
        Vec::new(),
        0i32.to_le_bytes().to_vec(),
        (-1i32).to_le_bytes().to_vec(),
        i32::MAX.to_le_bytes().to_vec(),
        [&one[..], &entry(b"x", i32::MAX)].concat(),
        [&one[..], &entry(b"x", -1)].concat(),
        [&one[..], &entry(b"\xff\xfe", 0)].concat(),
    ];
    for bytes in bad {
        let error = of_list(FILE, &bytes).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains("llama-imatrix"), "{bytes:?}: {error}");
    }
    let good = [&one[..], &entry(b"x", 1), &2.5f32.to_le_bytes()].concat();
    assert_eq!(of_list(FILE, &good).unwrap()["x"], [2.5]);
}

/// Proportions, with a floor so that no column is free.
#[test]
fn values_are_relative_to_the_largest() {
    assert_eq!(relative(FILE, "x", vec![4.0, 1.0, 0.0], 3).unwrap(), Some(vec![1.0, 0.25, FLOOR]));
    assert_eq!(relative(FILE, "x", vec![0.0; 3], 3).unwrap(), None);
}
