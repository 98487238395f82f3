"""The lock of a Session: one thread at a time, which may take it again."""

from __future__ import annotations

import threading

import pytest

from backstash import interpreter


def test_one_thread_has_it_and_may_take_it_again() -> None:
    lock, inside, most, total = interpreter.Lock(), 0, 0, 0
    begin = threading.Barrier(4)

    def work() -> None:
        nonlocal inside, most, total
        begin.wait(60)
        for _ in range(500):
            with lock, lock:
                inside += 1
                most = max(most, inside)
                seen = total
                threading.Event().wait(0)  # others may run
                total = seen + 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (most, total) == (1, 2000)


def test_who_does_not_wait_is_told() -> None:
    lock, answers = interpreter.Lock(), []

    def ask() -> None:
        answers.append(lock.acquire(False))
        if answers[-1]:
            lock.release()

    def asked() -> bool:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        return bool(answers[-1])

    assert asked()
    with lock:
        assert not asked()
        assert lock.acquire(False)
        lock.release()
        assert not asked()
    assert asked()


def test_it_is_given_back_by_who_has_it() -> None:
    lock = interpreter.Lock()
    with pytest.raises(RuntimeError):
        lock.release()
    with lock:
        errors: list[Exception] = []

        def release() -> None:
            try:
                lock.release()
            except RuntimeError as error:
                errors.append(error)

        other = threading.Thread(target=release)
        other.start()
        other.join()
        assert errors
        assert lock.acquire(False)
        lock.release()


def test_an_error_gives_it_back() -> None:
    lock = interpreter.Lock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    with pytest.raises(RuntimeError):
        lock.release()
