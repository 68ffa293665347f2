"""The command `embershard`: finds the subcommand, reports its errors; and the small commands settings, completion."""

from __future__ import annotations

import json
import os
import select
import sys
import textwrap
from collections.abc import Callable, Sequence

from embershard import __version__
from embershard.errors import ConfigError, EmbershardError, SetupError, did_you_mean, naming_file, os_problem, printable
from embershard.launch.arguments import as_called, examples, make_parser, note_program, program, shipped
from embershard.lazy_names import named

#: Name of each command; its module, below `embershard.commands` or an extra, and, where it is not `main`, its function
#: of the words behind the name, which returns the exit code; and its help.
_COMMANDS = (
    ("train", "train.command", "train a model"),
    ("settings", "cli:settings", "list all settings of a run, with their meanings"),
    ("profile", "profile.command", "count how often every row of a data set is looked up, or show such a profile"),
    ("plan", "plan.command", "place tables and size caches, without a GPU at hand; predict memory and speed"),
    ("data", "data.command", "look at files of data, convert them, check them, or make samples of a log of events"),
    (
        "verify",
        "extras.verify.command",
        "train first steps with the cache and with stock TorchRec, and compare every bit",
    ),
    ("predict", "score:predict", "score samples with a trained model, into a Parquet file"),
    ("eval", "score:evaluate", "measure a trained model on held-out or other samples"),
    (
        "export",
        "extras.serving.command",
        "write tables, a plain torch module and the mapping of ids, to serve without embershard",
    ),
    ("publish", "extras.publications.command", "list and verify what a run publishes, or make a base of deltas"),
    ("serve", "extras.serving.server.command", "serve an exported model over HTTP: JSON in, scores out"),
    ("sweep", "sweep.command", "train many runs from one file, and gather their results in a table"),
    ("report", "report.command", "show what a run gave beside its plan, or draw runs and sweeps on a page"),
    ("compare", "extras.compare.command", "is one model better than another on the same samples, or is it chance?"),
    ("ckpt", "ckpt", "list, verify, compact, prune or compare checkpoints of a run"),
    ("doctor", "doctor.command", "check if this machine can train, and say what to do if not"),
    ("completion", "cli:completion", "print what makes Tab complete commands in bash, zsh or fish"),
)


#: Those of commands with several, for who leaves out the command.
_ACTIONS = {
    "data": ("inspect", "convert", "validate", "events", "sessions", "ids"),
    "ckpt": ("ls", "verify", "compact", "prune", "diff"),
    "publish": ("ls", "verify", "base"),
}


#: Turns that a thread of libgomp waits for the next operation before it sleeps: some tenths of a millisecond. By itself
#: it waits for 10 ms and more, on a core that others could use.
_SPINS = "10000"


