"""The version of the package, on its own so that every part of the package can name it."""

__version__ = "0.1.0"
