"""The backward pass: what its kernels read straight from the stash, and which memory they may write over.

:mod:`table` says which saved tensors are unpacked as claims, :mod:`claims` what a claim is, :mod:`exclusive` when a
gradient may be overwritten. The kernels are in :mod:`convolution`, :mod:`linear`, :mod:`pointwise`, :mod:`pooling` and
:mod:`norms`; :mod:`accumulation` adds a large weight's gradient to ``.grad`` in slices.
"""
