//! What the checkpoint itself computes, kept between runs of `verify`: final-norm hidden states and greedy
//! continuations of prompts, in f32 and in bf16 arithmetic, and the residual stream that layers are fed.
//!
//! Logits are not kept: at the published sizes they would be 64 times as large, and the head makes them again, bit
//! for bit. So a run that finds everything here prints the same report as one that does not.
//!
//! An entry is named by a hash of all that decides its content (see [`Cache::open`]), so that one that does not
//! belong to a run is never looked up, and it ends with a hash of its bytes, so that damage is found before
//! anything of it is used: it is told, and made again. Whoever can write to the directory can still put a
//! well-formed lie there; it is to be trusted like the checkpoint.
//!
//! Memory: an entry of hidden states is read into what a run without a cache holds as well; the residual stream
//! passes a piece of 128 tokens at a time.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::layers::{Residuals, See, each_residual, residual_pieces};
use super::passes::{Passes, tokens_fed};
use crate::artifact::{Sha256Hex, Store, finish_hash, hash_bytes};
use crate::checkpoint::ModelDir;
use crate::error::{Failure, InputError, Result};
use crate::interrupt::Interrupt;
use crate::runtime::{Model, State};
use crate::scenario::Prompt;

/// Says what the directory is, to people, to us, and to programs that leave caches out of backups
/// (<https://bford.info/cachedir/>).
const TAG: (&str, &str) = (
    "CACHEDIR.TAG",
    "Signature: 8a477f597d28d172789f06886806bc55\n\
     # Reference runs of spark-convert verify --cache. May be removed at any time.\n",
);

/// How an entry begins; its number is the version of the form and of what decides the content.
const MAGIC: &[u8; 32] = b"spark-convert reference cache 1\n";

/// Length of a hash in hex.
const HASH: usize = 64;

/// Tokens that the arithmetic is told by: several at once, and one.
const PROBE: [usize; 2] = [16, 1];

/// A directory of reference runs.
pub struct Cache {
    store: Store,
    dir: ModelDir,
    /// Hash of all that decides an entry but the prompt.
    source: Sha256Hex,
    hidden_size: usize,
    vocab_size: usize,
    layers: usize,
    used: Cell<usize>,
    made: Cell<usize>,
}

