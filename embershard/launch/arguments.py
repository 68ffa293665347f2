"""Arguments that several commands have in common."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

from embershard.errors import ConfigError, did_you_mean, near_file
from embershard.settings.decoding import toml

NEWEST = -1  # --resume without a step
#: Set where argcomplete asks for completions.
ASKS = "_ARGCOMPLETE"
#: How this process and those that it starts were called, for what they tell a user to call next.
_PROGRAM = "EMBERSHARD_PROGRAM"


def note_program() -> None:
    """Note how this process was called: `embershard`, by its path, or as `python -m embershard`."""
    name = Path(sys.argv[0]).name
    called = _shown(name, sys.argv[0]) if name == "embershard" else f"{_shown('python', sys.executable)} -m embershard"
    os.environ.setdefault(_PROGRAM, called)


def _shown(name: str, path: str) -> str:
    """Return the name of a program where a shell finds it in this path's folder, else the path."""
    found = shutil.which(name)
    if found is not None and os.path.realpath(Path(found).parent) == os.path.realpath(Path(path).parent):
        return name
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)


def program() -> str:
    """Return how this process was called, as noted; in a program that calls embershard's functions, "embershard"."""
    return os.environ.get(_PROGRAM, "embershard")


def as_called(text: str) -> str:
    """Return a text with its commands of embershard as they are to be called here; those that are so already stay.

    >>> as_called("Try: embershard doctor")
    'Try: embershard doctor'
    >>> as_called("Try: python -m embershard doctor")
    'Try: python -m embershard doctor'
    """
    return re.sub(r"(?<!-m )(?<![\w./-])embershard (?=[a-zA-Z]|--)", lambda _: f"{program()} ", text)


