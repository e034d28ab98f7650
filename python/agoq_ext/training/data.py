"""Text as bytes: which files are read, how they part into training and validation, and which windows a step sees.

Nothing here depends on where the files lie or how the file system lists them: files are ordered by the digest of
their content. A window is `seq + 1` bytes: `seq` inputs and, shifted by one, `seq` targets.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

VALIDATION_SHARE = 0.05
# Ends every file in the stream; text does not hold it.
SEPARATOR = b"\0"
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
# Left out of the standard library: what pip added, and tests, which some distributions do not ship.
_SKIPPED_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Two byte streams that share no file content.

    Attributes:
        train, validation: uint8 [bytes].
        source: where the text came from, for messages.
        files: how many distinct files were read.
        digest: hexadecimal SHA-256 of both streams; equal digests mean equal training data.
    """

    train: Tensor
    validation: Tensor
    source: str
    files: int
    digest: str

    def windows(self, seq: int) -> int:
        """Training windows in one epoch."""
        return max(0, (len(self.train) - seq) // seq)

    def train_batch(self, first: int, count: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
        """Windows `first` to `first + count` of the endless, shuffled sequence of training windows.

        An epoch cuts the stream into windows that do not overlap, starting at an offset of its own, in an order
        of its own; both follow from (seed, epoch) alone, so any step can be drawn without the ones before it.

        Returns:
            inputs, targets: int64 [count, seq].
        """
        total = self.windows(seq)
        starts = []
        for index in range(first, first + count):
            epoch, position = divmod(index, total)
            offset, order = _epoch_order(total, seq, seed, epoch)
            starts.append(offset + int(order[position]) * seq)
        return self._cut(self.train, starts, seq)

    def validation_batches(self, seq: int, windows: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The fixed validation windows, spread evenly, at most `windows` of them, in batches of `batch`."""
        total = (len(self.validation) - 1) // seq
        count = min(windows, total)
        starts = [(i * total // count) * seq for i in range(count)]
        for i in range(0, count, batch):
            yield self._cut(self.validation, starts[i : i + batch], seq)

    @staticmethod
    def _cut(stream: Tensor, starts: Sequence[int], seq: int) -> tuple[Tensor, Tensor]:
        windows = torch.stack([stream[start : start + seq + 1] for start in starts]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def check_length(self, seq: int, sequences: int, batch: int) -> None:
        """Raises UserError unless both streams hold enough for one step and one validation batch."""
        if self.windows(seq) < sequences:
            raise UserError(
                f"--data: {self.source} gives {len(self.train)} bytes to train on, too short: one step takes "
                f"{sequences} windows of {seq} bytes (ranks x batch x accumulate), {(sequences + 1) * seq} bytes"
            )
        if (len(self.validation) - 1) // seq < 1:
            raise UserError(
                f"--data: {self.source} gives {len(self.validation)} bytes to validate on, too short for one "
                f"window of {seq + 1} bytes"
            )


_order_cache: dict[tuple[int, int, int, int], tuple[int, Tensor]] = {}


def _epoch_order(total: int, seq: int, seed: int, epoch: int) -> tuple[int, Tensor]:
    key = (total, seq, seed, epoch)
    if key not in _order_cache:
        while len(_order_cache) >= 2:  # a step touches at most the end of one epoch and the start of the next
            _order_cache.pop(next(iter(_order_cache)))
        # torch's CPU generator takes no more than 32 bits of its seed.
        mixed = hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
        offset = int(torch.randint(seq, (1,), generator=generator))
        _order_cache[key] = offset, torch.randperm(total, generator=generator)
    return _order_cache[key]


def load_corpus(paths: Sequence[str]) -> Corpus:
    """Reads files and folders; without any, the sources of Python's standard library.

    A folder gives its text files (no zero byte in the first 8192), hidden ones left out. Files with the same
    content count once, so no content is on both sides of the split.

    Raises:
        UserError: a path cannot be read, or there is no text.
    """
    contents: dict[bytes, bytes] = {}
    source = ", ".join(paths) if paths else "Python's standard library"
    for path, must_be_text in _files(paths) if paths else _standard_library():
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"--data: cannot read {path}: {error.strerror}") from error
        if content and not (must_be_text and SEPARATOR in content[:8192]):
            contents.setdefault(hashlib.sha256(content).digest(), content)
    if not contents:
        raise UserError(f"--data: {source} holds no text")
    ordered = [contents[digest] for digest in sorted(contents)]
    train, validation = split(ordered)
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + validation).hexdigest()
    return Corpus(_tensor(train), _tensor(validation), source, len(ordered), digest)


def split(contents: Sequence[bytes]) -> tuple[bytes, bytes]:
    """(training bytes, validation bytes) of files given in a fixed order.

    Whole files go to validation, the first that fit into its share of 5 %. Where whole files cannot fill half of
    that share (few files, or one very large), each file gives its last 5 % instead.
    """
    room = int(sum(map(len, contents)) * VALIDATION_SHARE)
    smallest = room // 2
    held: set[int] = set()
    for i, content in enumerate(contents):
        if len(content) <= room:
            held.add(i)
            room -= len(content)
    if sum(len(contents[i]) for i in held) >= smallest and len(held) < len(contents) and held:
        train = [content for i, content in enumerate(contents) if i not in held]
        validation = [contents[i] for i in sorted(held)]
    else:
        cuts = [len(content) - int(len(content) * VALIDATION_SHARE) for content in contents]
        train = [content[:cut] for content, cut in zip(contents, cuts, strict=True)]
        validation = [content[cut:] for content, cut in zip(contents, cuts, strict=True)]
    return _join(train), _join(validation)


def _join(parts: Sequence[bytes]) -> bytes:
    return b"".join(part + SEPARATOR for part in parts if part)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _files(paths: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """(file, whether to leave it out unless it is text): a file named by the user is taken as it is."""
    for name in paths:
        path = Path(name)
        if path.is_dir():
            for file in _walk(path, _SKIPPED_FOLDERS):
                yield file, True
        else:
            yield path, False


def _standard_library() -> Iterator[tuple[Path, bool]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in _walk(root, _SKIPPED_FOLDERS | _SKIPPED_LIBRARY_FOLDERS):
        if file.suffix == ".py":
            yield file, True


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"--data: cannot read {error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [s for s in subfolders if s not in skipped and not s.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
