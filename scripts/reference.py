"""The reference of docs/api.md and docs/ops.md, as Markdown: signatures and docstrings. `pages.py` writes it there.

Docstrings have Google's sections. Their indented blocks are formulas.
"""

import ast
import dataclasses
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, get_overloads

WIDTH = 100  # of a signature in one line
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Examples")


def described(path: str, *members: str) -> str:
    """A function, a class or a module, named as `specker.load`, and some of its members. Raises ValueError for one that
    does not exist or has no docstring."""
    it = resolved(path)
    name = path.rsplit(".", 1)[1]
    parts = [*([] if inspect.ismodule(it) else [f"### `{name}`"]), *whole(it, name, path)]
    for member in members:
        inside = member if inspect.ismodule(it) else f"{name}.{member}"
        parts += [f"{'###' if inspect.ismodule(it) else '####'} `{inside}`"]
        parts += whole(resolved(f"{path}.{member}"), inside, f"{path}.{member}")
    return "\n\n".join(parts)


def resolved(path: str) -> Any:
    """A package's attribute comes before its file of that name, as in an import statement."""
    package, _, name = path.rpartition(".")
    try:
        found = pkgutil.resolve_name(package)
        return getattr(found, name) if hasattr(found, name) else pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"a page asks for {path!r}: {error}") from None


def whole(it: Any, name: str, path: str) -> Iterator[str]:
    """The signatures and the docstring of `it`; of a dataclass without one, its fields with their comments."""
    if isinstance(it, property):
        yield f"```py\n{name}{returned(function_of(it.fget))}\n```"
    elif inspect.isfunction(it):
        made = (signature(name, each) for each in get_overloads(it) or [it])
        yield "```py\n" + "\n".join(made) + "\n```"
    generated = dataclasses.is_dataclass(it) and (it.__doc__ or "").startswith(f"{name}(")
    if generated:
        yield "\n".join(fields(it))
    elif not (it.__doc__ or "").strip():
        if inspect.isclass(it):
            return  # its members say what it does
        raise ValueError(f"a page describes {path}, which has no docstring")
    else:
        defaults = {f.name: f.default for f in dataclasses.fields(it)} if dataclasses.is_dataclass(it) else {}
        yield from paragraphs(inspect.getdoc(it) or "", defaults)


def function_of(function: Any) -> ast.FunctionDef:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(found, ast.FunctionDef)
    return found


def returned(function: ast.FunctionDef) -> str:
    return f" -> {ast.unparse(function.returns)}" if function.returns else ""


def signature(name: str, function: Callable[..., Any]) -> str:
    """A call as its author wrote it, without `self`; in several lines if it is long."""
    node = function_of(function)
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg) and isinstance(each.annotation, ast.Constant):  # an annotation as a string
            each.annotation = ast.parse(str(each.annotation.value), mode="eval").body
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        del node.args.args[0]
    line = f"{name}({ast.unparse(node.args)}){returned(node)}"
    if len(line) <= WIDTH:
        return line
    given = node.args
    required: list[None] = [None] * (len(given.args) - len(given.defaults))
    pieces = [argument(*each) for each in zip(given.args, [*required, *given.defaults], strict=True)]
    pieces += ["*"] if given.kwonlyargs else []
    pieces += [argument(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    pieces += [f"**{argument(given.kwarg)}"] if given.kwarg else []
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){returned(node)}"


def argument(arg: ast.arg, default: ast.expr | None = None) -> str:
    return ast.unparse(arg) if default is None else f"{ast.unparse(arg)} = {ast.unparse(default)}"


def fields(cls: type) -> Iterator[str]:
    """A dataclass's fields, by the comments behind them."""
    for line in inspect.getsource(cls).splitlines():
        if found := re.match(r"    (\w+): [^#]+?# (.+)", line):
            yield f"* `{found[1]}`: {prose(found[2])}"


def paragraphs(doc: str, defaults: dict[str, Any]) -> Iterator[str]:
    """A docstring as Markdown."""
    section = ""
    for block in re.split(r"\n\s*\n", doc):
        title, _, rest = block.partition("\n")
        if title.rstrip(":") in SECTIONS and title.endswith(":"):
            section, block = title[:-1], textwrap.dedent(rest)
            if section == "Examples":
                yield f"```pycon\n{block}\n```"
                continue
            entries = re.split(r"\n(?=\S)", block)
            if section in ("Args", "Attributes", "Raises"):
                yield f"**{section}**\n\n" + "\n".join(entry(each, defaults) for each in entries)
            else:
                yield f"**{section}** {prose(block)}"
        elif all(line.startswith("    ") for line in block.splitlines()):
            yield f"```{'pycon' if section == 'Examples' else 'text'}\n{textwrap.dedent(block)}\n```"
        else:
            yield prose(block)


def entry(text: str, defaults: dict[str, Any]) -> str:
    """An argument, an attribute or an error."""
    name, _, about = text.partition(": ")
    default = defaults.get(name, dataclasses.MISSING)
    said = f" (default `{default!r}`)" if isinstance(default, int | float | str | tuple) and default != () else ""
    return f"* `{name}`{said}: {prose(about)}"


def prose(text: str) -> str:
    """Running text in one line. What Markdown would take for markup, outside of code, is escaped."""
    line = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"[*<]|\](?=\()", r"\\\g<0>", part) for part in parts)
