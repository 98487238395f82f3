"""The backward pass: kernels that read the stash themselves, and when they may write over a gradient.

:mod:`table` says which saved tensors are unpacked as claims, :mod:`claims` what a claim is and how its kernel is found,
:mod:`exclusive` when a gradient may be overwritten, and :mod:`install` gets both ready before the first Session.

The kernels are in :mod:`convolution`, :mod:`linear`, :mod:`pointwise`, :mod:`factors`, :mod:`pooling` and :mod:`norms`.
:mod:`accumulation` adds a large weight's gradient to ``.grad`` in slices.
"""
