"""The Session's view of the program: the observer of torch functions, module hooks, names of saved tensors."""
