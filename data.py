"""Data: text to tokens, tokens to memory-mapped streams, streams to batches in one fixed order.

    files -> documents -> tokens + end-of-text -> memory-mapped cache -> train | validation stream
    stream -> windows of seq_len + 1 tokens -> shuffled by a permutation of (seed, epoch) -> batches

The batch of a step is a function of (seed, step) alone. A rank asks for its own rows of it, so
changing the layout or resuming never changes which sequences make up a step. The permutation needs
no memory: a Feistel network computes where each sequence goes.

Megatron's indexed format (course B): `.bin` holds the tokens, `.idx` the type and, per document,
its length and place.

Sources: tiktoken; Megatron-LM's indexed dataset; Black and Rogaway, "Ciphers with arbitrary finite
domains" (CT-RSA 2002) for cycle walking.
Course: 07:10:29 datasets, tokenization and data parallelism.

    python data.py                                          checks; prints PASS
    python data.py tokenize FILES --out NAME [--format megatron] [--tokenizer T]
    python data.py inspect PATH                             what a token file holds
"""
import argparse
import base64
import contextlib
import fcntl
import glob
import hashlib
import json
import multiprocessing
import os
import shutil
import struct
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch

IGNORED = -100          # the label of a position that has no target
TEXT = {".txt", ".md", ".py", ".jsonl"}
VALIDATION_SHARE = 20   # one document in 20, or a stream's last 20th, is kept for validation
EOT = "<|endoftext|>"
# Where tiktoken keeps its downloads: the sha1 of the address each file comes from.
ENCODING_FILES = {
    "gpt2": ["6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
             "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"],
    "r50k_base": ["0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"],
    "p50k_base": ["ec7223a39ce59f226a68acc30dc1af2788490e15"],
    "cl100k_base": ["9b5ad71b2ce5302211f9c61530b329a4922fc6a4"],
    "o200k_base": ["fb374d419588a4632f3f557e76b4b70aebbca790"]}
# cl100k_base's pattern: the default for a rank file, which does not say how to split text.
SPLIT_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
                 r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")


# ---- tokenizers ----

def load_tokenizer(spec):
    """The tiktoken.Encoding of `spec`: "bytes", an encoding's name, or a path to a rank file.

    Raises ValueError, saying what to supply, when there is no such encoding or file, when an
    encoding can't be fetched, and when a rank file is damaged or lacks one of the 256 bytes.
    """
    if spec == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks,
                                 special_tokens={EOT: 256})
    if spec.endswith(".tiktoken") or os.path.sep in spec:
        return load_rank_file(spec)
    if spec not in tiktoken.list_encoding_names():
        raise ValueError(f"--tokenizer {spec}: no such encoding; use bytes, "
                         f"{', '.join(tiktoken.list_encoding_names())}, or a path to a .tiktoken "
                         "file")
    try:
        return tiktoken.get_encoding(spec)
    except Exception as error:  # whatever the network library raises
        files = " and ".join(ENCODING_FILES.get(spec, ["named by the sha1 of its address"]))
        raise ValueError(f"--tokenizer {spec}: its file can't be fetched ({type(error).__name__}). "
                         f"Set TIKTOKEN_CACHE_DIR to a folder that holds it as {files}, or use "
                         "--tokenizer bytes") from None


def load_rank_file(path):
    """A tokenizer from lines of `base64(token) rank`; its end of text is the id after the last."""
    if not os.path.isfile(path):
        raise ValueError(f"--tokenizer {path}: no such file")
    try:  # tiktoken's own reader keeps a copy by name, and uses it when the file has changed
        pairs = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise ValueError(f"--tokenizer {path}: not a rank file, lines of `base64(token) rank` "
                         f"({error})") from None
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f"--tokenizer {path}: {len(missing)} of the 256 single bytes have no rank "
                         f"(first 0x{missing[0]:02x}), so not every text could be encoded")
    if len(set(ranks.values())) < len(ranks):
        raise ValueError(f"--tokenizer {path}: two tokens have the same rank")
    # The suffix stays in the name: mine is never taken for an encoding that is called alike.
    return tiktoken.Encoding(Path(path).name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks,
                             special_tokens={EOT: max(ranks.values()) + 1})


