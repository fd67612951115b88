"""The JSON schema of an output, as a file gives it. Without heavy imports, as commands read it first."""
from __future__ import annotations

import json

from common.errors import InputError
from common.files import read_text

ANY_OBJECT = '{"type": "object"}'
LONGEST_SCHEMA = 1 << 16  # characters of a schema


def read_schema(path: str) -> str:
    """Return the schema in a file. Raises InputError if it holds no JSON object, or one that is too long."""
    name = f"--json-schema {path}"
    try:
        found = json.loads(read_text(path, 16 * LONGEST_SCHEMA, "--json-schema"))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{name}: cannot be read as JSON ({e})") from None
    if not isinstance(found, dict):
        raise InputError(f"{name}: expected a JSON object, found {type(found).__name__}")
    schema = json.dumps(found)
    if len(schema) > LONGEST_SCHEMA:
        raise InputError(f"{name}: has {len(schema):,} characters, at most {LONGEST_SCHEMA:,}")
    return schema
