"""The trained run of the tests of commands."""

from tests.unit.commands.conftest import trained

__all__ = ["trained"]
