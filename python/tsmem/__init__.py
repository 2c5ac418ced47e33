"""Memory-efficient operators for training TorchScript models, and the tool that puts them in.

Importing this package loads the operators, so that torch.jit.load takes a rewritten file. After `pip install` nothing need be imported:
`import torch` does it.
"""
from ._error import Error
from ._library import library_path, load as _load

_load()

from ._session import diff, plan, profile, restore, rewrite, verify  # noqa: E402  (nothing is of use without the operators)
from ._tool import tool_path  # noqa: E402

__version__ = "0.1.0"
__all__ = ["Error", "diff", "library_path", "plan", "profile", "restore", "rewrite", "tool_path", "verify", "__version__"]
