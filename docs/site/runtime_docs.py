"""Shows the API as it is at run time where its source alone does not tell, and doctests as code."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}
DOCTEST = re.compile(r"^([ ]*)>>> .*\n(?:\1(?=\S).*(?:\n|$))*", re.MULTILINE)


def fenced(text: str) -> str:
    """Make a block of code of each doctest."""
    return DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", text)


class RuntimeDocs(griffe.Extension):
    """Takes the docstrings of methods and properties, and the signatures of methods, from the running program."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Show doctests as code."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Look at the members that a class defines itself."""
        for name, member in list(cls.members.items()):
            if name.startswith("_") and name != "__init__":
                continue
            if member.is_alias or not (member.is_function or member.is_attribute):
                continue
            try:
                found = griffe.dynamic_import(member.path)
            except ImportError:
                continue
            if inspect.isfunction(found):
                cls.members[name] = self._function(member, found)
            elif member.is_attribute and member.docstring is None and inspect.isdatadescriptor(found):
                member.docstring, member.value = _docstring(member, inspect.getdoc(found)), None

    def _function(self, member: Any, found: Any) -> Any:
        text = inspect.getdoc(found)
        signature = inspect.signature(found)
        if member.is_function and member.docstring is not None:
            return member
        names = [parameter.name for parameter in member.parameters] if member.is_function else []
        if names != list(signature.parameters):
            made = griffe.Function(
                member.name,
                lineno=member.lineno,
                endlineno=member.endlineno,
                parameters=griffe.Parameters(*map(_parameter, signature.parameters.values())),
                returns=_shown(signature.return_annotation),
                parent=member.parent,
            )
            if inspect.iscoroutinefunction(found):
                made.labels.add("async")
            member = made
        if member.docstring is None and text and member.name != "__init__":
            member.docstring = _docstring(member, text)
        return member


def _docstring(member: Any, text: str | None) -> griffe.Docstring | None:
    if not text:
        return None
    return griffe.Docstring(text, lineno=member.lineno, parent=member, parser=griffe.Parser.google)


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        default = "()"
    elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
        default = "{}"
    return griffe.Parameter(
        parameter.name, annotation=_shown(parameter.annotation), kind=KINDS[parameter.kind], default=default
    )


def _shown(annotation: Any) -> str | None:
    if annotation is inspect.Signature.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
