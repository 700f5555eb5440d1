"""Packed rows: an update computes prompts and completions end to end, with little padding.

A row begins with its prompts, each without its last token. Its completions follow. The inputs of a
completion are the last token of its prompt, then its own tokens but the last. A completion attends
to its prompt and to itself. A row holds a prompt once, however many of its completions follow. All
rows of an update have the same widths S and C, which follow from its batch and from RowLimits.

A row with 4 prompt slots (S) and 8 completion slots (C) for two prompts, `a b c` and `p q r`, and
three completions: `x y z` of the first prompt, `u v` and `w` of the second. `.` is padding.

    slot        0 1 2 3   4 5 6  7 8  9  10 11
    ids         a b p q   c x y  r u  r  .  .       the input tokens
    positions   0 1 0 1   2 3 4  2 3  2  0  0       of the input in its sequence
    segment_ids 0 0 1 1   0 0 0  1 1  1 -1 -1       the input's prompt, by its index in the row
    start       0 0 2 2   4 4 4  7 7  9 10 11       the slot where its prompt or completion begins
    targets               x y z  u v  w  .  .       the next token, whose log-probability is needed
    target_slots          0 1 2  3 4  5             those of each completion, counted from S on

The attention mask has a line for each input token, with an x for each key that it attends to:

     0  a       x                                   a prompt token attends to itself and to the
     1  b       x x                                 earlier tokens of its prompt
     2  p           x
     3  q           x x
     4  c       x x       x                         an input of a completion attends to its prompt,
     5  x       x x       x x                       to itself and to the completion's earlier inputs
     6  y       x x       x x x
     7  r           x x          x
     8  u           x x          x x
     9  r           x x               x             not to another completion of the same prompt

Linear attention (RowLimits.chunk) needs prompts that end at a multiple of CHUNK slots, and groups
of completions that begin at one. Then there is padding before prompts and between groups, too.

Dimensions: B sequences of a batch, K completions per prompt. X rows of a micro-step over all
devices, each with S slots for prompt tokens, C for completion tokens and Q for sequences.
T completion tokens, padded to MAX_LENGTH_SAMPLE; U ids of a support.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infra.sizes import next_multiple, prompt_width, widest_row

# S and C have few values, so that few programs are compiled: between two powers of two there are at
# most GRID_VALUES, and they are at least S_STEP or C_STEP apart. Where C is above LONG_C, the step
# of S grows with it: padding of prompts costs less there than compiling a program for each S.
GRID_VALUES, S_STEP, C_STEP, LONG_C = 4, 128, 256, 2048
# A row holds more short completions than completions of T tokens, but at most this many times as
# many, which bounds the arrays [X*Q, T].
SHORT_SEQUENCES = 8


class Batch(NamedTuple):
    """All sequences of a step or of one of its updates, in NumPy arrays on every process. The K
    sequences of a prompt are adjacent. An optional array is None until a phase computes it."""

    prompts: list[Any]  # [P] data.Prompt
    completion_ids: np.ndarray  # [B, T] int32, right-padded
    completion_mask: np.ndarray  # [B, T] int32, 1 on the tokens of the loss, stop token included
    lengths: np.ndarray  # [B] int32 tokens, stop tokens and an environment's tokens included
    sampling_logps: np.ndarray  # [B, T] float32 nats
    sampled_mask: np.ndarray  # [B, T] int32, 1 on tokens that the policy sampled
    stopped: np.ndarray  # [B] bool: it ended with a stop token and was not cut off
    rewards: np.ndarray  # [B] float64, weighted total; NaN: no function applies
    function_rewards: np.ndarray  # [B, functions] float64; NaN: it does not apply
    advantages: np.ndarray  # [B] float64; NaN until group_advantages has computed them
    decode_steps: np.ndarray | None = None  # [B] int32, as in Completions
    old_logps: np.ndarray | None = None  # [B, T] float32 nats
    ref_logps: np.ndarray | None = None  # [B, T] float32 nats
    teacher_logps: np.ndarray | None = None  # [B, T] float32 nats
    top_mask: np.ndarray | None = None  # [B, T] int32, 1 on the tokens of TOP_ENTROPY_QUANTILE
    support: np.ndarray | None = None  # [B, T, U] int32 ids, -1 in unused slots
    cut_tokens: np.ndarray | None = None  # [B] int32, as in Completions

    def completions_per_prompt(self) -> int:
        return len(self.lengths) // len(self.prompts)

    def prompt_of(self, sequence: int) -> int:
        return sequence * len(self.prompts) // len(self.lengths)

    def prompt_lengths(self) -> np.ndarray:
        """[B] int: the number of tokens in each sequence's prompt."""
        lengths = [len(prompt.ids) for prompt in self.prompts]  # [P]
        return np.repeat(lengths, self.completions_per_prompt())

    def prompt_tokens(self, prompt: int) -> int:
        """The tokens of a prompt in a row: all but the last one."""
        return len(self.prompts[prompt].ids) - 1

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: x for name, x in self._asdict().items() if isinstance(x, np.ndarray)}

    def select_groups(self, indices: np.ndarray) -> "Batch":
        K = self.completions_per_prompt()
        sequences = (indices[:, None] * K + np.arange(K)).reshape(-1)
        arrays = {name: x[sequences] for name, x in self.arrays().items()}
        return Batch(prompts=[self.prompts[i] for i in indices], **arrays)

    @staticmethod
    def concatenate(batches: "Sequence[Batch]") -> "Batch":
        """The sequences of all batches, one batch after the other."""
        arrays = [batch.arrays() for batch in batches]
        joined = {name: np.concatenate([x[name] for x in arrays]) for name in arrays[0]}
        return Batch([prompt for batch in batches for prompt in batch.prompts], **joined)


