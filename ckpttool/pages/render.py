"""Renders a template as one HTML file that a browser shows without loading anything else.

    render_page(make_environment("ckpttool.engine"), "inspect.html.j2", title="...", ...) -> str

Names come from checkpoints of others: jinja2 escapes every value, and before that `escape_unprintable` spells out what
does not print. The page's own policy (CSP) lets it load nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..printable import escape_unprintable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

__all__ = ["include_file", "make_environment", "mark_as_html", "render_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
#: A mark for each class of verdict, so that colour is not the only sign: a check mark, a cross, a dash.
_MARKS = {"pass": "M4 10.5l4 4 8-9", "fail": "M5 5l10 10M15 5L5 15", "aside": "M4 10h12"}


def make_environment(package: str) -> Environment:
    """Make jinja2's environment with the templates of a package and those that all pages share. Every printed value is
    escaped, and words of more than 160 characters are shortened; `value|whole` is not shortened."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("ckpttool.pages")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape_unprintable(value, 160),
    )
    environment.filters |= {
        "short": escape_unprintable,
        "whole": lambda text: escape(escape_unprintable(text)),
        "commas": lambda n: f"{n:,}",
    }
    return environment


def mark_as_html(text: str) -> Markup:
    """Mark a text as HTML that is not escaped."""
    from markupsafe import Markup

    return Markup(text)


def include_file(environment: Environment, name: str) -> Markup:
    """Read a file of the template folders, to be included in the page without escaping."""
    assert environment.loader is not None
    return mark_as_html(environment.loader.get_source(environment, name)[0])


def render_page(environment: Environment, template: str, **context: object) -> str:
    """Return a page made of a template, with the style of all pages, as one HTML file that refers to no other;
    `context` are the names that the template uses."""
    style = include_file(environment, "page.css")
    return environment.get_template(template).render(policy=_POLICY, style=style, marks=_MARKS, **context) + "\n"
