"""What envs were sent with their steps, kept until it is received together with what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from aioenvs.errors import SpecMismatchError
from aioenvs.trees import owned

__all__ = ["Sent", "gathered"]

PLAIN = frozenset((torch.Tensor,))


class Sent:
    """A copy of what a caller sent.

    Attributes:
        td: The copy.
        entries: Its entries, if all of them are tensors.
        form: The shape of a row of each of these, its dtype and its device.

    Args:
        td: What it is.

    Raises:
        SpecMismatchError: If an object in it contains itself, of which TensorDicts can have no copy for `recv`.
    """

    def __init__(self, td: TensorDictBase) -> None:
        self.td: TensorDictBase
        self.entries: dict[str, torch.Tensor] = {}
        self.form: dict[str, tuple[Any, ...]] = {}
        entries = dict(td.items()) if type(td) is TensorDict and td._maybe_names() is None else {}
        if entries and PLAIN.issuperset(map(type, entries.values())):
            self.entries = {name: value.clone() for name, value in entries.items()}
            self.form = {name: (value.shape[1:], value.dtype, value.device) for name, value in entries.items()}
            self.td = TensorDict._new_unsafe(dict(self.entries), batch_size=td.batch_size, device=td.device)
        else:
            self.td = owned(td)
            try:
                self.td.copy()
            except RecursionError as error:
                raise SpecMismatchError(
                    "send: expected entries of which a TensorDict can be copied, found an object that contains itself, "
                    "or does not end soon; leave it out, or put it into an object that is no dict, list or tuple"
                ) from error


def gathered(parts: Sequence[tuple[Sent, int]]) -> TensorDictBase:
    """Some rows of what was sent, as one batch; a dense one if they are alike.

    Args:
        parts: For each row of the result in what it was sent, and in which row of that.
    """
    first = parts[0][0]
    td: TensorDictBase
    if first.form and all(sent.form == first.form and sent.td.device == first.td.device for sent, _ in parts):
        rows = [(sent.entries, slice(row, row + 1)) for sent, row in parts]
        entries = {name: torch.cat([own[name][row] for own, row in rows]) for name in first.entries}
        batch_size = torch.Size([len(parts), *first.td.batch_size[1:]])
        td = TensorDict._new_unsafe(entries, batch_size=batch_size, device=first.td.device)
    elif all(sent is first for sent, _ in parts):
        td = first.td[torch.tensor([row for _, row in parts])]
    else:
        tds = [sent.td[row] for sent, row in parts]
        if len({own.device for own in tds}) > 1:
            tds = [own.clear_device_() for own in tds]
        td = LazyStackedTensorDict.maybe_dense_stack(tds)
    return td
