"""Triton kernels for CUDA tensors, with the signatures and the planes of the references, byte for byte.

A family's ``triton.py`` has its device code and, below that, the launchers. Importing it imports Triton; importing this
package does not, and the first CUDA tensor does. Under ``TRITON_INTERPRET=1`` the launchers run on CPU tensors, for
tests.

Three conventions hold in all device code. Elements are loaded as integers wherever their bits are meant: the launchers
pass integer views. Addresses are int64, so that tensors of more than 2**31 elements work. And no pointer is followed
before its index is compared with the size of its plane, whatever the planes say: a damaged stash decodes to wrong
numbers, never to an access out of bounds.

No launcher waits for the device, except ``sz_decode`` and the encoders whose results have a size that only the device
knows (``zvc_encode_within`` and its like do without). For the same reason decoding cannot raise for planes of the right
size and wrong contents, except in ``sz_decode``: the host checks the planes' sizes and nothing else.
"""

from importlib.util import find_spec


def available() -> bool:
    """Whether Triton is installed. Does not import it."""
    return find_spec("triton") is not None
