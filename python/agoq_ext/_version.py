"""The version number, written once."""

__version__ = "0.1.0"