impl Cache {
    /// Refuses a path that is something else than a cache, before any time is spent.
    ///
    /// # Errors
    /// When it is a file, or a directory with files in it that is no cache of this tool.
    pub fn check(path: &Path) -> Result<()> {
        let expected = "a directory that --cache has made, or a name for a new one";
        let error = |found: &str| {
            Failure::usage(format!("--cache {}: expected {expected}, found {found}", path.display()))
        };
        match std::fs::symlink_metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => match path.components().next_back() {
                Some(std::path::Component::Normal(_)) => return Ok(()),
                _ => return Err(error("a path without a name")),
            },
            Err(e) => return Err(Failure::io(path, "cannot open", e)),
            Ok(_) if !path.is_dir() => return Err(error("a file")),
            Ok(_) => {}
        }
        let dir = ModelDir::open(path)?;
        let mut entries = std::fs::read_dir(path).map_err(|e| Failure::io(path, "cannot list", e))?;
        if !dir.has(TAG.0) {
            return match entries.next() {
                None => Ok(()),
                Some(_) => Err(error(&format!("files, and no {} among them", TAG.0))),
            };
        }
        match dir.read(TAG.0)? == TAG.1.as_bytes() {
            true => Ok(()),
            false => Err(error(&format!("another program's {}", TAG.0))),
        }
    }

    /// Opens or makes the cache in `path` for a checkpoint, of which `source` has the hash of config.json and
    /// of every shard by name, and `model` and `floor` are its models in f32 and in bf16 arithmetic.
    ///
    /// Entries are named by a hash of the form's version, this program's version, these hashes, what a few fixed
    /// tokens come to in both models (so that a build whose arithmetic differs finds none of another's), the
    /// end tokens, the prompt's tokens and its limit of new ones.
    ///
    /// # Errors
    /// As [`Self::check`], when another run is using it, or it cannot be made.
    pub fn open(
        path: &Path,
        source: &BTreeMap<String, Sha256Hex>,
        stop: &[u32],
        model: &Model<'_>,
        floor: &Model<'_>,
    ) -> Result<Self> {
        Self::check(path)?;
        let store = Store::open(path, TAG)?;
        let dir = ModelDir::open(store.dir())?;
        let config = model.config();
        let mut text = String::from_utf8_lossy(MAGIC).into_owned();
        text += &format!("version {}\nend {stop:?}\n", env!("CARGO_PKG_VERSION"));
        for (name, sha256) in source {
            text += &format!("{sha256} {name:?}\n");
        }
        for model in [model, floor] {
            text += &format!("arithmetic {}\n", arithmetic(model)?);
        }
        Ok(Self {
            store,
            dir,
            source: hash_bytes(text.as_bytes()),
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            layers: config.num_hidden_layers(),
            used: Cell::new(0),
            made: Cell::new(0),
        })
    }

    /// The passes of a prompt: from here, or from `make` and then kept.
    ///
    /// # Errors
    /// Those of `make`, and when an entry cannot be written. One that cannot be used is told on stderr.
    pub fn passes(&self, prompt: &Prompt, make: impl FnOnce() -> Result<Passes>) -> Result<Passes> {
        let key = self.key("passes", &prompt.tokens, prompt.new_tokens);
        if let Some(passes) = self.find(&key, |entry| self.read_passes(entry, prompt)) {
            self.used.set(self.used.get() + 1);
            return Ok(passes);
        }
        let passes = make()?;
        self.made.set(self.made.get() + 1);
        self.store.write(&file_name(&key), |to| {
            let mut entry = EntryWriter::begin(to, &key, &passes.continuation)?;
            entry.floats(&passes.hidden)?;
            entry.floats(&passes.floor)?;
            entry.finish()
        })?;
        Ok(passes)
    }

    /// The residual stream of `model` on a text: from here, or run once and then kept.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, an entry cannot be written, or on an interrupt.
    pub(super) fn residuals<'a>(
        &'a self,
        tokens: &[u32],
        model: &Model<'_>,
        interrupt: &'a Interrupt,
    ) -> Result<Kept<'a>> {
        let key = self.key("residuals", tokens, 0);
        let kept = Kept { cache: self, key, tokens: tokens.len(), interrupt };
        let whole = self.find(&kept.key, |entry| {
            // Its bytes are proven first: what passes by piece by piece is used before the end is seen.
            entry.expect(0, kept.floats())?;
            entry.skip_floats(kept.floats())?;
            entry.finish()
        });
        if whole.is_some() {
            return Ok(kept);
        }
        let mut failed = None;
        let written = self.store.write(&file_name(&kept.key), |to| {
            let mut entry = EntryWriter::begin(to, &kept.key, &[])?;
            let mut trouble = Ok(());
            let ran = each_residual(model, tokens, interrupt, &mut |_, _, rows| {
                if trouble.is_ok() {
                    trouble = entry.floats(rows);
                }
            });
            trouble?;
            if let Err(e) = ran {
                failed = Some(e);
                return Err(std::io::Error::other("not finished"));
            }
            entry.finish()
        });
        match failed {
            Some(e) => Err(e),
            None => written.map(|()| kept),
        }
    }

    /// Prompts whose passes were found here, and those that were run and added.
    pub fn tally(&self) -> (usize, usize) {
        (self.used.get(), self.made.get())
    }

    fn key(&self, kind: &str, tokens: &[u32], new_tokens: usize) -> Sha256Hex {
        hash_bytes(format!("{} {kind}\nnew {new_tokens}\ntokens {tokens:?}\n", self.source).as_bytes())
    }

    /// Reads an entry, if there is one; tells one that cannot be used.
    fn find<T>(&self, key: &str, read: impl FnOnce(&mut Entry) -> Result<T, String>) -> Option<T> {
        let name = file_name(key);
        // A link that leads nowhere is in the way, too.
        if std::fs::symlink_metadata(self.store.dir().join(&name)).is_err() {
            return None;
        }
        let opened = self.dir.open_file(&name).map_err(|e| e.to_string());
        match opened.and_then(|file| Entry::begin(file, key)).and_then(|mut entry| read(&mut entry)) {
            Ok(found) => Some(found),
            Err(what) => {
                let path = self.store.dir().join(&name);
                let error = InputError::file(path.display()).found(what).hint("the checkpoint is run again");
                tracing::warn!("{error}");
                None
            }
        }
    }

    fn read_passes(&self, entry: &mut Entry, prompt: &Prompt) -> Result<Passes, String> {
        if !(1..=prompt.new_tokens).contains(&entry.count) {
            return Err(format!("a continuation of {} tokens", entry.count));
        }
        let floats = tokens_fed(prompt.tokens.len(), entry.count).checked_mul(self.hidden_size);
        let floats = floats.filter(|n| n.checked_mul(2).is_some()).ok_or("too many tokens")?;
        entry.expect(entry.count, 2 * floats)?;
        let continuation = entry.tokens()?;
        if let Some(token) = continuation.iter().find(|t| **t as usize >= self.vocab_size) {
            return Err(format!("token {token} in a vocabulary of {}", self.vocab_size));
        }
        let (hidden, floor) = (entry.floats(floats)?, entry.floats(floats)?);
        entry.finish()?;
        Ok(Passes { continuation, hidden, floor })
    }
}