#: Options, and what others call them.
_SAME = (
    ("--label", "", "target", "y", "label-column", "label_column", "target-column"),
    ("--drop", "", "ignore", "exclude", "skip", "drop-columns", "ignore-columns"),
    ("--nproc", "", "gpus", "gpu", "num-gpus", "ranks", "nproc_per_node", "world-size"),
    ("-o", "--run-dir", "output", "out", "o", "save", "output-dir", "output_dir", "model-dir", "save-dir", "outdir"),
    ("--data", "--config", "input", "file", "f", "train-data", "test-data", "samples"),
    ("--dry-run", "", "check", "dryrun", "print-settings"),
    ("--resume", "", "continue", "restart", "checkpoint"),
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors say what was meant, perhaps. Where argcomplete asks, it prints what the word at the cursor
    may become, and ends the process."""

    _answers = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse, or answer argcomplete. An unknown option is an error here: the outer parser knows no better."""
        self._answer()
        found, left = super().parse_known_args(args, namespace)
        words = list(itertools.takewhile(lambda word: word != "--", left))
        first = next((place for place, word in enumerate(words) if word.startswith("-")), None)
        if first is not None:
            self.error(f"unrecognized arguments: {' '.join(words[first:])}{self._meant(*words[first : first + 2])}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Show the message, with the choice that comes close to a wrong one, and end the process with code 2."""
        if (found := re.match(r"unrecognized arguments: (.*)", message)) and "Did you mean" not in message:
            words = found[1].split()
            settings = [word for word in words if _is_setting(word)]
            if settings and "--set" in self._option_string_actions:
                message += f". Did you mean {' '.join(f'--set {word}' for word in settings)}?"
            elif words and Path(words[0]).exists():
                is_scored = "--data" in self._option_string_actions
                message += f". Did you mean --data {words[0]}?" if is_scored else "; of several files, give the folder"
        if choice := re.search(r"invalid choice: '(.+)' \(choose from (.+)\)", message):
            known = re.findall(r"[\w-]+", choice[2])
            message += did_you_mean(choice[1], known)
            if "inspect" in known and Path(choice[1]).exists():
                message += f". Did you mean {self.prog} inspect {choice[1]}?"
        super().error(message)

    def format_help(self) -> str:
        """Return the help, its texts wrapped for the terminal."""
        width = shutil.get_terminal_size().columns - 2  # as argparse has it
        self.description, self.epilog = (_wrapped(text or "", width) for text in (self.description, self.epilog))
        return super().format_help()

    def _meant(self, option: str, value: str = "") -> str:
        """Return a question about an option that is not known: is a setting, or another option meant?"""
        option, equals, given = option.partition("=")
        value = given if equals else value if value and not value.startswith("-") else "VALUE"
        options = {*self._option_string_actions} - {"--help", "-h"}  # those that the help leaves out, too
        bare = option.lstrip("-")
        same = [name for names in _SAME if bare in names for name in names[:2] if name in options]
        same += [f"--{bare}"] if f"--{bare}" in options else []  # one dash was missing
        if same:
            return f". Did you mean {same[0]}{'' if value == 'VALUE' else f' {value}'}?"
        near = did_you_mean(f"--{bare}", sorted(options), least=0.8)
        if "--set" not in options or len(bare) < 2:
            return near
        from embershard.settings.files import describe, find_settings
        from embershard.training.config import RunConfig

        name = option.lstrip("-").replace("-", "_")
        keys = [setting.key for setting in find_settings(describe(RunConfig()), name)]
        if "_" not in name:  # the meaning of one word is told by chance
            keys = [key for key in keys if name in key]
        found = [key for key in keys if key.endswith(f".{name}")] or ([] if near else keys)
        if not found:
            return near
        return f". Did you mean {' or '.join(f'--set {key}={value}' for key in found[:3])}?"

    def parse_known_intermixed_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse, or answer argcomplete."""
        self._answer()
        return super().parse_known_intermixed_args(args, namespace)

    def _answer(self) -> None:
        if ASKS in os.environ and not Parser._answers:
            import argcomplete

            Parser._answers = True  # argcomplete parses, too
            # The words of the line that this parser does not see: the program's is one, however it was called.
            os.environ[ASKS] = str(1 + len(self.prog.removeprefix(program()).split()))
            argcomplete.autocomplete(self)


def _is_setting(word: str) -> bool:
    """Return whether a word has the form of a setting with its value: `train.epochs=3`.

    >>> _is_setting("train.epochs=3"), _is_setting("runs/a.b=3"), _is_setting("epochs=3")
    (True, False, False)
    """
    return re.match(r"[a-z]\w*(\.\w+)+=", word) is not None


def make_parser(command: str, text: str, usage: str | None = None) -> Parser:
    """Return the parser of `embershard COMMAND`.

    Args:
        command: "" for that of all commands.
        text: of its help, as for `help_parts`.
        usage: what follows the command in the line of usage; None: all arguments.
    """
    called = f"{program()} {command}".rstrip()
    return Parser(prog=called, usage=usage and f"{called} {usage}", **help_parts(text))


def _wrap(text: str, width: int, first: str = "", other: str = "") -> list[str]:
    """Return a text in lines of at most `width`, indented by these; a path or an option stays whole."""
    whole = textwrap.TextWrapper(width, first, other, break_long_words=False, break_on_hyphens=False)
    return whole.wrap(text)


def _wrapped(text: str, width: int) -> str:
    """Return a text with lines of at most `width`: paragraphs, and commands, which are indented and can be copied."""
    lines: list[str] = []
    for is_command, found in itertools.groupby(text.splitlines(), lambda line: line.startswith("  ")):
        if is_command:
            lines += [part for each in found for part in _wrapped_command(each, width)]
        else:
            lines += [part for each in "\n".join(found).split("\n\n") for part in ("", *_wrap(each, width))]
    return "\n".join(lines).strip("\n")


def _wrapped_command(line: str, width: int) -> list[str]:
    """Return a command in as many lines as it needs; its comment then stands above it."""
    if len(line) <= width:
        return [line]
    command, mark, comment = line.partition("    #")
    above = _wrap(f"#{comment}", width, "  ", "  # ") if mark else []
    tied = re.sub(r"( --?[a-z][\w-]*) (?=[^-\s])", r"\1\0", command.strip())  # a value stays beside its option
    return [*above, " \\\n".join(_wrap(tied, width - 2, "  ", "      ")).replace("\0", " ")]


def help_parts(text: str) -> dict[str, Any]:
    """Return arguments for a parser whose help shows a text: from its first indented line on, which begins the
    examples, below the options.

    >>> help_parts("Count.\\n\\n  embershard count\\n")["epilog"]
    '  embershard count\\n'
    """
    lines = text.splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if line.startswith("  ")), len(lines))
    parts = {"description": "".join(lines[:end]), "epilog": "".join(lines[end:])}
    called = {name: as_called(part) for name, part in parts.items()}
    return {**called, "formatter_class": argparse.RawDescriptionHelpFormatter}


def add_action(actions: Any, name: str, text: str, page: str, **defaults: Any) -> argparse.ArgumentParser:
    """Add an action to a command's `add_subparsers`; return its parser.

    Args:
        text: of the command's help.
        page: of the action's own, as for `help_parts`.
        defaults: more attributes of the parsed arguments.
    """
    action: argparse.ArgumentParser = actions.add_parser(name, help=text, **help_parts(page))
    action.set_defaults(**defaults)
    return action


class _OneConfig(argparse.Action):
    """Stores the settings' file, and refuses a second one."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        before = getattr(namespace, self.dest, None)
        if before is not None and values is not None:
            hint = "" if Path(values).suffix else f". Is {values} the value of an option? Settings are given by --set"
            parser.error(f"got two files of settings, {before} and {values}; give one{hint}")
        setattr(namespace, self.dest, values or before)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and `--set KEY=VALUE`; the overrides become the list `overrides`."""
    text = "the run's settings: TOML file or example (quickstart)"
    option = parser.add_argument("--config", type=config_file, action=_OneConfig, metavar="FILE", help=text)
    option.completer = _config_names  # type: ignore[attr-defined]
    add_overrides(parser, "override a setting: train.batch_size=512; repeatable")


def add_config_word(parser: argparse.ArgumentParser) -> None:
    """Let `--config` be left out: `embershard train run.toml`. Parse with `parse_intermixed_args`."""
    text = "the same as --config CONFIG"
    word = parser.add_argument("config", nargs="?", type=config_file, action=_OneConfig, metavar="CONFIG", help=text)
    word.completer = _config_names  # type: ignore[attr-defined]


def _config_names(**_: object) -> list[str]:
    return [*map(str, Path().glob("*.toml")), *examples()]


def _setting_names(**_: object) -> list[str]:
    from embershard.settings.files import describe
    from embershard.training.config import RunConfig

    return [f"{setting.key}=" for setting in describe(RunConfig())]


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--set KEY=VALUE` with this help; the overrides become the list `overrides`."""
    option = parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)
    option.completer = _setting_names  # type: ignore[attr-defined]


def set_words(overrides: Iterable[str]) -> list[str]:
    """Return the words of a command that have these overrides.

    >>> set_words(["train.epochs=2", "data.seed=4"])
    ['--set', 'train.epochs=2', '--set', 'data.seed=4']
    """
    return [word for override in overrides for word in ("--set", override)]


def trust_words(trust_code: bool) -> list[str]:
    """Return the words of a command that trusts the code in a run's folder, or does not."""
    return ["--trust-code"] if trust_code else []


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add `--plan FILE`, which becomes one of the `overrides`."""
    parser.add_argument(
        "--plan",
        dest="overrides",
        action="append",
        type=partial(text_override, "sharding.plan"),
        default=[],
        metavar="FILE",
        help="obey a plan of embershard plan (sharding.plan)",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-code`."""
    text = "import the module of model.build even from inside of a run's folder, which others may have written"
    parser.add_argument("--trust-code", action="store_true", help=text)


def program_words(name: str, module: str) -> str:
    """Return what starts a program here: its name, or this Python with its module where the name is not found."""
    return name if shutil.which(name) else f"{_shown('python', sys.executable)} -m {module}"


def text_override(key: str, text: str) -> str:
    """Return the override that sets `key` to a text, whatever characters it has.

    >>> print(text_override("data.path", "/a b"))
    data.path="/a b"
    """
    return f"{key}={toml(text)}"


def is_whole(text: str) -> bool:
    """Return True for digits alone. Python knows those of all scripts, users see the ones they gave.

    >>> is_whole("12"), is_whole("\u0662"), is_whole("1.0")
    (True, False, False)
    """
    return text.isascii() and text.isdecimal()


def whole(text: str, least: int = 0) -> int:
    """Read a whole number, `least` or more; a type for argparse."""
    if not is_whole(text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a whole number, {least} or more")
    return int(text)


positive = partial(whole, least=1)


def step_or_last(text: str) -> int | Literal["last"]:
    """Read the step of a checkpoint, or `last`; a type for argparse."""
    if text != "last" and not is_whole(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; needed the step of a checkpoint, or last for the newest")
    return "last" if text == "last" else int(text)


def check_output(path: Path) -> None:
    """Raise `ConfigError` unless a file can be written at `path`: before hours of work, not after."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"{path} {problem}; give the name of a file in a folder that exists.")


def check_new_folder(path: Path) -> None:
    """Raise `ConfigError` unless a folder can be made at `path`, and there is none yet."""
    if path.exists() or not path.absolute().parent.is_dir():
        problem = "exists" if path.exists() else "is in a folder that does not exist"
        raise ConfigError(f"{path} {problem}; give the name of a new folder in a folder that exists.")


def check_new_output(path: Path) -> None:
    """Raise `ConfigError` unless a file can be written at `path`, and there is none yet."""
    check_output(path)
    if path.exists():
        raise ConfigError(f"{path} exists and is not overwritten; give another file, or remove it.")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a training that `embershard train` also takes under torchrun."""
    add_settings(parser)
    add_plan(parser)
    add_trust(parser)
    text = "folder for the run's files (default: runs/NAME-TIME)"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=text)
    text = "trace steps A to B of each rank, for Perfetto"
    parser.add_argument("--profile-steps", type=_steps, metavar="A:B", help=text)
    text = "continue from the newest valid checkpoint in --run-dir, or from that of STEP"
    parser.add_argument("--resume", nargs="?", type=_step, const=NEWEST, metavar="STEP", help=text)
    text = "with --resume: also a checkpoint without a manifest"
    parser.add_argument("--unverified", action="store_true", help=text)
    text = "with --resume: go on though this setting is another one than in the checkpoint; may be repeated"
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=text)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (is_whole(first) and is_whole(last) and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"got {text!r}; needed the first and the last step, for instance 20:25")
    return int(first), int(last)


def check_resume(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` where an argument of the resume has no effect."""
    if arguments.resume is not None and arguments.run_dir is None:
        raise ConfigError("--resume needs --run-dir, the folder of the run to continue.")
    for option, value in (("--unverified", arguments.unverified), ("--allow-change", arguments.allow_change)):
        if value and arguments.resume is None:
            raise ConfigError(f"{option} has no effect without --resume.")
    if arguments.allow_change:
        from embershard.training.checkpoint.identity import check_keys  # it loads TorchRec

        check_keys(arguments.allow_change)


def _step(text: str) -> int:
    if not is_whole(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; needed the step of a checkpoint, or nothing for the newest")
    return int(text)


def refuse_starters(parser: argparse.ArgumentParser, *options: str) -> None:
    """Add the options of a command that starts ranks to the parser of one that is a rank, which refuses them."""
    for option in options:
        parser.add_argument(option, nargs="?", action=_OfStarter, help=argparse.SUPPRESS)


class _OfStarter(argparse.Action):
    """Says why a rank does not take an option of what starts ranks."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in variables)
        parser.error(
            f"{option_string}: this process is a rank already, since {given} and MASTER_ADDR are set, as torchrun and "
            f"Kubernetes' PyTorchJob do; what set them starts the ranks. Leave {option_string} out; or, to start ranks "
            f"here: unset {' '.join(variables)}"
        )


_IN_WHEEL = "share/embershard"  # as setup.cfg says


def shipped(folder: str, ending: str) -> list[Path]:
    """Return the files in "examples" or "docs" that come with embershard, in a clone or a wheel, by their ending."""
    source = Path(__file__).parents[2]
    if (source / "examples" / "quickstart.toml").is_file():
        return sorted((source / folder).glob(f"*{ending}"))
    try:
        installed = metadata.files("embershard") or []
    except metadata.PackageNotFoundError:
        return []
    ours = [each for each in installed if each.parent.as_posix().endswith(f"{_IN_WHEEL}/{folder}")]
    return sorted(Path(str(each.locate())).resolve() for each in ours if each.suffix == ending)


def examples() -> dict[str, Path]:
    """Return the TOML files of settings that come with embershard, by name.

    >>> examples()["quickstart"].name
    'quickstart.toml'
    """
    return {path.stem: path for path in shipped("examples", ".toml")}


def config_file(text: str) -> Path:
    """Return the file of settings with this name: that file, else the example that is called so; a type for argparse.

    >>> config_file("quickstart") == config_file("quickstart.toml") == examples()["quickstart"]
    True
    """
    path = Path(text)
    if _is_setting(text) and not path.exists():
        raise argparse.ArgumentTypeError(f"got {text}, which is a setting. Did you mean --set {text}?")
    if path.exists() or path.suffix not in ("", ".toml"):
        return path
    if path.stem not in examples() and not near_file(path) and (meant := did_you_mean(path.stem, examples())):
        raise argparse.ArgumentTypeError(f"got {text}: no such file, and no example is called so{meant}")
    return examples().get(path.stem, path) if len(path.parts) == 1 else path


def needed_config(arguments: argparse.Namespace) -> Path:
    """Return the file of settings that the arguments name.

    Raises:
        ConfigError: they name none.
    """
    if arguments.config is None:
        raise ConfigError(f"which settings? Give a TOML file, or the name of an example: {', '.join(examples())}.")
    path: Path = arguments.config
    check_is_settings(path)
    return path


def check_is_settings(path: Path) -> None:
    """Raise `ConfigError` where a file of data is given in place of settings."""
    if path.suffix.lower() in (".csv", ".tsv", ".parquet", ".jsonl", ".gz") and path.exists():
        file = shlex.quote(str(path))
        raise ConfigError(
            f"{path} is data, and this command takes settings. Write them, and give run.toml: embershard data inspect "
            f"{file} -o run.toml"
        )
