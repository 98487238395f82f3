"""Programs that are not written for backstash: a training script, a loop, the frameworks, the C library's allocator.

Nothing here imports a framework before its module is imported: ``backstash.integrations.huggingface``, ``.lightning``,
``.accelerate``. ``loop`` is ``backstash.wrap``.
"""
