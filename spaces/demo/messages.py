"""What a user did wrong, as a message on the page."""

import functools
import inspect
from collections.abc import Callable

import gradio as gr


def explained(function: Callable) -> Callable:
    """The same function, or generator function, with a ValueError shown on the page and not as a traceback."""
    if inspect.isgeneratorfunction(getattr(function, "__func__", function)):

        @functools.wraps(function)
        def wrapper(*arguments):
            try:
                yield from function(*arguments)
            except ValueError as error:
                raise gr.Error(str(error), title="That does not work", print_exception=False) from error
    else:

        @functools.wraps(function)
        def wrapper(*arguments):
            try:
                return function(*arguments)
            except ValueError as error:
                raise gr.Error(str(error), title="That does not work", print_exception=False) from error

    return wrapper
