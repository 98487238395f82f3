"""A fuzzer: random training programs, run with plain torch and under a Session, and compared bit for bit.

``python -m tests.fuzz --minutes 30`` runs it. The modules, in the order in which a program passes through them:

* ``kinds``: the table of everything that a statement of a program can be. Add a statement kind there, in one place.
* ``program``: a program as data, and as a few lines of text.
* ``generate``: makes a program from a seed.
* ``render``: turns a program into the Python code that is executed and printed.
* ``pieces``: classes and functions that rendered code uses, such as custom autograd Functions.
* ``execute``: runs a program both ways and says how the outcomes differ.
* ``minimise``: deletes whatever a failure does not need.

``interrupts`` interrupts trainings at random moments, which then go on: ``python -m tests.fuzz interrupts``.

``programs`` has programs that once went wrong, one in each file; tests/gradients/test_random_programs.py runs them.
"""
