"""A step measured: what it holds, what each choice would take, and the way to other memories."""
