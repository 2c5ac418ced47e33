"""What `import torch` calls through the entry point group `torch.backends`: loads tsmem's op library.

Nothing is imported up here: torch is still being imported when this module is, and whatever it raised would make that fail.
"""


def load() -> None:
    """Loads the op library; a failure ends in a warning, and never in an exception. TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it."""
    try:
        import tsmem  # noqa: F401  (its import loads the library)
    except Exception as error:
        text = f"tsmem: its operators are not loaded: {error}"
        try:
            import warnings

            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except Exception:  # warnings can be turned into errors
            import sys

            if sys.stderr is not None:
                print(text, file=sys.stderr)
