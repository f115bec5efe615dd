"""Libraries that only parts of the package need."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(requirement: str) -> Iterator[None]:
    """Import optional libraries inside: if one is missing, the error says what to install.

    Example:
        >>> with needs("ncl-multi[moon]"):
        ...     import moon
        Traceback (most recent call last):
        ModuleNotFoundError: needs moon: pip install 'ncl-multi[moon]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"needs {error.name}: pip install '{requirement}'", name=error.name
        ) from error
