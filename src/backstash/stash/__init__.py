"""Everything between pack and unpack: values, their contents and recipes, how they are encoded, remade and decoded."""
