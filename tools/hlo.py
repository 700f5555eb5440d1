"""The collectives of a compiled program, read from its optimized HLO text.

A TPU's loops do not state how often they run. The conditions of those we meet compare a counter
with a constant; a loop that also stops early (decoding) has no number: None.
"""

import math
import re
from typing import NamedTuple

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
BITS = {"pred": 8, "s4": 4, "u4": 4}  # else the number in the name: bf16, f32, s8, f8e4m3fn
SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
INSTRUCTION = re.compile(rf"= (.*?) ({KINDS})(-start)?\(")


class Collective(NamedTuple):
    """One instruction; `loops` holds how often each loop around it runs, from the outermost."""

    kind: str
    shape: str  # of its result
    sent_bytes: float  # by each device, each time, as a ring does it
    loops: tuple[int | None, ...]

    @property
    def times(self) -> int:
        """How often it runs, for each round of a loop without a number."""
        return math.prod(n or 1 for n in self.loops)


def collectives(hlo: str) -> list[Collective]:
    """Every collective of a program's compiled.as_text(), in the order of the text."""
    computations = dict(_computations(hlo))
    loops = _loops(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if match := INSTRUCTION.search(line):
                result, kind, start = match.groups()
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # a fusion, which keeps a part of its all-reduce
                    found.append(_collective(kind, result, _group_size(line), 1, loops[name]))
                    continue
                # The tuple of a start begins with its operands, but for an all-reduce's.
                shapes = SHAPE.findall(result)
                if start and kind != "all-reduce":
                    operands = len(
                        re.findall(r"%", line.partition(f"{kind}-start(")[2].split(")")[0])
                    )
                    result = " ".join("{}[{}]".format(*x) for x in shapes[operands : 2 * operands])
                group = _group_size(line)
                whole = group if kind == "reduce-scatter" else 1
                found.append(_collective(kind, result, group, whole, loops[name]))
    return found


def _collective(
    kind: str, result: str, group: int, whole: int, loops: tuple[int | None, ...]
) -> Collective:
    shapes = SHAPE.findall(result)
    size = whole * sum(_bytes(*shape) for shape in shapes)
    share = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1}
    sent = size * share.get(kind, (group - 1) / group)
    return Collective(kind, " ".join(f"{t}[{dims}]" for t, dims in shapes), sent, loops)


def _bytes(dtype: str, dims: str) -> float:
    digits = re.search(r"\d+", dtype)
    bits = BITS.get(dtype) or int(digits.group() if digits else 8)
    return math.prod(int(n) for n in dims.split(",") if n) * bits / 8


def _group_size(line: str) -> int:
    """Devices that take part in one: of {{0,1},{2,3}}, [4,2]<=[8] or mesh[...] {'axis_0'}."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match.group(1).split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match.group(1))
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match.group(2)))
    assert "replica_groups" not in line, f"unknown form of replica_groups: {line}"
    return 2  # a permutation has pairs


def _computations(hlo: str) -> list[tuple[str, list[str]]]:
    found, lines = [], []
    for line in hlo.splitlines():
        if match := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            lines = []
            found.append((match.group(1), lines))
        lines.append(line)
    return found


def _loops(computations: dict[str, list[str]]) -> dict[str, tuple[int | None, ...]]:
    """Computation -> the loops around it."""
    callers = {}  # computation -> (its caller, the trips of the loop whose body it is or ())
    for name, lines in computations.items():
        for line in lines:
            trips: tuple[int | None, ...] = ()
            if match := re.search(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)", line):
                condition, body = match.groups()
                trips = (_trips(computations[condition], computations[body]),)
            for called in re.findall(r"(?:body|condition|calls|to_apply)=%([\w.\-]+)", line):
                callers[called] = (name, trips)

    def around(name: str) -> tuple[int | None, ...]:
        if name not in callers:
            return ()
        caller, trips = callers[name]
        return around(caller) + trips

    return {name: around(name) for name in computations}


def _trips(condition: list[str], body: list[str]) -> int | None:
    """Of a loop that counts from 0 by a constant up to a constant."""
    root = next(line for line in condition if "ROOT" in line)
    match = re.search(r" compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT", root)
    if not match:
        return None
    counter, limit = (
        next((x for x in condition if f"%{name} =" in x), "") for name in match.groups()
    )
    end, index = re.search(r"constant\((\d+)\)", limit), re.search(r"index=(\d+)", counter)
    if not end or not index:
        return None
    root = next(line for line in body if "ROOT" in line)
    names = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2].split(")")[0])
    if int(index.group(1)) >= len(names):
        return None
    added = next((x for x in body if f"%{names[int(index.group(1))]} =" in x), "")
    steps = [
        int(value.group(1))
        for name in re.findall(r"%([\w.\-]+)", added.partition(" add(")[2].split(")")[0])
        for line in body
        if f"%{name} =" in line and (value := re.search(r" constant\((\d+)\)", line))
    ]
    return math.ceil(int(end.group(1)) / (steps[0] if steps else 1))
