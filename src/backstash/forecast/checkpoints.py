"""Copies and checkpoints of a program whose tensors have no numbers.

Copies of tensors are made without a look at their memory. Checkpoints are not written, but what was saved is loaded.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def without_files() -> Iterator[None]:
    """Inside, ``copy.deepcopy`` copies tensors that have no numbers, and what is saved is kept in place of a file."""
    saved: dict[Any, Any] = {}  # by path, or by the open file
    load = torch.load

    def key_of(where: Any) -> Any:
        return os.fspath(where) if isinstance(where, os.PathLike) else where

    def keep(what: Any, where: Any, *args: Any, **kwargs: Any) -> None:
        saved[key_of(where)] = what

    def kept(where: Any, *args: Any, **kwargs: Any) -> Any:
        return saved[key_of(where)] if key_of(where) in saved else load(where, *args, **kwargs)

    with (
        mock.patch.object(Tensor, "__deepcopy__", _copied),
        mock.patch.object(torch, "save", keep),
        mock.patch.object(torch, "load", kept),
    ):
        yield


_deepcopy = Tensor.__deepcopy__


def _copied(x: Tensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a tensor."""
    if not x.is_leaf or type(x).__deepcopy__ is not _copied:
        return _deepcopy(x, memo)  # which raises what torch raises
    if id(x) not in memo:
        own = x.detach().clone().requires_grad_(x.requires_grad)
        memo[id(x)] = own
        own.grad = copy.deepcopy(x.grad, memo)
        given = {name: each for name, each in vars(x).items() if name not in vars(own)}  # others are the fake tensor's
        vars(own).update(copy.deepcopy(given, memo))
    return memo[id(x)]
