"""What the site changes in docstrings: doctests become code, and the roles of other tools become plain names."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites the docstring of everything that is documented."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = re.sub(r":(?:func|class|meth|mod):`~?([\w.]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(
                r"(^[ ]*>>> .*\Z)", r"```pycon\n\1\n```", text.rstrip(), count=1, flags=re.MULTILINE | re.DOTALL
            )
            obj.docstring.value = text
