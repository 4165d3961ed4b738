"""Stage 6: the kernels of one call of FlexAttention's backward, which torch.compile launches one by one.

Beside the template that computes the gradients Inductor generates kernels for what its lowering adds around it: the row
sums of dO·O before, sums over a group's heads behind. Their names carry ``flex_attention_backward`` too, yet each has a
scope of its own. Reads and joins AttentionCalls; imports neither torch nor an implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.explaining.roles import FUSED_BACKWARD
from attnscope.explaining.works import Sequence, Work
from attnscope.trace.names import FLEX, MEMORY

if TYPE_CHECKING:
    from attnscope.explaining.sites import AttentionCall


def join_helpers(calls: list[AttentionCall], sequence: Sequence) -> list[AttentionCall]:
    """The calls, in order, with each helper in the call of its template: the one it stands right behind, or else the
    next one in the same graph. A helper without a template stays a call of its own."""
    if not any(_is_helper(call) for call in calls):
        return calls
    places = {id(work): at for at, work in enumerate(sequence)}
    joined: list[AttentionCall] = []
    waiting: list[AttentionCall] = []
    for call in calls:
        if not _is_helper(call):
            if _is_template(call):
                mine = [one for one in waiting if _same_graph(one, call)]
                call.works[:0] = [work for one in mine for work in one.works]
                waiting = [one for one in waiting if one not in mine]
            joined.append(call)
            continue
        last = joined[-1] if joined and not waiting else None
        behind = last is not None and places[id(last.works[-1])] + 1 == places[id(call.works[0])]
        if last is not None and behind and _is_template(last) and _same_graph(last, call):
            last.works += call.works
        else:
            waiting.append(call)
    return joined + waiting


def _is_helper(call: AttentionCall) -> bool:
    return all(_is_flex_backward(work) and work.meaning.unit == MEMORY for work in call.works)


def _is_template(call: AttentionCall) -> bool:
    return any(_is_flex_backward(work) and work.meaning.unit != MEMORY for work in call.works)


def _is_flex_backward(work: Work) -> bool:
    return work.meaning.family == FLEX and work.role == FUSED_BACKWARD


def _same_graph(one: AttentionCall, other: AttentionCall) -> bool:
    return one.op is not None and other.op is not None and one.op.parent is other.op.parent
