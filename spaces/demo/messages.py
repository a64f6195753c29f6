"""Errors of the user as messages on the page."""

import functools
import inspect
from collections.abc import Callable

import gradio as gr


def explained(function: Callable) -> Callable:
    """Wrap a function or generator function so that a ValueError becomes a message on the page."""
    if inspect.isgeneratorfunction(getattr(function, "__func__", function)):

        @functools.wraps(function)
        def wrapper(*arguments):
            try:
                yield from function(*arguments)
            except ValueError as error:
                raise gr.Error(str(error), title="Invalid input", print_exception=False) from error
    else:

        @functools.wraps(function)
        def wrapper(*arguments):
            try:
                return function(*arguments)
            except ValueError as error:
                raise gr.Error(str(error), title="Invalid input", print_exception=False) from error

    return wrapper
