"""The version of this package, which its wheel takes from here."""

__version__ = "0.1.0"