/// What a few tokens come to, as a hash.
fn arithmetic(model: &Model<'_>) -> Result<Sha256Hex> {
    let vocab = model.config().vocab_size;
    let token = |i: usize| u32::try_from((i * i * 31 + i * 17 + 7) % vocab).unwrap_or_default();
    let tokens: Vec<u32> = (0..PROBE.iter().sum()).map(token).collect();
    let (mut state, mut hash, mut fed) = (State::new(model.config()), Sha256::new(), 0);
    for n in PROBE {
        for x in model.forward(&mut state, &tokens[fed..fed + n])? {
            hash.update(x.to_le_bytes());
        }
        fed += n;
    }
    Ok(finish_hash(hash))
}

fn file_name(key: &str) -> String {
    format!("{key}.f32")
}

/// A residual stream in the cache, whose bytes were proven.
pub(super) struct Kept<'a> {
    cache: &'a Cache,
    key: Sha256Hex,
    tokens: usize,
    interrupt: &'a Interrupt,
}

impl Kept<'_> {
    fn floats(&self) -> usize {
        self.tokens * self.cache.hidden_size * (self.cache.layers + 1)
    }
}

impl Residuals for Kept<'_> {
    fn each(&self, see: &mut See<'_>) -> Result<()> {
        let name = file_name(&self.key);
        let changed = |what: String| {
            InputError::file(self.cache.store.dir().join(&name).display())
                .found(what)
                .hint("it was whole a moment ago; run verify again")
        };
        let file = self.cache.dir.open_file(&name)?;
        let mut entry = Entry::begin(file, &self.key).map_err(changed)?;
        entry.expect(0, self.floats()).map_err(changed)?;
        for (place, position, rows) in residual_pieces(self.tokens, self.cache.layers) {
            if place.is_none() {
                self.interrupt.check()?;
            }
            see(place, position, &entry.floats(rows * self.cache.hidden_size).map_err(changed)?);
        }
        Ok(())
    }
}

/// An entry on its way to disk: magic, key, number of tokens (u64), tokens (u32), floats (f32), and the SHA-256 of
/// all of it in hex; numbers little-endian.
struct EntryWriter<'a> {
    to: &'a mut dyn Write,
    hash: Sha256,
}