def token_dtype(tokenizer):
    return np.uint16 if tokenizer.n_vocab <= 2 ** 16 else np.uint32


def check_vocabulary(tokenizer, vocab_size):
    """Raises ValueError when the tokenizer makes tokens that the model has no row for."""
    if tokenizer.n_vocab > vocab_size:
        raise ValueError(f"tokenizer {tokenizer.name} has {tokenizer.n_vocab} tokens and the model "
                         f"vocab_size={vocab_size}; add --override vocab_size={tokenizer.n_vocab} "
                         "or use another --tokenizer")


# ---- text files to documents ----

def find_files(paths):
    """Files of `paths` (files, folders, globs), each with the name it is known by: relative to the
    folder it was found through, so that a moved corpus splits the same way."""
    found = {}

    def add(file, name):  # by its one real path, so that no text is read twice
        found.setdefault(os.path.realpath(file), name)

    for path in paths:
        if not glob.has_magic(path) and not os.path.exists(path):
            raise ValueError(f"--data {path}: no such file or folder")
        if os.path.isdir(path):
            for file in sorted(Path(path).rglob("*")):
                if file.suffix in TEXT | {".bin"} and file.is_file():
                    add(file, str(file.relative_to(path)))
            continue
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        for file in matches:
            if file.endswith(".idx"):  # the index of a pair stands for the pair
                file = file[:-4] + ".bin"
            if os.path.isfile(file):
                add(file, os.path.basename(file))
    if not found:
        raise ValueError(f"--data {' '.join(paths)}: no file there ends in "
                         f"{' '.join(sorted(TEXT))} or .bin")
    return found


def standard_library():
    """The standard library's own sources, without its tests: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
               "lib2to3"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped  # never entered: installed packages are thousands
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return {str(f): str(f.relative_to(root)) for f in sorted(files)}


def as_utf8(file, raw, offset, errors):
    """raw, the bytes of `file` from `offset` on, as UTF-8. Raises ValueError naming the byte."""
    try:
        raw.decode("utf-8")
        return raw
    except UnicodeDecodeError as error:
        if errors == "strict":
            raise ValueError(f"{file}: byte {offset + error.start} (0x{raw[error.start]:02x}) is "
                             "not UTF-8; --errors replace goes on with replacement characters"
                             ) from None
        return raw.decode("utf-8", "replace").encode("utf-8")


def cut_into_jobs(files, size=2 ** 23):
    """Pieces of work for a pool, (file, name, start, stop, first line): a file each, but a JSON
    lines file in pieces of about `size` bytes that end at a line's end."""
    jobs = []
    for file, name in files.items():
        end = os.path.getsize(file)
        if not file.endswith(".jsonl"):
            jobs.append((file, name, 0, end, 1))
            continue
        with open(file, "rb") as f:
            start, line = 0, 1
            while start < end:
                piece = f.read(size) + f.readline()
                jobs.append((file, name, start, start + len(piece), line))
                start, line = start + len(piece), line + piece.count(b"\n")
    return jobs


def read_documents(job, errors):
    """The documents of a job, as UTF-8: the whole file, or `text` of each JSON line. Empty ones are
    left out. Raises ValueError naming the file and the byte or the line that is wrong."""
    file, _, start, stop, line = job
    with open(file, "rb") as f:
        f.seek(start)
        raw = as_utf8(file, f.read(stop - start), start, errors)
    if not file.endswith(".jsonl"):
        return [raw] if raw else []
    documents = []
    for number, text in enumerate(raw.split(b"\n"), line):
        if not text.strip():
            continue
        try:
            documents.append(json.loads(text)["text"].encode("utf-8", "surrogatepass"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file}, line {number}: not a JSON object with a string under "
                             "`text`") from None
    return [d for d in documents if d]


def encode(tokenizer, document):
    """Tokens of one document (UTF-8) and its end of text. Special tokens in it are plain text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(document, np.uint8)
    else:
        tokens = tokenizer.encode_ordinary(document.decode("utf-8", "replace"))
    dtype = token_dtype(tokenizer)
    return np.append(np.asarray(tokens, dtype), np.asarray(tokenizer.eot_token, dtype))


def tokenize_job(arguments):
    """For a pool: the tokens of a job's documents, one array each."""
    tokenizer, errors, job = arguments
    return job[1], [encode(tokenizer, d) for d in read_documents(job, errors)]


