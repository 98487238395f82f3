"""The cache of what was proven on first use: what belongs to a question, how many answers are kept, what is counted."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_settings import matmul_precision, setting

from backstash.proofs import Counts, Proofs


class Proof:
    """A proof with a fixed answer that counts its runs."""

    def __init__(self, answer: bool = True) -> None:
        self.answer, self.runs = answer, 0

    def __call__(self) -> bool:
        self.runs += 1
        return self.answer


def attribute(holder: Any, name: str, value: Any) -> Any:
    return setting(lambda: getattr(holder, name), lambda new: setattr(holder, name, new), value)


SETTINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "threads": ("cpu", lambda: setting(torch.get_num_threads, torch.set_num_threads, 2)),
    "deterministic algorithms": (
        "cpu",
        lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "float32 matmul precision": ("cpu", lambda: matmul_precision("medium")),
    "mkldnn": ("cpu", lambda: setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False)),
    "deterministic mkldnn": (
        "cpu",
        lambda: setting(torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic, True),
    ),
    "mkldnn's matmul": ("cpu", lambda: attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16")),
    "cuda's matmul": ("cuda", lambda: attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32")),
    "cudnn's tf32": ("cuda", lambda: attribute(torch.backends.cudnn.conv, "fp32_precision", "ieee")),
    "deterministic cudnn": ("cuda", lambda: torch.backends.cudnn.flags(deterministic=True)),
    "cudnn's benchmark": ("cuda", lambda: torch.backends.cudnn.flags(benchmark=True)),
    "reduced precision": (
        "cuda",
        lambda: attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_another_question(name: str) -> None:
    device_type, changed = SETTINGS[name]
    proofs, proof = Proofs(), Proof()
    assert proofs.ask("op", (), proof, device_type=device_type)
    with changed():
        proofs.ask("op", (), proof, device_type=device_type)
        assert proof.runs == 2
    proofs.ask("op", (), proof, device_type=device_type)
    assert proof.runs == 2


def test_another_operation_argument_or_device_is_another_question() -> None:
    proofs, proof = Proofs(), Proof()
    for _ in range(2):
        proofs.ask("op", ((2, 3), torch.float32), proof)
        proofs.ask("op", ((2, 3), torch.float64), proof)
        proofs.ask("other", ((2, 3), torch.float32), proof)
        proofs.ask("op", ((2, 3), torch.float32), proof, device_type="cuda")
    assert proof.runs == 4


def test_a_false_answer_is_remembered_as_well() -> None:
    proofs, proof = Proofs(), Proof(False)
    assert [proofs.ask("op", (), proof, repeat_every=1) for _ in range(3)] == [False] * 3
    assert proof.runs == 1


def test_the_answer_that_was_used_longest_ago_is_forgotten() -> None:
    proofs, proof = Proofs(capacity=2), Proof()
    for number in (0, 1, 0, 2):  # 1 is forgotten
        proofs.ask("op", (number,), proof)
    assert (len(proofs), proof.runs) == (2, 3)
    proofs.ask("op", (0,), proof)
    assert proof.runs == 3
    proofs.ask("op", (1,), proof)
    assert proof.runs == 4


def test_a_proof_is_repeated_at_every_so_many_uses_and_may_change_its_mind() -> None:
    proofs, proof, counts = Proofs(), Proof(), Counts()
    for _ in range(40):
        assert proofs.ask("op", (), proof, repeat_every=10, counts=counts)
    assert (counts.proven, counts.repeated) == (1, 4) or (counts.proven, counts.repeated) == (1, 3)
    proof.answer = False
    answers = [proofs.ask("op", (), proof, repeat_every=10) for _ in range(20)]
    assert answers == sorted(answers, reverse=True)
    assert not answers[-1]
    assert (proofs.counts.proven, proofs.counts.repeated) == (1, counts.repeated + 1)


def test_different_questions_are_repeated_at_different_uses() -> None:
    proofs = Proofs()
    repeated = []
    for number in range(20):
        proof = Proof()
        for use in range(1, 11):
            before = proof.runs
            proofs.ask("op", (number,), proof, repeat_every=10)
            if use > 1 and proof.runs > before:
                repeated.append(use)
    assert len(set(repeated)) > 3


def test_forgetting_proves_again() -> None:
    proofs, proof = Proofs(), Proof()
    proofs.ask("op", (), proof)
    proofs.forget()
    proofs.ask("op", (), proof)
    assert (len(proofs), proof.runs) == (1, 2)


def test_a_proof_may_ask_and_other_threads_may_too() -> None:
    """A proof runs without the lock, also one that asks something else itself."""
    proofs = Proofs()
    assert proofs.ask("outer", (), lambda: proofs.ask("inner", (), lambda: True))

    def work(worker: int) -> None:
        for number in range(200):
            assert proofs.ask("op", (number % 50, worker % 2), lambda number=number: number % 50 != 7) is (
                number % 50 != 7
            )

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(proofs) == 102


def test_an_error_in_a_proof_leaves_no_answer() -> None:
    proofs = Proofs()

    def fail() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        proofs.ask("op", (), fail)
    assert len(proofs) == 0
    assert proofs.ask("op", (), lambda: True)


def test_answers_travel_to_a_process_of_the_same_environment() -> None:
    one, other, proof = Proofs(), Proofs(), Proof()
    assert one.ask("call", (torch.relu, (2, 3)), proof)
    assert not one.ask("call", (torch.tanh, (2, 3)), Proof(False))
    assert one.ask("recipe", ("a",), lambda: "fused") == "fused"
    other.believe(one.travelling())
    never = Proof()
    assert other.ask("call", (torch.relu, (2, 3)), never)
    assert not other.ask("call", (torch.tanh, (2, 3)), never)
    assert other.ask("recipe", ("a",), lambda: "plain") == "fused"
    assert (never.runs, other.counts.proven) == (0, 0)
    assert other.travelling() == one.travelling()
    assert other.ask("call", (torch.relu, (2, 3)), never, again=True)
    assert never.runs == 1
    other.forget()
    assert other.travelling() == {}


def test_what_another_process_cannot_name_does_not_travel() -> None:
    proofs = Proofs()
    proofs.ask("recipe", (object(),), lambda: "fused")
    proofs.ask("op", (), Proof())
    assert proofs.travelling() == {}


def test_no_more_answers_are_believed_than_are_kept() -> None:
    proofs = Proofs(capacity=2)
    proofs.believe({"True": ["a", "b", "c"]})
    assert proofs.travelling() == {"True": ["b", "c"]}


@pytest.mark.slow
def test_questions_have_the_same_names_in_another_process() -> None:
    program = (
        "import torch, torch.nn.functional as F\n"
        "from backstash.proofs import Proofs, environment\n"
        "from backstash.saved import TensorSpec\n"
        "torch.set_num_threads(1)\n"
        "proofs, spec = Proofs(), TensorSpec.of(torch.empty(2, 3))\n"
        "for function in (F.relu, torch.conv2d, torch.Tensor.add, torch.nn.functional.gelu):\n"
        "    proofs.ask('call', (function, repr((function, {'a': 1})), (spec,)), lambda: True)\n"
        "print(environment(), proofs.travelling())"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr
    assert runs[0].stdout.count("', '") == 3
