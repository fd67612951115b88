"""What a test expects of bad input."""
import re

import pytest

from common.errors import InputError


def refused(words: str):
    """A context that must raise an InputError whose message begins with these words."""
    return pytest.raises(InputError, match="^" + re.escape(words))
