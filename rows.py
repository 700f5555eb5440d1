"""Packed rows: an update computes prompts and completions end to end, with little padding.

A row begins with its prompts, each without its last token. Its completions follow. The inputs of a
completion are the last token of its prompt, then its own tokens but the last. A completion attends
to its prompt and to itself. A row holds a prompt once, however many of its completions follow. All
rows of an update have the same widths S and C, which follow from its batch and the run's Limits.

A row of S = 4 + C = 8 places with two prompts, `a b c` and `p q r`, and three completions:
`x y z` of the first prompt, `u v` and `w` of the second. `.` is padding.

    place       0 1 2 3   4 5 6  7 8  9  10 11
    ids         a b p q   c x y  r u  r  .  .       the input tokens
    positions   0 1 0 1   2 3 4  2 3  2  0  0       of the input in its sequence
    prompt      0 0 1 1   0 0 0  1 1  1 -1 -1       the input's prompt, by its index in the row
    start       0 0 2 2   4 4 4  7 7  9 10 11       the place where its prompt or completion begins
    targets               x y z  u v  w  .  .       the next token, whose log-probability is needed
    places                0 1 2  3 4  5             the target places of each completion, from S on

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

Dimensions: B sequences of a batch, K completions per prompt. X rows of a micro-step over all
devices, each with S places for prompt tokens, C for completion tokens and Q for sequences.
T tokens of the longest completion, padded; U ids of a support.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infra.sizes import bucket_length, prompt_width

# Adding the gradient of a micro-step costs about as much as the matmuls of this number of tokens.
MICRO_STEP_TOKENS = 256
# Widths are rounded up to a coarse grid, so that few programs are compiled: between two powers of
# two there are GRID values of C, and GRID / 2 of S.
GRID = 4
# Bounds Q: an array [X*Q, T] has at most this many elements per token of the widest padded rows.
RESULTS_PER_TOKEN = 8
# Of the widths whose cost is within 5 % of the cheapest, plan_rows takes the widest, because later
# steps can use them again and need no other program.
SLACK = 0.05


class Batch(NamedTuple):
    """All sequences of a step or of one of its updates, in NumPy arrays on every process. The K
    sequences of a prompt are adjacent. An array is None until its phase of the step makes it."""

    prompts: list[Any]  # [P] data.Prompt
    completion_ids: np.ndarray  # [B, T] int32, right-padded
    completion_mask: np.ndarray  # [B, T] int32, 1 on the sampled tokens that the loss counts
    lengths: np.ndarray  # [B] int32 tokens, stop tokens and an environment's tokens included
    sampling_logps: np.ndarray  # [B, T] float32 nats
    computed_tokens: np.ndarray | None = None  # [B] int32, decoding steps computed for the sequence
    drawn_mask: np.ndarray | None = None  # [B, T] int32, 1 on the tokens that the policy has drawn
    stopped: np.ndarray | None = None  # [B] bool: it ended with a stop token and was not cut off
    rewards: np.ndarray | None = None  # [B] float64, weighted total; NaN: no function applies
    per_function: np.ndarray | None = None  # [B, functions] float64; NaN: it does not apply
    advantages: np.ndarray | None = None  # [B] float64
    old_logps: np.ndarray | None = None  # [B, T] float32 nats
    ref_logps: np.ndarray | None = None  # [B, T] float32 nats
    top_mask: np.ndarray | None = None  # [B, T] int32, 1 on the tokens of TOP_ENTROPY_QUANTILE
    support: np.ndarray | None = None  # [B, T, U] int32 ids, -1 in unused places
    cut_tokens: np.ndarray | None = None  # [B] int32, tokens whose support was cut to U ids

    def completions_per_prompt(self) -> int:
        """K."""
        return len(self.lengths) // len(self.prompts)

    def prompt_of(self, sequence: int) -> int:
        """The index of the sequence's prompt."""
        return sequence * len(self.prompts) // len(self.lengths)

    def prompt_lengths(self) -> np.ndarray:
        """[B] int: the number of tokens in each sequence's prompt."""
        lengths = [len(prompt.ids) for prompt in self.prompts]  # [P]
        return np.repeat(lengths, self.completions_per_prompt())

    def arrays(self) -> dict[str, np.ndarray]:
        """{name: array} of the arrays that are not None."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, np.ndarray)}

    def select_groups(self, indices: np.ndarray) -> "Batch":
        """The groups with these indices, in this order."""
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

    def trim(self, T: int) -> "Batch":
        """The batch with its token arrays cut to width T, which no completion exceeds."""
        names = "completion_ids completion_mask drawn_mask sampling_logps support".split()
        arrays = self.arrays()
        return self._replace(**{name: arrays[name][:, :T] for name in names if name in arrays})


class MicroBatch(NamedTuple):
    """The rows of one micro-step: NumPy arrays of this process, or arrays over all devices."""

    ids: Any  # [X, S+C] int32, like positions, prompt and start; the picture above explains them
    positions: Any
    prompt: Any  # -1: padding
    start: Any
    targets: Any  # [X, C] int32
    places: Any  # [X, Q, T] int32, the targets of each sequence: indices into the C places
    sequences: Any  # [X*Q] int32, the index of each sequence in its batch; -1: an unused place
    completion_mask: Any  # [X*Q, T] int32, 1 on the tokens of the loss; 0 in unused places
    sampling_logps: Any  # [X*Q, T] float32 nats
    advantages: Any  # [X*Q] float32
    old_logps: Any = None  # [X*Q, T] float32 nats; None: the current logps, so that each ratio is 1
    ref_logps: Any = None  # [X*Q, T] float32 nats; None: no reference
    top_mask: Any = None  # [X*Q, T] int32, 1 on the tokens of TOP_ENTROPY_QUANTILE; None: all
    # [X, C, U] int32 ids over which log-probabilities are normalized, -1 in unused places. None:
    # they are normalized over the vocabulary.
    support: Any = None


class Widths(NamedTuple):
    """The sizes that all rows of an update have in common."""

    rows: int  # rows of a shard in a micro-step
    S: int  # places for prompt tokens in a row
    C: int  # places for completion tokens in a row
    Q: int  # places for sequences in a row
    T: int  # tokens of the longest completion, padded


class Limits(NamedTuple):
    """The limits of a run's rows, and the costs by which plan_rows compares their widths."""

    shards: int  # parts of a micro-step; a device, or the devices of a tp group, computes each
    sequences: int  # sequences of a shard in padded rows, which bound the tokens of packed ones
    completions: int  # K: completions per prompt
    max_length_sample: int  # the most tokens of a completion
    longest_prompt: int  # the largest S for one prompt of the dataset; an environment may exceed it
    shortest_prompt: int  # GLOBAL_LENGTH: prompts are padded to at least this number of tokens
    pack: bool  # False: every completion is padded to the width of the longest
    unit: int  # S and C are multiples of it
    row_tokens: int  # the most tokens of a row
    matmul_keys: float  # attention to this number of keys costs as much as the matmuls of a token

    def completion_width(self, longest: int) -> int:
        """T: the width of completions of up to `longest` tokens. For packed rows it has few values:
        a program is compiled for each, and a large T costs little."""
        if not self.pack:
            return min(bucket_length(longest), self.max_length_sample)
        T = self.max_length_sample
        while T > 1 and -(-T // 2) >= longest:
            T = -(-T // 2)
        return T


def widest(limits: Limits) -> Widths:
    """The widths of padded rows of the run's longest prompts and completions."""
    return padded_widths(limits, limits.longest_prompt, limits.max_length_sample)


def padded_widths(limits: Limits, S: int, T: int) -> Widths:
    """The widths of padded rows: each row has one prompt of S tokens and a fixed number of its
    completions of T tokens, the largest that divides both K and the sequences of a shard."""
    per_row = math.gcd(limits.completions, limits.sequences)
    S, C = (-(-n // limits.unit) * limits.unit for n in (S, per_row * T))
    return Widths(limits.sequences // per_row, S, C, power_of_two(per_row), T)


def plan_rows(
    batch: Batch, sequences: Sequence[int], limits: Limits
) -> tuple[list[list[list[int]]], Widths]:
    """The rows of each micro-step, and their widths. The rows of a shard are adjacent, and so are
    the sequences of a prompt in a row.

    sequences: indices in the batch, in ascending order. In a micro-step a shard has no more tokens
    than padded rows of the run's longest prompts and completions would have.
    """
    per_row = math.gcd(limits.completions, limits.sequences)
    groups = [[*group] for _, group in itertools.groupby(sequences, batch.prompt_of)]
    rows = [group[i : i + per_row] for group in groups for i in range(0, len(group), per_row)]
    longest = int(batch.prompt_lengths().max())
    S = prompt_width(longest, limits.shortest_prompt) - 1
    if longest > limits.longest_prompt + 1:  # with the text of an environment's reset
        limits = limits._replace(longest_prompt=S)
    widths = padded_widths(limits, S, batch.completion_ids.shape[1])
    if limits.pack and rows:
        candidates = [(rows, widths), *packed_rows(batch, groups, limits)]
        costs = [cost(limits, *candidate) for candidate in candidates]
        cheap = [i for i, x in enumerate(costs) if x <= (1 + SLACK) * min(costs)]
        rows, widths = max((candidates[i] for i in cheap), key=lambda plan: (plan[1].C, plan[1].S))
    per_step = limits.shards * widths.rows
    rows = rows + [[]] * (-len(rows) % per_step)
    return [rows[i : i + per_step] for i in range(0, len(rows), per_step)], widths


def cost(limits: Limits, rows: list[list[int]], widths: Widths) -> float:
    """The time of these rows on a shard, in units of the attention of one token to one key."""
    count, S, C, _, T = widths
    keys = S**2 + C * (S + T)
    tokens = count * (S + C) + MICRO_STEP_TOKENS
    micro_steps = math.ceil(len(rows) / (limits.shards * count))
    return micro_steps * (tokens * limits.matmul_keys + count * keys)


def packed_rows(
    batch: Batch, groups: list[list[int]], limits: Limits
) -> Iterator[tuple[list[list[int]], Widths]]:
    """Candidates for plan_rows: packed rows for each C of the grid, with one row per shard in a
    micro-step.

    A row has at most row_tokens, and no more tokens than a shard has with the widest padded rows.
    """
    lengths, T, padded = batch.lengths.tolist(), batch.completion_ids.shape[1], widest(limits)
    groups = [sorted(group, key=lambda i: -lengths[i]) for group in groups]
    groups.sort(key=lambda group: -sum(lengths[i] for i in group))  # by their tokens, descending
    prompt_tokens = [len(prompt.ids) - 1 for prompt in batch.prompts]
    tokens = padded.rows * (padded.S + padded.C)
    Q = max(RESULTS_PER_TOKEN * tokens // T, 1)
    Q = min(2 ** (Q.bit_length() - 1), power_of_two(len(lengths)))
    tokens = min(tokens, limits.row_tokens)
    C = round_up(max(lengths[group[0]] for group in groups), GRID, limits.unit)
    while C + limits.longest_prompt <= tokens:
        rows = fill_rows(batch, lengths, groups, Widths(1, tokens - C, C, Q, T))
        S = max(sum(prompt_tokens[p] for p in prompts_of(batch, row)) for row in rows)
        S = min(round_up(S, GRID // 2, limits.unit), tokens - C)
        yield rows, Widths(1, S, C, Q, T)
        if len(rows) <= limits.shards:  # one micro-step is enough: wider rows only add padding
            break
        C = round_up(C + 1, GRID, limits.unit)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 2 ** math.ceil(math.log2(max(n, 1)))


def round_up(n: int, steps: int, unit: int = 1) -> int:
    """The smallest number of the grid that is at least `n`. Between two powers of two the grid has
    `steps` numbers, or fewer, since all of them are multiples of `unit`."""
    step = max(2 ** (math.ceil(math.log2(max(n, 1))) - 1) // steps, unit)
    return max(math.ceil(n / step) * step, unit)


def prompts_of(batch: Batch, row: Sequence[int]) -> list[int]:
    """The indices of the prompts of a row, in the order in which the row holds them."""
    return sorted({batch.prompt_of(i) for i in row})


def fill_rows(
    batch: Batch, lengths: list[int], groups: list[list[int]], widths: Widths
) -> list[list[int]]:
    """Rows of these widths that hold all groups, by first-fit decreasing.

    lengths: [B] of the batch. groups: in descending order of their tokens, and so are the sequences
    of a group. A group goes into the first row that has room for it; if it is too large for an
    empty row, each of its sequences does.
    """
    rows: list[list[int]] = []
    free_places: list[list[int]] = []  # of each row: the unused S and C, and its last prompt
    for group in groups:
        prompt, tokens = batch.prompt_of(group[0]), sum(lengths[i] for i in group)
        prompt_tokens = len(batch.prompts[prompt].ids) - 1
        fits = tokens <= widths.C and len(group) <= widths.Q
        for part in [group] if fits else [[i] for i in group]:
            C = sum(lengths[i] for i in part)
            for row, free in zip(rows, free_places, strict=True):
                S = 0 if free[2] == prompt else prompt_tokens
                if S <= free[0] and C <= free[1] and len(row) + len(part) <= widths.Q:
                    break
            else:
                row, free, S = [], [widths.S, widths.C, prompt], prompt_tokens
                rows.append(row)
                free_places.append(free)
            row += part
            free[:] = free[0] - S, free[1] - C, prompt
    return rows


def pack(batch: Batch, rows: Sequence[Sequence[int]], widths: Widths, pad_id: int) -> MicroBatch:
    """The NumPy arrays of these rows, as the picture shows them."""
    (_, S, C, Q, T), X = widths, len(rows)
    ids, positions = np.full((X, S + C), pad_id, np.int32), np.zeros((X, S + C), np.int32)
    prompt = np.full((X, S + C), -1, np.int32)
    start = np.tile(np.arange(S + C, dtype=np.int32), (X, 1))  # padding begins at itself
    targets, places = np.full((X, C), pad_id, np.int32), np.zeros((X, Q, T), np.int32)
    sequences, support = np.full((X, Q), -1, np.int32), None
    if batch.support is not None:
        support = np.full((X, C, batch.support.shape[2]), -1, np.int32)

    def write(x: int, at: int, inputs: Sequence[int], position: int, prompt_of_row: int) -> int:
        span = slice(at, at + len(inputs))
        ids[x, span], prompt[x, span], start[x, span] = inputs, prompt_of_row, at
        positions[x, span] = np.arange(position, position + len(inputs))
        return at + len(inputs)

    lengths = batch.lengths.tolist()
    for x, row in enumerate(rows):
        at, prompts = 0, prompts_of(batch, row)
        for prompt_of_row, p in enumerate(prompts):
            at = write(x, at, batch.prompts[p].ids[:-1], 0, prompt_of_row)
        at = S
        sequences[x, : len(row)] = row
        for j, i in enumerate(row):
            p, completion = batch.prompt_of(i), batch.completion_ids[i, : lengths[i]]
            span = slice(at - S, at - S + lengths[i])
            targets[x, span] = completion
            places[x, j, : lengths[i]] = np.arange(span.start, span.stop)
            if support is not None:
                support[x, span] = batch.support[i, : lengths[i]]
            prompt_ids = batch.prompts[p].ids
            inputs = [prompt_ids[-1], *completion[:-1].tolist()]
            at = write(x, at, inputs, len(prompt_ids) - 1, prompts.index(p))
    indices = sequences.reshape(-1)  # [X*Q]
    is_used = indices >= 0
    optional = {name: getattr(batch, name) for name in ("old_logps", "ref_logps", "top_mask")}
    return MicroBatch(
        ids=ids,
        positions=positions,
        prompt=prompt,
        start=start,
        targets=targets,
        places=places,
        sequences=indices,
        completion_mask=batch.completion_mask[indices] * is_used[:, None].astype(np.int32),
        sampling_logps=batch.sampling_logps[indices],
        advantages=np.where(is_used, batch.advantages[indices], 0).astype(np.float32),
        support=support,
        **{name: x[indices] for name, x in optional.items() if x is not None},
    )
