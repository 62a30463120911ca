"""Token-level pipeline parallel training. Importing this package is cheap: no torch, no device, nothing optional."""

__version__ = "0.1.0"
