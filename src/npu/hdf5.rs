//! HDF5, as much of it as a set of calibration samples takes.
//!
//! AI Hub's quantize job reads `data/<k>/batch_<j>`, an f32 array per sample, under groups with the
//! attributes `order` (a number), `name` (the input) and `batch_count`. The file is written front to
//! back: everything but the arrays first, whose addresses follow from their sizes. By the HDF5 file
//! format specification, version 3.0: superblock 2, object headers 2, compact links, contiguous data.

/// An input of a graph, of which there are samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledInput {
    /// Name of the input.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
}

impl SampledInput {
    /// Bytes of a sample.
    pub fn len_bytes(&self) -> u64 {
        self.shape.iter().map(|d| *d as u64).product::<u64>() * 4
    }
}

/// Arrays begin at multiples of this.
const ALIGNMENT: u64 = 8;
const SIGNATURE: &[u8; 8] = b"\x89HDF\r\n\x1a\n";
const SUPERBLOCK_BYTES: u64 = 48;
const UNDEFINED: u64 = u64::MAX;

/// Message types of object headers.
mod message {
    pub(super) const DATASPACE: u8 = 0x01;
    pub(super) const LINK_INFO: u8 = 0x02;
    pub(super) const DATATYPE: u8 = 0x03;
    pub(super) const FILL_VALUE: u8 = 0x05;
    pub(super) const LINK: u8 = 0x06;
    pub(super) const LAYOUT: u8 = 0x08;
    pub(super) const GROUP_INFO: u8 = 0x0a;
    pub(super) const ATTRIBUTE: u8 = 0x0c;
}

/// The file up to the first array. The arrays follow without gaps: of each sample in turn those of all
/// inputs, in order, little-endian f32.
pub fn head(inputs: &[SampledInput], samples: usize) -> Vec<u8> {
    // Addresses only change values, never lengths: a first pass with any addresses gives the lengths.
    let draft = Addresses::default_for(inputs.len(), samples);
    let (_, lengths) = objects(inputs, samples, &draft);
    let mut end = SUPERBLOCK_BYTES;
    let mut place = |length: u64| {
        let at = end;
        end = (end + length).next_multiple_of(ALIGNMENT);
        at
    };
    let objects_at: Vec<u64> = lengths.iter().map(|length| place(*length)).collect();
    let mut arrays_at = vec![vec![0; samples]; inputs.len()];
    let start = place(0);
    let mut array = start;
    for sample in 0..samples {
        for (input, at) in inputs.iter().zip(&mut arrays_at) {
            at[sample] = array;
            // Elements of four bytes: a sample of odd length leaves the next one at a multiple of four,
            // which is all that a reader of f32 needs.
            array += input.len_bytes();
        }
    }
    let addresses = Addresses { objects: objects_at, arrays: arrays_at };
    let (blocks, _) = objects(inputs, samples, &addresses);
    let mut bytes = superblock(array, addresses.objects[0]);
    for (block, at) in blocks.iter().zip(&addresses.objects) {
        bytes.resize(usize::try_from(*at).unwrap_or(usize::MAX), 0);
        bytes.extend(block);
    }
    bytes.resize(usize::try_from(start).unwrap_or(usize::MAX), 0);
    bytes
}

/// Where everything is.
struct Addresses {
    /// Root, `data`, names, then for each input its group and its datasets.
    objects: Vec<u64>,
    /// By input and sample.
    arrays: Vec<Vec<u64>>,
}

impl Addresses {
    fn default_for(inputs: usize, samples: usize) -> Self {
        Self { objects: vec![0; 3 + inputs * (1 + samples)], arrays: vec![vec![0; samples]; inputs] }
    }

    fn group(&self, input: usize) -> u64 {
        self.objects[3 + input * (1 + self.arrays[input].len())]
    }

    fn dataset(&self, input: usize, sample: usize) -> u64 {
        self.objects[3 + input * (1 + self.arrays[input].len()) + 1 + sample]
    }
}

/// All blocks but the arrays, in the order of [`Addresses::objects`], and their lengths.
fn objects(inputs: &[SampledInput], samples: usize, at: &Addresses) -> (Vec<Vec<u8>>, Vec<u64>) {
    let data = [("data".to_owned(), at.objects[1])];
    let groups: Vec<_> = (0..inputs.len()).map(|k| (k.to_string(), at.group(k))).collect();
    let mut blocks = vec![group(&data, Vec::new()), group(&groups, Vec::new()), heap(inputs)];
    for (k, input) in inputs.iter().enumerate() {
        let links: Vec<_> = (0..samples).map(|j| (format!("batch_{j}"), at.dataset(k, j))).collect();
        let attributes = vec![
            integer_attribute("order", k as u64),
            text_attribute("name", input.name.len(), at.objects[2], k + 1),
            integer_attribute("batch_count", samples as u64),
        ];
        blocks.push(group(&links, attributes));
        for j in 0..samples {
            blocks.push(dataset(input, at.arrays[k][j]));
        }
    }
    let lengths = blocks.iter().map(|b| b.len() as u64).collect();
    (blocks, lengths)
}

