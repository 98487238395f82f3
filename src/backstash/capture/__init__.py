"""How a Session learns what the program does: the observer of torch functions, module hooks, names of saved tensors."""
