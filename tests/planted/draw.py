"""Draws faults by chance, and keeps those that a unit test of their room notices; prints the others, to be looked at.

python -m tests.planted.draw --count 50 --seed 3
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.planted.__main__ import copy_of_the_tree
from tests.planted.fault import Fault, keep, known, preload, run_tests

_COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_COMPARISONS |= {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
_ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")}
_SECONDS = 150.0  # a fault may let tests hang
_MOST_FILES = 6


def changes(tree: ast.Module) -> Iterator[tuple[int, int, int, str, str]]:
    """Yield small changes of a file: line, bytes from and to which the old text is looked for, old and new text.

    Not of messages, types and assertions: comparisons and arithmetic that are turned, `and` for `or`, calls left out,
    numbers one higher, `min` for `max`, True for False.
    """
    left_out = set(_left_out(tree))
    for node in ast.walk(tree):
        if node in left_out:
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
                yield from _between(left, right, *_COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                yield from _between(left, right, *_ARITHMETIC[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right]):
                yield from _between(left, right, *(("and", "or") if isinstance(operator, ast.And) else ("or", "and")))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node.lineno, node.col_offset, operand.col_offset, "not ", ""
            case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
                yield *_place(function), name, "max" if name == "min" else "min"
            case ast.Expr(value=ast.Call()) if node.lineno == node.end_lineno:
                yield *_place(node), ast.unparse(node), "pass"
            case ast.Constant(value=value) if type(value) is int and value in (0, 1, 2):
                yield *_place(node), str(value), str(value + 1)
            case ast.Return(value=ast.Constant(value=bool() as value) as constant):
                yield *_place(constant), str(value), str(not value)


def _left_out(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                yield from ast.walk(node)
            case ast.AnnAssign():
                yield from ast.walk(node.annotation)
            case ast.FunctionDef():
                annotations = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs)]
                for each in (*node.decorator_list, node.returns, *annotations):
                    yield from ast.walk(each) if each is not None else ()


def _between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[int, int, int, str, str]]:
    if left.end_lineno == right.lineno:
        yield right.lineno, left.end_col_offset or 0, right.col_offset, old, new


def _place(node: ast.expr | ast.stmt) -> tuple[int, int, int]:
    return node.lineno, node.col_offset, node.end_col_offset or 0


def faults_of(tree: Path, file: str) -> list[Fault]:
    """Return all that can be planted in a file."""
    text = (tree / file).read_text(encoding="utf-8")
    lines, found = text.splitlines(), []
    for line, start, stop, old, new in changes(ast.parse(text)):
        whole, at = lines[line - 1], lines[line - 1].find(old, start, max(stop, start + len(old)))
        indent = len(whole) - len(whole.lstrip())
        number = sum(each.strip() == whole.strip() for each in lines[: line - 1])
        fault = Fault(file, whole.strip(), number, at - indent, old, new)
        changed = fault.planted_in(text) if at >= 0 else None
        if changed is not None and _compiles(changed):
            found.append(fault)
    return found


def _compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def noticed_by(fault: Fault, tree: Path) -> str:
    """Return the test that fails with the fault planted; an empty string where none does. Of its file's own tests, of
    unit tests that import it, its examples, and of its folder."""
    with fault.planted(tree):
        for words in _tries(fault.file, tree):
            _, printed = run_tests(tree, [*words, "-m", "not matrix and (not extra or smoke)"], _SECONDS)
            if failed := re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", printed, re.MULTILINE):
                return failed[1]
    return ""


def _tries(file: str, tree: Path) -> Iterator[list[str]]:
    parts = Path(file).with_suffix("").parts
    folder = Path("tests", "unit", *parts[1:-1])
    own = folder / f"test_{parts[-1]}.py"
    if (tree / own).is_file():
        yield [str(own)]
    yield ["tests/unit/test_doctests.py", "-k", f"[{'.'.join(parts)}]"]
    imported = re.compile(
        rf"from {re.escape('.'.join(parts))} import|from {'.'.join(parts[:-1])} import .*\b{parts[-1]}\b"
    )
    paths = (path for path in sorted((tree / "tests" / "unit").rglob("test_*.py")) if path != tree / own)
    others = [str(path.relative_to(tree)) for path in paths if imported.search(path.read_text(encoding="utf-8"))]
    if others:
        yield others[:_MOST_FILES]
    while not (tree / folder).is_dir():
        folder = folder.parent
    if len(folder.parts) > 2:
        yield [str(folder)]


def main(argv: Sequence[str]) -> int:
    """Draw faults, half of them from each folder alike, half by the folders' sizes."""
    parser = argparse.ArgumentParser("python -m tests.planted.draw", description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    preload()
    generator = random.Random(options.seed)
    with copy_of_the_tree() as tree:
        files = [str(path.relative_to(tree)) for path in sorted((tree / "embershard").rglob("[!_]*.py"))]
        rooms: dict[str, list[str]] = {}
        for file in files:
            rooms.setdefault(Path(file).parts[1], []).append(file)
        for number in range(options.count):
            file = generator.choice(files if number % 2 else rooms[generator.choice(sorted(rooms))])
            faults = [fault for fault in faults_of(tree, file) if str(fault) not in set(map(str, known()))]
            if not faults:
                continue
            fault = generator.choice(faults)
            test = noticed_by(fault, tree)
            print(f"{'caught' if test else 'missed':<7} {fault}\n        {test}", flush=True)
            if test:
                keep([*known(), Fault(**{**vars(fault), "test": test})])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
