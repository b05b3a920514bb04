"""The errors a user can cause or meet, each with the exit code the command line ends with.

A message is one line: what was expected, what was found, and the remedy. Programming mistakes stay
`ValueError`/`AssertionError`: the command line gives them exit code 1, and with `--debug` shows any error's traceback.
"""


class DynajaxError(Exception):
    """Base of everything the command line turns into one line and an exit code."""

    exit_code = 1


class UsageError(DynajaxError, ValueError):
    """A flag or argument out of range, a prompt longer than the context."""

    exit_code = 2


class ModelError(DynajaxError, ValueError):
    """A model that is missing, misspelt, unsupported or corrupt."""

    exit_code = 3


class FitError(DynajaxError, RuntimeError):
    """The budget, the device or the host is too small for what was asked."""

    exit_code = 4


class MismatchError(DynajaxError, ValueError):
    """Predictors or statistics that belong to another model."""

    exit_code = 5


class StorageError(DynajaxError, OSError):
    """A file that cannot be read or written, a full disk, a download that failed."""

    exit_code = 6


class NumericalError(DynajaxError, ArithmeticError):
    """NaN or infinity where numbers are expected."""

    exit_code = 7


class EngineError(DynajaxError, RuntimeError):
    """The engine failed and refuses further work until it is opened again."""

    exit_code = 8
