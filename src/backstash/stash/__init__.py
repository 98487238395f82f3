"""Everything between pack and unpack: values, the state of their bytes, how they are encoded and decoded."""
