"""Claims about tests/hlo.py, on small texts in the form that the TPU's compiler writes."""

import pytest
from hlo import Collective, collectives

TO = "use_global_device_ids=true"


def program(*lines: str, before: str = "") -> str:
    """HLO whose entry computation has these lines; `before` holds other computations."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule jit_step, is_scheduled=true, num_partitions=8

{before}
ENTRY %main.5_spmd (param.1: f32[8,128], param.2: (s32[], bf16[4])) -> f32[8,128] {{
  %param.1 = f32[8,128]{{1,0:T(8,128)}} parameter(0), sharding={{devices=[8,1]<=[8]}}
{body}
  ROOT %copy.1 = f32[8,128]{{1,0:T(8,128)}} copy(%param.1), metadata={{op_name="all-gather(x)"}}
}}
"""


def collective_of(line: str) -> Collective:
    (found,) = collectives(program(line))
    return found


def all_reduce(groups: str, shape: str = "f32[100]{0:T(128)}") -> str:
    return f"%all-reduce.1 = {shape} all-reduce(%x), channel_id=1, {groups}, {TO}, to_apply=%add.1"


def compare(index: int, limit: int) -> str:
    """The end of a condition: element `index` of the loop's tuple is below `limit`."""
    return f"""%constant.5 = s32[]{{:T(128)}} constant({limit}), metadata={{op_name="while/cond"}}
  %get-tuple-element.7 = s32[]{{:T(128)}} get-tuple-element(%wide.param.1), index={index}
  ROOT %lt.1 = pred[]{{:T(512)}} compare(%get-tuple-element.7, %constant.5), direction=LT, x={{}}"""


# The condition of a loop that also stops when `done` is set.
STOPS_EARLY = f"""{compare(0, 1024).replace("ROOT ", "")}
  %get-tuple-element.8 = pred[] get-tuple-element(%wide.param.1), index=1
  %not.1 = pred[] not(%get-tuple-element.8)
  ROOT %and.1 = pred[]{{:T(512)}} and(%lt.1, %not.1), metadata={{op_name="while/cond/and"}}"""


def loop(name: str, condition: str, step: int, *lines: str) -> str:
    """A loop's body, which adds `step` to the elements 0 and 4 of its tuple, and its condition."""
    inside = "\n".join(f"  {line}" for line in lines)
    return f"""%{name}_body.clone.sunk (wide.param.0: (s32[], /*index=1*/f32[8])) -> (s32[]) {{
  %constant.2..sunk = s32[]{{:T(128)}} constant({step}), metadata={{op_name="while" id=7}}
  %constant.3 = s32[]{{:T(128)}} constant(7)
  %wide.param.0 = (s32[]{{:T(128)}}, pred[], f32[8]{{0:T(8)}}) parameter(0)
  %get-tuple-element.1 = s32[]{{:T(128)}} get-tuple-element(%wide.param.0), index=0
  %copy.4 = s32[]{{:T(128)S(6)}} copy(%get-tuple-element.1)
  %add.9 = s32[]{{:T(128)}} add(%copy.4, %constant.2..sunk), metadata={{op_name="while/add"}}
  %add.8 = s32[]{{:T(128)}} add(%copy.4, %constant.3)
{inside}
  ROOT %tuple.1 = (s32[]{{:T(128)}}, pred[], f32[8]{{0:T(8)}}) tuple(%add.9, %p, %f, %add.8, %add.9)
}}

%{name}_condition.clone (wide.param.1: (s32[], /*index=1*/f32[8])) -> pred[] {{
  %wide.param.1 = (s32[]{{:T(128)}}, pred[], f32[8]{{0:T(8)}}) parameter(0)
  {condition}
}}
"""


def call(name: str) -> str:
    names = f"condition=%{name}_condition.clone, body=%{name}_body.clone.sunk"
    return f"%while.1 = (s32[]{{:T(128)}}, pred[], f32[8]) while(%tuple.2), {names}, metadata={{}}"


# ---- What a device sends -------------------------------------------------------------------------

