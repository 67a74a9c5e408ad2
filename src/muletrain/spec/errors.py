"""The errors a user can meet, each with the exit code that says whose turn it is.

0 done; 2 the user's input; 3 does not fit; 4 a worker failed; 75 stopped by a signal after saving.
A message names the key or file:line at fault and the fix. Anything else that escapes is a bug of ours and shows a traceback.
"""

from __future__ import annotations

EXIT_DONE, EXIT_INPUT, EXIT_DOES_NOT_FIT, EXIT_WORKER_FAILED, EXIT_STOPPED = 0, 2, 3, 4, 75


class MuleError(Exception):
    """Base of all errors shown to a user without a traceback."""

    exit_code = EXIT_INPUT


class InputError(MuleError):
    """The recipe, the command line or the data is wrong. `problems` are all found at once."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DoesNotFitError(MuleError):
    """The run needs more memory than there is; the message says how much more and what would fit."""

    exit_code = EXIT_DOES_NOT_FIT


class WorkerFailedError(MuleError):
    """A worker process died or raised; the message says which one and why, once."""

    exit_code = EXIT_WORKER_FAILED


class StoppedError(MuleError):
    """A signal stopped the run after a complete checkpoint was saved; the same command continues it."""

    exit_code = EXIT_STOPPED
