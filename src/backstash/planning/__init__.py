"""One training step measured, what each choice would take of it, the best choices, and a program kept to them."""