GROUPS = [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
    ("replica_groups={{0,1,2,3,4,5,6,7}}", 8),
    ("replica_groups=[4,2]<=[8]", 2),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
    ("replica_groups=mesh['axis_0'=8] {'axis_0'}", 8),
    ("replica_groups=mesh['axis_0'=1,'axis_1'=8,'axis_2'=1] {'axis_1'}", 8),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}", 4),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", 4),
    (
        "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) "
        "{'axis_0'}",
        4,
    ),
]


@pytest.mark.parametrize("groups, size", GROUPS)
def test_the_size_of_a_group_is_read_from_every_notation(groups: str, size: int) -> None:
    sent = {2: 400, 4: 600, 8: 700}[size]  # of 400 bytes a device sends 2 (n - 1) / n
    assert collective_of(all_reduce(groups)) == ("all-reduce", "f32[100]", sent, ())


EIGHT = "channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}"
SENT = {
    # the result is the complete array, of which 7/8 come from other devices
    f"%all_gather.27 = bf16[2048,16]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%x), {EIGHT}": (
        "all-gather bf16[2048,16]",
        57344,
    ),
    # the second element of the tuple of a start is the result
    f"%ag = (bf16[256,16]{{1,0:T(8,128)}}, bf16[2048,16]{{1,0}}) all-gather-start(%x), {EIGHT}": (
        "all-gather bf16[2048,16]",
        57344,
    ),
    f"%all-reduce.40 = (bf16[2048]{{0}}, bf16[256]{{0}}, f32[]) all-reduce(%x, %y, %z), {EIGHT}": (
        "all-reduce bf16[2048] bf16[256] f32[]",
        8071,  # 4612 bytes * 7/4
    ),
    f"%ar = (f32[96]{{0}}, f32[32]{{0}}) all-reduce-start(%x, %y), {EIGHT}": (
        "all-reduce f32[96] f32[32]",
        896,
    ),
    # the result is an eighth of the array
    f"%rs = f32[128,256]{{1,0:T(8,128)S(1)}} reduce-scatter(%x), {EIGHT}, to_apply=%add.1": (
        "reduce-scatter f32[128,256]",
        917504,
    ),
    f"%rs = (f32[1024,256]{{1,0}}, f32[128,256]{{1,0}}) reduce-scatter-start(%x), {EIGHT}": (
        "reduce-scatter f32[128,256]",
        917504,
    ),
    f"%all-to-all.2 = bf16[1,4,16,1,64]{{4,2,3,0,1}} all-to-all(%x), {EIGHT}, dimensions={{1}}": (
        "all-to-all bf16[1,4,16,1,64]",
        7168,
    ),
    # a permutation sends the complete array
    "%cp = (bf16[256,16]{0,1}, bf16[256,16]{0,1}, u32[]{:S(2)}, u32[]{:S(2)}) "
    "collective-permute-start(%x), channel_id=62, source_target_pairs={{0,1},{1,2},{2,0}}": (
        "collective-permute bf16[256,16]",
        8192,
    ),
    f"%ag.1 = pred[80]{{0}} all-gather(%x), {EIGHT}": ("all-gather pred[80]", 70),
    f"%ag.2 = s4[80]{{0}} all-gather(%x), {EIGHT}": ("all-gather s4[80]", 35),
    f"%ag.3 = f8e4m3fn[80]{{0}} all-gather(%x), {EIGHT}": ("all-gather f8e4m3fn[80]", 70),
}


@pytest.mark.parametrize("line", SENT)
def test_a_device_sends_the_bytes_of_a_ring(line: str) -> None:
    found, (expected, sent) = collective_of(line), SENT[line]
    assert (f"{found.kind} {found.shape}", found.sent_bytes) == (expected, sent)
    assert found.loops == () and found.times == 1


