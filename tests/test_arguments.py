"""A Session refuses arguments that it cannot use, with an error that says what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backstash import Session, policies, stores
from backstash.papers.comet import comet
from backstash.papers.gist import gist
from backstash.stores import HostStore

STORE = HostStore()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_nbytes": "a"}, TypeError, r"asked for min_nbytes='a', but that is a number of bytes\. Pass an int"),
        ({"min_nbytes": 1.5}, TypeError, r"asked for min_nbytes=1.5, but"),
        ({"min_nbytes": -1}, ValueError, r"asked for min_nbytes=-1, but there are no fewer than 0 bytes\. Pass 0"),
        ({"model": "abc"}, TypeError, r"model='abc', but that is no nn\.Module\. Pass the module"),
        ({"stores": {"x": 3}}, TypeError, r"stores=\{'x': 3\}, but .* Pass one such as HostStore\(\)"),
        ({"stores": {"x": HostStore}}, TypeError, r"stores=\{'x': <class .* Pass one such as HostStore\(\)"),
        ({"stores": {3: HostStore()}}, TypeError, r"stores=\{3: .* a name is a str"),
        ({"stores": 3}, TypeError, r"stores=3, but that is no mapping\. Pass stores by their names"),
        (
            {"check": "a"},
            ValueError,
            r"asked for check='a', but the only check that has a name is 'full'",
        ),
        ({"check": 1.5}, TypeError, r"asked for check=1\.5, but that is a number of steps\. Pass an int, 0 or more"),
        (
            {"overwrite_gradients": 1},
            TypeError,
            r"asked for overwrite_gradients=1, but that is a switch\. Pass True",
        ),
        ({"check": True}, TypeError, r"asked for check=True, but"),
        ({"check": -1}, ValueError, r"asked for check=-1, but there are no fewer than 0 steps\. Pass 0 or more"),
        ({"check_limit": "a"}, TypeError, r"asked for check_limit='a', but that is a relative error\. Pass a number"),
        ({"check_limit": 0.0}, ValueError, r"asked for check_limit=0.0, but .* Pass a number above 0"),
        ({"check_limit": float("nan")}, ValueError, r"asked for check_limit=nan, but .* Pass a number above 0"),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Session("lossless", **arguments)


def test_usable_arguments_are_accepted() -> None:
    store = HostStore()
    session = Session("lossless", model=None, stores={"other": store}, min_nbytes=0, check=0, check_limit=1)
    assert session.stores["other"] is store


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: stores.HostStore(capacity="1GiB"),
            TypeError,
            r"HostStore was asked for capacity='1GiB', but",
        ),
        (lambda: stores.HostStore(capacity=1.5), TypeError, r"capacity=1\.5, but that is a number of bytes"),
        (lambda: stores.HostStore(capacity=True), TypeError, r"capacity=True, but that is a number of bytes"),
        (lambda: stores.HostStore(capacity=-1), ValueError, r"capacity=-1, but there are no fewer than 0 bytes"),
        (lambda: stores.DeviceStore("a"), TypeError, r"DeviceStore was asked for capacity='a'"),
        (lambda: stores.HostStore(in_flight="a"), TypeError, r"in_flight='a', but that is a number of bytes"),
        (lambda: stores.DiskStore(5), TypeError, r"directory=5, but that is no path\. Pass the folder"),
        (lambda: stores.DiskStore(None), TypeError, r"directory=None, but that is no path"),
        (lambda: stores.DiskStore(".", in_flight=1.5), TypeError, r"in_flight=1\.5, but"),
        (lambda: stores.TierStore(HostStore()), TypeError, r"stores=HostStore.*, but it takes several"),
        (
            lambda: stores.TierStore(["host"]),
            TypeError,
            r"'host' among its stores, but a store has the methods",
        ),
        (lambda: stores.TierStore([]), ValueError, r"asked for no stores"),
        (lambda: stores.TierStore([STORE, STORE]), ValueError, r"one store is named twice.*Name each once"),
        (lambda: policies.lossless(recompute="no"), TypeError, r"recompute='no', but that is a switch"),
        (lambda: policies.lossless(dense=3), TypeError, r"dense=3, but that is a switch"),
        (lambda: policies.lossless(min_saving=2), ValueError, r"min_saving=2, but that is a share"),
        (lambda: policies.lossless(min_saving="a"), TypeError, r"min_saving='a', but that is a number"),
        (lambda: policies.offload(store=5), TypeError, r"store=5, but that is a name\. Pass one such as 'host'"),
        (lambda: policies.offload(codec=5), TypeError, r"codec=5, but that is no codec"),
        (lambda: policies.offload(ahead="x"), TypeError, r"ahead='x', but that is a number of values"),
        (lambda: policies.offload(ahead=0), ValueError, r"ahead=0, but it takes 1 or more"),
        (lambda: policies.offload(dense="x"), TypeError, r"dense='x', but that is a switch"),
        (lambda: policies.offload_hidden(nbytes="1GiB"), TypeError, r"nbytes='1GiB', but that is a number of bytes"),
        (lambda: policies.offload_hidden(store=5), TypeError, r"store=5, but that is a name"),
        (lambda: policies.sliced("a"), TypeError, r"parts='a', but that is a number of parts"),
        (lambda: policies.sliced(share="a"), TypeError, r"share='a', but that is a number"),
        (lambda: policies.quantized(True), TypeError, r"bits=True, but that is a number of bits"),
        (lambda: policies.quantized(4.0), TypeError, r"bits=4\.0, but that is a number of bits"),
        (lambda: gist(fewbit=True), TypeError, r"fewbit=True, but that is a number of bits"),
        (lambda: gist(recompute=1), TypeError, r"recompute=1, but that is a switch"),
        (lambda: comet(5), TypeError, r"layers=5, but that is a name\. Pass one such as 'conv'"),
        (lambda: comet(sigma="x"), TypeError, r"sigma='x', but that is a number"),
        (lambda: comet(every=1.5), TypeError, r"every=1\.5, but that is a number of steps"),
        (lambda: comet(optimizer=5), TypeError, r"optimizer=5, but that is no optimizer"),
        (
            lambda: comet(optimizer=torch.optim.SGD),
            TypeError,
            r"optimizer=<class .*, but that is no",
        ),
    ],
)
def test_what_stores_and_policies_cannot_use_is_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