def tokenize(files, tokenizer, errors, progress):
    """Yield (name, tokens) of every document in order, by all cores where it is worth their start.
    The bytes tokenizer only copies, so it takes more text to be worth it."""
    jobs = cut_into_jobs(files)
    total = sum(stop - start for _, _, start, stop, _ in jobs)
    arguments = [(tokenizer, errors, job) for job in jobs]
    many = total > (2 ** 28 if tokenizer.name == "bytes" else 2 ** 22) and len(jobs) > 1
    done, announced = 0, 0.0
    with contextlib.ExitStack() as stack:
        if many:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool())
            results = pool.imap(tokenize_job, arguments)
        else:
            results = map(tokenize_job, arguments)
        for job, (name, documents) in zip(jobs, results):
            yield from ((name, d) for d in documents)
            done += job[3] - job[2]
            if done >= announced * total:
                progress(f"tokenising {len(jobs)} pieces of text, {total / 1e6:,.1f} MB: "
                         f"{done / max(total, 1):.0%}")
                announced = done / max(total, 1) + 0.25


# ---- the cache ----

def cache_folder(given=None):
    """`given`, or $XDG_CACHE_HOME/quintet, or ~/.cache/quintet; the temporary folder if it can't be
    written."""
    folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
                                "quintet"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        fallback = Path(tempfile.gettempdir(), f"quintet-{os.getuid()}")
        fallback.mkdir(mode=0o700, exist_ok=True)
        print(f"note: {folder} can't be written; tokens are kept in {fallback}", file=sys.stderr)
        return fallback


def build_once(folder, key, build):
    """folder/key, made by build(path) unless it is there; returns it.

    Any number of processes may ask at once: a lock lets one build, and the system frees the lock of
    one that was killed. Building happens under another name and ends with a rename, so what is
    found under the right name is whole; remains of a killed build are removed by the next.
    """
    whole = folder / key
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            partial = folder / f"{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                os.rename(partial, whole)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return whole


def identity(files, *more):
    """A key that changes when a file is another, or anything in `more` is."""
    facts = [(os.path.realpath(f), name, found.st_size, found.st_mtime_ns)
             for f, name in files.items() for found in [os.stat(f)]]
    return hashlib.blake2b(json.dumps([facts, *more]).encode(), digest_size=12).hexdigest()


def tokenizer_identity(tokenizer):
    ranks = hashlib.blake2b(digest_size=8)
    if tokenizer.name not in tiktoken.list_encoding_names():
        for token, rank in sorted(tokenizer._mergeable_ranks.items()):
            ranks.update(token + struct.pack("<q", rank))
    return f"{tokenizer.name}-{tokenizer.n_vocab}-{ranks.hexdigest()}"