fn superblock(end_of_file: u64, root: u64) -> Vec<u8> {
    let mut bytes = SIGNATURE.to_vec();
    // Version, bytes of an offset, bytes of a length, consistency flags.
    bytes.extend([2, 8, 8, 0]);
    for address in [0, UNDEFINED, end_of_file, root] {
        bytes.extend(address.to_le_bytes());
    }
    let checksum = lookup3(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// An object header of these messages.
fn header(messages: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, data) in messages {
        body.push(*kind);
        body.extend(u16::try_from(data.len()).unwrap_or(u16::MAX).to_le_bytes());
        body.push(0);
        body.extend(data);
    }
    let mut bytes = b"OHDR".to_vec();
    // Version; the length of the messages takes four bytes.
    bytes.extend([2, 2]);
    bytes.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(body);
    let checksum = lookup3(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// A group with hard links.
fn group(links: &[(String, u64)], attributes: Vec<Vec<u8>>) -> Vec<u8> {
    // Links are in the header itself: no heap, no index.
    let mut info = vec![0, 0];
    info.extend(UNDEFINED.to_le_bytes());
    info.extend(UNDEFINED.to_le_bytes());
    let mut messages = vec![(message::LINK_INFO, info), (message::GROUP_INFO, vec![0, 0])];
    for (name, address) in links {
        // Version 1, a name of at most 255 ASCII bytes, a hard link.
        let mut link = vec![1, 0, u8::try_from(name.len()).unwrap_or(u8::MAX)];
        link.extend(name.as_bytes());
        link.extend(address.to_le_bytes());
        messages.push((message::LINK, link));
    }
    messages.extend(attributes.into_iter().map(|attribute| (message::ATTRIBUTE, attribute)));
    header(&messages)
}

/// A contiguous array of f32.
fn dataset(input: &SampledInput, address: u64) -> Vec<u8> {
    let mut space = vec![2, u8::try_from(input.shape.len()).unwrap_or(u8::MAX), 0, 1];
    input.shape.iter().for_each(|d| space.extend((*d as u64).to_le_bytes()));
    let mut layout = vec![3, 1];
    layout.extend(address.to_le_bytes());
    layout.extend(input.len_bytes().to_le_bytes());
    header(&[
        (message::DATASPACE, space),
        (message::DATATYPE, float32()),
        // As libraries write it for such arrays: allocated late, filled only if a value is set.
        (message::FILL_VALUE, vec![3, 0x0a]),
        (message::LAYOUT, layout),
    ])
}

/// IEEE binary32, little endian.
fn float32() -> Vec<u8> {
    // Class 1; an implied leading bit; the sign is bit 31.
    let mut bytes = vec![0x11, 0x20, 31, 0];
    bytes.extend(4u32.to_le_bytes());
    bytes.extend(0u16.to_le_bytes());
    bytes.extend(32u16.to_le_bytes());
    // Exponent: 8 bits from 23; fraction: 23 bits from 0; bias 127.
    bytes.extend([23, 8, 0, 23]);
    bytes.extend(127u32.to_le_bytes());
    bytes
}

/// A scalar attribute of this type and value.
fn attribute(name: &str, datatype: &[u8], value: &[u8]) -> Vec<u8> {
    let scalar = [2, 0, 0, 0];
    let length = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_le_bytes();
    let mut bytes = vec![3, 0];
    bytes.extend(length(name.len() + 1));
    bytes.extend(length(datatype.len()));
    bytes.extend(length(scalar.len()));
    bytes.push(0);
    bytes.extend(name.as_bytes());
    bytes.push(0);
    bytes.extend(datatype);
    bytes.extend(scalar);
    bytes.extend(value);
    bytes
}

fn integer_attribute(name: &str, value: u64) -> Vec<u8> {
    // Class 0, signed, little endian, 64 bits.
    let mut datatype = vec![0x10, 0x08, 0, 0];
    datatype.extend(8u32.to_le_bytes());
    datatype.extend(0u16.to_le_bytes());
    datatype.extend(64u16.to_le_bytes());
    attribute(name, &datatype, &value.to_le_bytes())
}

/// A text of variable length, which is the object with this index of the heap: readers give those as
/// text, and texts of fixed length as bytes.
fn text_attribute(name: &str, length: usize, heap: u64, index: usize) -> Vec<u8> {
    // Class 9, a string, UTF-8, of elements that are strings of one byte.
    let mut datatype = vec![0x19, 1, 1, 0];
    datatype.extend(16u32.to_le_bytes());
    datatype.extend([0x13, 0x10, 0, 0]);
    datatype.extend(1u32.to_le_bytes());
    let mut value = u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    value.extend(heap.to_le_bytes());
    value.extend(u32::try_from(index).unwrap_or(u32::MAX).to_le_bytes());
    attribute(name, &datatype, &value)
}

/// The global heap with the names of the inputs, from index 1 on.
fn heap(inputs: &[SampledInput]) -> Vec<u8> {
    const HEADER: usize = 16;
    const SMALLEST: usize = 4096;
    let mut objects = Vec::new();
    for (k, input) in inputs.iter().enumerate() {
        objects.extend(u16::try_from(k + 1).unwrap_or(u16::MAX).to_le_bytes());
        objects.extend([1, 0, 0, 0, 0, 0]);
        objects.extend((input.name.len() as u64).to_le_bytes());
        objects.extend(input.name.as_bytes());
        objects.resize(objects.len().next_multiple_of(8), 0);
    }
    let size = (HEADER + objects.len() + HEADER).max(SMALLEST);
    let mut bytes = b"GCOL".to_vec();
    bytes.extend([1, 0, 0, 0]);
    bytes.extend((size as u64).to_le_bytes());
    bytes.extend(objects);
    // What is left over is object 0.
    let free = (size - bytes.len()) as u64;
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(free.to_le_bytes());
    bytes.resize(size, 0);
    bytes
}

/// Bob Jenkins' lookup3 (`hashlittle` from 0), the checksum of HDF5's metadata.
fn lookup3(bytes: &[u8]) -> u32 {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let mut state = [0xdead_beef_u32.wrapping_add(length); 3];
    let mut rest = bytes;
    let add = |state: &mut [u32; 3], block: &[u8]| {
        for (i, byte) in block.iter().enumerate() {
            state[i / 4] = state[i / 4].wrapping_add(u32::from(*byte) << (i % 4 * 8));
        }
    };
    while rest.len() > 12 {
        add(&mut state, &rest[..12]);
        for (i, turn) in [4, 6, 8, 16, 19, 4].into_iter().enumerate() {
            let (a, b, c) = (i % 3, (i + 1) % 3, (i + 2) % 3);
            state[a] = state[a].wrapping_sub(state[c]) ^ state[c].rotate_left(turn);
            state[c] = state[c].wrapping_add(state[b]);
        }
        rest = &rest[12..];
    }
    if rest.is_empty() {
        return state[2];
    }
    add(&mut state, rest);
    for (i, turn) in [14, 11, 25, 16, 4, 14, 24].into_iter().enumerate() {
        let (x, by) = ((i + 2) % 3, (i + 1) % 3);
        state[x] = (state[x] ^ state[by]).wrapping_sub(state[by].rotate_left(turn));
    }
    state[2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the comments of lookup3.c.
    #[test]
    fn the_checksum_is_lookup3() {
        assert_eq!(lookup3(b""), 0xdead_beef);
        assert_eq!(lookup3(b"Four score and seven years ago"), 0x1777_0551);
    }

    #[test]
    fn arrays_follow_the_head_and_addresses_say_so() {
        let input = |name: &str, shape: &[usize]| SampledInput { name: name.into(), shape: shape.into() };
        let inputs = [input("hidden_in", &[1, 1, 8]), input("mask", &[1, 1, 1, 5])];
        let bytes = head(&inputs, 2);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(&bytes[..8], SIGNATURE);
        // Two samples of 8 and 5 floats behind the head: the end of the file.
        assert_eq!(word(28), bytes.len() as u64 + 2 * 13 * 4);
        assert_eq!(word(36), SUPERBLOCK_BYTES);
        assert_eq!(bytes.len() % 8, 0);
        // The layout of the second sample of the mask: one sample and eight floats behind the head.
        let layout = [vec![3, 1], (bytes.len() as u64 + 84).to_le_bytes().into(), 20u64.to_le_bytes().into()];
        let layout = layout.concat();
        assert!(bytes.windows(layout.len()).any(|w| w == layout));
    }
}
