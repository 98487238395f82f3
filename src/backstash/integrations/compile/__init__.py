"""torch.compile: saved tensors in a smaller form inside a compiled graph.

A graph that AOTAutograd has traced is split into a forward and a backward graph by a partitioner. Ours lets torch split
it (``partitioner.py``), lists what the forward graph saves (``values.py``), finds what the backward graph reads of each
value (``reading.py``, ``effect.py``, ``ranges.py``), asks the policy (``choose.py``) and puts the encoding into the one
graph and the decoding into the other (``rewrite.py``), as calls of aten operators (``graph_codecs.py``,
``graph_rounding.py``, ``graph_bounded.py``, ``graph_offload.py``, ``layout.py``, ``emit.py``), or, where that would be
many, as calls of our kernels (``graph_kernels.py``, ``images.py``). ``substitutes.py`` finds
what is saved in the place of values that cannot be rounded. Error bounds come from outside of the graph
(``bounding.py``, ``bounds.py``, ``layers.py``), and ``announce.py`` tells a Session around what the graph saves. Under
a budget, ``budget.py`` chooses what the forward graph saves: ``joint.py`` reads the joint graph, ``lifetimes.py`` knows
its memory, ``search.py`` searches, and ``saved_inputs.py`` saves inputs where a compiler would save copies of them.
``sums.py`` lets sums of products be computed in the memory of a summand, and ``image_gradients.py`` computes a
convolution's gradients one after the other. ``account.py`` has the report, ``options.py`` what users call.
"""

from backstash.integrations.compile.options import (
    CompileBackend,
    CompileOptions,
    Patched,
    compile_backend,
    compile_options,
    patch_compile,
)

__all__ = ["CompileBackend", "CompileOptions", "Patched", "compile_backend", "compile_options", "patch_compile"]