def build_text(files, tokenizer, errors, progress):
    """A builder for build_once: train.bin, validation.bin, the places where their documents start,
    and a content hash.

    From 20 documents on, one in 20 is kept for validation: those with the smallest hash of name and
    number, in that order, so that a part of them is a fair sample. With fewer, the last 20th of the
    tokens is.
    """
    def build(folder):
        """Tokenise all documents into one file, then deal them out to the two splits."""
        dtype = token_dtype(tokenizer)
        lengths, keys, numbers = [], [], {}
        with open(folder / "all.bin", "wb") as out:
            for name, tokens in tokenize(files, tokenizer, errors, progress):
                out.write(tokens.tobytes())
                lengths.append(len(tokens))
                numbers[name] = numbers.get(name, 0) + 1
                keys.append(hashlib.blake2b(f"{name}#{numbers[name]}".encode()).digest())
        if not lengths:
            raise ValueError(f"--data: no text in {', '.join(list(files)[:3])}"
                             f"{' ...' if len(files) > 3 else ''}: every file is empty")
        tokens = np.memmap(folder / "all.bin", dtype, "r")
        starts = np.cumsum([0] + lengths)
        pieces = [(starts[i], starts[i + 1]) for i in range(len(lengths))]
        if len(lengths) >= VALIDATION_SHARE:
            chosen = sorted(range(len(keys)), key=keys.__getitem__)[:len(keys) // VALIDATION_SHARE]
            rest = sorted(set(range(len(keys))) - set(chosen))
            split = {"train": [pieces[i] for i in rest], "validation": [pieces[i] for i in chosen]}
        else:
            cut = cut_for_validation(starts[:-1], len(tokens))
            split = {"train": [(a, min(b, cut)) for a, b in pieces if a < cut],
                     "validation": [(max(a, cut), b) for a, b in pieces if b > cut]}
        for part, ranges in split.items():
            write_part(folder, part, tokens, ranges)
        os.remove(folder / "all.bin")
    return build


def write_part(folder, part, tokens, ranges):
    """One split of a text corpus: its tokens, its documents' starts, a hash of its content."""
    digest = hashlib.blake2b(digest_size=12)
    with open(folder / f"{part}.bin", "wb") as out:
        for start, stop in ranges:
            raw = tokens[start:stop].tobytes()
            digest.update(raw)
            out.write(raw)
    np.save(folder / f"{part}.starts.npy",
            np.cumsum([0] + [b - a for a, b in ranges])[:-1].astype(np.int64))
    (folder / f"{part}.hash").write_text(digest.hexdigest())


def cut_for_validation(starts, n_tokens):
    """Where a stream's last 20th begins: at the nearest start of a document, if one is near."""
    wanted = n_tokens - n_tokens // VALIDATION_SHARE
    near = starts[(starts > 0.9 * n_tokens) & (starts < 0.98 * n_tokens)]
    return int(near[np.abs(near - wanted).argmin()]) if len(near) else wanted


# ---- token files ----

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64,
                  7: np.float32, 8: np.uint16}