class MicroBatch(NamedTuple):
    """The rows of one micro-step, which the picture explains: NumPy arrays of this process, or
    arrays over all devices."""

    ids: Any  # [X, S+C] int32
    positions: Any  # [X, S+C] int32
    segment_ids: Any  # [X, S+C] int32, -1 on padding
    start: Any  # [X, S+C] int32
    targets: Any  # [X, C] int32
    target_slots: Any  # [X, Q, T] int32, of each sequence: indices into targets; 0 on padding
    sequence_indices: Any  # [X*Q] int32, of each sequence in its batch; -1: an unused slot
    completion_mask: Any  # [X*Q, T] int32, 1 on the tokens of the loss; 0 in unused slots
    sampling_logps: Any  # [X*Q, T] float32 nats
    advantages: Any  # [X*Q] float32
    old_logps: Any = None  # [X*Q, T] float32 nats; None: the current logps, so each ratio is 1
    ref_logps: Any = None  # [X*Q, T] float32 nats; None: no reference
    teacher_logps: Any = None  # [X*Q, T] float32 nats; None: no teacher
    top_mask: Any = None  # [X*Q, T] int32, 1 on the tokens of TOP_ENTROPY_QUANTILE; None: all
    support: Any = None  # [X, C, U] int32, as in Batch; logps are normalized over it; None: over V
    key_blocks: Any = None  # as in PackedRows


class RowShape(NamedTuple):
    """The sizes that all rows of an update have in common."""

    S: int  # slots for prompt tokens in a row
    C: int  # slots for completion tokens in a row
    Q: int  # slots for sequences in a row
    chunk: int = 1  # prompts end, and the completions of a prompt begin, at a multiple of it


class RowLimits(NamedTuple):
    """What bounds a micro-batch: the slots of TRAIN_MICRO_BATCH_SIZE sequences of T tokens with
    their prompts (`widest`), and SHORT_SEQUENCES times as many sequences."""

    shards: int  # parts of a micro-step; a device, or the devices of a tp group, computes each
    full_length_sequences_per_shard: int  # in a micro-step, if all of them have T tokens
    completions_per_prompt: int  # K
    max_length_sample: int  # T: the most tokens of a completion
    longest_prompt_slots: int  # S of a row with only the run's longest prompt
    unit: int = 1  # S and C are multiples of it, and it divides S_STEP
    chunk: int = 1  # as in RowShape; it divides unit

    def widest(self) -> RowShape:
        """The shape of a row with a shard's full-length sequences and their prompts. No row has
        more slots (S + C) or more for completions (C); one with a smaller C may have a larger S."""
        count, K = self.full_length_sequences_per_shard, self.completions_per_prompt
        lengths = self.longest_prompt_slots, self.max_length_sample
        S, C = widest_row(count, K, *lengths, chunk=self.chunk, unit=self.unit)
        return RowShape(S, C, SHORT_SEQUENCES * count, self.chunk)