impl<'a> EntryWriter<'a> {
    fn begin(to: &'a mut dyn Write, key: &str, tokens: &[u32]) -> std::io::Result<Self> {
        let mut this = Self { to, hash: Sha256::new() };
        this.bytes(MAGIC)?;
        this.bytes(key.as_bytes())?;
        this.bytes(&(tokens.len() as u64).to_le_bytes())?;
        for token in tokens {
            this.bytes(&token.to_le_bytes())?;
        }
        Ok(this)
    }

    fn bytes(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hash.update(bytes);
        self.to.write_all(bytes)
    }

    fn floats(&mut self, values: &[f32]) -> std::io::Result<()> {
        for part in values.chunks(1 << 16) {
            let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
            self.bytes(&bytes)?;
        }
        Ok(())
    }

    fn finish(self) -> std::io::Result<()> {
        self.to.write_all(finish_hash(self.hash).as_bytes())
    }
}

/// An entry that is being read. Nothing is believed before its length was held against what it says, and
/// nothing is used before [`Entry::finish`].
struct Entry {
    from: BufReader<File>,
    length: u64,
    hash: Sha256,
    /// Number of tokens.
    count: usize,
}

impl Entry {
    fn begin(file: File, key: &str) -> Result<Self, String> {
        let length = file.metadata().map_err(|e| e.to_string())?.len();
        let mut this = Self { from: BufReader::new(file), length, hash: Sha256::new(), count: 0 };
        let (magic, found) = (this.bytes(MAGIC.len())?, this.bytes(HASH)?);
        if magic != MAGIC {
            return Err("no entry of this form".to_owned());
        }
        if found != key.as_bytes() {
            return Err("an entry of another run, renamed".to_owned());
        }
        let count = this.bytes(8)?;
        let count = count.first_chunk().map(|b| u64::from_le_bytes(*b)).unwrap_or_default();
        this.count = usize::try_from(count).map_err(|e| e.to_string())?;
        Ok(this)
    }

    /// Checks the length of the file against so many tokens and floats.
    fn expect(&self, tokens: usize, floats: usize) -> Result<(), String> {
        let words = tokens.checked_add(floats).and_then(|n| n.checked_mul(4));
        let expected = words.and_then(|n| n.checked_add(MAGIC.len() + HASH + 8 + HASH)).map(|n| n as u64);
        if self.count != tokens {
            return Err(format!("expected {tokens} tokens, found {}", self.count));
        }
        if expected != Some(self.length) {
            let expected = expected.unwrap_or(u64::MAX);
            return Err(format!("expected {expected} bytes, found {}", self.length));
        }
        Ok(())
    }

    /// The next bytes, of which there are few or their length was checked.
    fn bytes(&mut self, n: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; n];
        self.from.read_exact(&mut bytes).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => format!("cut short: {} bytes", self.length),
            _ => e.to_string(),
        })?;
        self.hash.update(&bytes);
        Ok(bytes)
    }

    fn tokens(&mut self) -> Result<Vec<u32>, String> {
        let bytes = self.bytes(4 * self.count)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    fn floats(&mut self, n: usize) -> Result<Vec<f32>, String> {
        let mut values = Vec::with_capacity(n);
        while values.len() < n {
            let bytes = self.bytes(4 * (n - values.len()).min(1 << 16))?;
            values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        }
        Ok(values)
    }

    fn skip_floats(&mut self, n: usize) -> Result<(), String> {
        let mut left = n;
        while left > 0 {
            let part = left.min(1 << 16);
            self.bytes(4 * part)?;
            left -= part;
        }
        Ok(())
    }

    /// The hash at the end.
    fn finish(&mut self) -> Result<(), String> {
        let found = finish_hash(self.hash.clone());
        match self.bytes(HASH)? == found.as_bytes() {
            true => Ok(()),
            false => Err("its bytes were changed: they do not hash to what stands at its end".to_owned()),
        }
    }
}
