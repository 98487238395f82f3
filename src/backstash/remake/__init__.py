"""Rematerialisation: the calls that make values, and recipes by which values are made again instead of being stored."""
