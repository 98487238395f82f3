"""A step as data, what each choice takes of it, and a plan as data and as a policy."""
