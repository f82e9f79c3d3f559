"""``python -m microtome.torch_api.compare``; the work is done in ``command.py``."""

import sys

from .comparison.command import main
from .comparison.compare import compare

if __name__ == "__main__":
    sys.exit(main())

# An import of this module would bind it over the function of the same name in the package: the function stands in.
sys.modules[__name__] = compare  # type: ignore[assignment]
