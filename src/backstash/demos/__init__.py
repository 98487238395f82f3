"""Demonstrations in the units in which people think: images, tokens, voxels, layers, time steps."""
