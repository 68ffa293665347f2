"""`embershard completion`: Tab completes commands, options, settings and files, by argcomplete."""

from __future__ import annotations

from collections.abc import Sequence

from embershard.errors import SetupError
from embershard.launch.arguments import make_parser

_HELP = """Print the lines that make Tab complete embershard's commands, options, settings and files in a shell.

  eval "$(embershard completion bash)"          # in ~/.bashrc; zsh: in ~/.zshrc, behind compinit
  embershard completion fish > ~/.config/fish/completions/embershard.fish
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard completion`; return 0.

    Raises:
        SetupError: argcomplete is not installed.
    """
    parser = make_parser("completion", _HELP)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    arguments = parser.parse_args(argv)
    try:
        import argcomplete
    except ModuleNotFoundError as error:
        raise SetupError('completion needs argcomplete. Try: pip install "argcomplete>=3.1"') from error
    print(argcomplete.shellcode(["embershard"], shell=arguments.shell))
    return 0
