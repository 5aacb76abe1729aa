"""Train PyTorch models on many processes while communicating less.

Importing this package is cheap and does not import torch. The usual entry point is ``import bagua.torch_api as bagua``.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