#: Commands, by what others call them.
_SAME = {
    **dict.fromkeys(("fit", "run", "learn", "start", "resume"), "train"),
    **dict.fromkeys(("test", "score", "measure"), "eval"),
    **dict.fromkeys(("infer", "inference"), "predict"),
    **dict.fromkeys(("tune", "search", "hpo"), "sweep"),
    **dict.fromkeys(("config", "options", "params"), "settings"),
    "help": "--help",
    "version": "--version",
    "check": "doctor",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 wrong usage, settings or data, 130 Ctrl-C."""
    if argv is None:
        note_program()
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    words = _words() if argv is None else list(argv)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # before torch and ranks are loaded
    try:
        _check_encoding(words)
        try:
            return _command(words)(words)
        finally:
            with naming_file("standard output"):
                sys.stdout.flush()
    except EmbershardError as error:
        from embershard.launch.screen import complain  # loads rich, and --help must answer at once

        complain(str(error))
        return 2
    except OSError as error:
        is_read = not (isinstance(error, BrokenPipeError) and _is_unread())
        try:
            sys.stdout.flush()
        except OSError:  # what is left goes nowhere, or Python would complain at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_read:
            print(f"embershard: {os_problem(error)}", file=sys.stderr)
        return 2 if is_read else 0  # the reader of the output has seen enough
    except KeyboardInterrupt:
        print("embershard: stopped.", file=sys.stderr)
        return 130


def _command(words: Sequence[str]) -> Callable[[Sequence[str]], int]:
    """Return the function of these words that does the command. Its module is imported here: most commands load torch
    and TorchRec, the others answer at once."""
    place = next((place for name, place, _ in _COMMANDS if words[:1] == [name]), None)
    if place is None:
        return _no_command
    module, _, function = place.partition(":")
    room = "embershard" if module.startswith("extras.") else "embershard.commands"
    command = named(f"{room}.{module}:{function or 'main'}")
    return lambda words: int(command(words[1:]))


def _is_unread() -> bool:
    """Return whether the output is a pipe whose reader has ended."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _no_command(words: Sequence[str]) -> int:
    """Show the help or the version, or refuse what is no command, with the one that was meant, perhaps; return 2."""
    pages = [f" Its pages, from {page} on, say how." for page in shipped("docs", ".md") if page.name == "README.md"]
    what = "Train recommendation models whose embedding tables are larger than device memory."
    parser = make_parser("", f"{what}{''.join(pages)}\n\n  embershard train quickstart\n")
    parser.add_argument("--version", action="version", version=f"embershard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, _, text in _COMMANDS:
        commands.add_parser(name, help=text)
    meant = [name for name, actions in _ACTIONS.items() if words[0] in actions] if words else []
    if words and (words[0].endswith((".toml", ".csv", ".parquet")) or words[0] in examples()):
        meant = ["train"]
    if words and (same := _SAME.get(words[0])):
        parser.error(f"got {words[0]!r}, needed a command. Did you mean {program()} {same}?")
    if meant:
        questions = " or ".join(as_called(f"embershard {name} {words[0]}") for name in meant)
        parser.error(f"got {words[0]!r}, needed a command. Did you mean {questions}?")
    parser.parse_args(words)
    return 2


def _check_encoding(words: Sequence[str]) -> None:
    """Raise `ConfigError` where a word is no UTF-8: settings, reports and the libraries that read files need that."""
    for word in words:
        if printable(word) != word:
            raise ConfigError(
                f"got {printable(word)}, whose bytes are no UTF-8; needed UTF-8. Rename the file or folder, or start "
                "in it and give a path from there."
            )


def _words() -> list[str]:
    """Return the words behind the program: those of the command line, or those before the cursor where argcomplete asks
    for completions."""
    if "_ARGCOMPLETE" not in os.environ:
        return sys.argv[1:]
    before = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = before.split()
    return words[1:] if len(words) > 2 or before.endswith(" ") else []  # the command itself may be unfinished


_SETTINGS = """List the settings of a run, for its TOML file and for --set: type, default and meaning.

  embershard settings
  embershard settings cache
  embershard settings learning_rate "early stopping"
  embershard settings --json-schema > embershard.schema.json    # for editors: "#:schema ./embershard.schema.json"
"""
_COMPLETION = """Print the lines that make Tab complete embershard's commands, options, settings and files in a shell.

  eval "$(embershard completion bash)"          # in ~/.bashrc; zsh: in ~/.zshrc, behind compinit
  embershard completion fish > ~/.config/fish/completions/embershard.fish
"""


def settings(argv: Sequence[str]) -> int:
    """Run `embershard settings`; return 0.

    Raises:
        ConfigError: no setting has a name like those that were given.
    """
    from embershard.settings.files import describe, find_settings, json_schema
    from embershard.training.config import RunConfig

    found = describe(RunConfig())
    parser = make_parser("settings", _SETTINGS)
    text = "section, setting, or words of its name or meaning"
    names = parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    names.completer = lambda **_: [setting.key for setting in found]  # type: ignore[attr-defined]
    parser.add_argument("--json-schema", action="store_true", help="print the JSON Schema of the TOML file")
    arguments = parser.parse_args(argv)
    if arguments.json_schema:
        if arguments.names:
            raise ConfigError("--json-schema has all settings: give no name with it.")
        print(json.dumps(json_schema(RunConfig), indent=2))
        return 0
    shown = {} if arguments.names else dict.fromkeys(found)
    for name in arguments.names:
        shown |= dict.fromkeys(find_settings(found, name))
        if not shown:
            keys = [setting.key for setting in found]
            near = did_you_mean(name, keys, end=". embershard settings lists all.", least=0.5)
            raise ConfigError(f"no setting is called like {name!r}, or means that{near}")
    for setting in shown:
        print(f"{setting.key}    {setting.type}    (default: {setting.default})")
        print(textwrap.fill(setting.doc, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return 0


def completion(argv: Sequence[str]) -> int:
    """Run `embershard completion`, with which Tab completes by argcomplete; return 0.

    Raises:
        SetupError: argcomplete is not installed.
    """
    parser = make_parser("completion", _COMPLETION)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    arguments = parser.parse_args(argv)
    try:
        import argcomplete
    except ModuleNotFoundError as error:
        raise SetupError('completion needs argcomplete. Try: pip install "argcomplete>=3.1"') from error
    print(argcomplete.shellcode(["embershard"], shell=arguments.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
