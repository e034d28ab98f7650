"""The planted bugs of kernels/bugs_*.cu: what the emulator has to call each, and what the mended kernels compute."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .build import SOURCE
from .device import UNWRITTEN, Array, Call, Finding, Pointer
from .structs import Probe

KERNELS = SOURCE / "kernels"
SCRATCH_WORDS = 64


@dataclass(frozen=True)
class Bug:
    """A planted bug: what the emulator has to call it, and what the mended kernel computes.

    Attributes:
        kinds: any of these findings names the bug; which one comes first depends on the schedule.
        buffer: the buffer that the finding names.
        result: the mended kernel's output: a copy of its input, or the input in reversed "blocks" of 128 words or
            in reversed "pieces" of 4 words.
    """

    kinds: tuple[str, ...]
    buffer: str = ""
    result: str = "copy"
    words: int = 256
    gaps: tuple[tuple[int, int], ...] = ()


RACE = ("race", "uninitialised")
BUGS = {
    # memory
    "read_past_end": Bug(("out-of-bounds",), "in"),
    "write_past_end": Bug(("out-of-bounds",), "out"),
    "write_between_rows": Bug(("out-of-bounds",), "out", gaps=((400, 416),)),
    "shared_past_end": Bug(("out-of-bounds",), "tile"),
    "dynamic_past_end": Bug(("out-of-bounds",), "dynamic"),
    "dynamic_not_asked_for": Bug(("out-of-bounds",), "dynamic"),
    "uninitialised_global": Bug(("uninitialised",), "out"),
    "uninitialised_shared": Bug(("uninitialised",), "tile"),
    "write_to_input": Bug(("input-write",), "in"),
    "unwritten_output": Bug(("unwritten-output",), "out"),
    "misaligned_load": Bug(("misaligned",), "in"),
    "misaligned_store": Bug(("misaligned",), "out"),
    "misaligned_struct": Bug(("misaligned",), "in"),
    "misaligned_word": Bug(("misaligned",), "in"),
    "shared_as_global": Bug(("misuse",), "tile"),
    "wild_pointer": Bug(("wild-pointer",)),
    "other_threads_stack": Bug(("wild-pointer",)),
    "endless_loop": Bug(("endless",)),
    "too_much_shared": Bug(("launch",), "tile"),
    # races
    "missing_barrier": Bug(RACE, "tile", "blocks"),
    "reused_without_barrier": Bug(RACE, "tile", "blocks"),
    "missing_syncwarp": Bug(RACE, "tile"),
    "same_word_in_warp": Bug(("race",), "sums"),
    "same_word_in_blocks": Bug(("race",), "scratch"),
    "plain_counter": Bug(("race",), "scratch"),
    "atomic_and_plain": Bug(("race",), "count"),
    "missing_fence": Bug(("race",), "scratch"),
    "fence_too_narrow": Bug(("race",), "scratch"),
    "named_barrier_of_others": Bug(RACE, "tile", "blocks"),
    "arrived_without_waiting": Bug(RACE, "tile", "blocks"),
    # barriers and warp collectives
    "shuffle_in_branches": Bug(("collective",)),
    "masks_differ": Bug(("collective",)),
    "mask_without_caller": Bug(("collective",)),
    "source_outside_mask": Bug(("collective",)),
    "different_collectives": Bug(("collective",)),
    "exit_before_shuffle": Bug(("early-exit",)),
    "exit_before_barrier": Bug(("early-exit",)),
    "barriers_in_branches": Bug(("collective",)),
    "barrier_for_some": Bug(("early-exit",)),
    "barrier_against_warp": Bug(("deadlock",)),
    "starved_named_barrier": Bug(("deadlock",)),
    "named_barrier_counts": Bug(("collective",)),
    "named_barrier_number": Bug(("collective",)),
    "multiply_in_half_warp": Bug(("early-exit", "collective")),
    "misaligned_matrix_row": Bug(("misaligned",), "rows"),
    # asynchronous copies
    "copy_without_wait": Bug(("async",), "tile", "pieces"),
    "wait_for_too_few_groups": Bug(("async",), "tile", "pieces"),
    "copy_without_commit": Bug(("async",), "tile", "pieces"),
    "copy_without_barrier": Bug(("async", *RACE), "tile", "pieces"),
    "copy_over_readers": Bug(("async", "race"), "tile", "pieces"),
    "copy_past_end": Bug(("out-of-bounds",), "in"),
    "misaligned_copy": Bug(("misaligned",), "tile"),
    "copy_to_global": Bug(("misuse",)),
    "bulk_without_wait": Bug(("async", *RACE), "slots", "pieces"),
    "bulk_slot_reused": Bug(("async", "race", "misuse", "deadlock"), result="pieces"),
    "bulk_wrong_bytes": Bug(("deadlock",), result="pieces"),
    "bulk_extra_arrival": Bug(("async", "race", "misuse", "deadlock"), result="pieces"),
    "mbarrier_not_initialised": Bug(("misuse",), "barrier"),
    # seen by the compiler's sanitizers alone
    "local_past_end": Bug(("index 4 out of bounds",), words=64),
    "shift_too_far": Bug(("shift exponent",), words=64),
    "signed_overflow": Bug(("signed integer overflow",), words=64),
    "global_past_end": Bug(("out-of-bounds", "use-after-poison"), "out", words=64),
}
SANITIZERS_ONLY = ("local_past_end", "shift_too_far", "signed_overflow")


def input_words(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 2**31, count, dtype=np.uint32)


def probe_call(
    kernel: str, words: np.ndarray, *, out_words: int | None = None, gaps: tuple[tuple[int, int], ...] = ()
) -> Call:
    """A launch of one of kernels/*.cu: `words` in, as many words out unless `out_words` says otherwise."""
    out = bytes(4 * (len(words) if out_words is None else out_words))
    fields = {"in": Pointer("in"), "out": Pointer("out"), "scratch": Pointer("scratch"), "n": len(out) // 4}
    arrays = (
        Array("in", "input", words.tobytes()),
        Array("out", "output", out, gaps=gaps),
        Array("scratch", "inout", bytes(4 * SCRATCH_WORDS)),
    )
    return Call(kernel, Probe, fields, arrays)


def bug_call(name: str, *, fixed: bool) -> Call:
    bug = BUGS[name]
    return probe_call(f"{name}_fixed" if fixed else name, input_words(bug.words), gaps=bug.gaps)


def mended_output(bug: Bug) -> bytes:
    words = input_words(bug.words)
    if bug.result == "blocks":
        words = words.reshape(-1, 128)[:, ::-1]
    if bug.result == "pieces":
        words = words.reshape(-1, 4)[::-1]
    out = bytearray(words.tobytes())
    for start, stop in bug.gaps:
        out[start:stop] = bytes([UNWRITTEN]) * (stop - start)
    return bytes(out)


def marked_lines(name: str) -> set[tuple[str, int]]:
    """The places (file name, line) that the sources mark with "FOUND name"."""
    family = f"{name.split('_')[0]}_*"
    marker = re.compile(rf"// FOUND ({name}|{re.escape(family)})$")
    return {
        (path.name, number)
        for path in KERNELS.glob("*.cu")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marker.search(line)
    }


def names_the_bug(finding: Finding, name: str, places: set[tuple[str, int]]) -> bool:
    bug = BUGS[name]
    if finding.kind not in bug.kinds or finding.kernel != f"{name}<true>":
        return False
    if finding.buffer != bug.buffer and bug.buffer:
        return False
    if finding.kind in ("unwritten-output", "launch"):
        return True  # no line and no thread is to blame
    block_threads = re.fullmatch(r"\d+,0,0", finding.block) and re.fullmatch(r"\d+,0,0", finding.thread)
    return bool(block_threads) and (Path(finding.file).name, finding.line) in places
