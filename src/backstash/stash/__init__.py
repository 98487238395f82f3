"""What is saved and what became of it: values, their contents and recipes, how they are remade and decoded."""