def plan_rows(
    batch: Batch, sequences: np.ndarray, limits: RowLimits
) -> tuple[list[list[list[int]]], RowShape]:
    """The rows of each micro-step, one for each shard, and the widths of all rows. A row lists its
    sequences; those of a prompt are adjacent.

    sequences: indices in the batch, in ascending order.
    """
    longest_prompt = max(len(prompt.ids) for prompt in batch.prompts)
    if longest_prompt > limits.longest_prompt_slots + 1:  # with the text of an environment's reset
        limits = limits._replace(longest_prompt_slots=prompt_width(longest_prompt) - 1)
    widest = limits.widest()
    if len(sequences) == 0:
        return [], widest
    for count, C in rows_to_try(batch.lengths[sequences], limits):
        most_S = widest.S + widest.C - C
        rows = fill_rows(batch, sequences, count, widest._replace(S=most_S, C=C))
        if rows is not None:
            S = max(
                sum(prompt_slots(batch, p, widest) for p in prompts_of(batch, row)) for row in rows
            )
            steps = [rows[i : i + limits.shards] for i in range(0, count, limits.shards)]
            S = round_to_grid(S, S_STEP * max(C // LONG_C, 1))
            return steps, widest._replace(S=min(S, most_S), C=C)
    raise AssertionError("no layout found, although a row per sequence fits")


def rows_to_try(lengths: np.ndarray, limits: RowLimits) -> Iterator[tuple[int, int]]:
    """Yields pairs (number of rows, C) for completions of these lengths, the best first: those with
    the fewest micro-steps, and among them those with the smallest C. C is at least an equal share
    of the tokens, and at most that of the widest row."""
    largest_C = limits.widest().C
    for micro_steps in range(1, len(lengths) + 1):
        count = micro_steps * limits.shards
        C = max(int(lengths.max()), math.ceil(lengths.sum() / count))
        while C <= largest_C:
            C = min(round_to_grid(C, C_STEP), largest_C)
            yield count, C
            C += 1


def fill_rows(
    batch: Batch, sequences: np.ndarray, count: int, shape: RowShape
) -> list[list[int]] | None:
    """`count` rows of these widths with all sequences, by first-fit decreasing; None if they do not
    fit.

    Groups are placed whole, those with most tokens first. If no row has room for a group, each of
    its sequences is placed by itself, the longest first.
    """
    lengths = batch.lengths.tolist()
    rows: list[list[int]] = [[] for _ in range(count)]
    free_S, free_C, free_Q = (np.full(count, size) for size in (shape.S, shape.C, shape.Q))
    last_prompt = np.full(count, -1)  # of each row

    def add_to_row(prompt: int, part: list[int]) -> bool:
        """Adds sequences of a prompt to the first row with room for them; False: there is none."""
        completion_tokens = sum(lengths[i] for i in part)
        has_prompt = last_prompt == prompt  # [count]
        slots = np.where(has_prompt, 0, prompt_slots(batch, prompt, shape))
        # A group begins at a multiple of the chunk.
        room_C = np.where(has_prompt, free_C, free_C // shape.chunk * shape.chunk)
        fits = (slots <= free_S) & (completion_tokens <= room_C) & (len(part) <= free_Q)
        if not fits.any():
            return False
        x = fits.argmax()
        rows[x] += part
        last_prompt[x] = prompt
        free_S[x] -= slots[x]
        free_C[x] = room_C[x] - completion_tokens
        free_Q[x] -= len(part)
        return True

    groups = [[*group] for _, group in itertools.groupby(sequences, batch.prompt_of)]
    groups = [sorted(group, key=lambda i: -lengths[i]) for group in groups]
    for group in sorted(groups, key=lambda group: -sum(lengths[i] for i in group)):
        prompt = batch.prompt_of(group[0])
        if not add_to_row(prompt, group) and not all(add_to_row(prompt, [i]) for i in group):
            return None
    return rows


def round_to_grid(n: int, step: int) -> int:
    """n rounded up to a multiple of `step`, or of a larger step, so that there are at most
    GRID_VALUES sizes between two powers of two: 1280, 1536, 1792, 2048 after 1024."""
    half_power = 2 ** math.ceil(math.log2(max(n, 1))) // 2
    step = max(half_power // GRID_VALUES, step)
    return max(math.ceil(n / step), 1) * step


def prompt_slots(batch: Batch, prompt: int, shape: RowShape) -> int:
    """The slots of a prompt in a row, with the padding before it."""
    return next_multiple(batch.prompt_tokens(prompt), shape.chunk)


def prompts_of(batch: Batch, row: Sequence[int]) -> list[int]:
    return sorted({batch.prompt_of(i) for i in row})


def pack(batch: Batch, rows: Sequence[Sequence[int]], shape: RowShape, pad_id: int) -> MicroBatch:
    """The NumPy arrays of these rows, as the picture shows them."""
    (S, C, Q, chunk), X, T = shape, len(rows), batch.completion_ids.shape[1]
    ids, positions = np.full((X, S + C), pad_id, np.int32), np.zeros((X, S + C), np.int32)
    segment_ids = np.full((X, S + C), -1, np.int32)
    start = np.tile(np.arange(S + C, dtype=np.int32), (X, 1))  # padding begins at itself
    targets, target_slots = np.full((X, C), pad_id, np.int32), np.zeros((X, Q, T), np.int32)
    sequences = np.full((X, Q), -1, np.int32)
    support: Any = None
    if batch.support is not None:
        support = np.full((X, C, batch.support.shape[2]), -1, np.int32)

    def write(x: int, at: int, inputs: Sequence[int], position: int, segment_id: int) -> int:
        span = slice(at, at + len(inputs))
        ids[x, span], segment_ids[x, span], start[x, span] = inputs, segment_id, at
        positions[x, span] = np.arange(position, position + len(inputs))
        return at + len(inputs)

    lengths = batch.lengths.tolist()
    for x, row in enumerate(rows):
        at, prompts = 0, prompts_of(batch, row)
        for segment_id, p in enumerate(prompts):
            at += prompt_slots(batch, p, shape) - batch.prompt_tokens(p)
            at = write(x, at, batch.prompts[p].ids[:-1], 0, segment_id)
        at = S
        sequences[x, : len(row)] = row
        for j, i in enumerate(row):
            p, completion = batch.prompt_of(i), batch.completion_ids[i, : lengths[i]]
            if j and p != batch.prompt_of(row[j - 1]):  # the next group begins
                at = next_multiple(at, chunk)
            span = slice(at - S, at - S + lengths[i])
            targets[x, span] = completion
            target_slots[x, j, : lengths[i]] = np.arange(span.start, span.stop)
            if batch.support is not None:
                support[x, span] = batch.support[i, : lengths[i]]
            prompt_ids = batch.prompts[p].ids
            inputs = [prompt_ids[-1], *completion[:-1].tolist()]
            at = write(x, at, inputs, len(prompt_ids) - 1, prompts.index(p))
    indices = sequences.reshape(-1)  # [X*Q]
    is_used = indices >= 0
    names = "old_logps", "ref_logps", "teacher_logps", "top_mask"
    optional = {name: getattr(batch, name) for name in names}
    return MicroBatch(
        ids=ids,
        positions=positions,
        segment_ids=segment_ids,
        start=start,
        targets=targets,
        target_slots=target_slots,
        sequence_indices=indices,
        completion_mask=batch.completion_mask[indices] * is_used[:, None].astype(np.int32),
        sampling_logps=batch.sampling_logps[indices],
        advantages=np.where(is_used, batch.advantages[indices], 0).astype(np.float32),
        support=support,
        **{name: x[indices] for name, x in optional.items() if x is not None},
    )
