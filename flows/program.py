"""A flow as a program, whose arguments are the flow's parameters."""

import argparse
import inspect
import re
import sys
from typing import Any

from tasks import console, services

_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)
"""A parameter and its help, in a docstring."""


def run_as_program(flow: Any, shows_result: bool = False) -> None:
    """Run a Prefect flow as a program, with parameters from the command line.

    Parameters without a default are positional, unless they are keywords only. The docstring's "Args:" has their help.
    """
    about, _, arguments = (inspect.getdoc(flow.fn) or "").partition("Args:")
    texts = {name: " ".join(text.split()) for name, text in re.findall(_ARGUMENT, arguments)}
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{flow.name}", description=about or sys.modules[flow.fn.__module__].__doc__
    )
    for name, parameter in inspect.signature(flow.fn).parameters.items():
        default, option = parameter.default, f"--{name.replace('_', '-')}"
        given: dict[str, Any] = {"help": texts[name]}
        if default is False:
            parser.add_argument(option, action="store_true", **given)
            continue
        if parameter.annotation in (int, list[str] | None):
            given |= {"type": int} if parameter.annotation is int else {"nargs": "+"}
        if default is not parameter.empty:
            parser.add_argument(option, default=default, **given)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            parser.add_argument(option, required=True, **given)
        else:
            parser.add_argument(name, **given)
    parsed = vars(parser.parse_args())

    def run_and_show() -> None:
        result = flow(**parsed)
        if shows_result:
            console.show("text", f"\n{result}")

    services.run_flow(run_and_show)
