"""What a program does beside its steps, as far as that needs numbers, processes or files: done otherwise in a trace.

A loader loads in this process, whatever workers it asks for, and what it computes of single examples is no operation
of the step: there are as many as the batch has. Copies of tensors are made without a look at their memory. A truncated
normal distribution is drawn in a loop that ends when all numbers are inside, of which nothing here tells. Checkpoints
are not written, but what was saved is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

_FETCHERS = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)


@contextmanager
def without_data(loading: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Inside, programs do without numbers, processes and files.

    Args:
        loading: what is entered around all that a loader does for a batch.
    """
    saved: dict[str, Any] = {}
    load = torch.load

    def keep(what: Any, where: Any, *args: Any, **kwargs: Any) -> None:
        saved[str(where)] = what

    def kept(where: Any, *args: Any, **kwargs: Any) -> Any:
        return saved[str(where)] if str(where) in saved else load(where, *args, **kwargs)

    replaced = [
        (DataLoader, "_get_iterator", _iterator),
        (Tensor, "__deepcopy__", _copied),
        (nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: nn.init._no_grad_normal_(tensor, 0.0, 1.0)),
        (torch, "save", keep),
        (torch, "load", kept),
        *((each, "fetch", _inside(each.fetch, loading)) for each in _FETCHERS),
    ]
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _inside(fetch: Callable[..., Any], loading: Callable[[], AbstractContextManager[object]]) -> Callable[..., Any]:
    @wraps(fetch)
    def fetched(*args: Any) -> Any:
        with loading():
            return fetch(*args)

    return fetched


def _iterator(loader: Any) -> Any:
    """What loads batches in this process."""
    loader.num_workers, loader.timeout, loader.prefetch_factor = 0, 0, None
    return _SingleProcessDataLoaderIter(loader)


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
