"""All exceptions that embershard raises on purpose.

::

    EmbershardError
    ├── ConfigError (ValueError)            a setting is wrong, missing, or has no effect
    ├── DataError (ValueError)              the input is malformed: file, row and column are named
    │   └── IdOutOfRangeError (IndexError)  an id is not a row of its table
    ├── CacheError (RuntimeError)           the cache cannot do what was asked
    │   └── CacheOverflowError              one batch needs more rows than there are slots
    ├── ShardingError (ValueError)          a plan cannot be made, or does not fit the model
    ├── StepError (RuntimeError)            a rank left a training step that the others are in
    ├── NotFiniteError (ArithmeticError)    a loss or a parameter is NaN or infinite
    ├── CheckpointError (RuntimeError)      a checkpoint is missing, or belongs to another model
    │   ├── InvalidCheckpointError          it is damaged, incomplete, or cannot be verified
    │   └── FailedSaveError                 it could not be written: a full disk, a folder that cannot be written
    └── SetupError (RuntimeError)           versions, devices or process groups do not fit together

A message names what it got, what it needed, and how to fix it.

>>> issubclass(IdOutOfRangeError, IndexError)
True
"""

from __future__ import annotations


class EmbershardError(Exception):
    """Base of all errors that embershard raises on purpose."""


class ConfigError(EmbershardError, ValueError):
    """A setting is wrong, missing, contradicts another one, or would have no effect."""


class DataError(EmbershardError, ValueError):
    """The input data are malformed."""


class IdOutOfRangeError(DataError, IndexError):
    """A sparse id is negative, or not smaller than its table's number of rows."""


class CacheError(EmbershardError, RuntimeError):
    """The cache cannot do what was asked of it."""


class CacheOverflowError(CacheError):
    """One batch needs more rows at a time than the cache has slots, and `overflow="raise"`."""


class ShardingError(EmbershardError, ValueError):
    """A sharding plan cannot be made, or does not fit the model."""


class StepError(EmbershardError, RuntimeError):
    """A rank left a training step that the other ranks are in."""


class NotFiniteError(EmbershardError, ArithmeticError):
    """A rank's loss, or a dense parameter, is NaN or infinite."""


class CheckpointError(EmbershardError, RuntimeError):
    """A checkpoint is missing, or was written by a model of another shape."""


class InvalidCheckpointError(CheckpointError):
    """A checkpoint is damaged, incomplete, or cannot be verified. An older one may be valid."""


class FailedSaveError(CheckpointError):
    """A checkpoint could not be written. Earlier ones are as they were."""


class SetupError(EmbershardError, RuntimeError):
    """Versions, devices or process groups do not fit together."""