def test_only_instructions_count_and_in_the_order_of_the_text() -> None:
    text = program(
        f"%ag = (f32[1], f32[8]) all-gather-start(%all-reduce.9), {EIGHT}",
        '%all-gather-done.1 = f32[8]{0} all-gather-done(%ag), metadata={op_name="all-reduce(y)"}',
        "%fusion.1 = f32[8]{0} fusion(%all-gather-done.1, %all-reduce), kind=kLoop, calls=%f",
        all_reduce("replica_groups={{0,1}}"),
        "%copy-start.50 = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}) copy-start(%all-reduce.1)",
        "%cp = (s32[2], s32[2], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
        "%collective-permute-done.1 = s32[2] collective-permute-done(%cp)",
    )
    kinds = [found.kind for found in collectives(text)]
    assert kinds == ["all-gather", "all-reduce", "collective-permute"]
    assert collectives(program()) == collectives("") == []


# ---- How often it runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index, limit, step, trips",
    [
        (0, 36, 1, 36),
        (4, 36, 1, 36),  # the counter is element 4 of the tuple
        (4, 4, 2, 2),  # two iterations a trip, as in a windowed matmul
        (0, 75, 2, 38),  # the last trip has one iteration
        (3, 75, 1, 11),  # element 3 grows by 7 in each trip
    ],
)
def test_a_loop_runs_until_its_counter_reaches_the_constant(
    index: int, limit: int, step: int, trips: int
) -> None:
    layers = loop("layers", compare(index, limit), step, all_reduce("replica_groups=[4,2]<=[8]"))
    (found,) = collectives(program(call("layers"), before=layers))
    assert found == ("all-reduce", "f32[100]", 400, (trips,))
    assert found.times == trips


def test_the_counts_of_nested_loops_multiply() -> None:
    reduce = all_reduce("replica_groups=[4,2]<=[8]")
    inner = loop("inner", compare(4, 8), 2, reduce)
    outer = loop("outer", compare(0, 36), 1, call("inner"), reduce)
    for before in (inner + outer, outer + inner):
        found = collectives(program(call("outer"), reduce, before=before))
        times = {collective.loops: collective.times for collective in found}
        assert times == {(36, 4): 144, (36,): 36, (): 1} and len(found) == 3


def test_a_loop_that_may_stop_early_has_the_count_none_and_multiplies_by_one() -> None:
    reduce = all_reduce("replica_groups=[4,2]<=[8]")
    layers = loop("layers", compare(0, 28), 1, reduce)
    tokens = loop("tokens", STOPS_EARLY, 1, call("layers"), reduce)
    found = collectives(program(call("tokens"), before=layers + tokens))
    assert [(collective.loops, collective.times) for collective in found] == [
        ((None, 28), 28),
        ((None,), 1),
    ]


def test_a_loop_whose_limit_is_not_a_constant_has_the_count_none() -> None:
    condition = """%get-tuple-element.7 = s32[] get-tuple-element(%wide.param.1), index=0
  %get-tuple-element.8 = s32[] get-tuple-element(%wide.param.1), index=3
  ROOT %lt.1 = pred[] compare(%get-tuple-element.7, %get-tuple-element.8), direction=LT"""
    reduce = all_reduce("replica_groups=[4,2]<=[8]")
    (found,) = collectives(program(call("x"), before=loop("x", condition, 1, reduce)))
    assert found.loops == (None,)


def test_a_fused_reduce_scatter_counts_as_such_in_the_loop_of_its_fusion() -> None:
    reduce = all_reduce("replica_groups={{0,1,2,3,4,5,6,7}}", "(bf16[64,32]{1,0}, bf16[64]{0})")
    fused = f"""%all-reduce-scatter.7.clone.1 (input.2: bf16[64,32]) -> (bf16[8,32], bf16[8]) {{
  %input.2 = bf16[64,32]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  {reduce}
  ROOT %dynamic-slice.6 = bf16[8,32]{{1,0}} dynamic-slice(%all-reduce.1, %m, %c)
}}

"""
    fusion = "%fusion.9 = (bf16[8,32]{1,0}, bf16[8]{0}) fusion(%x), kind=kCustom, "
    fusion += "calls=%all-reduce-scatter.7.clone.1, metadata={}"
    layers = loop("layers", compare(0, 36), 1, fusion)
    (found,) = collectives(program(call("layers"), before=fused + layers))
    # 7/8 of the 4096 + 128 bytes go to other devices; an all-reduce would send them twice
    assert found == ("reduce-scatter", "bf16[64,32] bf16[64]", 3696, (36,))