def read_megatron(path):
    """Megatron's `path`.bin and `path`.idx -> (tokens, memory-mapped; documents' starts).

    The index: magic, version 1 (8 bytes), type (1), sequences n and documents m (8 each), then n
    lengths (int32), n places in bytes (int64), and m numbers of documents' first sequences (int64),
    the last of them n. Raises ValueError for a file that is cut short or contradicts itself.
    """
    index, binary = Path(f"{path}.idx"), Path(f"{path}.bin")
    raw = index.read_bytes()
    if raw[:9] != MEGATRON_MAGIC:
        raise ValueError(f"{index}: not a Megatron index (it begins with {raw[:9]!r})")
    if len(raw) < 34:
        raise ValueError(f"{index}: cut short in its header: {len(raw)} of 34 bytes")
    version, code, n, m = struct.unpack_from("<QBQQ", raw, 9)
    if version != 1 or code not in MEGATRON_TYPES or code in (6, 7):
        raise ValueError(f"{index}: version {version}, type {code}; version 1 with an integer type "
                         "is what can be read")
    if len(raw) != 34 + 12 * n + 8 * m:
        raise ValueError(f"{index}: {len(raw):,} bytes, but {n:,} sequences and {m:,} documents "
                         f"take {34 + 12 * n + 8 * m:,}: it is cut short or damaged")
    lengths = np.frombuffer(raw, "<i4", n, 34)
    places = np.frombuffer(raw, "<i8", n, 34 + 4 * n)
    firsts = np.frombuffer(raw, "<i8", m, 34 + 12 * n)
    dtype = np.dtype(MEGATRON_TYPES[code]).newbyteorder("<")
    ends = np.cumsum(lengths, dtype=np.int64)
    needed = int(ends[-1]) * dtype.itemsize if n else 0
    if binary.stat().st_size < needed:
        raise ValueError(f"{binary}: {binary.stat().st_size:,} bytes, but its index speaks of "
                         f"{needed:,}: it is cut short")
    starts = ends - lengths
    if (lengths < 0).any() or not np.array_equal(places, starts * dtype.itemsize):
        raise ValueError(f"{index}: its lengths and places contradict each other")
    if m == 0 or firsts[0] != 0 or firsts[-1] != n or (np.diff(firsts) < 0).any():
        raise ValueError(f"{index}: its documents do not run from sequence 0 to {n:,}")
    tokens = (np.memmap(binary, dtype, "r", shape=(needed // dtype.itemsize,)) if needed
              else np.empty(0, dtype))
    firsts = np.unique(firsts[:-1])
    return tokens, starts[firsts[firsts < n]]


def write_megatron(path, documents, dtype):
    """Write arrays of tokens, one per document, as `path`.bin and `path`.idx."""
    dtype = np.dtype(dtype).newbyteorder("<")
    if dtype == np.uint32:
        dtype = np.dtype("<i4")  # the format has no uint32; ids are below 2^31
    code = next(c for c, t in MEGATRON_TYPES.items() if np.dtype(t) == dtype)
    lengths = []
    with open(f"{path}.bin", "wb") as out:
        for document in documents:
            out.write(np.asarray(document).astype(dtype).tobytes())
            lengths.append(len(document))
    places = np.cumsum([0] + lengths)[:-1] * dtype.itemsize
    with open(f"{path}.idx", "wb") as out:
        out.write(MEGATRON_MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1))
        out.write(np.asarray(lengths, "<i4").tobytes() + np.asarray(places, "<i8").tobytes())
        out.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def read_flat(path, tokenizer):
    """A flat token file, memory-mapped: uint16, or uint32 for more than 65,536 tokens, or where
    every second of its first uint16 numbers is 0, as only small numbers in uint32 make it."""
    dtype, size = np.dtype(token_dtype(tokenizer)).newbyteorder("<"), os.path.getsize(path)
    first = np.fromfile(path, "<u2", 4096)
    if size % 4 == 0 and len(first) > 2 and first.any() and not first[1::2].any():
        dtype = np.dtype("<u4")
    if size % dtype.itemsize or not size:
        raise ValueError(f"{path}: {size:,} bytes are no whole number of {dtype.name} tokens (what "
                         f"tokenizer {tokenizer.name}, {tokenizer.n_vocab} tokens, needs): it is "
                         "empty, cut short or of another type")
    return np.memmap(path, dtype, "r")


def build_token_file(path, tokenizer):
    """A builder for build_once: reads a token file through once and keeps its documents' starts and
    a content hash. Raises ValueError for a token that the tokenizer does not have."""
    def build(folder):
        """One pass over the file."""
        megatron = os.path.exists(path[:-4] + ".idx")
        tokens, starts = (read_megatron(path[:-4]) if megatron
                          else (read_flat(path, tokenizer), None))
        found, digest = [np.zeros(1, np.int64)], hashlib.blake2b(digest_size=12)
        for at in range(0, len(tokens), 2 ** 24):
            chunk = tokens[at:at + 2 ** 24]
            digest.update(chunk.tobytes())
            wrong = np.flatnonzero((chunk < 0) | (chunk >= tokenizer.n_vocab))
            if len(wrong):
                raise ValueError(f"{path}: token {at + int(wrong[0]):,} is {int(chunk[wrong[0]])}, "
                                 f"and tokenizer {tokenizer.name} has {tokenizer.n_vocab} tokens; "
                                 "give the --tokenizer that it was made with")
            found.append(np.flatnonzero(chunk == tokenizer.eot_token) + at + 1)
        if starts is None:
            starts = np.concatenate(found)
        np.save(folder / "starts.npy", starts[starts < len(tokens)].astype(np.int64))
        (folder / "hash").write_text(digest.hexdigest())
    return build


# ---- streams and batches ----

class TokenStream:
    """Tokens of one split, memory-mapped, in pieces one after the other, with the places where
    documents start.

    name; n_tokens; fingerprint: a hash of the content, equal wherever the same text lies.
    """

    def __init__(self, name, pieces, starts, fingerprint):
        self.name, self.pieces, self.starts, self.fingerprint = name, pieces, starts, fingerprint
        self.ends = np.cumsum([len(p) for p in pieces])
        self.n_tokens = int(self.ends[-1])

    def read(self, start, count):
        """Tokens start .. start + count - 1 as int64 (count,)."""
        parts = []
        for piece, end in zip(self.pieces, self.ends):
            first = start - (end - len(piece))
            if first < len(piece) and count > 0:
                parts.append(piece[first:first + count].astype(np.int64))
                start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def document_ids(self, start, count):
        """Number of the document that each of these tokens belongs to, (count,)."""
        return np.searchsorted(self.starts, np.arange(start, start + count), side="right") - 1


def join(name, streams):
    starts, offset = [], 0
    for stream in streams:
        starts.append(stream.starts + offset)
        offset += stream.n_tokens
    fingerprint = hashlib.blake2b("".join(s.fingerprint for s in streams).encode(), digest_size=12)
    return TokenStream(name, [p for s in streams for p in s.pieces], np.concatenate(starts),
                       fingerprint.hexdigest())


def open_corpus(paths, tokenizer, errors="strict", cache_dir=None, progress=print):
    """The training and the validation TokenStream of `paths` (None: the standard library's text).

    Text is tokenised once into the cache; token files are used where they lie. Raises ValueError
    (or OSError) naming the file for input that can't be used, before anything else is done.
    """
    files = standard_library() if paths is None else find_files(paths)
    name = "the Python standard library" if paths is None else " ".join(paths)
    cache = cache_folder(cache_dir)
    who = tokenizer_identity(tokenizer)
    text = {f: n for f, n in files.items() if Path(f).suffix != ".bin"}
    pairs = []
    if text:
        folder = build_once(cache, identity(text, who, errors, 1),
                            build_text(text, tokenizer, errors, progress))
        pairs.append([TokenStream(name, [open_bin(folder / f"{part}.bin", token_dtype(tokenizer))],
                                  np.load(folder / f"{part}.starts.npy"),
                                  (folder / f"{part}.hash").read_text())
                      for part in ("train", "validation")])
    for path in (f for f in files if f not in text):
        pairs.append(open_token_file(path, tokenizer, cache, who))
    return tuple(join(part, [pair[i] for pair in pairs])
                 for i, part in enumerate((name, f"{name}, validation split")))


def open_bin(path, dtype):
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.empty(0, dtype)


def open_token_file(path, tokenizer, cache, who):
    """(train, validation) of a token file: its last 20th, from a document's start, validates."""
    index = path[:-4] + ".idx"
    files = {path: "bin"} | ({index: "idx"} if os.path.exists(index) else {})
    folder = build_once(cache, identity(files, who, 1), build_token_file(path, tokenizer))
    tokens = read_megatron(path[:-4])[0] if len(files) == 2 else read_flat(path, tokenizer)
    starts, digest = np.load(folder / "starts.npy"), (folder / "hash").read_text()
    cut = cut_for_validation(starts, len(tokens))
    train = TokenStream(path, [tokens[:cut]], starts[starts < cut], digest)
    later = starts[starts > cut] - cut
    return train, TokenStream(path, [tokens[cut:]], np.insert(later, 0, 0), digest)


def permuted(index, n, key):
    """Where a permutation of 0..n-1, chosen by `key`, sends `index`; a bijection with no table.

    Four Feistel rounds permute the numbers below the next power of four, which keeps every round
    invertible whatever its mixing function is; an image of n or more is sent on until it falls
    below n (cycle walking), fewer than four times on average.
    """
    half = max((max(n - 1, 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixed = hash64(key + 0x9E3779B97F4A7C15 * (turn + 1) ^ right)
            left, right = right, left ^ (mixed & mask)
        index = left << half | right
        if index < n:
            return index


def hash64(x):
    """The finalizer of splitmix64: every bit of x reaches every bit of the result."""
    x &= 2 ** 64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2 ** 64 - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 2 ** 64 - 1
    return x ^ x >> 31


class Batch(NamedTuple):
    tokens: torch.Tensor                # (n, s) int64
    labels: torch.Tensor                # (n, s) int64: the next token, IGNORED where there is none
    document_ids: torch.Tensor | None   # (n, s) int64, given when documents are to be kept apart


class Batches:
    """The sequences of a stream in the order of training, or (in_order) as they lie.

    Sequence i is tokens i*seq_len .. (i+1)*seq_len - 1, its labels one further, so that no target
    is lost. Raises ValueError when the stream is shorter than one sequence.
    """

    def __init__(self, stream, seq_len, global_batch, seed, mask_boundaries=False,
                 isolate_documents=False):
        self.stream, self.seq_len = stream, seq_len
        self.global_batch, self.seed = global_batch, seed
        self.mask_boundaries, self.isolate_documents = mask_boundaries, isolate_documents
        self.n_sequences = (stream.n_tokens - 1) // seq_len
        if self.n_sequences < 1:
            raise ValueError(f"{stream.name}: {stream.n_tokens} tokens, and one sequence of "
                             f"--seq-len {seq_len} needs {seq_len + 1}; use a shorter --seq-len "
                             "or more text")

    def sequence_number(self, step, row):
        """Which sequence is row `row` of step `step`. Every epoch has a permutation of its own."""
        epoch, index = divmod(step * self.global_batch + row, self.n_sequences)
        return permuted(index, self.n_sequences, hash64(self.seed << 32 ^ epoch))

    def get(self, step, start=0, count=None):
        """Rows start .. start + count - 1 (None: to the end) of the global batch of a 0-based
        step."""
        stop = self.global_batch if count is None else start + count
        return self._batch([self.sequence_number(step, row) for row in range(start, stop)])

    def in_order(self, limit):
        """The first `limit` sequences as they lie, in batches of at most global_batch."""
        total = min(limit, self.n_sequences)
        for first in range(0, total, self.global_batch):
            yield self._batch(range(first, min(first + self.global_batch, total)))

    def _batch(self, numbers):
        s = self.seq_len
        windows = np.stack([self.stream.read(i * s, s + 1) for i in numbers])  # (n, s + 1)
        tokens, labels = (torch.from_numpy(w.copy()) for w in (windows[:, :-1], windows[:, 1:]))
        if not (self.mask_boundaries or self.isolate_documents):
            return Batch(tokens, labels, None)
        ids = torch.from_numpy(np.stack([self.stream.document_ids(i * s, s + 1) for i in numbers]))
        if self.mask_boundaries:
            labels[ids[:, 1:] != ids[:, :-1]] = IGNORED
        return Batch(tokens, labels, ids[:, :-1].contiguous() if self.isolate_documents else None)


# ---- how predictable the text is ----

def ngram_entropies(train, validation, vocab_size, limit=2 ** 17, train_limit=2 ** 26):
    """(unigram, bigram) cross-entropy, nats per token, of the first `limit` targets of validation
    under counts of the first train_limit tokens of train, one added to each (Laplace):

        p(b) = (count(b) + 1) / (N + V),   p(b | a) = (count(a b) + 1) / (count(a) + V).
    """
    text = validation.read(0, min(limit + 1, validation.n_tokens))
    pairs, place = np.unique(text[:-1] * vocab_size + text[1:], return_inverse=True)
    singles = np.zeros(vocab_size, np.int64)
    firsts, together = singles.copy(), np.zeros(len(pairs), np.int64)
    n = min(train.n_tokens, train_limit)
    for at in range(0, n, 2 ** 22):
        chunk = train.read(at, min(2 ** 22 + 1, n - at))  # one more, for the pair across the cut
        singles += np.bincount(chunk[:2 ** 22], minlength=vocab_size)
        firsts += np.bincount(chunk[:-1], minlength=vocab_size)
        codes = chunk[:-1] * vocab_size + chunk[1:]
        if vocab_size <= 1024:
            together += np.bincount(codes, minlength=vocab_size ** 2)[pairs]
        else:
            seen, counts = np.unique(codes, return_counts=True)
            at_pair = np.searchsorted(pairs, seen).clip(max=len(pairs) - 1)
            known = pairs[at_pair] == seen
            together[at_pair[known]] += counts[known]
    unigram = -np.log((singles[text[1:]] + 1) / (n + vocab_size)).mean()
    bigram = -np.log((together[place] + 1) / (firsts[text[:-1]] + vocab_size)).mean()
    return float(unigram), float(bigram)


# ---- demonstration and commands ----

def demo():
    """Check the order of the data, a token file's round trip and the corpus; exit 1 on a fault."""
    checks, tokenizer = {}, load_tokenizer("bytes")
    for n in (1, 2, 3, 5, 1000, 4097):
        checks[f"permutation of {n}"] = sorted(permuted(i, n, 7) for i in range(n)) == [*range(n)]
    with tempfile.TemporaryDirectory() as folder:
        text = [f"document {i} " * (i + 3) for i in range(40)]
        for i, document in enumerate(text):
            Path(folder, f"{i:02}.txt").write_text(document)
        train, validation = open_corpus([folder], tokenizer, cache_dir=f"{folder}/cache",
                                        progress=print)
        whole = Batches(train, 32, 6, seed=1)
        print(f"{train.n_tokens} tokens to train on, {validation.n_tokens} to validate on, "
              f"{whole.n_sequences} sequences of 32")
        for step in range(2):
            print(f"step {step}: sequences {[whole.sequence_number(step, r) for r in range(6)]}")
        parts = torch.cat([whole.get(3, start, 2).tokens for start in (0, 2, 4)])
        checks["three ranks' rows are the batch"] = torch.equal(parts, whole.get(3).tokens)
        epoch = [whole.sequence_number(g // 6, g % 6) for g in range(whole.n_sequences)]
        checks["an epoch has every sequence once"] = sorted(epoch) == [*range(whole.n_sequences)]
        documents = [encode(tokenizer, t.encode()) for t in text]
        write_megatron(f"{folder}/m", documents, np.uint16)
        tokens, starts = read_megatron(f"{folder}/m")
        checks["Megatron's format"] = np.array_equal(tokens, np.concatenate(documents)) and (
            [tokenizer.decode(tokens[a:b - 1].tolist()) for a, b in
             zip(starts, [*starts[1:], len(tokens)])] == text)
        packed = Batches(train, 512, 1, 0, mask_boundaries=True, isolate_documents=True).get(0)
        ends = packed.tokens == tokenizer.eot_token
        checks["boundaries are masked"] = bool(ends.any()) and torch.equal(
            packed.labels == IGNORED, ends)
    failed = [what for what, right in checks.items() if not right]
    print(f"{len(checks)} checks")
    print(f"FAILED: {', '.join(failed)}" if failed or not checks else "PASS")
    return 1 if failed or not checks else 0


def tokenize_command(args):
    """Write FILES as one token file of every document, for other programs or other machines."""
    tokenizer = load_tokenizer(args.tokenizer)
    documents = (tokens for _, tokens in tokenize(find_files(args.files), tokenizer, args.errors,
                                                  print))
    if args.format == "megatron":
        write_megatron(args.out, documents, token_dtype(tokenizer))
        print(f"wrote {args.out}.bin and {args.out}.idx")
        return
    with open(f"{args.out}.bin", "wb") as out:
        for tokens in documents:
            out.write(tokens.tobytes())
    print(f"wrote {args.out}.bin, {token_dtype(tokenizer).__name__}")


def inspect_command(args):
    """Print what a token file or a text corpus holds, and the beginning of its first documents."""
    tokenizer = load_tokenizer(args.tokenizer)
    for part, stream in zip(("train", "validation"), open_corpus([args.path], tokenizer)):
        print(f"{part}: {stream.n_tokens:,} tokens, {len(stream.starts):,} documents, content "
              f"{stream.fingerprint}")
        for start in stream.starts[:3]:
            print(f"  {tokenizer.decode(stream.read(int(start), 40).tolist())!r}")


def main(argv=None):
    """The commands of the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    write = commands.add_parser("tokenize", help="text to a token file")
    write.add_argument("files", nargs="+", help="files, folders or globs")
    write.add_argument("--out", required=True, help="name to write, without .bin")
    write.add_argument("--format", choices=["flat", "megatron"], default="flat", help="of the file")
    write.add_argument("--errors", choices=["strict", "replace"], default="strict",
                       help="what to do with text that is not UTF-8")
    show = commands.add_parser("inspect", help="what a corpus or token file holds")
    show.add_argument("path", help="a .bin file, or text")
    for command in (write, show):
        command.add_argument("--tokenizer", default="bytes", help="as for train.py")
    args = parser.parse_args(argv)
    try:
        if args.command is None:
            return demo()
        tokenize_command(args) if args.command == "tokenize" else inspect_command(args)
    except (ValueError, OSError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
