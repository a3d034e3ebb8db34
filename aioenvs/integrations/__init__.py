"""Envs as other libraries know them; each module needs the library it is named after, an extra."""

__all__ = ["explained"]


def explained(error: ImportError, extra: str) -> ImportError:
    """Return the error to raise where a module of this package cannot import its library, which an extra installs."""
    package = (error.name or "a library").partition(".")[0]
    if package == __name__.partition(".")[0]:
        return error
    return ImportError(
        f"this needs {package}, which cannot be imported ({error}); to install it: pip install 'aioenvs[{extra}]'",
        name=error.name,
    )
