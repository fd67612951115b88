"""An environment in which a chat template can neither run nor grow without end.

A template is a program of whoever made the checkpoint. Every loop, call and sum of it is paid for here, and
what would grow is measured before it is made. The limits are far above what any conversation needs. Whatever
they miss meets those of `tokens.guard`, which ends the process that renders.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS = 1_000_000  # of loops and calls
LONGEST = 4 << 20  # characters of a text, beside eight times what the template is given
NUMBER = 1_000_000  # that a function is called with: a width, a count
DIGITS = 10_000  # bits of a number that is computed
INDENT = 64  # of JSON
WIDTHS = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(\d+)?(?:\.(\d+))?|\{[^{}:]*:[^{}]*?(\d+)(?:\.(\d+))?")


class TooMuch(Exception):
    """A template does or makes too much."""


class Bounds:
    """What is left to one rendering. given: characters of what the template is given."""

    def __init__(self, given: int = 0):
        self.steps, self.longest = STEPS, LONGEST + 8 * given

    def step(self) -> None:
        """One step of a loop, or one call. Raises TooMuch."""
        self.steps -= 1
        if self.steps < 0:
            raise TooMuch(f"makes more than {STEPS:,} steps")

    def room(self, size: int) -> None:
        """Raise TooMuch unless a text of so many characters may be made."""
        if size > self.longest:
            raise TooMuch(f"makes a text or list of more than {self.longest:,} characters")

    def weigh(self, value: object) -> int:
        """About how many characters a value has, written out. Raises TooMuch if they are too many."""
        if isinstance(value, (str, bytes)):
            self.room(len(value))
            return len(value)
        if not isinstance(value, (list, tuple, dict, set)):
            return 1
        total, waiting = 0, [value]
        while waiting:
            found = waiting.pop()
            if isinstance(found, dict):
                waiting += found.keys()
                waiting += found.values()
            elif isinstance(found, (list, tuple, set)):
                waiting += found
            total += len(found) if isinstance(found, (str, bytes)) else 2
            self.room(total + len(waiting))
        return total


class BoundedCode(CodeGenerator):
    """Jinja's, in which a sum of texts with ~ is measured."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.sum_of((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds; set `bounds` before each rendering."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = BoundedCode

    def __init__(self, **options):
        super().__init__(**options, finalize=self.measured)
        self.bounds = Bounds()
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["_steps"] = self._steps
        self.globals |= {"range": self._range}
        del self.globals["lipsum"]  # which writes as much as it is asked for

    def add_filters(self, **filters: Callable) -> None:
        """Add filters, with bounds."""
        self.filters |= {name: self._bounded(name, function) for name, function in filters.items()}

    def measured(self, value):
        """A value that is small enough to be written."""
        self.bounds.weigh(value)
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """The texts, joined."""
        found, size = [], 0
        for part in parts:
            size += len(part)
            self.bounds.room(size)
            found.append(part)
        return "".join(found)

    def sum_of(self, parts: tuple) -> str:
        """What ~ makes of its parts."""
        return self.concat(str(self.measured(part)) for part in parts)

    def call_binop(self, context, operator: str, left, right):
        self.bounds.step()
        if operator == "%" and isinstance(left, str):
            self._format(left, right if isinstance(right, (tuple, list)) else [right])
        elif operator == "**":
            self._power(left, right)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, bytes, list, tuple)) and isinstance(times, int):
                    self.bounds.room(self.bounds.weigh(text) * max(0, times))
            if isinstance(left, int) and isinstance(right, int):
                self._number(left.bit_length() + right.bit_length())
        elif operator == "+" and not isinstance(left, (int, float)):
            self.bounds.room(self.bounds.weigh(left) + self.bounds.weigh(right))
        return self.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context, __obj, *args, **kwargs):
        bounds = __self.bounds
        bounds.step()
        __self._judge_numbers([*args, *kwargs.values()])
        function = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes)):
            __self._judge(getattr(function, "__name__", ""), owner, args, kwargs)
        for value in (*args, *kwargs.values()):
            bounds.weigh(value)
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_steps", [], [], None, None, lineno=loop.lineno)
        return tree

    def _steps(self, values) -> Iterable:
        """What a loop goes over. Lists keep their length, which templates ask for."""
        if isinstance(values, (list, tuple, dict, range)):
            self.bounds.steps -= len(values)
            self.bounds.step()
            return values
        return self._counted(iter(values))

    def _counted(self, values: Iterator) -> Iterator:
        for value in values:
            self.bounds.step()
            yield value

    def _range(self, *args: int) -> range:
        found = range(*args)
        if len(found) > self.bounds.steps:
            raise TooMuch(f"makes more than {STEPS:,} steps")
        return found

    def _bounded(self, name: str, function: Callable) -> Callable:
        """A filter with bounds."""
        before = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args, **kwargs):
            self.bounds.step()
            args = [list(a) if isinstance(a, Iterator) else a for a in args]
            value, more = args[before], args[before + 1 :]
            self._judge_numbers([*more, *kwargs.values()])
            for each in (value, *more, *kwargs.values()):
                self.bounds.weigh(each)
            if name == "tojson":
                indent = kwargs.get("indent", next((a for a in more if isinstance(a, int)), 0))
                if isinstance(indent, int) and indent > INDENT:
                    raise TooMuch(f"indents JSON by {indent:,}, at most {INDENT}")
            self._judge(name, value, more, kwargs)
            return self.measured(function(*args, **kwargs))

        return bounded

    def _judge_numbers(self, values: Iterable) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > NUMBER:
                raise TooMuch(f"calls a function with the number {_short(value)}, at most {NUMBER:,}")

    def _number(self, bits: float) -> None:
        if bits > DIGITS:
            raise TooMuch(f"computes a number of more than {DIGITS:,} bits")

    def _power(self, base, exponent) -> None:
        if isinstance(base, int) and isinstance(exponent, int):
            self._number(max(base.bit_length() * abs(exponent) if abs(base) > 1 else 0, 0))

    def _format(self, text: str, values: Iterable) -> None:
        """Raise TooMuch if a form such as %9d or {:>9}, filled with values, may become too long."""
        self._judge_numbers(values if "*" in text or "{" in text else ())
        widths = (number for found in WIDTHS.findall(text) for number in found if number)
        size = sum(int(number[:12]) for number in widths)
        filled = (text.count("%") + text.count("{")) * max(map(self.bounds.weigh, values), default=0)
        self.bounds.room(len(text) + size + filled)

    def _judge(self, name: str, value, args, kwargs: dict) -> None:
        """Raise TooMuch if a filter or a method of a text would make too long a text of its arguments."""
        text = value if isinstance(value, str) else str(value) if name == "indent" else ""
        given = [*args, *kwargs.values()]
        texts = [a for a in given if isinstance(a, (str, bytes))]
        widest = max((a for a in given if isinstance(a, int)), default=0)
        size = len(text)
        if name in ("format", "format_map"):
            self._format(text, given)
        elif name == "replace" and len(texts) > 1 and isinstance(texts[0], str):
            size += text.count(texts[0]) * max(0, len(texts[1]) - len(texts[0]))
        elif name == "indent":
            size += (text.count("\n") + 1) * max([widest, 4, *map(len, texts)])
        elif name == "expandtabs":
            size += text.count("\t") * (widest if given else 8)
        elif name == "wordwrap":
            size += size // max(1, widest or 79) * max(map(len, texts), default=1)
        elif name == "translate" and given and isinstance(given[0], dict):
            size *= max((len(v) for v in given[0].values() if isinstance(v, str)), default=1)
        elif name in ("urlize", "xmlattr"):
            size *= 1 + sum(map(len, texts))
        elif name == "join" and isinstance(value, str) and given:  # the method
            parts = given[0] if isinstance(given[0], (list, tuple, str, dict)) else ()
            size = size * len(parts) + self.bounds.weigh(parts)
        elif name == "join":
            parts = value if isinstance(value, (list, tuple, str, dict)) else ()
            size = max(map(len, texts), default=0) * len(parts) + self.bounds.weigh(parts)
        self.bounds.room(size)


def _short(number: int) -> str:
    return f"{number:,}" if number.bit_length() < 64 else f"of {number.bit_length():,} bits"


def template_error(error: BaseException) -> BaseException:
    """What an error of a template comes down to."""
    words = {RecursionError: "it is nested too deeply", MemoryError: "it needs too much memory"}
    return jinja2.TemplateError(words[type(error)]) if type(error) in words else error
