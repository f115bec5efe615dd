"""Messages of the library go to `logging`, under `ncl_multi`; scripts show them on stderr."""

import logging
import os
import sys


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # As in all handlers: a message that cannot be shown must not stop a run.
            self.handleError(record)


def show_messages(level: int = logging.INFO) -> None:
    """Show messages of this package on stderr; of several processes only the first shows notices.

    For scripts and notebooks. A program with its own `logging` setup does not need it.
    """
    logger = logging.getLogger("ncl_multi")
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
    logger.setLevel(level if os.environ.get("RANK", "0") == "0" else logging.WARNING)
