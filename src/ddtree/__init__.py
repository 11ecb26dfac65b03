"""ddtree: lossless speculative decoding with DFlash drafters and draft trees."""

__version__ = "0.1.0"
__all__ = ["__version__"]
