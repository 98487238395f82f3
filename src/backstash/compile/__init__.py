"""torch.compile: saved tensors in a smaller form inside a compiled graph.

A graph that AOTAutograd has traced is split into a forward and a backward graph by a partitioner. Ours lets torch split
it, and works in four rooms, each of which imports only those before it.

``graph/`` reads a graph and rearranges it. It lists what the forward graph saves (``values.py``), finds what the
backward graph reads of each value (``reading.py``, ``effect.py``, ``ranges.py``), knows layers (``layers.py``) and the
order of values in memory (``layout.py``), and puts calls of operators into the graph (``emit.py``). ``sums.py`` lets
sums of products be computed in the memory of a summand, ``image_gradients.py`` and ``image_calls.py`` compute a
convolution's gradients one after the other, ``convolutions.py`` has its memory formats, and ``repeated.py`` lets each
kernel compute light values for itself.

``forms/`` asks the policy (``choose.py``) and puts the encoding into the one graph and the decoding into the other
(``rewrite.py``), as calls of aten operators (``codecs.py``, ``rounding.py``, ``bounded.py``, ``offload.py``), or, where
that would be many, as calls of our kernels (``kernels.py``). ``substitutes.py`` finds what is saved in the place of
values that cannot be rounded, and ``saved_inputs.py`` saves inputs where a compiler would save copies of them. Error
bounds come from outside of the graph (``bounds.py``). ``account.py`` has the report, and ``announce.py`` tells a
Session around the graph what it saves.

``budget/`` chooses what the forward graph saves under a budget (``splitting.py``): ``joint.py`` reads the joint graph,
``lifetimes.py`` knows its memory (``native_lifetimes.py`` in C++), and ``search.py`` searches.

``inductor/`` has the partitioner (``partitioner.py``) and what users call (``options.py``).
"""

from backstash.compile.inductor.options import (
    CompileBackend,
    CompileOptions,
    Patched,
    compile_backend,
    compile_options,
    patch_compile,
)

__all__ = ["CompileBackend", "CompileOptions", "Patched", "compile_backend", "compile_options", "patch_compile"]
