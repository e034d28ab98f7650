"""The error that the `agoq` command reports in one line instead of a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave cannot work: a file, an option, a checkpoint.

    The message is one sentence that names what was given and what is wrong with it. The command line prints
    it and exits with status 2. Library functions raise ValueError or TypeError instead.
    """
